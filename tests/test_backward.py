"""The portable backward kernels, launched as the operator launches them, against float64 within the error budget."""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from calls import BEND, SIEVE, bools, moved, normal, stored

import lazymax
from lazymax import arch as arches
from lazymax import ops_backward, testing
from lazymax.backends import BackwardTile, Half
from lazymax.compat import tritons
from lazymax.dispatch import plan
from lazymax.dispatch_backward import BackwardPlan, plan_backward
from lazymax.extras import Extras, Rules
from lazymax.kernels.backward_launch import BackwardLaunch
from lazymax.options import parse_options
from lazymax.problem import Problem

INF, NAN = math.inf, math.nan
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SHORT = {FP16: "fp16", BF16: "bf16", FP32: "fp32"}


def tile(keys: tuple[int, int], queries: tuple[int, int], **options: Any) -> BackwardTile:
    """A row that no table holds: (queries, keys) of a tile of each kernel."""
    halves = (Half(block_m=m, block_n=n, num_warps=4, num_stages=1) for m, n in (keys, queries))
    return BackwardTile(**dict(zip(("keys", "queries"), halves, strict=True)), reason="", provenance="", **options)


SMALL, FLAT, TALL = tile((16, 16), (16, 16)), tile((16, 32), (16, 32)), tile((32, 16), (32, 16))
LARGE = tile((32, 32), (32, 32), descriptors=True)


def separate(row: BackwardTile) -> BackwardTile:
    """The row with dK and dV in a launch each."""
    return replace(row, keys=replace(row.keys, separate=True))


def anew(row: BackwardTile, columns: int | None) -> BackwardTile:
    """The row with operands that come when they are due."""
    halves = (replace(half, reload=True, columns=columns) for half in (row.keys, row.queries))
    return replace(row, **dict(zip(("keys", "queries"), halves, strict=True)))


ONE_LOOP = replace(LARGE, keys=replace(LARGE.keys, one_loop=True))
APART, ANEW, BOTH = separate(LARGE), anew(TALL, None), separate(anew(FLAT, 16))
ROWS = {
    "16x16": SMALL,
    "32x32": LARGE,
    "one loop": ONE_LOOP,
    "separate": APART,
    "reload": ANEW,
    "separate, reload": BOTH,
}


@dataclass(frozen=True)
class Case:
    """One call. sizes: B, Hq, Hkv, Sq, Sk, D[, D_v]; stored: the orders of dimensions in memory of q, k, v, d_out."""

    id: str
    sizes: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = FP32
    row: BackwardTile = SMALL
    stored: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),) * 4
    size: float = 1.0  # q and k are multiplied by it
    lse: bool = True  # a gradient comes in through the LSE


NEEDS = (True, True, True, False)


def upstream(case: Case, q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    grad = normal(*q.shape[:3], v.shape[3], seed=5).to(q.dtype).to(q.device)
    return stored(grad, case.stored[3]), normal(*q.shape[:3], seed=6).to(q.device) if case.lse else None


def call_of(case: Case, device: str) -> tuple[Any, ...]:
    q, k, v = testing.make_qkv(*case.sizes, dtype=case.dtype, device=device)
    q, k, v = (stored(t, order) for t, order in zip((q * case.size, k * case.size, v), case.stored, strict=False))
    extras, rules = parse_options(q, **moved(case.options, device))
    return q, k, v, extras, rules


NOTHING_SAVED = ops_backward.Saved()  # the operator runs the forward again


def by_row(
    row: BackwardTile,
    d_out: Any,
    d_lse: Any,
    qkv: Any,
    problem: Problem,
    extras: Extras,
    rules: Rules,
    saved: ops_backward.Saved = NOTHING_SAVED,
) -> Any:
    """Through the operator, past its choice of a row, into gradients full of NaN; the forward as it is chosen."""
    arch, problem = arches.of(qkv[0].device), ops_backward.beside(problem, d_out)
    assert row.refusal(problem, arch) is None
    forward = plan(problem, arch)
    chosen = BackwardPlan(
        route="triton", backend="test", tile=row, level="", reason="", rejected=(),
        least_columns=tritons.least_columns(arch.matrix_unit),
    )  # fmt: skip
    copies = d_out.stride(3) != 1 or row.descriptors
    decision = ops_backward._Decision(
        problem, arch, forward, chosen, BackwardLaunch.prepare(problem, chosen), (), copies
    )
    grads = tuple(testing.poisoned(*t.shape, dtype=t.dtype, device=t.device) for t in qkv)
    others = ops_backward._by_kernels(decision, saved, d_out, d_lse, qkv, extras, rules, list(NEEDS), grads)
    return [*grads, *(d_out.new_empty(0) if grad is None else grad for grad in others)]


def run(case: Case, device: str) -> tuple[Any, ...]:
    """The gradients, and all that `testing.check_gradients` takes behind them."""
    q, k, v, extras, rules = call_of(case, device)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    d_out, d_lse = upstream(case, q, v)
    grads = by_row(case.row, d_out, d_lse, (q, k, v), problem, extras, rules)
    return grads, d_out, d_lse, q, k, v, problem, extras, NEEDS


def check(case: Case, device: str) -> list[torch.Tensor]:
    made = run(case, device)
    for budget in testing.check_gradients(*made):
        assert budget.ok, budget
    return made[0]


def cases(*found: Case) -> Any:
    assert len({case.id for case in found}) == len(found)
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in found])


