"""The reference: attention one explicit step at a time, in torch operations, on any device.

`attention` is the oracle that everything is checked against (in float64), with every rule of the semantics; `fallback`
is the route for what no kernel takes. `backward` gives the gradients until there is a Triton backward. All work through
the query rows in chunks, so that memory does not grow with Sq * Sk.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from .problem import Problem, default_scale

CHUNK_SCORES = 1 << 26  # score elements held at once


Function = TypeVar("Function", bound=Callable[..., Any])


def _without_autocast(function: Function) -> Function:
    """A caller's autocast must not lower the precision that a reference computes in."""

    @functools.wraps(function)
    def wrapped(*tensors: Any, **options: Any) -> Any:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return function(*tensors, **options)

    return wrapped  # type: ignore[return-value]


def keep(rows: torch.Tensor, kv_len: int, first_offset: int | None, last_offset: int | None) -> torch.Tensor:
    """Which keys the query `rows` see, boolean (rows, kv_len); the torch twin of `kernels.masking.keep`."""
    cols = torch.arange(kv_len, device=rows.device)[None, :]
    inside = torch.ones(rows.shape[0], kv_len, dtype=torch.bool, device=rows.device)
    if first_offset is not None:
        inside &= cols >= rows[:, None] + first_offset
    if last_offset is not None:
        inside &= cols <= rows[:, None] + last_offset
    return inside


