"""The oracle against a few lines of plain Python, and the routes built on it against the oracle."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lazymax import reference
from lazymax.problem import Problem
from lazymax.testing import EPS, make_qkv, within_budget

INF = float("inf")


@dataclass(frozen=True)
class Case:
    id: str
    sizes: tuple[int, ...]
    rules: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("plain", (2, 2, 2, 4, 5, 3)),
    Case("one of each", (1, 1, 1, 1, 1, 1)),
    Case("grouped", (1, 6, 2, 3, 4, 3)),
    Case("D_v", (1, 2, 2, 3, 4, 3, 5)),
    Case("causal, top left", (1, 2, 2, 4, 6, 3), dict(causal="top_left")),
    Case("causal, bottom right", (1, 2, 2, 4, 6, 3), dict(causal="bottom_right")),
    Case("causal, fewer keys, top left", (1, 2, 2, 6, 4, 3), dict(causal="top_left")),
    Case("rows without keys", (1, 2, 2, 6, 4, 3), dict(causal="bottom_right")),
    Case("window", (1, 2, 2, 6, 6, 3), dict(window=(2, 1))),
    Case("window, bottom right", (1, 2, 2, 4, 7, 3), dict(window=(1, 0), window_align="bottom_right")),
    Case("window open on the left", (1, 2, 2, 6, 6, 3), dict(window=(None, 1))),
    Case("window open on the right", (1, 2, 2, 6, 6, 3), dict(window=(0, -1))),
    Case("window beyond the keys", (1, 2, 2, 9, 4, 3), dict(window=(1, 1))),
    Case("causal window", (1, 2, 1, 7, 7, 3), dict(causal="top_left", window=(2, 5))),
    Case("scale", (1, 2, 2, 4, 5, 3), dict(scale=1.7)),
    Case("negative scale", (1, 2, 2, 4, 5, 3), dict(scale=-0.3, causal="top_left")),
    Case("zero scale", (1, 2, 2, 4, 5, 3), dict(scale=0.0, causal="top_left")),
    Case("huge scores", (1, 2, 2, 4, 5, 3), dict(scale=1e4)),
    Case("no keys", (1, 2, 2, 3, 0, 3)),
    Case("no queries", (1, 2, 2, 0, 4, 3)),
    Case("no head dim", (1, 2, 2, 3, 4, 0, 3)),
)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in Python floats, one number at a time, straight from the rules of DESIGN.md section 3."""
    batch, q_heads, kv_heads, q_len, kv_len, dim = case.sizes[:6]
    v_dim = case.sizes[-1]
    causal, window = case.rules.get("causal"), case.rules.get("window") or (None, None)
    align = causal or case.rules.get("window_align") or "top_left"
    scale = case.rules.get("scale", 1 / math.sqrt(dim) if dim else 1.0)
    left, right = (None if side == -1 else side for side in window)
    out = torch.zeros(batch, q_heads, q_len, v_dim, dtype=torch.float64)
    lse = torch.full((batch, q_heads, q_len), -INF, dtype=torch.float64)
    for b in range(batch):
        for h in range(q_heads):
            g = h // (q_heads // kv_heads)
            for i in range(q_len):
                middle = i + (kv_len - q_len if align == "bottom_right" else 0)
                scores = {
                    j: scale * math.fsum(float(q[b, h, i, d]) * float(k[b, g, j, d]) for d in range(dim))
                    for j in range(kv_len)
                    if not (causal and j > middle)
                    and (left is None or j >= middle - left)
                    and (right is None or j <= middle + right)
                }
                if not scores:
                    continue
                top = max(scores.values())
                total = math.fsum(math.exp(s - top) for s in scores.values())
                lse[b, h, i] = top + math.log(total)
                for d in range(v_dim):
                    out[b, h, i, d] = math.fsum(
                        math.exp(s - top) / total * float(v[b, g, j, d]) for j, s in scores.items()
                    )
    return out, lse


def make(case: Case, dtype: torch.dtype = torch.float64, **rules: Any) -> Any:
    q, k, v = make_qkv(*case.sizes, dtype=dtype)
    return q, k, v, Problem.from_call(q, k, v, **{**case.rules, **rules})


def assert_within(actual: torch.Tensor, exact: torch.Tensor, low: torch.Tensor, what: str) -> None:
    budget = within_budget(actual, exact.double(), low.clone(), eps=EPS[actual.dtype], what=what)
    assert budget.ok, str(budget)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_oracle_by_hand(case: Case) -> None:
    q, k, v, problem = make(case)
    out, lse = reference.attention(q, k, v, problem)
    want, want_lse = by_hand(q, k, v, case)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    assert_within(out, want, want, "out")
    assert_within(lse[..., None], want_lse[..., None], want_lse[..., None], "lse")


