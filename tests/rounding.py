"""How far rounding alone may take gradients, element by element: a priori, to first order (Higham, Accuracy and
Stability of Numerical Algorithms, 2002, chapter 3). One run in low precision is a bad sample of it where rows see one
key, so that dS cancels to 0, where scores are many thousands, or where a head has a gradient of one number.

Every kernel sums fp32 products in an order of its own, so a sum is known to UNIT times the sum of its absolute values;
an exponential to the error of its argument; and numbers of fp16 below 6e-5 to half of the spacing there. What P and dS
lose to a dtype of 16 bits otherwise is not here: the twins of testing.within_budget have it. Modifications are taken to
have a slope of 1 at most.
"""

from collections.abc import Sequence

import torch

from lazymax.extras import Extras
from lazymax.problem import Problem
from lazymax.reference_backward import _add_per_head
from lazymax.reference_scores import Part, Scoring, chunks, grouped, mask_rows, parts

UNIT = 2.0**-23  # eps of fp32, two roundings: tensor cores cut off what they add
MASKED = 1e30  # scores beyond are a mask's lowest numbers, which kernels take apart
HALF_SPACING = {torch.float16: 2.0**-25, torch.bfloat16: 0.0, torch.float32: 0.0}


def allowances(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    extras: Extras,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    """Of [dq, dk, dv, dmask, dslopes, dsinks], float64, as `reference.backward` returns them; q, k, v in their own
    dtype, extras widened to float64."""
    of = _Allowances(grad_out, grad_lse, q, k, v, extras, needs)
    for part in parts(problem, extras):
        of.add(part)
    return [t.new_empty(0) if not wanted else t for t, wanted in zip(of.totals, of.wanted, strict=True)]


class _Allowances:
    def __init__(self, grad_out, grad_lse, q, k, v, extras, needs) -> None:
        self.inputs = tuple(t.double() for t in (q, k, v, grad_out))
        self.grad_lse = None if grad_lse is None else grad_lse.double()
        self.half_spacing = HALF_SPACING[q.dtype]
        optional = (extras.mask, extras.alibi_slopes, extras.sinks)
        self.wanted = (True, True, True, *(t is not None and need for t, need in zip(optional, needs[:3], strict=True)))
        tensors = (*self.inputs[:3], *(q.new_empty(0) if t is None else t for t in optional))
        self.totals = [torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in tensors]

    def add(self, part: Part) -> None:
        problem = part.problem
        scoring = Scoring(part, torch.float64, self.inputs[0].device)
        q, g = (self.inputs[i][:, :, part.q_rows] for i in (0, 3))
        k, v = (self.inputs[i][:, :, part.k_rows].nan_to_num(0.0, 0.0, 0.0) for i in (1, 2))
        d_q, d_k, d_v, d_mask, d_slopes, d_sinks = self.totals
        d_q, d_k, d_v = d_q[:, :, part.q_rows], d_k[:, :, part.k_rows], d_v[:, :, part.k_rows]

        def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            """Of each row with each key, (B, Hq, rows, Sk)."""
            return torch.einsum("bhgqd,bhkd->bhgqk", grouped(a, problem), b).flatten(1, 2)

        for rows in chunks(problem):
            q_rows, g_rows = q[:, :, rows].nan_to_num(0.0, 0.0, 0.0), g[:, :, rows]
            at = scoring.positions(rows)
            allowed = scoring.allowed(at, rows)
            raw = scoring.raw(q_rows, k, allowed)
            s = scoring.modify(raw, at, rows)
            p, lse, p_sink = scoring.softmax(s, allowed)
            kept = scoring.kept(at)
            kept = 1.0 if kept is None else kept
            dp = times(g_rows, v) * kept
            delta = (p * dp).sum(-1, keepdim=True)
            shift = delta if self.grad_lse is None else delta - self.grad_lse[:, :, part.q_rows][:, :, rows][..., None]
            seen = p > 0

            def known(t: torch.Tensor) -> torch.Tensor:
                return torch.where(seen, t.nan_to_num(0.0, 0.0, 0.0), 0.0)  # noqa: B023

            sizes = s.abs() + lse[..., None].abs()
            sizes = torch.where(sizes > MASKED, 0.0, sizes)
            of_s = UNIT * known(abs(problem.scale) * times(q_rows.abs(), k.abs()) + sizes)
            of_p = p * of_s.clamp(max=1.0)
            of_dp = UNIT * times(g_rows.abs(), v.abs()) * kept
            of_delta = UNIT * ((p * times(g_rows.abs(), v.abs()) * kept).sum(-1, keepdim=True) + shift.abs())
            ds = p * (dp - shift)
            of_ds = known(p * (of_dp + of_delta) + of_p * (dp - shift).abs())
            if p_sink is not None and self.wanted[5]:
                of_sink = p_sink * (of_delta[..., 0] + UNIT * (1 + lse.abs()) * shift.abs()[..., 0])
                _add_per_head(d_sinks, of_sink.sum(-1), part)
            if self.wanted[3]:
                total = mask_rows(d_mask, rows)
                total += (of_ds + UNIT * ds.abs()).sum_to_size(total.shape)
            if self.wanted[4]:
                _add_per_head(d_slopes, ((of_ds + UNIT * ds.abs()) * scoring.distance(at)).sum((-2, -1)), part)
            of_ds = of_ds + UNIT * ds.abs() + known(ds).abs().clamp(max=self.half_spacing)
            of_weights = (of_p + UNIT * p + p.clamp(max=self.half_spacing)) * kept
            of_ds, of_weights = grouped(of_ds, problem) * abs(problem.scale), grouped(of_weights, problem)
            d_q[:, :, rows] += torch.einsum("bhgqk,bhkd->bhgqd", of_ds, k.abs()).flatten(1, 2)
            d_k += torch.einsum("bhgqk,bhgqd->bhkd", of_ds, grouped(q_rows.abs(), problem))
            d_v += torch.einsum("bhgqk,bhgqd->bhkd", of_weights, grouped(g_rows.abs(), problem))
