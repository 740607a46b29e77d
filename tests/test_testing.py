"""The tools that judge results must fail when they should."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from by_hand import FEATURES, PACKED, build, philox_by_hand

from lazymax import dropout, testing
from lazymax.problem import Problem
from lazymax.testing import EPS, check_attention, dropout_keep, make_qkv, moat, poisoned, within_budget

NAN, INF = float("nan"), float("inf")
EPSILON = 2.0**-10


def exact() -> torch.Tensor:
    return torch.tensor([[1.0, 2.0, 4.0], [0.0, -8.0, 0.5]], dtype=torch.float64)


def lowered() -> torch.Tensor:
    """Off by 0.01 in the first row, right in the second."""
    return (exact() + torch.tensor([[0.0, 0.01, 0.0], [0.0, 0.0, 0.0]])).float()


@dataclass(frozen=True)
class Judged:
    id: str
    at: tuple[int, int]
    value: float
    ok: bool


JUDGED = (
    Judged("right", (0, 1), 2.0, True),
    Judged("within twice the cost of the precision", (0, 1), 2.019, True),
    Judged("elsewhere in that row", (0, 0), 1.019, True),
    Judged("beyond", (0, 1), 2.03, False),
    Judged("below by as much", (0, 1), 1.97, False),
    Judged("a row without cost allows rounding and its head's cost", (1, 2), 0.5 + 0.02 + 8 * EPSILON * 0.9, True),
    Judged("and no more", (1, 2), 0.5 + 0.02 + 8 * EPSILON * 1.1, False),
    Judged("wrong sign", (1, 1), 8.0, False),
    Judged("NaN", (0, 1), NAN, False),
    Judged("NaN where 0 is right", (1, 0), NAN, False),
    Judged("inf", (0, 1), INF, False),
    Judged("-inf", (1, 1), -INF, False),
    Judged("forgotten", (0, 2), 0.0, False),
)


@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.id)
def test_one_element(case: Judged) -> None:
    x = exact().float()
    x[case.at] = case.value
    budget = within_budget(x, exact(), lowered(), eps=EPSILON, what="x")
    assert budget.ok is case.ok
    if not case.ok:
        assert budget.worst == case.at
        assert budget.error > budget.allowed
        assert str(budget).startswith("x: error ") and str(case.at) in str(budget)


@dataclass(frozen=True)
class NonFinite:
    id: str
    right: float
    value: float
    ok: bool


NON_FINITE = (
    NonFinite("-inf is -inf", -INF, -INF, True),
    NonFinite("inf is not -inf", -INF, INF, False),
    NonFinite("finite where -inf is right", -INF, -1e30, False),
    NonFinite("NaN where -inf is right", -INF, NAN, False),
    NonFinite("NaN where NaN is right", NAN, NAN, True),
    NonFinite("finite where NaN is right", NAN, 0.0, False),
)


@pytest.mark.parametrize("case", NON_FINITE, ids=lambda case: case.id)
def test_what_is_not_finite_must_be_equal(case: NonFinite) -> None:
    x64, x = exact(), exact().float()
    x64[0, 1], x[0, 1] = case.right, case.value
    low = x64.float()
    assert within_budget(x, x64, low, eps=EPSILON).ok is case.ok


def test_a_precision_that_overflows_excuses_nothing() -> None:
    """The low-precision twin is inf where the result should be finite: no unlimited budget for the row."""
    low = lowered()
    low[0, 0] = INF
    x = exact().float()
    x[0, 1] = 3.0
    assert not within_budget(x, exact(), low, eps=EPSILON).ok
    x[0, 1] = INF
    assert not within_budget(x, exact(), low, eps=EPSILON).ok


def test_a_comparison_that_could_not_fail_is_refused() -> None:
    x, x64 = exact().float(), exact()
    with pytest.raises(ValueError, match="the same tensor twice"):
        within_budget(x64, x64, lowered(), eps=EPSILON)
    with pytest.raises(ValueError, match="the same tensor twice"):
        within_budget(x, x64, x, eps=EPSILON)
    with pytest.raises(ValueError, match="the same tensor twice"):
        within_budget(x64.view_as(x64), x64, lowered(), eps=EPSILON)
    with pytest.raises(ValueError, match="the same tensor twice"):
        within_budget(x.view_as(x), x64, x, eps=EPSILON)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"got shapes .*\[1, 3\]"):
        within_budget(exact().float()[:1], exact(), lowered(), eps=EPSILON)
    with pytest.raises(ValueError, match="got shapes"):
        within_budget(exact().float(), exact(), lowered()[:1], eps=EPSILON)


def test_nothing_is_within_any_budget() -> None:
    empty = torch.empty(2, 0)
    assert within_budget(empty, empty.double(), empty.clone(), eps=EPSILON).ok


def test_check_attention_sees_one_wrong_element_of_out_and_of_lse() -> None:
    q, k, v = make_qkv(1, 2, 2, 9, 11, 16, dtype=torch.float16)
    problem = Problem.from_call(q, k, v, return_lse=True)
    exact_out, exact_lse = testing.reference.attention(q, k, v, problem)
    out, lse = exact_out.half(), exact_lse.float()
    assert all(budget.ok for budget in check_attention(out, lse, q, k, v, problem))
    assert [budget.what for budget in check_attention(out, lse, q, k, v, problem)] == ["out", "lse"]
    assert len(check_attention(out, None, q, k, v, problem)) == 1
    bad = out.clone()
    bad[0, 1, 3, 4] += 0.05
    assert [b.ok for b in check_attention(bad, lse, q, k, v, problem)] == [False, True]
    assert check_attention(bad, lse, q, k, v, problem)[0].worst == (0, 1, 3, 4)
    bad_lse = lse.clone()
    bad_lse[0, 1, 3] += 1e-3
    assert [b.ok for b in check_attention(out, bad_lse, q, k, v, problem)] == [True, False]


@dataclass(frozen=True)
class Fault:
    """A fault that a kernel could have, as a change of the right output."""

    id: str
    change: Any


FAULTS = (
    Fault("one key left out", dict(kv_len=-1)),
    Fault("scale of 1 / D", dict(scale=1 / 16)),
    Fault("causal the other way", dict(causal="bottom_right")),
    Fault("not causal", dict(causal=None)),
    Fault("window one short", dict(window=(9, None))),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.id)
def test_check_attention_sees_faults_of_a_kernel(case: Fault, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(1, 2, 2, 12, 14, 16, dtype=dtype)
    right: dict[str, Any] = dict(causal="top_left", window=(10, None))
    problem = Problem.from_call(q, k, v, **right)
    change = dict(case.change)
    if change.pop("kv_len", 0):
        k2, v2 = k[:, :, 1:], v[:, :, 1:]
        wrong, _ = testing.reference.attention(q, k2, v2, Problem.from_call(q, k2, v2, **right))
    else:
        wrong, _ = testing.reference.attention(q, k, v, Problem.from_call(q, k, v, **{**right, **change}))
    assert not check_attention(wrong.to(dtype), None, q, k, v, problem)[0].ok


def test_every_dtype_has_a_rounding_unit() -> None:
    assert EPS[torch.float64] < EPS[torch.float32] < EPS[torch.float16] < EPS[torch.bfloat16]
    for dtype, eps in EPS.items():
        assert eps >= torch.finfo(dtype).eps / 2


def test_make_qkv_gives_the_same_numbers_for_a_seed() -> None:
    first, again, other = (make_qkv(2, 4, 2, 5, 7, 8, 6, seed=seed) for seed in (3, 3, 4))
    torch.manual_seed(99)
    later = make_qkv(2, 4, 2, 5, 7, 8, 6, seed=3)
    assert [tuple(t.shape) for t in first] == [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)]
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(first, again, later, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(first, other, strict=True))
    assert not torch.equal(first[1][..., :6], first[2])


def test_make_qkv_of_other_dtypes_and_layouts_holds_the_same_numbers() -> None:
    whole = make_qkv(2, 4, 2, 5, 7, 8, dtype=torch.float32)
    for x, y, z in zip(whole, make_qkv(2, 4, 2, 5, 7, 8, dtype=torch.bfloat16),
                       make_qkv(2, 4, 2, 5, 7, 8, dtype=torch.float32, layout="bshd"), strict=True):  # fmt: skip
        assert torch.equal(x.bfloat16(), y) and torch.equal(x, z)
        assert x.is_contiguous() and z.transpose(1, 2).is_contiguous() and not z.is_contiguous()


def test_make_qkv_does_not_touch_torchs_generator() -> None:
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    make_qkv(1, 1, 1, 4, 4, 4)
    assert torch.equal(torch.rand(3), want)


@pytest.mark.gpu
def test_make_qkv_on_a_gpu_holds_the_same_numbers() -> None:
    for x, y in zip(make_qkv(2, 4, 2, 5, 7, 8), make_qkv(2, 4, 2, 5, 7, 8, device="cuda"), strict=True):
        assert torch.equal(x, y.cpu())


def test_moat() -> None:
    t = torch.arange(24.0).view(1, 2, 3, 4)
    inside = moat(t, 1, 0, 2, 3)
    assert torch.equal(inside, t) and inside.data_ptr() != t.data_ptr()
    buffer = inside._base
    assert buffer is not None and buffer.shape == (2, 2, 5, 7)
    assert buffer.isnan().sum() == buffer.numel() - t.numel()
    with pytest.raises(ValueError):
        moat(t, 1, 0)


def test_poisoned() -> None:
    t = poisoned(2, 3, dtype=torch.bfloat16, device="cpu")
    assert t.shape == (2, 3) and t.dtype == torch.bfloat16 and t.isnan().all()
    assert not within_budget(t, torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3), eps=EPSILON).ok


# philox4x32-10 in tests/kat_vectors of Random123 1.14: counter, key, output.
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("counter, key, output", KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_numbers(counter: str, key: str, output: str) -> None:
    assert [int(t) for t in dropout.philox(*map(torch.tensor, words(counter) + words(key)))] == words(output)
    assert philox_by_hand(words(counter), words(key)) == words(output)


@triton.jit
def philox_kernel(seed_ptr, out_ptr, c1, c2, c3, N: tl.constexpr):
    fours = tl.arange(0, N)
    zero = tl.zeros([N], tl.int32)
    a, b, c, d = tl.philox(tl.load(seed_ptr), fours, zero + c1, zero + c2, zero + c3)
    tl.store(out_ptr + fours * 4, a.to(tl.int64))
    tl.store(out_ptr + fours * 4 + 1, b.to(tl.int64))
    tl.store(out_ptr + fours * 4 + 2, c.to(tl.int64))
    tl.store(out_ptr + fours * 4 + 3, d.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0], ids=hex)
def test_philox_gives_tritons_numbers(seed: int, device: str) -> None:
    b, h, q_idx, fours = 3, 2, 70_000, 16
    out = torch.empty(fours * 4, dtype=torch.int64, device=device)
    philox_kernel[(1,)](torch.tensor([seed], device=device), out, q_idx, h, b, N=fours)
    kept = out.cpu() % 2**32 >> 8
    for dropout_p in (0.1, 0.5, 0.9):
        want = kept * 2.0**-24 >= torch.tensor(dropout_p, dtype=torch.float32)
        index = (torch.tensor([n]) for n in (b, h, q_idx))
        assert torch.equal(dropout.kept(dropout.seed_tensor(seed, "cpu"), *index, fours * 4, dropout_p), want)


@pytest.mark.parametrize("kv_len", [1, 3, 4, 9])
def test_dropout_keep_by_hand(kv_len: int) -> None:
    seed = 2**40 + 3
    got = dropout_keep(seed, 2, 3, 2, kv_len, 0.5)
    assert got.shape == (2, 3, 2, kv_len) and got.dtype == torch.bool
    for (b, h, i, j), keep in zip(torch.cartesian_prod(*map(torch.arange, got.shape)).tolist(), got.flatten().tolist(),
                                  strict=True):  # fmt: skip
        word = philox_by_hand([j // 4, i, h, b], [3, 2**8])[j % 4]
        assert keep == ((word >> 8) / 2**24 >= 0.5)


def test_dropout_keeps_a_number_equal_to_p_in_float32() -> None:
    number = (philox_by_hand([0, 0, 0, 0], [7, 0])[0] >> 8) * 2.0**-24
    for dropout_p, keep in ((number, True), (number * (1 + 1e-10), True), (number + 2.0**-24, False)):
        assert dropout_keep(7, 1, 1, 1, 1, dropout_p).item() is keep


def test_dropout_keeps_the_share_it_should() -> None:
    for dropout_p in (0.0, 0.1, 0.5, 0.95, 1.0):
        share = dropout_keep(7, 2, 4, 64, 65, dropout_p).float().mean().item()
        assert abs(share - (1 - dropout_p)) < 5 * (dropout_p * (1 - dropout_p) / (2 * 4 * 64 * 65)) ** 0.5 + 1e-9


def test_a_seed_is_its_64_bits() -> None:
    masks = [dropout_keep(seed, 1, 2, 8, 32, 0.5) for seed in (-1, 2**64 - 1, torch.tensor([-1]), torch.tensor(-1))]
    assert all(torch.equal(masks[0], mask) for mask in masks)
    others = [dropout_keep(seed, 1, 2, 8, 32, 0.5) for seed in (0, 1, 2**32, 2**32 - 1)]
    everything = [masks[0], *others]
    assert not any(torch.equal(x, y) for n, x in enumerate(everything) for y in everything[:n])


def test_dropout_differs_between_all_positions() -> None:
    """Neither heads nor batch elements nor rows share a mask."""
    rows = dropout_keep(11, 3, 4, 8, 64, 0.5).flatten(0, 2)
    assert len({tuple(row) for row in rows.tolist()}) == 3 * 4 * 8


@pytest.mark.gpu
def test_dropout_on_a_gpu_keeps_the_same() -> None:
    assert torch.equal(dropout_keep(5, 2, 3, 9, 70, 0.3, "cuda").cpu(), dropout_keep(5, 2, 3, 9, 70, 0.3))


# What another answer looks like: the call it is right for.
OTHER_CALLS = (
    (dict(softcap=2.0), {}),
    (dict(softcap=2.0), dict(softcap=2.5)),
    (dict(alibi_slopes=torch.full((2,), 0.1)), dict(alibi_slopes=torch.full((2,), 0.1), window_align="bottom_right")),
    (dict(attn_mask=torch.arange(14.0) / 9), dict(attn_mask=torch.arange(12.0)[:, None] / 9)),
    (dict(attn_mask=torch.arange(14) < 13), {}),
    (dict(sinks=torch.tensor([0.0, 1.0])), dict(sinks=torch.tensor([1.0, 0.0]))),
    (dict(seqlens_k=torch.tensor([13])), dict(seqlens_k=torch.tensor([12]))),
    (dict(dropout_p=0.2, dropout_seed=torch.tensor([1])), dict(dropout_p=0.2, dropout_seed=torch.tensor([2]))),
    (dict(cu_seqlens_q=torch.tensor([0, 6, 12]), cu_seqlens_k=torch.tensor([0, 6, 14])),
     dict(cu_seqlens_q=torch.tensor([0, 6, 12]), cu_seqlens_k=torch.tensor([0, 7, 14]))),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("right, other", OTHER_CALLS, ids=lambda options: ",".join(options) or "nothing")
def test_check_attention_knows_the_extras(right: Any, other: Any, dtype: torch.dtype) -> None:
    *call, extras = build(*make_qkv(1, 2, 2, 12, 14, 16, dtype=dtype), right)
    out, lse = testing.reference.attention(*call, extras=extras)
    assert all(budget.ok for budget in check_attention(out.to(dtype), lse.float(), *call, extras))
    *wrong, wrong_extras = build(*call[:3], other)
    out, _ = testing.reference.attention(*wrong, extras=wrong_extras)
    assert not check_attention(out.to(dtype), None, *call, extras)[0].ok


@pytest.mark.parametrize("case", [*FEATURES, *PACKED], ids=lambda case: case.id)
def test_check_attention_takes_every_feature(case: Any) -> None:
    *call, extras = case.build(torch.float32, return_lse=True)
    out, lse = testing.reference.attention(*call, extras=extras)
    assert all(budget.ok for budget in check_attention(out.float(), lse.float(), *call, extras))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_check_gradients_excuses_what_follows_from_a_given_output_and_nothing_more(dtype: torch.dtype) -> None:
    """Nearly one-hot rows, whose dP - delta cancels, and an output as far off as its own budget allows."""
    *call, _ = build(*(6 * t if i == 0 else t for i, t in enumerate(make_qkv(1, 2, 1, 12, 14, 16, dtype=dtype))), {})
    grad = torch.randn(1, 2, 12, 16, generator=torch.Generator().manual_seed(5)).to(dtype)
    right, _ = testing.reference.attention(*call)
    out = (right + 0.9 * EPS[dtype] * grad.double().sign() * right.abs().amax(-1, keepdim=True)).to(dtype)
    assert check_attention(out, None, *call)[0].ok
    q, k, v, problem = call

    def verdicts(made_with: torch.Tensor, given: torch.Tensor | None) -> list[bool]:
        wide = testing.reference.backward(grad, None, q.double(), k.double(), v.double(), problem, out=made_with)
        grads = [t.to(dtype) for t in wide]
        return [budget.ok for budget in testing.check_gradients(grads, grad, None, *call, out=given)]

    assert verdicts(out, out) == [True, True, True]
    assert verdicts(out, None) == [False, False, True]
    assert verdicts(1.05 * out, out) == [False, False, True]
    assert verdicts(right, None) == verdicts(right, out) == [True, True, True]
