"""From q and k to the scores that the softmax takes, one explicit step at a time: what the reference's forward and
backward share. Everything is in torch operations, on any device, and goes through the query rows in chunks."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from . import dropout, mods
from .extras import Extras
from .problem import Problem

CHUNK_SCORES = 1 << 26  # score elements held at once
NEVER = float("-inf")

Function = TypeVar("Function", bound=Callable[..., Any])


def without_autocast(function: Function) -> Function:
    """A caller's autocast must not lower the precision that a reference computes in."""

    @functools.wraps(function)
    def wrapped(*tensors: Any, **options: Any) -> Any:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return function(*tensors, **options)

    return wrapped  # type: ignore[return-value]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the fallback and the backward compute: float64 stays, all else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Part(NamedTuple):
    """A padded problem inside a call: the call itself, or one packed sequence."""

    problem: Problem
    extras: Extras
    q_rows: slice
    k_rows: slice
    first: int  # its first batch element, or the number of the sequence


def parts(problem: Problem, extras: Extras) -> Iterator[Part]:
    """The padded problems that make up a call. Reads packed offsets, clamped to the tensors: a device synchronisation.
    Rows beyond the last offset belong to no part."""
    if problem.packed is None:
        yield Part(problem, extras, slice(None), slice(None), 0)
        return
    assert extras.cu_seqlens_q is not None and extras.cu_seqlens_k is not None
    q_ends, k_ends = (
        cu.clamp(0, total).tolist()
        for cu, total in zip((extras.cu_seqlens_q, extras.cu_seqlens_k), problem.packed, strict=True)
    )
    for index in range(problem.batch):
        q_rows, k_rows = (slice(ends[index], max(ends[index : index + 2])) for ends in (q_ends, k_ends))
        yield Part(
            replace(problem, batch=1, q_len=q_rows.stop - q_rows.start, kv_len=k_rows.stop - k_rows.start, packed=None),
            extras._replace(
                cu_seqlens_q=None,
                cu_seqlens_k=None,
                alibi_slopes=of_sequence(extras.alibi_slopes, index),
                sinks=of_sequence(extras.sinks, index),
            ),
            q_rows,
            k_rows,
            index,
        )


def of_sequence(t: torch.Tensor | None, index: int) -> torch.Tensor | None:
    """The row of a (B, Hq) tensor, as (1, Hq), that belongs to a packed sequence; (Hq,) belongs to all."""
    return t if t is None or t.dim() == 1 else t[index : index + 1]


