"""The reference's gradients, of everything in a call that can have one.

By formula, with everything recomputed from the inputs; a score_mod is differentiated by torch.
"""

from collections.abc import Callable, Sequence

import torch

from .extras import NO_EXTRAS, Extras
from .problem import Problem
from .reference_scores import (
    Part,
    Positions,
    Scoring,
    chunks,
    compute_dtype,
    grouped,
    mask_rows,
    parts,
    without_autocast,
)

Pullback = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


class _Sums:
    """The gradients under way, in the compute dtype; of a packed call, over its sequences."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, needs: Sequence[bool]
    ) -> None:
        self.dtype = compute_dtype(q.dtype)
        self.inputs = (q, k, v)
        self.q, self.k, self.v = (torch.zeros(t.shape, dtype=self.dtype, device=t.device) for t in self.inputs)
        self.mask, self.slopes, self.sinks = (
            self._of(t, need)
            for t, need in zip((extras.mask, extras.alibi_slopes, extras.sinks), needs[:3], strict=True)
        )
        self.args = [self._of(t, needs[3]) for t in extras.score_args]
        self.optional = (extras.mask, extras.alibi_slopes, extras.sinks, *extras.score_args)

    def _of(self, t: torch.Tensor | None, need: bool) -> torch.Tensor | None:
        if t is None or not need or not t.is_floating_point():
            return None
        return torch.zeros(t.shape, dtype=self.dtype, device=t.device)

    def result(self) -> list[torch.Tensor]:
        """In the dtypes of the inputs; an empty tensor for each optional one without a gradient."""
        sums = (self.mask, self.slopes, self.sinks, *self.args)
        return [
            *(total.to(t.dtype) for total, t in zip((self.q, self.k, self.v), self.inputs, strict=True)),
            *(
                self.inputs[0].new_empty(0) if total is None or t is None else total.to(t.dtype)
                for total, t in zip(sums, self.optional, strict=True)
            ),
        ]


@without_autocast
@torch.no_grad()
def backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    extras: Extras = NO_EXTRAS,
    needs: Sequence[bool] = (True, True, True, True),
    p_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradients [dq, dk, dv, dmask, dslopes, dsinks, *dscore_args], each of the shape and dtype of its input; computed
    in `compute_dtype`. needs: whether those of the mask, the slopes, the sinks and the arguments of the score_mod are
    wanted; an empty tensor stands for one that is not, and for those of absent and of integer tensors.

    grad_out (B, Hq, Sq, D_v), grad_lse (B, Hq, Sq) or None; the rest as in `reference.attention`. With `p_dtype`, P, dS
    and the output that delta is made of are rounded to it, as a kernel in that precision must. With `out`, the output
    of a forward, delta is rowsum(grad_out * out), whose error is that of `out`.

    With P = softmax(S), Z what dropout multiplies P by, and R the scaled scores, of which S is a function:
    dV = (P Z)^T dO, dP = Z dO V^T, dS = P * (dP - delta + dLSE) with delta = rowsum(P * dP), dR = dS * S'(R),
    dQ = dR K, dK = dR^T Q, times the scale (Dao et al., FlashAttention, 2022, appendix B; the dLSE term: d LSE / d S =
    P). The mask's is dS, summed over what it broadcasts. A sink is one more score, of value 0: dsink = sum of
    P_sink * (dLSE - delta). Rows without keys, and packed rows of no sequence, give 0.
    """
    sums = _Sums(q, k, v, extras, needs)
    for part in parts(problem, extras):
        _add_part(sums, part, grad_out, grad_lse, p_dtype, out)
    return sums.result()