# ---- shapes ----

AROUND = (1, 15, 16, 17, 35)
PAIRS = [(q, k) for q, k in itertools.product(AROUND, AROUND)]


@cases(*(Case(f"{q}x{k}", (1, 1, 1, q, k, 16)) for q, k in PAIRS))
def test_lengths(case, device):
    check(case, device)


BANDS = {
    "causal": dict(causal="top_left"),
    "bottom right": dict(causal="bottom_right"),
    "window": dict(window=(8, 3)),
    "window, bottom right": dict(window=(0, 15), window_align="bottom_right"),
    "left": dict(window=(20, None)),
    "causal window": dict(causal="bottom_right", window=(9, None)),
}


@cases(
    *(
        Case(f"{name} {q}x{k} {row.keys.name}", (1, 1, 1, q, k, 16), rules, row=row)
        for name, rules in BANDS.items()
        for q, k, row in (
            (35, 50, SMALL),
            (50, 35, FLAT),
            (67, 35, TALL),
            (35, 67, LARGE),
            (35, 50, APART),
            (67, 35, ANEW),
            (35, 67, BOTH),
        )
    )
)
def test_bands(case, device):
    """Rows and keys that nobody sees are in here: their gradients are 0."""
    check(case, device)


@cases(
    *(
        Case(f"{hq} over {hkv}, {d} {dv} {SHORT[dtype]} {row.keys.name}", (b, hq, hkv, q, k, d, dv), rules, dtype, row)
        for (b, hq, hkv), (q, k), (d, dv), dtype, row, rules in (
            ((2, 4, 1), (19, 35), (16, 16), FP16, SMALL, {}),
            ((2, 6, 2), (35, 19), (8, 24), BF16, FLAT, dict(causal="top_left")),
            ((1, 3, 3), (17, 33), (1, 3), FP32, TALL, {}),
            ((1, 2, 1), (17, 40), (40, 72), FP16, LARGE, dict(causal="bottom_right")),
            ((1, 1, 1), (17, 20), (80, 96), FP16, SMALL, {}),
            ((1, 2, 2), (20, 17), (100, 33), FP32, SMALL, dict(window=(3, 9))),
            ((1, 1, 1), (9, 33), (192, 128), BF16, LARGE, {}),
            ((1, 1, 1), (33, 9), (256, 256), FP16, SMALL, {}),
            ((2, 4, 1), (19, 35), (16, 16), FP16, APART, {}),
            ((1, 6, 2), (35, 19), (8, 24), BF16, ANEW, dict(causal="top_left")),
            ((1, 2, 1), (17, 40), (100, 33), FP32, BOTH, dict(window=(3, 9))),
            ((1, 1, 1), (9, 33), (192, 128), BF16, BOTH, {}),
        )
    )
)
def test_heads_and_dims(case, device):
    check(case, device)