def chunks(problem: Problem) -> Iterator[slice]:
    """Query rows of which all scores are held at once."""
    per_row = max(1, problem.batch * problem.q_heads * problem.kv_len)
    step = max(1, CHUNK_SCORES // per_row)
    for start in range(0, problem.q_len, step):
        yield slice(start, min(start + step, problem.q_len))


def grouped(t: torch.Tensor, problem: Problem) -> torch.Tensor:
    """(B, Hq, ...) -> (B, Hkv, group, ...): query head h uses key head h // group, without expanding K and V."""
    return t.reshape(t.shape[0], problem.kv_heads, problem.group, *t.shape[2:])


def keep(rows: torch.Tensor, kv_len: int, first_offset: int | None, last_offset: int | None) -> torch.Tensor:
    """Which keys the query `rows` see, boolean (rows, kv_len); the torch twin of `kernels.masking.keep`."""
    cols = torch.arange(kv_len, device=rows.device)[None, :]
    inside = torch.ones(rows.shape[0], kv_len, dtype=torch.bool, device=rows.device)
    return functools.reduce(torch.logical_and, band(rows[:, None], cols, first_offset, last_offset), inside)


def band(
    q_idx: torch.Tensor, k_idx: torch.Tensor, first: torch.Tensor | int | None, last: torch.Tensor | int | None
) -> list[torch.Tensor]:
    """The bounds of a band that there are, each boolean over the positions."""
    terms = [] if first is None else [k_idx >= q_idx + first]
    return terms if last is None else [*terms, k_idx <= q_idx + last]


class Positions(NamedTuple):
    """Of the scores of a chunk: int64, broadcasting to (B, Hq, rows, Sk)."""

    b: torch.Tensor
    h: torch.Tensor
    q_idx: torch.Tensor
    k_idx: torch.Tensor


class Weights(NamedTuple):
    """Of a chunk, after the softmax."""

    p: torch.Tensor  # (B, Hq, rows, Sk)
    lse: torch.Tensor  # (B, Hq, rows)
    p_sink: torch.Tensor | None  # (B, Hq, rows)


class Scoring:
    """How one part of a call turns q and k into scores, and scores into weights."""

    def __init__(self, part: Part, dtype: torch.dtype, device: torch.device) -> None:
        self.problem, self.extras, self.dtype, self.device = part.problem, part.extras, dtype, device
        self.first = part.first
        problem, extras = self.problem, self.extras
        self.lengths: torch.Tensor | None = None
        self.diagonal: torch.Tensor | int = 0  # key index minus query index on the diagonal
        if extras.seqlens_k is not None:
            self.lengths = extras.seqlens_k.long().clamp(0, problem.kv_len).view(-1, 1, 1, 1)
        if problem.align == "bottom_right":
            self.diagonal = (problem.kv_len if self.lengths is None else self.lengths) - problem.q_len
        self.slopes = None if extras.alibi_slopes is None else extras.alibi_slopes.to(dtype)
        self.sinks = None if extras.sinks is None else extras.sinks.to(dtype)
        # Promoted, or a float64 oracle would compute parts of a modification in the precision of its arguments.
        self.args = tuple(t.to(dtype) if t.is_floating_point() else t for t in extras.score_args)

    def positions(self, rows: slice) -> Positions:
        """Positions of the scores of `rows`: batch element or sequence, query head, query and key in the sequence."""
        problem, device = self.problem, self.device
        return Positions(
            torch.arange(self.first, self.first + problem.batch, device=device).view(-1, 1, 1, 1),
            torch.arange(problem.q_heads, device=device).view(1, -1, 1, 1),
            torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1),
            torch.arange(problem.kv_len, device=device).view(1, 1, 1, -1),
        )

    def allowed(self, at: Positions, rows: slice) -> torch.Tensor | None:
        """Which keys take part: boolean, broadcasting to (B, Hq, rows, Sk); None for all."""
        problem = self.problem
        first, last = problem.first_offset, problem.last_offset
        own = self.diagonal if problem.ragged else 0  # elsewhere the offsets contain it
        terms = band(at.q_idx, at.k_idx, *(None if offset is None else offset + own for offset in (first, last)))
        if self.lengths is not None:
            terms.append(at.k_idx < self.lengths)
        if self.extras.mask is not None and self.extras.mask.dtype == torch.bool:
            terms.append(mask_rows(self.extras.mask, rows))
        if problem.mask_mod is not None:
            terms.append(mods.get("mask_mod", problem.mask_mod).twin()(*at, *self.extras.mask_args).bool())
        return functools.reduce(torch.logical_and, terms) if terms else None

    def _added(self, mask: torch.Tensor) -> torch.Tensor:
        """A float mask is added in float32, whatever its dtype; in float64 to float64 scores."""
        return mask.to(compute_dtype(getattr(torch, self.problem.dtype))).to(self.dtype)

    def modify(self, s: torch.Tensor, at: Positions, rows: slice) -> torch.Tensor:
        """All that may happen to scaled scores (B, Hq, rows, Sk) before the softmax."""
        return self.mod(self.bias(self.cap(s), at, rows), at, self.args)

    def cap(self, s: torch.Tensor) -> torch.Tensor:
        """Soft-capped scores."""
        cap = self.problem.softcap
        return cap * torch.tanh(s / cap) if cap else s

    def bias(self, s: torch.Tensor, at: Positions, rows: slice) -> torch.Tensor:
        """Capped scores with what ALiBi and a floating mask add."""
        if self.slopes is not None:
            s = s - self.slopes[..., None, None] * self.distance(at)
        mask = self.extras.mask
        return s if mask is None or mask.dtype == torch.bool else s + self._added(mask_rows(mask, rows))

    def distance(self, at: Positions) -> torch.Tensor:
        """From the diagonal, in keys."""
        return (at.q_idx + self.diagonal - at.k_idx).abs()

    def mod(self, s: torch.Tensor, at: Positions, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Biased scores through the score_mod."""
        name = self.problem.score_mod
        return s if name is None else mods.get("score_mod", name).twin()(s, *at, *args).to(self.dtype).expand(s.shape)

    def raw(self, q: torch.Tensor, k: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        """Scaled scores (B, Hq, rows, Sk) of q (B, Hq, rows, D) and k (B, Hkv, Sk, D); finite where a key takes no
        part, as what it holds would come back through the derivatives of modifications."""
        s = torch.einsum("bhgqd,bhkd->bhgqk", grouped(q, self.problem), k).flatten(1, 2) * self.problem.scale
        if allowed is None or not self.problem.modified:
            return s
        return torch.where(allowed, s, s.nan_to_num(0.0, 0.0, 0.0))

    def softmax(self, s: torch.Tensor, allowed: torch.Tensor | None) -> Weights:
        """Softmax of modified scores over the keys that take part (and a sink). A row without keys gives zeros, and
        the LSE -inf or its sink."""
        if allowed is not None:
            s = s.masked_fill(~allowed, NEVER)
        sinks = None if self.sinks is None else self.sinks[..., None]
        # Divided by the sum, not exp(s - lse): beside a row of the lowest float, lse has no room for the sum.
        top = s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], NEVER)
        top = top if sinks is None else torch.maximum(top, sinks.detach())
        top = torch.where(top == NEVER, 0.0, top)
        p = torch.exp(s - top[..., None])
        p_sink = None if sinks is None else torch.exp(sinks - top)
        total = p.sum(-1) if p_sink is None else p.sum(-1) + p_sink
        empty = total == 0
        total = torch.where(empty, 1.0, total)
        lse = torch.where(empty, NEVER, top + torch.log(total))
        return Weights(p / total[..., None], lse, None if p_sink is None else p_sink / total)

    def kept(self, at: Positions) -> torch.Tensor | None:
        """What dropout multiplies the probabilities by: 0 or 1 / (1 - p), (B, Hq, rows, Sk); None without dropout."""
        problem = self.problem
        if not problem.dropout_p:
            return None
        assert self.extras.dropout_seed is not None
        kept = dropout.kept(self.extras.dropout_seed, at.b, at.h, at.q_idx, problem.kv_len, problem.dropout_p).to(
            self.dtype
        )
        return kept / (1.0 - problem.dropout_p) if problem.dropout_p < 1.0 else kept


def mask_rows(mask: torch.Tensor, rows: slice) -> torch.Tensor:
    """The rows of a mask that may be one row for all."""
    return mask if mask.shape[2] == 1 else mask[:, :, rows]