def _chunks(problem: Problem) -> Iterator[slice]:
    per_row = max(1, problem.batch * problem.q_heads * problem.kv_len)
    step = max(1, CHUNK_SCORES // per_row)
    for start in range(0, problem.q_len, step):
        yield slice(start, min(start + step, problem.q_len))


def _grouped(t: torch.Tensor, problem: Problem, dtype: torch.dtype) -> torch.Tensor:
    """(B, Hq, ...) -> (B, Hkv, group, ...): query head h uses key head h // group, without expanding K and V."""
    return t.to(dtype).reshape(t.shape[0], problem.kv_heads, problem.group, *t.shape[2:])


def _scores(q: torch.Tensor, k: torch.Tensor, rows: slice, problem: Problem) -> torch.Tensor:
    """Scaled scores of a chunk, -inf where masked: (B, Hkv, group, rows, Sk)."""
    s = torch.einsum("bhgqd,bhkd->bhgqk", q[..., rows, :], k) * problem.scale
    first, last = problem.first_offset, problem.last_offset
    if first is None and last is None:
        return s
    index = torch.arange(rows.start, rows.stop, device=q.device)
    return s.masked_fill(~keep(index, problem.kv_len, first, last), float("-inf"))


def _probabilities(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of the last dimension and its logsumexp; a row without keys gives zeros and -inf."""
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return p, lse


def _weighted(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p @ v in which a key of weight 0 adds nothing, whatever its value holds (0 * NaN is not 0)."""
    finite = torch.isfinite(v)
    out = torch.einsum("bhgqk,bhkd->bhgqd", p, torch.where(finite, v, 0.0))
    if not finite.all():
        for value, hits in ((torch.inf, v == torch.inf), (-torch.inf, v == -torch.inf), (torch.nan, v.isnan())):
            seen = torch.einsum("bhgqk,bhkd->bhgqd", (p > 0).to(p.dtype), hits.to(p.dtype)) > 0
            out = out + torch.where(seen, value, 0.0)
    return out


@_without_autocast
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    dtype: torch.dtype = torch.float64,
    p_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle. q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, D_v) of any dtype, computed in `dtype`; with
    `p_dtype`, the probabilities are rounded to it before they meet v, as a kernel in that precision must.

    Returns out (B, Hq, Sq, D_v) and LSE (B, Hq, Sq, natural log), both in `dtype`. A query row with no allowed key
    gives 0 and -inf; keys outside the band never reach a result.
    """
    q, k, v = _grouped(q, problem, dtype), k.to(dtype), v.to(dtype)
    out = q.new_empty(*q.shape[:-1], problem.v_head_dim)
    lse = q.new_empty(q.shape[:-1])
    for rows in _chunks(problem):
        p, lse[..., rows] = _probabilities(_scores(q, k, rows, problem))
        out[..., rows, :] = _weighted(p if p_dtype is None else p.to(p_dtype).to(dtype), v)
    return out.flatten(1, 2), lse.flatten(1, 2)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the fallback and the backward compute: float64 stays, all else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fallback(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """What runs when no kernel does: (out in q's dtype, LSE as float32, empty unless `problem.return_lse`).

    torch's own SDPA where it means the same: no window, no LSE, positive scale (its CPU kernel gives NaN for causal
    with scale <= 0, pytorch#105202), no NaN or inf that a causal mask must hide; the oracle in `compute_dtype`
    elsewhere.
    """
    plain = problem.window == (None, None)
    if problem.causal:
        plain &= problem.align == "top_left" and bool(torch.isfinite(k).all() and torch.isfinite(v).all())
    if plain and not problem.return_lse and problem.scale > 0 and problem.kv_len and problem.head_dim:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=problem.causal, scale=problem.scale, enable_gqa=problem.group > 1
        )
        return out, q.new_empty(0, dtype=torch.float32)
    out, lse = attention(q, k, v, problem, compute_dtype(q.dtype))
    return out.to(q.dtype), lse.float() if problem.return_lse else q.new_empty(0, dtype=torch.float32)


@_without_autocast
def masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention with a dense mask, torch's meaning: q (..., Hq, Sq, D), k (..., H, Sk, D), v (..., H, Sk, D_v) and a
    mask (boolean, True keeps; or floating, added) that broadcast as matmul does. Differentiable, also in a floating
    mask.

    By formula in `compute_dtype`: torch's fused CUDA kernels are wrong or refuse on masks that users have (2.11: rows
    of the lowest float, fp32 masks beside bf16, a last dimension that is not contiguous). Holds all scores at once.
    """
    dtype = compute_dtype(q.dtype)
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scale = default_scale(q.shape[-1]) if scale is None else scale
    s = torch.matmul(q.to(dtype), k.to(dtype).transpose(-2, -1)) * scale
    s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask.to(dtype)
    if s.shape[-1] == 0:
        return torch.matmul(s, v.to(dtype)).to(q.dtype)
    empty = (s == float("-inf")).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return torch.matmul(p, v.to(dtype)).to(q.dtype)


@_without_autocast
def backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v by formula, in `compute_dtype`, everything recomputed from the inputs.

    With P = softmax(S): dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(P * dP) + dLSE), dQ = dS K, dK = dS^T Q, times
    the scale (Dao et al., FlashAttention, 2022, appendix B; the dLSE term: d LSE / d S = P). Rows without keys give 0.
    """
    dtype = compute_dtype(q.dtype)
    g = _grouped(grad_out, problem, dtype)
    queries, keys, values = _grouped(q, problem, dtype), k.to(dtype), v.to(dtype)
    # A key outside a row's band has weight 0 and may hold anything; a row that does see NaN has NaN in p already.
    clean_keys = keys.nan_to_num(0.0, 0.0, 0.0)
    clean_queries = queries.nan_to_num(0.0, 0.0, 0.0)
    dlse = None if grad_lse is None else _grouped(grad_lse, problem, dtype)
    dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for rows in _chunks(problem):
        p, _ = _probabilities(_scores(queries, keys, rows, problem))
        dv += torch.einsum("bhgqk,bhgqd->bhkd", p, g[..., rows, :])
        dp = torch.einsum("bhgqd,bhkd->bhgqk", g[..., rows, :], values)
        dp = torch.where(p == 0, 0.0, dp)
        shift = (p * dp).sum(-1)
        if dlse is not None:
            shift = shift - dlse[..., rows]
        ds = p * (dp - shift[..., None]) * problem.scale
        dq[..., rows, :] = torch.einsum("bhgqk,bhkd->bhgqd", ds, clean_keys)
        dk += torch.einsum("bhgqk,bhgqd->bhkd", ds, clean_queries[..., rows, :])
    return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
