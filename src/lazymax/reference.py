"""The reference: attention one explicit step at a time, in torch operations, on any device.

`attention` is the oracle that everything is checked against (in float64), with every rule of the semantics; `fallback`
is the route for what no kernel takes. `backward` (in reference_backward.py) gives the gradients.
All work through the query rows in chunks, so that memory does not grow with Sq * Sk.
"""

import torch

from .extras import NO_EXTRAS, Extras
from .problem import Problem
from .reference_backward import backward
from .reference_scores import NEVER, Scoring, chunks, compute_dtype, grouped, keep, parts, without_autocast

__all__ = ["TORCH_SDPA", "attention", "backward", "compute_dtype", "fallback", "keep"]

# Not from torch.nn.functional, where a program may have put another function: `replace_sdpa` does.
TORCH_SDPA = torch._C._nn.scaled_dot_product_attention


def _weighted(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p @ v, grouped, in which a key of weight 0 adds nothing, whatever its value holds (0 * NaN is not 0)."""
    finite = torch.isfinite(v)
    out = torch.einsum("bhgqk,bhkd->bhgqd", p, torch.where(finite, v, 0.0))
    if not finite.all():
        for value, hits in ((torch.inf, v == torch.inf), (-torch.inf, v == -torch.inf), (torch.nan, v.isnan())):
            seen = torch.einsum("bhgqk,bhkd->bhgqd", (p > 0).to(p.dtype), hits.to(p.dtype)) > 0
            out = out + torch.where(seen, value, 0.0)
    return out


@without_autocast
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    dtype: torch.dtype = torch.float64,
    p_dtype: torch.dtype | None = None,
    extras: Extras = NO_EXTRAS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle. q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, D_v) of any dtype, computed in `dtype`; with
    `p_dtype`, the probabilities are rounded to it before they meet v, as a kernel in that precision must.

    Returns out (B, Hq, Sq, D_v) and LSE (B, Hq, Sq, natural log, sinks included), both in `dtype`. A query row with no
    allowed key gives 0, and -inf or its sink; keys that take no part never reach a result. Packed rows of no sequence
    give 0 and -inf.

    Raises NotImplementedError for a modification that was registered without a torch form.
    """
    out = torch.zeros(*q.shape[:3], problem.v_head_dim, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:3], NEVER, dtype=dtype, device=q.device)
    for part in parts(problem, extras):
        scoring = Scoring(part, dtype, q.device)
        keys, values = (t[:, :, part.k_rows].to(dtype) for t in (k, v))
        queries, part_out, part_lse = (t[:, :, part.q_rows] for t in (q, out, lse))
        for rows in chunks(part.problem):
            at = scoring.positions(rows)
            allowed = scoring.allowed(at, rows)
            s = scoring.raw(queries[:, :, rows].to(dtype), keys, allowed)
            p, part_lse[..., rows], _ = scoring.softmax(scoring.modify(s, at, rows), allowed)
            kept = scoring.kept(at)
            p = p if kept is None else p * kept
            p = p if p_dtype is None else p.to(p_dtype).to(dtype)
            part_out[..., rows, :] = _weighted(grouped(p, part.problem), values).flatten(1, 2)
    return out, lse


def fallback(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, extras: Extras = NO_EXTRAS
) -> tuple[torch.Tensor, torch.Tensor]:
    """What runs when no kernel does: (out in q's dtype, LSE as float32, empty unless `problem.return_lse`).

    torch's own SDPA where it means the same: none of the extras, no window, no LSE, positive scale (its CPU kernel
    gives NaN for causal with scale <= 0, pytorch#105202), no NaN or inf that a causal mask must hide; the oracle in
    `compute_dtype` elsewhere. With dense masks torch's fused CUDA kernels are wrong or refuse on masks that users have
    (2.11: rows of the lowest float, fp32 masks beside bf16, a last dimension that is not contiguous).
    """
    plain = problem.plain and not problem.ragged and problem.window == (None, None)
    if plain and problem.causal:
        plain = problem.align == "top_left" and bool(torch.isfinite(k).all() and torch.isfinite(v).all())
    if plain and not problem.return_lse and problem.scale > 0 and problem.kv_len and problem.head_dim:
        out = TORCH_SDPA(q, k, v, is_causal=problem.causal, scale=problem.scale, enable_gqa=problem.group > 1)
        return out, q.new_empty(0, dtype=torch.float32)
    out, lse = attention(q, k, v, problem, compute_dtype(q.dtype), extras=extras)
    return out.to(q.dtype), lse.float() if problem.return_lse else q.new_empty(0, dtype=torch.float32)