BSHD = (0, 2, 1, 3)
ORDERS = {
    "all stored as B, S, H, D": (BSHD,) * 4,
    "k and v": ((0, 1, 2, 3), BSHD, (2, 1, 0, 3), (0, 1, 2, 3)),
    "the last dimension not contiguous": ((0, 1, 3, 2),) * 4,
    "d_out by heads first": ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (1, 0, 2, 3)),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_strides(orders, row, device):
    check(Case("", (2, 4, 2, 19, 35, 16), dict(causal="top_left"), FP16, row, orders), device)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=SHORT.get)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_scales(scale, dtype, device):
    check(Case("", (1, 2, 1, 20, 35, 16), dict(scale=scale, causal="top_left"), dtype), device)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_gradient_of_stride_0(row, device):
    q, k, v = testing.make_qkv(2, 2, 1, 19, 35, 16, device=device)
    extras, rules = parse_options(q, causal="top_left")
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    d_out = torch.ones((), dtype=q.dtype, device=device).expand(2, 2, 19, 16)
    grads = by_row(row, d_out, None, (q, k, v), problem, extras, rules)
    for budget in testing.check_gradients(grads, d_out, None, q, k, v, problem, extras, NEEDS):
        assert budget.ok, budget


# ---- features ----


def holes(*shape: int) -> torch.Tensor:
    """A float mask with masked keys, a masked row, and a row of the lowest number."""
    mask = normal(*shape).masked_fill(normal(*shape, seed=8) > 0.8, -INF)
    if shape[-2] > 5:
        mask[..., 3, :] = -INF
        mask[..., 5, :] = torch.finfo(FP32).min
    return mask


B, H, Q, K = 2, 2, 20, 35
ENDS = dict(cu_seqlens_q=torch.tensor([0, 7, 7, 17]), cu_seqlens_k=torch.tensor([0, 11, 20, 33]))
FEATURES: dict[str, dict[str, Any]] = {
    "bool mask": dict(attn_mask=bools(B, 1, Q, K) & (torch.arange(Q) != 3)[:, None]),
    "key padding": dict(attn_mask=bools(B, 1, 1, K), causal="bottom_right"),
    "float mask": dict(attn_mask=holes(Q, K)),
    "float mask of batch and head": dict(attn_mask=holes(B, H, Q, K), causal="top_left", softcap=3.0),
    "float mask of keys": dict(attn_mask=normal(B, 1, 1, K), seqlens_k=torch.tensor([30, 0])),
    "float mask of queries": dict(attn_mask=normal(1, H, Q, 1), window=(5, 5)),
    "float mask of heads": dict(attn_mask=normal(1, H, 1, 1), sinks=normal(H)),
    "float mask, expanded": dict(attn_mask=normal(1, 1, Q, 1).expand(B, H, Q, K)),
    "float mask, transposed": dict(attn_mask=normal(K, Q).T),
    "float mask, dropout, sinks": dict(
        attn_mask=holes(Q, K), sinks=normal(B, H), dropout_p=0.3, dropout_seed=torch.tensor([7])
    ),
    "softcap": dict(softcap=1.5, causal="bottom_right"),
    "large softcap": dict(softcap=1e4),
    "ALiBi": dict(alibi_slopes=normal(B, H), causal="bottom_right"),
    "ALiBi of heads": dict(alibi_slopes=normal(H)),
    "sinks": dict(sinks=normal(B, H), causal="top_left"),
    "sinks of heads": dict(sinks=normal(H)),
    "dropout": dict(dropout_p=0.3, dropout_seed=torch.tensor([12345678901])),
    "dropout of everything": dict(dropout_p=1.0, dropout_seed=torch.tensor([1])),
    "lengths": dict(seqlens_k=torch.tensor([17, 0]), causal="bottom_right", sinks=normal(B, H)),
    "lengths, top left": dict(seqlens_k=torch.tensor([35, 3]), window=(6, 1)),
    "mask_mod": dict(**SIEVE, causal="top_left"),
    "score_mod": dict(**BEND, causal="bottom_right"),
    "score_mod behind everything": dict(
        **BEND, softcap=3.0, alibi_slopes=normal(H), attn_mask=normal(B, 1, Q, K), window=(9, 9)
    ),
    "score_mod, packed": dict(**ENDS, **BEND, sinks=normal(H)),
    "packed": dict(**ENDS),
    "packed, sinks and slopes of each": dict(
        **ENDS, sinks=normal(3, H), alibi_slopes=normal(3, H), causal="bottom_right"
    ),
    "packed, window, dropout": dict(
        **ENDS, window=(3, 2), dropout_p=0.2, dropout_seed=torch.tensor([3]), sinks=normal(H)
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, row, device):
    options = FEATURES[name]
    sizes = (1 if "cu_seqlens_q" in options else B, H, 1, Q, K, 16)
    dtype = FP32 if row in (SMALL, BOTH) else BF16
    # The LSE of a row of the lowest number has no room for a derivative that anyone could check.
    check(Case("", sizes, options, dtype, row, lse="float mask" not in name), device)


# ---- what may hide ----


HIDING = pytest.mark.parametrize("row", [SMALL, separate(SMALL), ANEW, BOTH], ids=lambda row: row.keys.name)


@HIDING
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    "options", [dict(causal="top_left"), dict(seqlens_k=torch.tensor([9])),
                dict(attn_mask=(torch.arange(35) < 9)[None])], ids=["causal", "lengths", "bool mask"]
)  # fmt: skip
def test_hidden_keys_reach_no_gradient(options, value, row, device):
    q, k, v = testing.make_qkv(1, 2, 1, 9, 35, 16, dtype=FP32, device=device)
    extras, rules = parse_options(q, **moved(options, device))
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    d_out = normal(1, 2, 9, 16).to(device)
    want = by_row(row, d_out, None, (q, k, v), problem, extras, rules)
    k, v = k.clone(), v.clone()
    k[:, :, 9:], v[:, :, 9:] = value, -value
    got = by_row(row, d_out, None, (q, k, v), problem, extras, rules)
    for what, x, y in zip(("dq", "dk", "dv"), got, want, strict=False):
        budget = testing.within_budget(x, y.double(), y.clone(), eps=testing.EPS[FP32], what=what)
        assert budget.ok, budget
    assert (got[1][:, :, 9:] == 0).all() and (got[2][:, :, 9:] == 0).all()


