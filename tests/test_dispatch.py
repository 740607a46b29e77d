"""plan(): the choice, its reasons, and that it is pure."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lazymax import arch as arches
from lazymax.arch import Arch
from lazymax.backends import Tile, registry
from lazymax.dispatch import Plan, lists_blocks, plan
from lazymax.explanation import Explanation
from lazymax.problem import Problem

SHAPE = (1, 4, 2, 300, 300, 128)
TRITON = "3.9.0"
GPUS = [name for name in arches.names() if arches.by_name(name).matrix_unit != "none"]


def on(name: str, **change: Any) -> Arch:
    return replace(arches.by_name(name), triton=TRITON, **change)


def problem(shape: tuple[int, ...] = SHAPE, dtype: str = "bf16", **rules: Any) -> Problem:
    return Problem.from_shape(shape, dtype, **rules)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_runs_a_kernel_from_its_own_backend(name: str, dtype: str) -> None:
    chosen = plan(problem(dtype=dtype), on(name))
    assert chosen.route == "triton" and chosen.tile is not None
    mine = [folder for folder, backend in registry().items() if name in backend.archs and backend.automatic]
    assert len(mine) <= 1, f"{name} is listed by {mine}"
    assert chosen.backend == (mine[0] if mine else "portable")
    assert chosen.level == (chosen.tile.level or registry()[chosen.backend].level_on(on(name)))
    assert chosen.tile in registry()[chosen.backend].forward
    assert chosen.describe() == f"triton:{chosen.backend}:{chosen.tile.name}"


@dataclass(frozen=True)
class Relative:
    arch: str
    backend: str


RELATIVES = (
    Relative("sm_90", "sm_90"),
    Relative("sm_100", "sm_100"),
    Relative("sm_103", "sm_100"),
    Relative("gfx1151", "gfx1151"),
)


@pytest.mark.parametrize("case", RELATIVES, ids=lambda case: case.arch)
def test_relatives_share_a_backend(case: Relative) -> None:
    assert plan(problem(), on(case.arch)).backend == case.backend


@pytest.mark.parametrize("name", ["sm_120", "sm_121"])
def test_newer_is_not_larger(name: str) -> None:
    """sm_120 has neither the shared memory nor the tensor memory of sm_100."""
    chosen = plan(problem(), on(name))
    assert chosen.backend != "sm_100"
    assert any(r.candidate == "sm_100" and f"this is {name}" in r.reason for r in chosen.rejected)


UNKNOWN = (
    Arch("sm_137", "nvidia", "mma", 10, 48 * 1024, 32, False, TRITON),
    Arch("gfx1399", "amd", "wmma", 10, 64 * 1024, 32, False, TRITON),
)


@pytest.mark.parametrize("arch", UNKNOWN, ids=lambda arch: arch.id)
def test_an_unknown_gpu_runs_the_portable_rows(arch: Arch) -> None:
    chosen = plan(problem(), arch)
    assert (chosen.route, chosen.backend) == ("triton", "portable")
    named = {r.candidate for r in chosen.rejected}
    assert named >= {name for name in registry() if name != "portable"}


@dataclass(frozen=True)
class Refusal:
    """A problem or a GPU that no kernel takes: what every backend says about it."""

    id: str
    words: str
    arch: Arch
    shape: tuple[int, ...] = SHAPE
    dtype: str = "bf16"
    change: tuple[tuple[str, Any], ...] = ()


H = on("sm_90")
REFUSALS = (
    Refusal("CPU", "device cpu: no GPU (TRITON_INTERPRET=1", Arch("cpu", "cpu", "none", 1, 1, triton=TRITON)),
    Refusal(
        "no matrix unit",
        "gfx906 has no matrix unit that Triton uses",
        Arch("gfx906", "amd", "none", 1, 1, triton=TRITON),
    ),
    Refusal("no Triton", "no module named triton", replace(H, triton=None)),
    Refusal("old Triton", "Triton 3.5.1 is older than 3.6.0", replace(H, triton="3.5.1")),
    Refusal("float64", "float64 goes to the reference", H, dtype="fp64"),
    Refusal("head dim 577", "head dim of q and k: the kernel takes 1 to 576, got 577", H, (1, 1, 1, 8, 8, 577)),
    Refusal("head dim of v 513", "head dim of v: the kernel takes 1 to 512, got 513", H, (1, 1, 1, 8, 8, 64, 513)),
    Refusal("head dim 0", "head dim of q and k: the kernel takes 1 to 576, got 0", H, (1, 1, 1, 8, 8, 0, 8)),
    Refusal("head dim of v 0", "head dim of v: the kernel takes 1 to 512, got 0", H, (1, 1, 1, 8, 8, 8, 0)),
    *(
        Refusal(f"batches beyond a launch, {name}", "dropout and mods count batch elements to 65535, got 65536", H,
                (65536, 1, 1, 8, 8, 8), change=((name, value),))
        for name, value in (("dropout_p", 0.1), ("score_mod", "any"), ("mask_mod", "any"))
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.id)
def test_refusal_falls_back_by_default_and_raises_when_asked_by_name(case: Refusal) -> None:
    asked = replace(problem(case.shape, case.dtype), **dict(case.change))
    chosen = plan(asked, case.arch)
    assert (chosen.route, chosen.backend, chosen.tile) == ("reference", "reference", None)
    assert case.words in chosen.reason
    assert {r.candidate for r in chosen.rejected} == set(registry())
    assert any(case.words in r.reason for r in chosen.rejected)
    with pytest.raises(NotImplementedError) as caught:
        plan(asked, case.arch, "portable")
    for words in ("impl: 'portable' cannot take this problem", case.arch.id, case.words, "impl='auto'"):
        assert words in str(caught.value)


@dataclass(frozen=True)
class Edge:
    id: str
    shape: tuple[int, ...]


EDGES = (
    Edge("D=1", (1, 1, 1, 8, 8, 1)),
    Edge("D=256", (1, 1, 1, 8, 8, 256)),
    Edge("Dv=1", (1, 1, 1, 8, 8, 256, 1)),
    Edge("D=257", (1, 1, 1, 8, 8, 257)),
    Edge("D=576, Dv=512", (1, 1, 1, 8, 8, 576, 512)),
    Edge("Dv=512", (1, 1, 1, 8, 8, 1, 512)),
)


@pytest.mark.parametrize("case", EDGES, ids=lambda case: case.id)
@pytest.mark.parametrize("name", GPUS)
def test_the_ends_of_the_head_dims_are_inside(case: Edge, name: str) -> None:
    assert plan(problem(case.shape), on(name)).route == "triton"


FEATURES: dict[str, dict[str, Any]] = {
    "bool mask": dict(mask="bool", mask_varies=(True, False, False, True)),
    "float mask": dict(mask="float32", mask_varies=(True, True, True, True)),
    "softcap": dict(softcap=30.0),
    "ALiBi": dict(alibi=True),
    "sinks": dict(sinks=True),
    "score_mod": dict(score_mod="any"),
    "mask_mod": dict(mask_mod="any"),
    "dropout": dict(dropout_p=0.1),
    "seqlens_k": dict(seqlens_k=True),
    "packed": dict(packed=(300, 300)),
    "batches beyond a launch": dict(batch=65536),
    "batches beyond a launch, masked": dict(batch=65536, mask="bool", sinks=True, seqlens_k=True),
    "many sequences": dict(batch=60000, packed=(300, 300), dropout_p=0.1, mask_mod="any"),
}
FEATURES["all at once"] = {n: v for feature in list(FEATURES.values())[:9] for n, v in feature.items()}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("change", FEATURES.values(), ids=FEATURES)
def test_the_kernel_takes_every_feature_on_every_gpu(change: dict[str, Any], dtype: str) -> None:
    for name in GPUS:
        for shape in (SHAPE, (2, 8, 8, 4096, 4096, 64), (1, 1, 1, 1, 1, 576, 512)):
            chosen = plan(replace(problem(shape, dtype), **change), on(name))
            assert chosen.route == "triton", (name, shape, chosen.reason)


@dataclass(frozen=True)
class Listed:
    """Whether the key blocks are listed before the forward, for a row of 64 queries and 64 keys."""

    id: str
    change: dict[str, Any]
    words: str | None
    kv_len: int = 300


def bool_mask(pattern: str, **more: Any) -> dict[str, Any]:
    """ "b.qk": the mask varies over batch, query and key."""
    return dict(mask="bool", mask_varies=tuple(letter != "." for letter in pattern), **more)


SAME = "the bool mask is the same for all heads"
LISTED = (
    Listed("plain", {}, None),
    Listed("mask_mod", dict(mask_mod="any"), "mask_mod is known by position"),
    Listed("mask_mod, few keys", dict(mask_mod="any"), None, 128),
    Listed("mask_mod, three blocks", dict(mask_mod="any"), "mask_mod is known by position", 129),
    Listed("padding", bool_mask("b..k"), SAME),
    Listed("padding, one head", bool_mask("b..k", q_heads=1, kv_heads=1), SAME),
    Listed("padding, few keys", bool_mask("b..k"), None, 128),
    Listed("mask, many heads", bool_mask("..qk"), SAME),
    Listed("mask, few heads: the list costs as much", bool_mask("..qk", q_heads=2, kv_heads=2), None),
    Listed("mask of heads", bool_mask(".hqk"), None),
    Listed("float mask", {**bool_mask("..qk"), "mask": "float32"}, None),
    Listed("dropout", dict(dropout_p=0.5), None),
    Listed("both", bool_mask(".hqk", mask_mod="any"), "mask_mod is known by position"),
)


@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.id)
def test_when_key_blocks_are_listed_first(case: Listed) -> None:
    row = Tile(block_m=64, block_n=64, num_warps=4, num_stages=1, reason="test", provenance="test")
    asked = replace(problem((1, 4, 2, 300, case.kv_len, 64)), **case.change)
    assert lists_blocks(asked, row) == case.words
    chosen = plan(replace(asked, kv_len=4096), on("sm_90"))
    wanted = case.words is not None or "few keys" in case.id
    assert chosen.listed is wanted
    assert any("key blocks that no pair needs are skipped" in note for note in chosen.notes) is wanted


@dataclass(frozen=True)
class Impl:
    id: str
    impl: str
    arch: str
    want: Any  # a (route, backend), or an exception type
    words: str = ""


IMPLS = (
    Impl("reference", "reference", "sm_90", ("reference", "reference")),
    Impl("portable on sm_90", "portable", "sm_90", ("triton", "portable")),
    Impl("portable on gfx1151", "portable", "gfx1151", ("triton", "portable")),
    Impl("portable on sm_120", "portable", "sm_120", ("triton", "portable")),
    Impl("unknown", "flash", "sm_90", ValueError, "impl: got 'flash', expected one of auto, "),
    Impl("empty", "", "sm_90", ValueError, "impl: got ''"),
)


@pytest.mark.parametrize("case", IMPLS, ids=lambda case: case.id)
def test_named_impl(case: Impl) -> None:
    if isinstance(case.want, tuple):
        chosen = plan(problem(), on(case.arch), case.impl)
        assert (chosen.route, chosen.backend) == case.want
        return
    with pytest.raises(case.want) as caught:
        plan(problem(), on(case.arch), case.impl)
    assert case.words in str(caught.value) and "portable" in str(caught.value) and "reference" in str(caught.value)


@pytest.mark.parametrize("name", [name for name in registry() if registry()[name].archs])
def test_impl_of_another_gpu_raises(name: str) -> None:
    other = next(id for id in arches.names() if id not in registry()[name].archs)
    with pytest.raises(
        NotImplementedError, match=rf"impl: '{name}' cannot take this problem on {other}: for .*{other}"
    ):
        plan(problem(), on(other), name)


@pytest.mark.parametrize("name", [*arches.names(), "cpu"])
@pytest.mark.parametrize("rules", [{}, dict(causal="top_left")], ids=["full", "causal"])
def test_every_other_candidate_is_refused_with_a_reason(name: str, rules: dict[str, Any]) -> None:
    asked, arch = problem(**rules), on(name)
    chosen = plan(asked, arch)
    refused = {r.candidate for r in chosen.rejected}
    tried = list(registry())[: list(registry()).index(chosen.backend)] if chosen.route == "triton" else registry()
    assert refused >= set(tried)
    if chosen.route == "triton":
        assert "reference" in refused and chosen.backend not in refused
        rows = registry()[chosen.backend].forward
        before = rows[: rows.index(chosen.tile)]  # type: ignore[arg-type]
        assert [r for r in refused if r.startswith(f"{chosen.backend} row")] or not before
    assert all(r.reason and "None" not in r.reason for r in chosen.rejected)
    assert chosen.reason


def test_rescale_form_is_the_rows_unless_this_triton_cannot_compile_it() -> None:
    rows = [
        (name, tile)
        for name in ("sm_90", "sm_100", "sm_120", "gfx1151")
        for tile in [plan(problem(), on(name)).tile]
        if tile is not None
    ]
    for name, tile in rows:
        assert plan(problem(), on(name)).rescale == tile.rescale
        old = plan(problem(), replace(on(name), triton="3.6.0"))
        faulty = arches.by_name(name).matrix_unit == "tcgen05" and old.tile is not None and old.tile.rescale == "branch"
        assert old.rescale == ("select" if faulty else old.tile.rescale)  # type: ignore[union-attr]
        assert any("rescale by select instead of branch" in note for note in old.notes) is faulty


@dataclass(frozen=True)
class Note:
    id: str
    words: str
    change: dict[str, Any]


NOTES = (
    Note("copied", "k is copied first: its head dimension is not contiguous", dict(copied=("k",))),
    Note("tf32", "fp32 products in tf32", dict(dtype="float32", fp32_precision="tf32")),
)


@pytest.mark.parametrize("case", NOTES, ids=lambda case: case.id)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_notes(case: Note, impl: str) -> None:
    plain, changed = plan(problem(), on("sm_90"), impl), plan(replace(problem(), **case.change), on("sm_90"), impl)
    assert any(note.startswith(case.words) for note in changed.notes)
    assert not any(note.startswith(case.words) for note in plain.notes)


def test_the_interpreter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    arch = arches.of(torch.device("cpu"))
    chosen = plan(problem(), arch)
    assert chosen.route == "triton" and any("interpreter runs the kernel on the CPU" in note for note in chosen.notes)


def test_planning_is_repeatable_and_plans_are_values() -> None:
    import copy
    import pickle

    chosen = plan(problem(causal="top_left"), on("sm_90"))
    assert chosen == plan(problem(causal="top_left"), on("sm_90"))
    assert pickle.loads(pickle.dumps(chosen)) == copy.deepcopy(chosen) == chosen
    assert isinstance(hash(chosen), int) and isinstance(chosen, Plan)


PURE = """
import sys
import lazymax.dispatch as dispatch
from lazymax import arch, problem
import torch
plans = []
for name in arch.names():
    if arch.by_name(name).matrix_unit == "none": continue
    for dtype in ("fp16", "bf16", "fp32"):
        for rules in ({}, {"causal": "top_left"}, {"window": (7, 0)}):
            p = problem.Problem.from_shape((2, 8, 2, 333, 444, 128), dtype, **rules)
            plans.append(dispatch.plan(p, arch.by_name(name)))