@pytest.mark.parametrize("scores", [1, 7, 40, 1000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_chunks_change_nothing(case: Case, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, problem = make(case)
    whole, whole_lse = reference.attention(q, k, v, problem)
    grad, grad_lse = torch.ones_like(whole), torch.ones_like(whole_lse)
    whole_grads = reference.backward(grad, grad_lse, q, k, v, problem)
    monkeypatch.setattr(reference, "CHUNK_SCORES", scores)
    out, lse = reference.attention(q, k, v, problem)
    assert_within(out, whole, whole, "out")
    assert_within(lse[..., None], whole_lse[..., None], whole_lse[..., None], "lse")
    for name, x, y in zip("qkv", reference.backward(grad, grad_lse, q, k, v, problem), whole_grads, strict=True):
        assert_within(x, y, y, f"d{name}")


def test_chunks_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = reference._scores

    def spy(*arguments: Any) -> torch.Tensor:
        s = real(*arguments)
        sizes.append(s.numel())
        return s

    monkeypatch.setattr(reference, "_scores", spy)
    monkeypatch.setattr(reference, "CHUNK_SCORES", 100)
    q, k, v, problem = make(Case("", (1, 2, 1, 33, 10, 4)))
    reference.attention(q, k, v, problem)
    assert max(sizes) <= 100 and sum(sizes) == 2 * 33 * 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_fallback_is_the_oracle(case: Case, return_lse: bool, dtype: torch.dtype) -> None:
    q, k, v, problem = make(case, dtype, return_lse=return_lse)
    out, lse = reference.fallback(q, k, v, problem)
    exact, exact_lse = reference.attention(q, k, v, problem)
    low, low_lse = reference.attention(q, k, v, problem, reference.compute_dtype(dtype), p_dtype=dtype)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_within(out, exact, low.to(dtype), "out")
    if return_lse:
        assert_within(lse[..., None], exact_lse[..., None], low_lse.float()[..., None], "lse")
    else:
        assert lse.numel() == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_backward_is_autograd_of_the_oracle(case: Case) -> None:
    q, k, v, problem = make(case)
    leaf = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = reference.attention(*leaf, problem)
    generator = torch.Generator().manual_seed(3)
    grad, grad_lse = (torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (out, lse))
    if out.requires_grad:  # not without queries
        loss = (out * grad).sum() + (torch.where(lse == -INF, 0.0, lse) * grad_lse).sum()
        loss.backward()
    for name, x, t in zip("qkv", reference.backward(grad, grad_lse, q, k, v, problem), leaf, strict=True):
        want = torch.zeros_like(t) if t.grad is None else t.grad
        assert_within(x, want, want, f"d{name}")


BANDS = (
    Case("causal", (1, 2, 1, 5, 7, 4), dict(causal="top_left")),
    Case("window", (1, 2, 1, 5, 9, 4), dict(window=(1, 1))),
)


@pytest.mark.parametrize("poison", [math.nan, INF, -INF], ids=str)
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("case", BANDS, ids=lambda case: case.id)
def test_unseen_keys_reach_no_result(case: Case, return_lse: bool, poison: float) -> None:
    """The last key is unseen by all queries."""
    q, k, v, problem = make(case, torch.float32, return_lse=return_lse)
    want, want_lse = reference.attention(q, k, v, problem)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    want_grads = reference.backward(grad, None, q, k, v, problem)
    k[:, :, -1], v[:, :, -1] = poison, poison
    results = [reference.attention(q, k, v, problem), reference.fallback(q, k, v, problem)]
    for what, (out, lse) in zip(("oracle", "fallback"), results, strict=True):
        assert_within(out.float(), want, want.float(), what)
        if lse.numel():
            assert_within(lse[..., None].float(), want_lse[..., None], want_lse[..., None].float(), f"{what} lse")
    grads = reference.backward(grad, None, q, k, v, problem)
    for name, x, y in zip("qkv", grads, want_grads, strict=True):
        assert_within(x, y, y, f"d{name}")


def test_a_poisoned_key_that_is_seen_shows() -> None:
    q, k, v, problem = make(BANDS[0], torch.float32)
    v[:, :, 2, 0] = INF
    out, _ = reference.attention(q, k, v, problem)
    assert out[:, :, :2].isfinite().all() and (out[:, :, 2:, 0] == INF).all() and out[..., 1:].isfinite().all()


def test_p_dtype_rounds_the_probabilities_alone() -> None:
    q, k, v, problem = make(Case("", (1, 2, 2, 9, 33, 16)))
    exact, lse = reference.attention(q, k, v, problem)
    rounded, same_lse = reference.attention(q, k, v, problem, p_dtype=torch.bfloat16)
    assert torch.equal(lse, same_lse)
    assert 0 < (rounded - exact).abs().max() < 2.0**-7 * v.abs().max()


@pytest.mark.parametrize("window", [None, (3, 1)], ids=["full", "window"])
def test_autocast_does_not_lower_the_reference(window: Any) -> None:
    q, k, v, problem = make(Case("", (1, 2, 2, 9, 9, 16), dict(window=window)), torch.float32, return_lse=True)
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