@HIDING
def test_a_visible_nan_arrives(row, device):
    q, k, v = testing.make_qkv(1, 1, 1, 20, 35, 16, dtype=FP32, device=device)
    v[:, :, 30] = NAN
    extras, rules = parse_options(q)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    dq, dk, *_ = by_row(row, torch.ones_like(q), None, (q, k, v), problem, extras, rules)
    assert dq.isnan().all() and dk.isnan().any()


@HIDING
def test_scores_beyond_the_fused_exponent(row, device):
    """To 1e9: dV is exact; dQ and dK cancel to 0, and what is left of them goes by the size of K and Q."""
    size = 3e4
    q, k, v, extras, rules = call_of(Case("", (1, 2, 1, 20, 35, 16), size=size), device)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    d_out = normal(1, 2, 20, 16).to(device)
    dq, dk, dv, *_ = by_row(row, d_out, None, (q, k, v), problem, extras, rules)
    made = testing.check_gradients([dq, dk, dv, *[q.new_empty(0)] * 3], d_out, None, q, k, v, problem, extras)
    assert made[2].ok, made[2]
    assert max(dq.abs().max(), dk.abs().max()) <= 1e-4 * size


@HIDING
def test_rows_without_keys_pass_no_gradient_on(row, device):
    """Whatever the gradient of their LSE of -inf came out as."""
    q, k, v, extras, rules = call_of(Case("", (1, 2, 2, 35, 17, 16), dict(causal="bottom_right")), device)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    d_out, d_lse = normal(1, 2, 35, 16).to(device), normal(1, 2, 35).to(device)
    want = by_row(row, d_out, d_lse, (q, k, v), problem, extras, rules)
    d_lse[:, :, :18] = NAN
    got = by_row(row, d_out, d_lse, (q, k, v), problem, extras, rules)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert (got[0][:, :, :18] == 0).all()