assert all(plan.route == "triton" for plan in plans)
print(len(plans), "triton" in sys.modules, torch.cuda.is_initialized())
"""


def test_planning_for_every_gpu_imports_no_triton_and_touches_no_gpu(clean_env: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", PURE], env=clean_env, capture_output=True, text=True)
    assert done.stdout.split() == [str(9 * len(GPUS)), "False", "False"], done.stdout + done.stderr


def test_explanation_as_text_and_json() -> None:
    asked = problem((2, 8, 2, 30, 40, 64, 32), causal="bottom_right", window=(7, None))
    arch = on("sm_90")
    explanation = Explanation(asked, arch, plan(asked, arch))
    text, chosen = str(explanation), explanation.plan
    assert chosen.tile is not None
    for words in (
        "bfloat16 B=2 Hq=8 Hkv=2 Sq=30 Sk=40 D=64 Dv=32, causal bottom_right, window (7, None)",
        "arch      sm_90 (wgmma, 132 SMs, 227 KiB shared memory), Triton 3.9.0",
        f"route     {chosen.describe()}",
        f"because   {chosen.reason}",
        f"level     {chosen.level}",
        f"{chosen.tile.block_m} queries x {chosen.tile.block_n} keys",
        chosen.tile.provenance,
        *(f"refused   {r.candidate}: {r.reason}" for r in chosen.rejected),
    ):
        assert words in text
    assert all(word not in text for word in ("mask", "softcap", "ALiBi", "sinks", "dropout", "packed", "seqlens"))
    data = json.loads(explanation.to_json())
    assert set(data) == {"problem", "arch", "plan", "backward"}
    assert data["backward"]["tile"]["keys"]["block_n"] == explanation.backward.tile.keys.block_n  # type: ignore[union-attr]
    assert data["problem"]["window"] == [7, None] and data["problem"]["kv_len"] == 40
    assert data["arch"]["id"] == "sm_90"
    assert data["plan"]["tile"]["block_m"] == chosen.tile.block_m
    assert len(data["plan"]["rejected"]) == len(chosen.rejected)


def test_explanation_of_features() -> None:
    asked = replace(problem(), **FEATURES["all at once"])
    words = (
        "seqlens_k, mask float32, softcap 30, ALiBi, sinks, score_mod any, mask_mod any, dropout 0.1\n",
        "note      key blocks that no pair needs are skipped: listed first, for mask_mod is known by position\n",
    )
    text = str(Explanation(asked, on("sm_90"), plan(asked, on("sm_90"))))
    assert all(line in text for line in words), text
    asked = replace(problem(), batch=3, packed=(300, 310))
    assert "D=128, packed, 300 and 310 rows\n" in str(Explanation(asked, H, plan(asked, H)))
