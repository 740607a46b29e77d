"""The kernel of sm_100 in the Gluon simulator, under adversarial schedules, beside float64, and what ptxas says of
every row. No GPU has run it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import blackwell
import pytest
import torch
import triton
from blackwell import BY_ROLES, CALLS, LONG, PAIRED, QUICK, ROWS, RUNGS
from simulators.gluon_sim import Worker
from turns import FLOOR, mine

from lazymax import arch as arches
from lazymax.backends import registry
from lazymax.compat import tritons
from lazymax.dispatch import plan
from lazymax.explanation import Explanation
from lazymax.problem import Problem
from lazymax.testing import check_attention

SHAPE = (4, 32, 8, 1024, 1024, 128)
NAMES = [f"{row.when.archs[0]}-{row.name}" for row in ROWS]
BANDS: tuple[dict[str, Any], ...] = ({}, {"causal": "top_left"}, {"causal": "top_left", "window": (512, None)})


@pytest.fixture(scope="module")
def sim() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.mark.parametrize("which", range(len(CALLS) + len(LONG)))
@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_rows_on_the_gpu(index: int, which: int, device: str) -> None:
    """For who has one."""
    arch, row = arches.of(torch.device(device)), ROWS[index]
    call = (PAIRED * 2 if row.pair else (*CALLS, *LONG))[which]
    if device != "cuda" or arch.id not in row.when.archs or row.outdated(arch):
        pytest.skip(f"needs {' or '.join(row.when.archs)}: this is {arch.id}; {row.outdated(arch) or ''}")
    for dtype in (torch.bfloat16, torch.float16):
        (q, k, v), extras, problem = call.inputs((row.head_dim,) * 2, dtype, which, device)
        assert row.inability(problem, arch) is None, row.inability(problem, arch)
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device=device)
        launch = row.prepare(problem, replace(plan(problem, arch), tile=row))
        for _ in range(2):  # the second call launches the binary directly
            launch(q, k, v, out, lse, extras)
        first = out.clone()
        launch(q, k, v, out, lse, extras)
        assert torch.equal(first.view(torch.int16), out.view(torch.int16)), "not the same bits again"
        budgets = check_attention(out, lse, q, k, v, problem, extras)
        assert all(b.ok for b in budgets), f"{call} {dtype}: {'; '.join(map(str, budgets))}"


def dtype_of(index: int) -> str:
    """One of the two on each Triton: every build takes seconds."""
    return ("bf16", "fp16")[mine(index)]


@pytest.mark.parametrize("index", [i for i, row in enumerate(ROWS) if not row.pair], ids=NAMES.__getitem__)
def test_rows_in_the_simulator(index: int, sim: Worker) -> None:
    """Ten schedules for a row on the oldest Triton: of as many calls, or, where only the share of exp2 differs, of a
    sixth of them and quick ones. A third and a sixth of the calls on the others."""
    row = ROWS[index]
    of = list(range(index % 4, len(CALLS), 3 if row.software else 6))
    if FLOOR:
        of = (
            [which for which in range(len(CALLS)) if (which + 5 * index) % len(CALLS) < 10]
            if row.software
            else of + QUICK
        )
    assert not FLOOR or len(of) >= 10
    wrong = sim.call("blackwell:seeds", row, dtype_of(index), of)
    assert not wrong, "\n".join(wrong)


def test_heads_in_sections(sim: Worker) -> None:
    wrong = sim.call("blackwell:sections", ROWS[1], dtype_of(1), [0])
    assert not wrong, "\n".join(wrong)


def paired(row: blackwell.BlackwellTile) -> None:
    """Skips what the installed Triton cannot build."""
    if why := row.outdated(arches.by_name(row.when.archs[0])):
        pytest.skip(why)


PAIRS = [i for i, row in enumerate(ROWS) if row.pair]
# Ten schedules each, of one build and of two: calls with the LSE for one row, without it for the other.
PAIR_SEEDS = ([0, 1, 4, 5, 9, 12, 13, 17, 20, 21], [2, 6, 7, 14, 15, 22, 23, 30, 31, 39])


@pytest.mark.parametrize(
    "index, of", list(zip(PAIRS, PAIR_SEEDS, strict=True)), ids=lambda x: NAMES[x] if x in PAIRS else ""
)
def test_pairs_of_ctas_in_the_simulator(index: int, of: list[int], sim: Worker) -> None:
    paired(ROWS[index])
    assert len(of) >= 10
    wrong = sim.call("blackwell:seeds", ROWS[index], dtype_of(index), of)
    assert not wrong, "\n".join(wrong)


def with_rung(name: str, head_dim: int) -> blackwell.BlackwellTile:
    row = next(row for row in ROWS if row.head_dim == head_dim and not row.pair)
    return replace(row, **RUNGS[name])


@pytest.mark.parametrize("name", RUNGS)
def test_rungs_in_the_simulator(name: str, sim: Worker) -> None:
    """Every rung of the ladder the other way, at a head dim on each Triton."""
    turn = list(RUNGS).index(name)
    head_dim = 128 if mine(turn) else 64
    wrong = sim.call("blackwell:seeds", with_rung(name, head_dim), "bf16", [turn])
    assert not wrong, "\n".join(wrong)


def check_build(row: blackwell.BlackwellTile, dtype: str, rules: dict[str, Any], sim: Worker, lse: bool = True) -> None:
    report = sim.call("blackwell:assembled", row, dtype, rules, lse)
    assert report["products"] > 0 and report["columns"] == 512, f"{rules}: {report}"
    assert report["of_pairs"] == (report["products"] if row.pair else 0), f"{rules}: {report}"
    assert report["shared"] <= arches.by_name(row.when.archs[0]).shared_memory, f"{rules}: {report}"
    assert report["fault"] is None, f"{rules}: {report}"
    assert report["in_loops"] == report["spills"] == 0, f"{rules}: {report}"
    # Of single warps, the correction and the softmax: 4 * 24 + 4 * 104 + 8 * 192 = 2048 for 32 threads, all there are.
    assert report["dealt"] == [24, 104, 192], f"{rules}: {report}"
    for role, used in report["registers"].items():
        assert used <= {"softmax": 192, "correction": 104}.get(role, 24), f"{rules}: {report}"


@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_ptxas_has_little_to_say(index: int, sim: Worker) -> None:
    """No spills. Of the bands of a row two are compiled on the oldest Triton, which takes half the time, the third,
    which wants the most registers, on the others."""
    row = ROWS[index]
    paired(row)
    for rules in BANDS[:1] if row.pair else BANDS[:2] if FLOOR else BANDS[2:]:
        if row.software:
            check_build(row, "bf16", rules, sim)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_ptxas_has_little_to_say_of_any_build(index: int, sim: Worker) -> None:
    paired(ROWS[index])
    for dtype in ("bf16", "fp16"):
        for rules in BANDS[: 1 if ROWS[index].pair else None]:
            for lse in (True, False):
                check_build(ROWS[index], dtype, rules, sim, lse)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_many_schedules(index: int, sim: Worker) -> None:
    paired(ROWS[index])
    for dtype in ("bf16", "fp16"):
        wrong = sim.call("blackwell:seeds", ROWS[index], dtype, list(range(2 * len(CALLS))))
        wrong += sim.call("blackwell:seeds", ROWS[index], dtype, list(range(2 * len(LONG))), LONG)
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_schedules_of_rungs(head_dim: int, name: str, sim: Worker) -> None:
    wrong = sim.call("blackwell:seeds", with_rung(name, head_dim), "fp16", list(range(len(CALLS))))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("index", [i for i, row in enumerate(ROWS) if row.software], ids=str)
def test_a_dropped_synchronisation_is_found(index: int, sim: Worker) -> None:
    paired(ROWS[index])
    count, survived = sim.call("blackwell:mutants", ROWS[index], [0, 1, 4, 5])  # that want the LSE: one build
    assert count > 80 and len(survived) <= 0.05 * count, f"{len(survived)} of {count}: {survived}"


# ---- the portable kernel in roles that Triton makes


def role_id(index: int) -> str:
    row = BY_ROLES[index]
    return f"{row.when.head_dims}-{'full' if row.when.causal is False else 'others'}"


BUILT = [i for i, row in enumerate(BY_ROLES) if not row.outdated(arches.by_name("sm_100"))]


@pytest.mark.parametrize("index", range(len(BY_ROLES)), ids=role_id)
def test_roles_that_triton_makes_on_the_gpu(index: int, device: str) -> None:
    """For who has one."""
    arch, row = arches.of(torch.device(device)), BY_ROLES[index]
    if device != "cuda" or not registry()["sm_100"].serves(arch) or row.outdated(arch):
        pytest.skip(f"needs sm_100 or sm_103: this is {arch.id}; {row.outdated(arch) or ''}")
    for seed in range(28):
        wrong = blackwell.by_roles(row, ("bf16", "fp16")[seed % 2], [seed], device)
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("index", BUILT, ids=role_id)
def test_roles_that_triton_makes_in_the_simulator(index: int, sim: Worker) -> None:
    """Ten schedules for a row on the oldest Triton."""
    of = list(range(10 if FLOOR else 3))
    wrong = sim.call("blackwell:by_roles", BY_ROLES[index], ("bf16", "fp16")[index // 2], of)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("index", BUILT, ids=role_id)
def test_many_schedules_of_roles_that_triton_makes(index: int, sim: Worker) -> None:
    for dtype in ("bf16", "fp16"):
        wrong = sim.call("blackwell:by_roles", BY_ROLES[index], dtype, list(range(28)))
        assert not wrong, "\n".join(wrong)


def check_roles(index: int, dtype: str, rules: dict[str, Any], sim: Worker) -> None:
    row = BY_ROLES[index]
    report = sim.call("blackwell:assembled_roles", row, dtype, rules)
    assert report["parted"] == report["loops"] == (3 if "window" in rules else 2), report
    # Products, loads, and the softmax or the rescale, whichever has not the kernel's own 8 warps.
    assert all(sorted(warps) in ([1, 2, 4], [1, 2, 8]) for warps in report["partitions"]), report
    assert report["products"] > 0 and report["columns"] == 512 and report["spills"] == 0, f"{rules}: {report}"
    assert report["shared"] <= arches.by_name("sm_100").shared_memory, f"{rules}: {report}"


def test_roles_that_triton_makes_are_compiled(sim: Worker) -> None:
    """One build on each Triton."""
    if FLOOR:
        check_roles(3, "bf16", BANDS[1], sim)
    else:
        check_roles(0, "fp16", {}, sim)


@pytest.mark.slow
@pytest.mark.parametrize("index", BUILT, ids=role_id)
def test_every_build_of_roles_that_triton_makes(index: int, sim: Worker) -> None:
    for dtype in ("bf16", "fp16"):
        for rules in BANDS[:1] if BY_ROLES[index].when.causal is False else BANDS[1:]:
            check_roles(index, dtype, rules, sim)


FEW = (1, 4, 4, 4096, 4096, 128)  # too few tiles for the backend's own kernel
ROLE_CASES: tuple[tuple[str, tuple[int, ...], str, dict[str, Any], tuple[bool, bool]], ...] = (
    ("full", FEW, "bf16", {}, (True, True)),
    ("fp16, D=64", (*FEW[:5], 64), "fp16", {}, (True, True)),
    ("decode", (1, 4, 4, 1, 4096, 128), "bf16", {}, (True, True)),
    ("causal", FEW, "bf16", {"causal": "top_left"}, (True, False)),
    ("window", FEW, "bf16", {"window": (1100, None)}, (True, False)),
    ("seqlens_k", (4, 32, 8, 4096, 4096, 64), "bf16", {"seqlens_k": torch.tensor([9] * 4)}, (True, False)),
    ("short", (1, 4, 4, 1000, 1000, 128), "bf16", {}, (False, False)),
    ("D=96", (*FEW[:5], 96), "bf16", {}, (False, False)),
    ("D_v", (*FEW, 64), "bf16", {}, (False, False)),
    ("fp32", FEW, "fp32", {}, (False, False)),
    ("mask", FEW, "bf16", {"attn_mask": torch.ones(4096) > 0}, (False, False)),
    ("softcap", FEW, "bf16", {"softcap": 20.0}, (False, False)),
    ("own kernel", SHAPE, "bf16", {}, (False, False)),
)


@pytest.mark.parametrize("case", ROLE_CASES, ids=lambda case: case[0])
def test_where_triton_makes_roles(case: Any) -> None:
    """(Triton 3.6, 3.9), where its pass takes the kernel without a spill."""
    _, shape, dtype, rules, (old, new) = case
    problem = Problem.from_shape(shape, dtype, **rules)
    for version, roles in (("3.6.0", old), ("3.7.1", new), ("3.9.0", new)):
        arch = replace(arches.by_name("sm_100"), triton=version)
        chosen = plan(problem, arch)
        assert chosen.tile is not None and chosen.tile.warp_specialize is roles
        text = str(Explanation(problem, arch, chosen))
        assert ("(warp_specialize)" in text) is roles
        simulated = roles or isinstance(chosen.tile, blackwell.BlackwellTile)
        assert ("simulated and compiled, not run on hardware" in text) is simulated, text
    described = replace(problem, descriptor_refusal="k has stride 7")
    for name in ("sm_90", "sm_120", "sm_80"):
        assert not plan(problem, arches.by_name(name)).tile.warp_specialize  # type: ignore[union-attr]
    assert not plan(described, arches.by_name("sm_100")).tile.warp_specialize  # type: ignore[union-attr]


# ---- dispatch

REFUSED: tuple[tuple[str, tuple[int, ...], str, dict[str, Any], str], ...] = (
    ("D=96", (4, 32, 8, 1024, 1024, 96), "bf16", {}, "for head dim 128, of v too, got 96"),
    ("D_v", (4, 32, 8, 1024, 1024, 128, 64), "bf16", {}, "got 128 and 64 of v"),
    ("fp32", SHAPE, "fp32", {}, "for float16 and bfloat16, got float32"),
    ("softcap", SHAPE, "bf16", {"softcap": 20.0}, "takes no softcap and no sinks"),
    ("dropout", SHAPE, "bf16", {"dropout_p": 0.1}, "takes no mask, mod, ALiBi or dropout"),
    ("short", (64, 32, 8, 128, 4096, 128), "bf16", {}, "for 129 queries and more, got 128"),
    ("few", (1, 2, 2, 1024, 1024, 128), "bf16", {}, "programs per multiprocessor and more"),
)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_what_the_kernel_does_not_take_has_a_portable_row(case: Any) -> None:
    _, shape, dtype, rules, why = case
    chosen = plan(Problem.from_shape(shape, dtype, **rules), arches.by_name("sm_100"))
    assert chosen.backend == "sm_100" and not isinstance(chosen.tile, blackwell.BlackwellTile)
    assert chosen.level == "compiled only, not run" or chosen.tile in BY_ROLES
    assert ROWS[0].refusal(Problem.from_shape(shape, dtype, **rules), arches.by_name("sm_100")).count(why) == 1


def test_strides_that_no_descriptor_takes() -> None:
    problem = replace(Problem.from_shape(SHAPE, "bf16"), descriptor_refusal="k has stride 7")
    assert not isinstance(plan(problem, arches.by_name("sm_100")).tile, blackwell.BlackwellTile)


@pytest.mark.parametrize("arch, software", [("sm_100", True), ("sm_103", False)])
def test_each_arch_has_its_rows(arch: str, software: bool) -> None:
    for shape in (SHAPE, (*SHAPE[:5], 64)):
        for rules in BANDS:
            chosen = plan(Problem.from_shape(shape, "fp16", **rules), arches.by_name(arch))
            assert isinstance(chosen.tile, blackwell.BlackwellTile) and bool(chosen.tile.software) is software
            assert chosen.level == "simulated and compiled, not run on hardware"


def chosen_row(shape: tuple[int, ...], triton: str, arch: str = "sm_100", **rules: Any) -> blackwell.BlackwellTile:
    tile = plan(Problem.from_shape(shape, "bf16", **rules), replace(arches.by_name(arch), triton=triton)).tile
    assert isinstance(tile, blackwell.BlackwellTile)
    return tile


@pytest.mark.parametrize("arch", ["sm_100", "sm_103"])
@pytest.mark.parametrize("triton, pair", [("3.6.0", False), ("3.8.0", False), ("3.9.0", True), ("3.10.0+git1", True)])
def test_pairs_of_ctas_where_triton_has_them(triton: str, pair: bool, arch: str) -> None:
    assert chosen_row(SHAPE, triton, arch).pair is pair
    chosen = plan(Problem.from_shape(SHAPE, "bf16"), replace(arches.by_name(arch), triton=triton))
    refused = [refusal for refusal in chosen.rejected if "512x128" in refusal.candidate]
    assert any(f"for Triton 3.9 and newer, this is {triton}" in refusal.reason for refusal in refused) is not pair


def test_pairs_of_ctas_are_for_full_bands_that_fill_them() -> None:
    assert all(not chosen_row(SHAPE, "3.9.0", **rules).pair for rules in BANDS[1:])
    assert not chosen_row((*SHAPE[:5], 64), "3.9.0").pair
    assert not chosen_row((16, 32, 8, 700, 700, 128), "3.9.0").pair  # three tiles of 256
    assert not chosen_row((1, 32, 8, 1024, 1024, 128), "3.9.0").pair  # 64 tiles of 512
    assert chosen_row((4, 32, 8, 16 * 512 + 1, 1024, 128), "3.9.0").pair


def test_the_first_tiles_of_a_launch() -> None:
    """Heads go in sections only where tiles are drawn."""
    full, causal = (Problem.from_shape(SHAPE, "bf16", **rules) for rules in BANDS[:2])
    for problem, drawn in ((full, False), (causal, True)):
        launch = ROWS[0].prepare(problem, None)  # type: ignore[arg-type]
        clc = tritons.has_clc(triton.__version__)
        assert (launch.config.COUNTER.value, launch.config.CLC.value) == (drawn and not clc, drawn and clc)
        assert launch.heads_together == 128
    long = replace(causal, kv_len=2**17)
    assert ROWS[0].prepare(long, None).heads_together == 4  # type: ignore[arg-type]
    assert replace(ROWS[0], scheduler="snake").prepare(long, None).heads_together == 128  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "version, who", [("3.6.0", "from a counter"), ("3.9.0", "from the grid"), ("3.10.0", "from the grid")]
)
def test_explain_says_who_deals_the_tiles(version: str, who: str) -> None:
    arch = replace(arches.by_name("sm_100"), triton=version)
    full, causal = (
        str(Explanation(problem, arch, plan(problem, arch)))
        for problem in (Problem.from_shape(SHAPE, "bf16", **rules) for rules in BANDS[:2])
    )
    assert "drawn" not in full and f"drawn {who}" in causal