@pytest.mark.parametrize("row", [APART, BOTH], ids=["separate", "separate, reload"])
def test_an_infinite_value_leaves_the_launch_of_dv_alone(row, device):
    """It is in dP: dK is computed again, carefully, and dV is what it was, to the bit."""
    q, k, v = testing.make_qkv(1, 1, 1, 20, 35, 16, dtype=FP32, device=device)
    extras, rules = parse_options(q)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    d_out = normal(1, 1, 20, 16).to(device)
    saved = ops_backward.Saved(*lazymax.attention(q, k, v, return_lse=True))
    found = []
    for value in (v, torch.cat([torch.full_like(v[:, :, :1], INF), v[:, :, 1:]], 2)):
        found.append(by_row(row, d_out, None, (q, k, value), problem, extras, rules, saved))
    assert torch.equal(found[0][2], found[1][2]) and found[1][1].isnan().any()


@pytest.mark.parametrize("row", [FLAT, LARGE], ids=["pointers", "descriptors"])
def test_separate_launches_give_the_bits_of_one(row, device):
    """The same products of the same tiles, in the same order, in the interpreter."""
    q, k, v, extras, rules = call_of(Case("", (1, 4, 2, 35, 50, 16), dict(causal="bottom_right"), BF16), device)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    d_out = normal(1, 4, 35, 16).to(device, BF16)
    one, two, again = (by_row(of, d_out, None, (q, k, v), problem, extras, rules) for of in (row, *[separate(row)] * 2))
    assert all(torch.equal(x, y) for x, y in zip(two, again, strict=True))
    if device == "cpu":
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


# ---- the same bits ----


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_the_same_bits_in_20_runs(deterministic, device):
    gpu = device == "cuda"
    heads, length = (8, 1000) if gpu else (2, 40)
    q, k, v = testing.make_qkv(1, heads, heads // 2, length, length, 64 if gpu else 16, device=device)
    sinks = normal(heads).to(device)
    found = []
    for _ in range(20 if gpu else 3):
        leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
        out = lazymax.attention(*leaves[:3], sinks=leaves[3], causal="top_left", deterministic=deterministic)
        out.square().sum().backward()
        found.append([t.grad for t in leaves])
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


def test_the_switch_of_torch_is_heard(device):
    q = torch.empty(1, 1, 1, 8, device="meta")
    assert not Problem.from_call(q, q, q).deterministic
    assert Problem.from_call(q, q, q, deterministic=True).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert Problem.from_call(q, q, q).deterministic
    finally:
        torch.use_deterministic_algorithms(False)


# ---- the choice ----


@dataclass(frozen=True)
class Choice:
    id: str
    route: str
    words: str
    shape: tuple[int, ...] = (2, 4, 4, 64, 64, 64)
    arch: str = "sm_90"
    dtype: str = "bf16"
    impl: str = "auto"
    rules: dict[str, Any] = field(default_factory=dict)


CHOICES = (
    Choice("a kernel", "triton", "", (4, 16, 16, 4096, 4096, 128)),
    Choice("another GPU", "triton", "any GPU", arch="gfx90a"),
    Choice("fp64", "reference", "float64 goes to the reference", dtype="fp64"),
    Choice(
        "large heads", "reference", "head dim of q and k: the kernels take 1 to 256, got 576", (1, 4, 1, 9, 9, 576, 512)
    ),
    Choice(
        "large heads of v", "reference", "head dim of v: the kernels take 1 to 256, got 512", (1, 4, 1, 9, 9, 64, 512)
    ),
    Choice("the reference", "reference", "the forward is the reference's: asked for", impl="reference"),
    Choice("nothing", "reference", "an input is empty", (2, 4, 4, 0, 64, 64)),
)


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case.id)
def test_choice(case):
    problem, arch = Problem.from_shape(case.shape, case.dtype, **case.rules), arches.by_name(case.arch)
    chosen = plan_backward(problem, arch, plan(problem, arch, case.impl))
    assert chosen.route == case.route and case.words in chosen.reason
    assert (chosen.tile is None) == (case.route == "reference")


