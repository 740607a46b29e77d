"""Is the result right? Asked of every candidate before any time is taken.

Everyone: the whole output against float32, by relative Frobenius error and by its worst row (one wrong row of many
would not show in the former). lazymax also: the float64 error budget of `lazymax.testing`. What would take too long at
a large size is sampled: some heads, and of long ones the first, middle and last rows; where a result depends on more
than the band, the first heads, all rows of them.
"""

from dataclasses import dataclass, replace

import torch

from .. import reference
from ..extras import NO_EXTRAS, Extras
from ..problem import Problem
from ..testing import check_attention

FROBENIUS = 1.5e-2  # a bf16 result of random normal inputs is off by 2e-3 to 5e-3
WORST_ROW = 0.15  # a row over wrong keys is off by about its own size, 1
SCORES_FP32, SCORES_FP64 = 1 << 34, 1 << 30  # (query, key) pairs computed at most


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a problem that can be computed alone."""

    batch: slice
    kv_heads: slice
    rows: slice

    def cut(self, t: torch.Tensor, group: int) -> torch.Tensor:
        """This part of a query or an output, whose heads come in groups."""
        return t[self.batch, self.kv_heads.start * group : self.kv_heads.stop * group, self.rows]

    def problem(self, whole: Problem) -> Problem:
        """The rules of the part; its query 0 is row `rows.start`, which shifts the band."""
        first, last, start = whole.first_offset, whole.last_offset, self.rows.start
        kv_heads = self.kv_heads.stop - self.kv_heads.start
        if not banded(whole):
            return replace(whole, q_heads=kv_heads * whole.group, kv_heads=kv_heads)
        return replace(
            whole,
            batch=self.batch.stop - self.batch.start,
            q_heads=kv_heads * whole.group,
            kv_heads=kv_heads,
            q_len=self.rows.stop - start,
            causal=False,
            window=(None if first is None else -(first + start), None if last is None else last + start),
            align="top_left",
        )

    def extras(self, extras: Extras, group: int) -> Extras:
        """The optional tensors of the part, which has all rows and batch elements then."""
        heads = slice(self.kv_heads.start * group, self.kv_heads.stop * group)
        mask, slopes, sinks = extras.mask, extras.alibi_slopes, extras.sinks
        return extras._replace(
            mask=mask if mask is None or mask.shape[1] == 1 else mask[:, heads],
            alibi_slopes=None if slopes is None else slopes[..., heads],
            sinks=None if sinks is None else sinks[..., heads],
        )


def banded(problem: Problem) -> bool:
    """Nothing but causal rule and window hides a key or changes a score: a row can be computed anywhere."""
    p = problem
    return not (p.modified or p.mask or p.mask_mod or p.sinks or p.dropout_p or p.ragged)


def pieces(problem: Problem, limit: int) -> list[Piece]:
    """All of the problem if it has at most `limit` scores, else a sample of about that many."""
    p = problem
    if not banded(p):
        q_rows, keys = p.packed or (p.batch * p.q_len, p.kv_len)
        count = max(1, min(p.kv_heads, limit // (p.group * q_rows * keys)))
        return [Piece(slice(0, p.batch), slice(0, count), slice(0, p.packed[0] if p.packed else p.q_len))]
    one_head = p.group * p.q_len * p.kv_len
    if p.batch * p.kv_heads * one_head <= limit:
        return [Piece(slice(0, p.batch), slice(0, p.kv_heads), slice(0, p.q_len))]
    count = min(p.batch * p.kv_heads, max(1, limit // one_head), 8)
    step = max(1, (p.batch * p.kv_heads - 1) // max(1, count - 1))
    rows = [slice(0, p.q_len)]
    if one_head > limit:
        length = max(1, limit // (3 * p.group * p.kv_len))
        middle = (p.q_len - length) // 2
        rows = [slice(start, start + length) for start in (0, middle, p.q_len - length)]
    heads = [divmod(unit * step, p.kv_heads) for unit in range(count)]
    return [Piece(slice(b, b + 1), slice(h, h + 1), part) for b, h in heads for part in rows]


OK, WRONG, FAILED, LEFT_OUT = "ok", "wrong", "failed", "left out"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Only a candidate with status "ok" is timed. `error`: relative, Frobenius norm."""

    error: float | None
    why: str = ""
    status: str = WRONG


class Oracle:
    """The exact result of one problem's inputs, or of parts of it, and a judge of others' results."""

    def __init__(
        self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras = NO_EXTRAS
    ) -> None:
        self.problem, self.inputs, self.extras = problem, (q, k, v), extras
        dtype = reference.compute_dtype(q.dtype)
        self.exact = [
            (piece, reference.attention(*self._cut(piece), dtype, extras=piece.extras(extras, problem.group))[0])
            for piece in pieces(problem, SCORES_FP32)
        ]

    def _cut(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Problem]:
        q, k, v = self.inputs
        keys = (t[piece.batch, piece.kv_heads] for t in (k, v))
        return piece.cut(q, self.problem.group), *keys, piece.problem(self.problem)  # type: ignore[return-value]

    def judge(self, out: torch.Tensor, budget: bool, lse: torch.Tensor | None = None) -> Verdict:
        """Compare; `budget`: also within the float64 error budget, the LSE too if there is one."""
        q, _, v = self.inputs
        expected = (*q.shape[:3], v.shape[3])
        if tuple(out.shape) != expected or out.dtype != q.dtype:
            return Verdict(None, f"shape {tuple(out.shape)} {out.dtype}, expected {expected} {q.dtype}")
        wrong = worst = torch.zeros((), device=q.device)
        size = torch.stack([exact.square().sum() for _, exact in self.exact]).sum()
        typical = (size / sum(exact[..., 0].numel() for _, exact in self.exact)).sqrt()
        for piece, exact in self.exact:
            gap = piece.cut(out, self.problem.group).to(exact.dtype) - exact
            row_gap, row_size = gap.norm(dim=-1), exact.norm(dim=-1)
            wrong = wrong + row_gap.square().sum()
            # a row may be zero, or nearly; torch.maximum keeps NaN
            relative = row_gap / torch.maximum(row_size, 0.1 * typical)
            worst = torch.maximum(worst, torch.where(row_gap == 0, 0.0, relative).amax())
        error, worst_row = (wrong / size.clamp_min(1e-30)).sqrt().item(), worst.item()
        if not error < FROBENIUS:
            return Verdict(error, f"relative error {error:.3g}, expected below {FROBENIUS:g}")
        if not worst_row < WORST_ROW:
            return Verdict(error, f"a row is off by {worst_row:.3g} of its size, expected below {WORST_ROW:g}")
        why = self._budget(out, lse) if budget else ""
        return Verdict(error, why, WRONG if why else OK)

    def _budget(self, out: torch.Tensor, lse: torch.Tensor | None) -> str:
        group = self.problem.group
        for piece in pieces(self.problem, SCORES_FP64):
            part_lse = None if lse is None else piece.cut(lse, group)
            extras = piece.extras(self.extras, group)
            for result in check_attention(piece.cut(out, group), part_lse, *self._cut(piece), extras):
                if not result.ok:
                    return f"outside the float64 error budget in {piece}: {result}"
        return ""
