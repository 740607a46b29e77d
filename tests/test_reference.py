"""The oracle against plain Python (by_hand.py), and the routes built on it against the oracle."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import ALL, FEATURES, INF, LOWEST, PACKED, PACKED_SIZES, PLAIN, SIZES, Case, build, by_hand

from lazymax import mods, reference, reference_scores
from lazymax.testing import EPS, check_attention, dropout_keep, make_qkv, within_budget


def assert_within(actual: torch.Tensor, exact: torch.Tensor, low: torch.Tensor, what: str) -> None:
    budget = within_budget(actual, exact.double(), low.clone(), eps=EPS[actual.dtype], what=what)
    assert budget.ok, str(budget)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_oracle_by_hand(case: Case) -> None:
    q, k, v, problem, extras = case.build()
    out, lse = reference.attention(q, k, v, problem, extras=extras)
    want, want_lse = by_hand(q, k, v, case.options())
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    assert_within(out, want, want, "out")
    assert_within(lse[..., None], want_lse[..., None], want_lse[..., None], "lse")


@pytest.mark.parametrize("scores", [1, 40, 100])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_chunks_change_nothing(case: Case, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, problem, extras = case.build()
    whole, whole_lse = reference.attention(q, k, v, problem, extras=extras)
    grad, grad_lse = torch.ones_like(whole), torch.ones_like(whole_lse)
    whole_grads = reference.backward(grad, grad_lse, q, k, v, problem, extras)
    monkeypatch.setattr(reference_scores, "CHUNK_SCORES", scores)
    out, lse = reference.attention(q, k, v, problem, extras=extras)
    assert_within(out, whole, whole, "out")
    assert_within(lse[..., None], whole_lse[..., None], whole_lse[..., None], "lse")
    grads = reference.backward(grad, grad_lse, q, k, v, problem, extras)
    for number, (x, y) in enumerate(zip(grads, whole_grads, strict=True)):
        assert_within(x, y, y, f"gradient {number}")


def test_chunks_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = reference_scores.Scoring.raw

    def spy(*arguments: Any) -> torch.Tensor:
        s = real(*arguments)
        sizes.append(s.numel())
        return s

    monkeypatch.setattr(reference_scores.Scoring, "raw", spy)
    monkeypatch.setattr(reference_scores, "CHUNK_SCORES", 100)
    q, k, v, problem, extras = Case("", (1, 2, 1, 33, 10, 4)).build()
    reference.attention(q, k, v, problem, extras=extras)
    assert max(sizes) <= 100 and sum(sizes) == 2 * 33 * 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "case, return_lse",
    [*((case, True) for case in ALL), *((case, False) for case in (*PLAIN, FEATURES[-1], PACKED[-1]))],
    ids=lambda value: getattr(value, "id", "lse" if value else "out"),
)
def test_fallback_is_the_oracle(case: Case, return_lse: bool, dtype: torch.dtype) -> None:
    q, k, v, problem, extras = case.build(dtype, return_lse=return_lse)
    out, lse = reference.fallback(q, k, v, problem, extras)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert return_lse or lse.numel() == 0
    budgets = check_attention(out, lse if return_lse else None, q, k, v, problem, extras)
    assert all(budget.ok for budget in budgets), "; ".join(map(str, budgets))


@pytest.mark.parametrize("case", [*FEATURES, *PACKED], ids=lambda case: case.id)
def test_torchs_own_attention_runs_for_plain_calls_only(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("called torch's attention")

    monkeypatch.setattr(reference, "TORCH_SDPA", refuse)
    q, k, v, problem, extras = case.build()
    reference.fallback(q, k, v, problem, extras)
    q, k, v, problem, extras = PLAIN[0].build()
    with pytest.raises(AssertionError, match="called torch's attention"):
        reference.fallback(q, k, v, problem, extras)


def test_a_replaced_function_of_torch_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, problem, extras = PLAIN[0].build()
    want, _ = reference.fallback(q, k, v, problem, extras)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    assert torch.equal(reference.fallback(q, k, v, problem, extras)[0], want)


@pytest.mark.parametrize("shape", [(1, 7), (5, 1), (1, 4, 1, 7), (2, 1, 1, 7), (2, 4, 5, 7)], ids=str)
def test_float_masks_as_torch_adds_them(shape: tuple[int, ...]) -> None:
    q, k, v = make_qkv(*SIZES, dtype=torch.float64)
    mask = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    *call, extras = build(q, k, v, dict(attn_mask=mask))
    out, _ = reference.attention(*call, extras=extras)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert_within(out, want, want, "out")


def test_rows_of_the_lowest_float_are_ordinary_rows() -> None:
    q, k, v = make_qkv(*SIZES, dtype=torch.float16)
    *call, extras = build(q, k, v, dict(attn_mask=torch.full((5, 7), LOWEST), return_lse=True))
    for out, lse in (reference.attention(*call, extras=extras), reference.fallback(*call, extras)):
        assert out.isfinite().all() and lse.isfinite().all()
        mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand(out.shape)
        assert_within(out, mean, mean.to(out.dtype), "out")


# How the last key of a call can take no part in it.
UNSEEN = (
    Case("causal", (1, 2, 1, 5, 7, 4), dict(causal="top_left")),
    Case("window", (1, 2, 1, 5, 9, 4), dict(window=(1, 1))),
    Case("length", (1, 2, 1, 5, 7, 4), dict(seqlens_k=torch.tensor([6]))),
    Case("no key at all", (1, 2, 1, 5, 1, 4), dict(seqlens_k=torch.tensor([0]), sinks=torch.tensor([0.5, 1.0]))),
    Case("bool mask", (1, 2, 1, 5, 7, 4), dict(attn_mask=torch.arange(7) < 6)),
    Case("mask_mod", (1, 2, 1, 5, 7, 4), dict(mask_mod="by_hand.sieve", mask_mod_args=(torch.tensor([6]),))),
    Case("packed", (1, 2, 1, 5, 7, 4), dict(
        cu_seqlens_q=torch.tensor([0, 2, 5]), cu_seqlens_k=torch.tensor([0, 3, 6]))),
)  # fmt: skip
WITH = (
    {},
    dict(softcap=3.0),
    dict(alibi_slopes=torch.tensor([0.5, -0.25])),
    dict(score_mod="by_hand.tilt", score_mod_args=(torch.ones(2), torch.ones(2, 3))),
    dict(score_mod="by_hand.root", score_mod_args=(torch.tensor([0.5, 2.0]),)),
    dict(dropout_p=0.5, dropout_seed=torch.tensor([3])),
)


@pytest.mark.parametrize("poison", [math.nan, INF, -INF], ids=str)
@pytest.mark.parametrize("more", WITH, ids=lambda more: more.get("score_mod", next(iter(more), "plain")))
@pytest.mark.parametrize("case", UNSEEN, ids=lambda case: case.id)
def test_unseen_keys_reach_no_result(case: Case, more: dict[str, Any], poison: float) -> None:
    q, k, v, problem, extras = case.build(torch.float32, **more, return_lse=True)
    want, want_lse = reference.attention(q, k, v, problem, extras=extras)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    want_grads = reference.backward(grad, want_lse.nan_to_num(), q, k, v, problem, extras)
    k[:, :, -1], v[:, :, -1] = poison, poison
    for what, (out, lse) in (
        ("oracle", reference.attention(q, k, v, problem, extras=extras)),
        ("fallback", reference.fallback(q, k, v, problem, extras)),
    ):
        assert_within(out.float(), want, want.float(), what)
        assert_within(lse[..., None].float(), want_lse[..., None], want_lse[..., None].float(), f"{what} lse")
    grads = reference.backward(grad, want_lse.nan_to_num(), q, k, v, problem, extras)
    for number, (x, y) in enumerate(zip(grads, want_grads, strict=True)):
        assert_within(x, y, y, f"gradient {number}")


@pytest.mark.parametrize("poison", [math.nan, INF], ids=str)
def test_plain_fallback_hides_keys_that_causal_excludes(poison: float) -> None:
    q, k, v, problem, extras = UNSEEN[0].build(torch.float32)
    want, _ = reference.attention(q, k, v, problem)
    k[:, :, -1], v[:, :, -1] = poison, poison
    out, _ = reference.fallback(q, k, v, problem, extras)
    assert_within(out, want, want.float(), "out")


def test_dropped_values_reach_no_result() -> None:
    q, k, v = make_qkv(1, 1, 1, 1, 16, 4, dtype=torch.float64)
    *call, extras = build(q, k, v, dict(dropout_p=0.5, dropout_seed=torch.tensor([9])))
    grad = torch.ones_like(q)
    want, _ = reference.attention(*call, extras=extras)
    want_grads = reference.backward(grad, None, *call, extras)
    v[:, :, ~dropout_keep(9, 1, 1, 1, 16, 0.5)[0, 0, 0]] = math.nan
    assert torch.equal(reference.attention(*call, extras=extras)[0], want)
    for x, y in zip(reference.backward(grad, None, *call, extras), want_grads, strict=True):
        assert torch.equal(x, y)


def test_a_poisoned_key_that_is_seen_shows() -> None:
    q, k, v, problem, _ = UNSEEN[0].build(torch.float32)
    v[:, :, 2, 0] = INF
    out, _ = reference.attention(q, k, v, problem)
    assert out[:, :, :2].isfinite().all() and (out[:, :, 2:, 0] == INF).all() and out[..., 1:].isfinite().all()


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.id)
def test_packed_rows_of_no_sequence(case: Case) -> None:
    """They may hold anything, give 0 and -inf, and have no gradients."""
    q, k, v, problem, extras = case.build()
    want = reference.attention(q, k, v, problem, extras=extras)
    grad, grad_lse = torch.ones_like(want[0]), torch.ones_like(want[1])
    want_grads = reference.backward(grad, grad_lse, q, k, v, problem, extras)
    ends = [min(int(t[-1]), rows) for t, rows in ((extras.cu_seqlens_q, q.shape[2]), (extras.cu_seqlens_k, k.shape[2]))]
    q[:, :, ends[0] :] = k[:, :, ends[1] :] = v[:, :, ends[1] :] = math.nan
    grad[:, :, ends[0] :] = grad_lse[:, :, ends[0] :] = math.nan
    out, lse = reference.attention(q, k, v, problem, extras=extras)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    assert (out[:, :, ends[0] :] == 0).all() and (lse[:, :, ends[0] :] == -INF).all()
    grads = reference.backward(grad, grad_lse, q, k, v, problem, extras)
    assert all(torch.equal(x, y) for x, y in zip(grads, want_grads, strict=True))
    assert all((t[:, :, end:] == 0).all() for t, end in zip(grads, (ends[0], ends[1], ends[1]), strict=False))


def test_packed_is_each_sequence_alone() -> None:
    """Bitwise, with every feature whose meaning does not depend on the number of the sequence."""
    q, k, v = make_qkv(*PACKED_SIZES, dtype=torch.float32)
    features = dict(causal="bottom_right", softcap=2.0, alibi_slopes=torch.rand(4), sinks=torch.rand(4))
    ends = dict(cu_seqlens_q=torch.tensor([0, 3, 3, 8]), cu_seqlens_k=torch.tensor([0, 2, 6, 12]))
    *call, extras = build(q, k, v, {**features, **ends})
    out, lse = reference.attention(*call, extras=extras)
    for rows, keys in ((slice(0, 3), slice(0, 2)), (slice(3, 8), slice(6, 12))):
        *call, extras = build(q[:, :, rows], k[:, :, keys], v[:, :, keys], features)
        one, one_lse = reference.attention(*call, extras=extras)
        assert torch.equal(out[:, :, rows], one) and torch.equal(lse[:, :, rows], one_lse)


def test_modifications_without_a_torch_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mods, "_registered", dict(mods._registered))
    mods.register_score_mod("no twin", mods.get("score_mod", "by_hand.flat").function)
    *call, extras = build(*make_qkv(*SIZES), dict(score_mod="no twin"))
    with pytest.raises(NotImplementedError, match="'no twin' was registered without reference="):
        reference.fallback(*call, extras)


def test_p_dtype_rounds_the_probabilities_alone() -> None:
    q, k, v, problem, _ = Case("", (1, 2, 2, 9, 33, 16)).build()
    exact, lse = reference.attention(q, k, v, problem)
    rounded, same_lse = reference.attention(q, k, v, problem, p_dtype=torch.bfloat16)
    assert torch.equal(lse, same_lse)
    assert 0 < (rounded - exact).abs().max() < 2.0**-7 * v.abs().max()


@pytest.mark.parametrize("options", [{}, dict(window=(3, 1)), dict(softcap=1.0)], ids=["full", "window", "softcap"])
def test_autocast_does_not_lower_the_reference(options: Any) -> None:
    q, k, v, problem, _ = Case("", (1, 2, 2, 9, 9, 16), options).build(torch.float32, return_lse=True)
    want = reference.fallback(q, k, v, problem)
    grad = torch.ones_like(want[0])
    want_grads = reference.backward(grad, None, q, k, v, problem)
    with torch.autocast("cpu", torch.bfloat16):
        got = reference.fallback(q, k, v, problem)
        grads = reference.backward(grad, None, q, k, v, problem)
    for x, y in zip((*got, *grads), (*want, *want_grads), strict=True):
        assert torch.equal(x, y)


def test_keep_is_the_band() -> None:
    rows = torch.arange(3, 6)
    want = [
        [3 - 2 <= j <= 3 + 1 for j in range(6)],
        [4 - 2 <= j <= 4 + 1 for j in range(6)],
        [j >= 3 for j in range(6)],
    ]
    assert reference.keep(rows, 6, -2, 1).tolist() == want
    assert reference.keep(rows, 6, None, None).all()