def test_a_score_mod_is_differentiated_by_torch():
    q = torch.empty(1, 2, 5, 16, device="meta", dtype=FP16)
    weight = torch.empty(2, device="meta")
    problem = Problem.from_call(q, q, q, score_mod="calls.weigh", score_mod_args=(weight,))
    arch = arches.by_name("sm_90")
    chosen = plan_backward(problem, arch, plan(problem, arch))
    assert chosen.route == "reference"
    assert "score_mod 'calls.weigh' is differentiated by torch: it was registered without derivative=" in chosen.reason


def test_a_row_that_adds_in_any_order_is_passed_over_where_the_same_bits_are_asked_for():
    row = tile((16, 16), (16, 16), deterministic=False)
    arch = arches.by_name("sm_90")
    for asked in (False, True):
        problem = Problem.from_shape((1, 1, 1, 9, 9, 16), "fp16", deterministic=asked)
        assert (row.refusal(problem, arch) is None) is not asked


def test_explain_tells_of_the_backward():
    shape = (4, 16, 16, 4096, 4096, 128)
    text = str(lazymax.explain(shape=shape, arch="sm_80", show=False))
    assert "backward  triton:sm_80:dkdv-" in text and "dK and dV 64 queries x 64 keys" in text
    assert "the same bits from run to run, no atomics" in text
    text = str(lazymax.explain(shape=shape, arch="gfx1151", show=False))
    assert "-reload-c32-separate-dq-" in text and "dK and dV, in a launch each, 16 queries x 64 keys" in text
    text = str(lazymax.explain(shape=shape, arch="sm_90", show=False))
    assert "backward  triton:sm_90:ws-" in text and "all gradients in one kernel: 64 queries x 128 keys" in text
    assert "added up in the order in which programs finish; deterministic=True takes another row" in text


def test_a_row_that_cannot_be_built_gives_way_to_the_reference(device, monkeypatch):
    from triton.runtime.errors import OutOfResources

    def fail(*arguments: Any) -> Any:
        raise OutOfResources(2, 1, "shared memory")

    monkeypatch.setattr(ops_backward, "_decided", {})
    monkeypatch.setattr(BackwardLaunch, "__call__", fail)
    leaves = [t.requires_grad_() for t in testing.make_qkv(1, 2, 2, 9, 9, 16, dtype=FP32, device=device)]
    with pytest.warns(UserWarning, match="the backward .* cannot be built .*; reference takes over"):
        lazymax.attention(*leaves).sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves)


def test_the_gradient_of_a_mask_of_one_row_is_of_the_rows_that_there_are(device):
    """A row outside the tensors would see key 5 and its NaN; found by the fuzz."""
    q, k, v = testing.make_qkv(1, 1, 1, 5, 7, 16, dtype=FP32, device=device)
    k[:, :, 5:], v[:, :, 5:] = NAN, NAN
    extras, rules = parse_options(q, attn_mask=torch.zeros(7, device=device), causal="top_left")
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    grads = by_row(SMALL, torch.ones_like(q), None, (q, k, v), problem, extras, rules)
    assert grads[3].isfinite().all()


def test_a_score_mod_with_a_derivative_is_of_kernels_unless_its_tensors_want_gradients(device):
    q, k, v = testing.make_qkv(1, 2, 1, 20, 35, 16, dtype=FP32, device=device)
    weight = BEND["score_mod_args"][0].to(device)
    d_out = normal(1, 2, 20, 16).to(device)
    found = []
    for wants in (False, True):
        leaves = [*(t.clone().requires_grad_() for t in (q, k, v)), weight.clone().requires_grad_(wants)]
        out = lazymax.attention(*leaves[:3], score_mod="calls.bend", score_mod_args=(leaves[3],), causal="top_left")
        found.append(torch.autograd.grad(out, leaves[: 3 + wants], d_out))
    for x, y in zip(*found, strict=False):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert len(found[1]) == 4 and found[1][3].abs().max() > 0
    extras, rules = parse_options(q, score_mod="calls.bend", score_mod_args=(weight,))
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    arch = arches.by_name("sm_90")
    assert plan_backward(problem, arch, plan(problem, arch)).route == "triton"