def _add_part(
    sums: _Sums,
    part: Part,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    p_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> None:
    problem, dtype = part.problem, sums.dtype

    def narrow(t: torch.Tensor) -> torch.Tensor:
        return t if p_dtype is None else t.to(p_dtype).to(dtype)

    q, k, v = sums.inputs
    scoring = Scoring(part, dtype, q.device)
    queries, dq, g = (t[:, :, part.q_rows] for t in (q, sums.q, grad_out))
    keys, values = (t[:, :, part.k_rows].to(dtype) for t in (k, v))
    dk, dv = (t[:, :, part.k_rows] for t in (sums.k, sums.v))
    # A key that takes no part has weight 0 and may hold anything; a row that does see NaN has NaN in p already.
    clean_keys = keys.nan_to_num(0.0, 0.0, 0.0)
    for rows in chunks(problem):
        q_chunk, g_chunk = queries[:, :, rows].to(dtype), g[:, :, rows].to(dtype)
        at = scoring.positions(rows)
        allowed = scoring.allowed(at, rows)
        raw = scoring.raw(q_chunk, keys, allowed)
        capped = scoring.cap(raw)
        s, pullback = _modded(scoring, sums, scoring.bias(capped, at, rows), at)
        p, _, p_sink = scoring.softmax(s, allowed)
        kept = scoring.kept(at)
        weights = p if kept is None else p * kept

        g_grouped = grouped(g_chunk, problem)
        dv += torch.einsum("bhgqk,bhgqd->bhkd", grouped(narrow(weights), problem), g_grouped)
        dp = torch.einsum("bhgqd,bhkd->bhgqk", g_grouped, values).flatten(1, 2)
        dp = torch.where(weights == 0, 0.0, dp if kept is None else dp * kept)
        shift = -(p * dp).sum(-1)
        if out is not None:
            shift = -(g_chunk * out[:, :, part.q_rows][:, :, rows].to(dtype)).sum(-1)
        elif p_dtype is not None:
            finite = grouped(narrow(weights), problem), torch.where(torch.isfinite(values), values, 0.0)
            shift = -(g_chunk * narrow(torch.einsum("bhgqk,bhkd->bhgqd", *finite).flatten(1, 2))).sum(-1)
        if grad_lse is not None:
            shift = shift + grad_lse[:, :, part.q_rows][:, :, rows].to(dtype)
        ds = torch.where(p == 0, 0.0, p * (dp + shift[..., None]))
        if sums.sinks is not None and p_sink is not None:
            _add_per_head(sums.sinks, torch.where(p_sink == 0, 0.0, p_sink * shift).sum(-1), part)
        if pullback is not None:
            ds = torch.where(ds == 0, 0.0, _pull_back(sums, pullback, ds))  # also where the slope is infinite
        if sums.mask is not None:
            total = mask_rows(sums.mask, rows)
            total += ds.sum_to_size(total.shape)
        if sums.slopes is not None:
            _add_per_head(sums.slopes, -(ds * scoring.distance(at)).sum((-2, -1)), part)
        draw = ds * (1.0 - (capped / problem.softcap) ** 2) if problem.softcap else ds
        draw = grouped(narrow(draw) * problem.scale, problem)
        dq[:, :, rows] = torch.einsum("bhgqk,bhkd->bhgqd", draw, clean_keys).flatten(1, 2)
        dk += torch.einsum("bhgqk,bhgqd->bhkd", draw, grouped(q_chunk.nan_to_num(0.0, 0.0, 0.0), problem))


def _add_per_head(total: torch.Tensor, own: torch.Tensor, part: Part) -> None:
    """own: (B or 1, Hq) of this part; total: (Hq,) or (B, Hq) of the call."""
    if total.dim() == 1:
        total += own.sum(0)
    else:
        total[part.first : part.first + part.problem.batch] += own


def _modded(scoring: Scoring, sums: _Sums, biased: torch.Tensor, at: Positions) -> tuple[torch.Tensor, Pullback | None]:
    """Scores through the score_mod, and the function from their gradient to those of biased scores and of the wanted
    arguments; None without one.

    torch.func.vjp and not torch.autograd.grad: the operator that this runs in is called below autograd, where ordinary
    tensors record nothing, without an error. Only here, as its first use imports torch._dynamo (1 s, and Triton).
    """
    if scoring.problem.score_mod is None:
        return biased, None
    wanted = [total is not None for total in sums.args]

    def mod(biased: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        rest = iter(leaves)
        args = tuple(next(rest) if want else t for t, want in zip(scoring.args, wanted, strict=True))
        return scoring.mod(biased, at, args)

    s, pullback = torch.func.vjp(  # type: ignore[misc]
        mod, biased, *(t for t, want in zip(scoring.args, wanted, strict=True) if want)
    )
    return s, pullback


def _pull_back(sums: _Sums, pullback: Pullback, ds: torch.Tensor) -> torch.Tensor:
    """From the gradient of scores behind the score_mod to that before it; adds to those of its arguments."""
    biased, *others = pullback(ds)
    found = iter(others)
    for total in sums.args:
        if total is not None:
            total += next(found)
    return biased
