"""The kernel of sm_90 against float64: every row on a Hopper GPU, if there is one, and in the Gluon simulator, under
adversarial schedules; what ptxas says of every row."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper import CAUSAL, DIVIDED, Call, arranged, head_dims, rows
from simulators.gluon_sim import Worker
from turns import FLOOR, mine, my_turn

from lazymax import arch as arches
from lazymax.backends import registry
from lazymax.backends.sm_90 import work
from lazymax.backends.sm_90.launch import HopperLaunch
from lazymax.backends.sm_90.rows import HopperTile
from lazymax.backends.sm_90.work import WHOLE, Division
from lazymax.dispatch import plan
from lazymax.problem import Problem
from lazymax.testing import check_attention, make_qkv

ROWS = rows()
CHOSEN = registry()["sm_90"].forward
CALLS = (
    Call((1, 4, 1, 70, 150), CAUSAL),
    Call((2, 8, 2, 1000, 1000), {"causal": "top_left"}, layout="bshd", sinks=True),
    Call((1, 2, 2, 33, 64), layout="padded"),
    Call((4, 40, 8, 517, 517)),  # several tiles for every CTA
    Call((4, 40, 8, 517, 901), CAUSAL, "rising"),
    Call((1, 6, 2, 450, 777), {"window": (60, 5), "window_align": "bottom_right", "scale": -0.2}, "rising", "bshd"),
    Call((1, 4, 1, 500, 900), CAUSAL | {"window": (300, None)}, "large"),
    Call((1, 4, 1, 900, 500), CAUSAL, sinks=True),  # rows and tiles without keys
    Call((2, 4, 2, 1, 65), CAUSAL),
    Call((1, 4, 1, 1, 1), CAUSAL),
    Call((1, 7, 1, 300, 300), {"causal": "top_left"}, "large"),
    Call((1, 2, 1, 400, 400), {"window": (None, 40), "scale": 0.0}),
    Call((1, 4, 1, 200, 370), CAUSAL, "huge"),
    Call((1, 4, 1, 237, 297), CAUSAL, "hidden"),
    Call((1, 4, 1, 237, 297), CAUSAL, "visible"),
    Call((1, 4, 2, 300, 1000), CAUSAL, "step"),
    Call((1, 4, 2, 300, 1000), {"window": (400, None), "window_align": "bottom_right"}, "cliff"),
    Call((3, 2, 1, 265, 257), CAUSAL | {"rescale_threshold": 0.0}, "rising"),
    Call((2, 4, 1, 300, 700), CAUSAL | {"softcap": 20.0}, "large", sinks=True),
    Call((1, 4, 2, 300, 700), {"softcap": 200.0, "scale": -1.0}),
    Call((1, 4, 2, 300, 700), {"softcap": 20.0}, "hidden"),
    Call((4, 4, 2, 300, 700), CAUSAL, lengths=(0, 700, 130, 600), sinks=True),
    Call((3, 4, 2, 300, 700), {"window": (200, None), "window_align": "top_left"}, "hidden", lengths=(1, 699, 130)),
    Call((1, 8, 2, 3000, 4000), CAUSAL, offsets=((0, 700, 700, 1300, 2900), (0, 300, 310, 1420, 3800))),
    Call((1, 40, 8, 3000, 3000), {"softcap": 20.0}, "rising", "bshd", True, offsets=((0, 1, 1300, 3000),) * 2),
    Call((1, 2, 1, 500, 300), CAUSAL, "hidden", offsets=((0, 100, 480), (0, 150, 299))),
)


UNDIVIDED = 16  # calls of `simulated.CALLS`, of which one has the number of each seed; the divided ones come after
# Packed, split, and both: as a row chooses, and as it is told.
DIVIDED_CALLS = (
    *DIVIDED,
    Call((4, 32, 8, 1, 8192), division=Division(4, 4)),
    Call((2, 32, 8, 64, 4096), CAUSAL, "rising", "bshd", division=Division(4, 4)),
    Call((1, 6, 2, 1000, 3001), CAUSAL, sinks=True, division=Division(1, 5)),
    Call((1, 8, 8, 900, 5000), {"window": (700, 20), "window_align": "bottom_right"}, division=Division(1, 3)),
    Call((2, 24, 8, 130, 2000), CAUSAL | {"softcap": 20.0}, "large", sinks=True, division=Division(4, 2)),
)


def needs_hopper(device: str) -> None:
    if device != "cuda" or arches.of(torch.device(device)).id != "sm_90":
        pytest.skip(f"needs an H100 or H200: this is {arches.of(torch.device(device)).id}")


def run(row: HopperTile, call: Call, dims: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[bool, str]:
    (q, k, v), extras, problem = call.inputs(dims, dtype, sum(call.shape), device)
    arch = arches.of(q.device)
    assert row.inability(problem, arch) is None, row.inability(problem, arch)
    out = torch.full((*q.shape[:3], dims[1]), torch.nan, dtype=dtype, device=device)
    lse = torch.full(q.shape[:3], torch.nan, device=device)
    launch = row.prepare(problem, replace(plan(problem, arch), tile=row))
    if call.division != WHOLE:
        launch = type(launch).of_forward(problem, row, call.division)
    for _ in range(2):  # the second call launches the binary directly
        launch(q, k, v, out, lse, extras)
    first = out.clone()
    launch(q, k, v, out, lse, extras)
    if not torch.equal(first.view(torch.int16), out.view(torch.int16)):
        return False, "not the same bits again"
    budgets = check_attention(out, lse, q, k, v, problem, extras)
    return all(b.ok for b in budgets), "; ".join(map(str, budgets))


@pytest.mark.parametrize("which", range(len(CALLS)))
@pytest.mark.parametrize("index", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_rows_on_the_gpu(index: int, which: int, device: str) -> None:
    needs_hopper(device)
    row, call = ROWS[index], CALLS[which]
    if row not in CHOSEN and which % 4:
        pytest.skip("a row that only `bench --rows all` takes runs every fourth call")
    full, *others = head_dims(row)
    dims = [full, *others] if which % 4 == index % 4 else [full]
    wrong = []
    for dim in dims:
        for dtype in (torch.bfloat16, torch.float16) if which % 2 == index % 2 else (torch.bfloat16,):
            ok, why = run(row, call, dim, dtype, device)
            if not ok:
                wrong.append(f"{call} {dim} {dtype}: {why}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("which", range(len(DIVIDED_CALLS)))
@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_divided_on_the_gpu(width: int, which: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_hopper(device)
    if which < len(DIVIDED):
        monkeypatch.setattr(work, "LEAST_KEYS", 1)
    row = ROWS[dividing(width)]
    for dtype in (torch.bfloat16, torch.float16):
        ok, why = run(row, DIVIDED_CALLS[which], head_dims(row)[0], dtype, device)
        assert ok, f"{DIVIDED_CALLS[which]} {dtype}: {why}"


def dividing(width: int) -> int:
    """The row that takes problems of few tiles, which are divided."""
    return max(i for i, row in enumerate(ROWS) if row in CHOSEN and row.width == width and row.warpgroups == 2)


REPEATED = (
    Call((2, 16, 4, 1000, 1501), {}),
    Call((2, 16, 4, 1000, 1501), CAUSAL),
    Call((2, 32, 8, 64, 4096), CAUSAL, division=Division(4, 4)),
    # Tiles of one block behind each other. TMA overtook the loads of Q, in 3 of 1,000 calls.
    Call((1, 32, 8, 2900, 2900), CAUSAL, offsets=((0, 700, 701, 1300, 2900),) * 2),
)


@pytest.mark.parametrize("which", range(len(REPEATED)))
@pytest.mark.parametrize("index", [i for i, row in enumerate(ROWS) if row in CHOSEN])
def test_the_same_bits_a_thousand_times(index: int, which: int, device: str) -> None:
    needs_hopper(device)
    row, call = ROWS[index], REPEATED[which]
    if call.division != WHOLE and row.warpgroups > 2:
        pytest.skip("a row that neither packs nor splits")
    dims = head_dims(row)[0]
    (q, k, v), extras, problem = call.inputs(dims, torch.bfloat16, 0, device)
    launch = HopperLaunch.of_forward(problem, row, call.division)

    def bits() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full((*q.shape[:3], dims[1]), torch.nan, dtype=q.dtype, device=device)
        lse = torch.full(q.shape[:3], torch.nan, device=device)
        launch(q, k, v, out, lse, extras)
        return out.view(torch.int16), lse.view(torch.int32)

    out, lse = bits()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        again, lse_again = bits()
        wrong += (again != out).any() | (lse_again != lse).any()
    assert wrong == 0


@pytest.fixture(scope="session")
def sim() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


BANDS: tuple[dict[str, Any], ...] = ({}, {"causal": "top_left"}, {"causal": "top_left", "window": (512, None)})


INDICES = [
    pytest.param(i, id=row.name, marks=() if row in CHOSEN else pytest.mark.slow) for i, row in enumerate(ROWS)
]  # those that dispatch takes, by default


@pytest.mark.parametrize("index", INDICES)
def test_rows_in_the_simulator(index: int, sim: Worker) -> None:
    """Ten calls on the oldest Triton, four on the others, other ones for each row; every one with --slow."""
    full, *others = head_dims(ROWS[index])
    of = [which for which in range(UNDIVIDED) if (which + 3 * index) % 8 < (5 if FLOOR else 2)]
    assert not FLOOR or len(of) >= 10
    wrong = sim.call("simulated:seeds", index, full, "bf16", of[::2])
    wrong += sim.call("simulated:seeds", index, full, "fp16", of[1::2])
    for i, dims in enumerate(others if FLOOR else []):  # columns to spare: a plain call or a packed one
        wrong += sim.call("simulated:seeds", index, dims, ("bf16", "fp16")[i % 2], [(2, 12)[(i + index) % 2]])
    assert not wrong, "\n".join(wrong)


WIDTHS = [
    pytest.param(64, marks=my_turn(0)),
    pytest.param(128, marks=my_turn(1)),
    pytest.param(192, marks=pytest.mark.slow),
    pytest.param(256, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("width", WIDTHS)
def test_divided_in_the_simulator(width: int, sim: Worker) -> None:
    """Every call on the oldest Triton, every second one on the others."""
    index = dividing(width)
    of = list(range(UNDIVIDED, UNDIVIDED + len(DIVIDED), 1 if FLOOR else 2))
    wrong = sim.call("simulated:seeds", index, head_dims(ROWS[index])[0], "bf16", of[::2])
    wrong += sim.call("simulated:seeds", index, head_dims(ROWS[index])[0], "fp16", of[1::2])
    assert not wrong, "\n".join(wrong)


def check_build(index: int, rules: dict[str, Any], sim: Worker, division: Division = WHOLE) -> None:
    """One advisory C75xx serialises every product of the kernel, and the time doubles."""
    report = sim.call("simulated:assembled", index, head_dims(ROWS[index])[0], "bf16", rules, division)
    assert not report["advisories"] and report["wgmma"] > 0, f"{rules}: {report}"
    assert not (ROWS[index].tuned and report["spills"]), f"{rules}: {report}"
    assert report["shared"] <= arches.by_name("sm_90").shared_memory and report["fault"] is None, f"{rules}: {report}"


DIVISIONS = {"pack": Division(4, 1), "split": Division(1, 4), "both": Division(4, 4)}


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_ptxas_has_nothing_to_say_of_divided_builds(width: int, division: str, sim: Worker) -> None:
    """A band each."""
    check_build(dividing(width), BANDS[division == "split"], sim, DIVISIONS[division])


@pytest.mark.parametrize("index", INDICES)
def test_ptxas_has_nothing_to_say(index: int, sim: Worker) -> None:
    """On each Triton the causal build of a row, and of a tuned one another, in turns."""
    check_build(index, BANDS[1], sim)
    if ROWS[index].tuned:
        check_build(index, BANDS[0 if mine(index) else 2], sim)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_ptxas_has_nothing_to_say_of_any_build(index: int, sim: Worker) -> None:
    for rules in BANDS if ROWS[index].tuned else BANDS[1:2]:
        check_build(index, rules, sim)
    for division in DIVISIONS.values() if ROWS[index].pack_gqa and ROWS[index].split else ():
        for rules in BANDS[:2]:
            check_build(index, rules, sim, division)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_many_schedules(index: int, sim: Worker) -> None:
    for dtype in ("bf16", "fp16"):
        wrong = sim.call(
            "simulated:seeds", index, head_dims(ROWS[index])[0], dtype, list(range(2 * (UNDIVIDED + len(DIVIDED))))
        )
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("index", [i for i, row in enumerate(ROWS) if row in CHOSEN])
def test_a_dropped_synchronisation_is_found(index: int, sim: Worker) -> None:
    count, survived = sim.call("simulated:mutants", index, head_dims(ROWS[index])[0], list(range(4)))
    assert count > 40 and len(survived) <= 0.05 * count, f"{len(survived)} of {count}: {survived}"


def test_descriptors_follow_the_tensors_of_a_call() -> None:
    problem = Problem.from_shape((1, 4, 2, 256, 256, 128), "bf16")
    launch = next(row for row in ROWS if row.width == 128).prepare(problem, None)  # type: ignore[arg-type]
    calls = []
    for _ in range(2):
        q, k, v = make_qkv(1, 4, 2, 256, 256, 128, dtype=torch.bfloat16)
        out, lse = torch.empty_like(q), torch.empty(0)
        arguments = launch.arguments(q, k, v, out, lse)
        assert [view.ptr is t for view, t in zip(arguments[:4], (q, k, v, out), strict=True)] == [True] * 4
        assert [tile.base is t for tile, t in zip(arguments[6:10], (q, k, v, out), strict=True)] == [True] * 4
        calls.append(arguments)
    for first, second in zip(calls[0][6:10], calls[1][6:10], strict=True):
        assert first is not second and first.base is not second.base
        assert (first.shape, first.strides, first.block_shape) == (second.shape, second.strides, second.block_shape)


RAGGED = [
    *(call for call in CALLS if call.lengths or call.offsets[0]),
    Call((1, 5, 5, 900, 900), {"window": (100, 3), "window_align": "top_left"}, offsets=((0, 900), (0, 900))),
    Call((1, 2, 1, 300, 200), offsets=((0,) * 140 + (300,), (0,) * 140 + (200,))),  # more slots than a program places
    Call((130, 1, 1, 129, 64), CAUSAL, lengths=tuple(range(65)) * 2),
]


@pytest.mark.parametrize("call", RAGGED, ids=lambda call: f"{call.shape}")
def test_the_schedule_of_ragged_problems(call: Call, device: str) -> None:
    """The kernel that makes it, beside a Python twin; every CTA count deals it anew."""
    (q, *_), extras, problem = call.inputs((128, 128), torch.bfloat16, 0, device)
    for heads_together, ctas in ((None, 7), (3, 132), (1, 1)):
        launch = next(row for row in ROWS if row.width == 128).prepare(problem, None)  # type: ignore[arg-type]
        launch.ctas = ctas
        if heads_together:
            launch.heads_together = heads_together
        for _ in range(2):
            table = launch._arrange(extras, q.device).cpu()
            expected = arranged(launch, extras, q.device)
            assert table.shape == expected.shape
            assert torch.equal(table[..., 0], expected[..., 0])
            work = expected[..., 0] >= 0
            assert torch.equal(table[work], expected[work])


def test_a_ragged_call_keeps_no_schedule(device: str) -> None:
    """Two threads may call with other lengths at once: a table that the launch kept would reach the other's kernel."""
    call = RAGGED[0]
    (q, k, v), extras, problem = call.inputs((128, 128), torch.bfloat16, 0, device)
    launch = next(row for row in ROWS if row.width == 128).prepare(problem, None)  # type: ignore[arg-type]
    tables = [
        next(t for t in launch.arguments(q, k, v, torch.empty_like(q), q.new_empty(0), extras) if is_table(t))
        for _ in range(2)
    ]
    assert tables[0] is not tables[1] and launch.numbers is None


def is_table(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.dim() == 3
