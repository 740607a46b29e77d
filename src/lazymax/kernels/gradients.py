"""What the kernels of the backward share: statistics of rows, and from the products of a tile to probabilities and to
the gradient of its scores. Tiles have queries along the first dimension, TURNED along the second (masking.py).

Dao et al., FlashAttention (2022), appendix B: dS = P * (dP - delta), with delta = rowsum(dO * O). The gradient of the
LSE is a part of delta, since d LSE / d S = P.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import dropout, masking, memory, products, scores, softmax

REST = tl.constexpr(0)
DELTA = tl.constexpr(1)
EXACT_PIVOT = tl.constexpr(2)
EXACT_REST = tl.constexpr(3)


class Stats(NamedTuple):
    """fp32 numbers of each query row, in planes: REST, which the fused exponent takes, DELTA, and EXACT_PIVOT and
    EXACT_REST for the exact one (`softmax.recompute`)."""

    ptr: Any
    plane: Any  # stride
    batch_stride: Any
    head_stride: Any


class Row(NamedTuple):
    """The statistics of a tile's rows. A row outside the span has the rest inf, hence probabilities 0."""

    pivot: Any
    rest: Any
    delta: Any


@triton.jit
def pointers(stats, span, head, first_row, ROWS: tl.constexpr, end=None):
    """To the numbers of the span's rows from first_row, in the first plane. end: as in `memory.tile_pointers`."""
    base = stats.ptr + tl.cast(span.slab, tl.int64) * stats.batch_stride + tl.cast(head, tl.int64) * stats.head_stride
    base += span.q_row + first_row
    rows = tl.arange(0, ROWS)
    if end is not None:
        rows = tl.minimum(rows, end - 1 - first_row)
    return base + rows


@triton.jit
def load_row(stats, span, head, first_row, ROWS: tl.constexpr, CHECK: tl.constexpr, EXACT: tl.constexpr,
             CLAMP: tl.constexpr = False):
    """The statistics of the rows from first_row. CHECK: some may lie outside the span. CLAMP: as in
    `memory.load_tile`."""
    at = pointers(stats, span, head, first_row, ROWS, span.q_len if CHECK and CLAMP else None)
    pivot = 0.0
    if CHECK and not CLAMP:
        inside = first_row + tl.arange(0, ROWS) < span.q_len
        rest = tl.load(at + (EXACT_REST if EXACT else REST) * stats.plane, mask=inside, other=float("inf"))
        delta = tl.load(at + DELTA * stats.plane, mask=inside, other=0.0)
        if EXACT:
            pivot = tl.load(at + EXACT_PIVOT * stats.plane, mask=inside, other=0.0)
    else:
        rest = tl.load(at + (EXACT_REST if EXACT else REST) * stats.plane)
        delta = tl.load(at + DELTA * stats.plane)
        if EXACT:
            pivot = tl.load(at + EXACT_PIVOT * stats.plane)
    return Row(pivot, rest, delta)


@triton.jit
def rough(rest, dtype: tl.constexpr):
    """Whether the LSE of one of the rows, log2 units, is too large to make probabilities of: from 2**12 on its last
    place is 2**-12 of them. In fp32 always."""
    if dtype == tl.float32:
        found = True
    else:
        found = tl.max(tl.where(rest < float("inf"), tl.abs(rest), 0.0), 0) > 4096.0
    return found


@triton.jit
def store_exact(stats, span, head, first_row, m, rest, ROWS: tl.constexpr):
    """Put what the exact exponent takes in the place of what `prepare` made of the LSE."""
    at = pointers(stats, span, head, first_row, ROWS)
    inside = first_row + tl.arange(0, ROWS) < span.q_len
    tl.store(at + EXACT_PIVOT * stats.plane, m, mask=inside)
    tl.store(at + EXACT_REST * stats.plane, rest, mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_stored", "n_cleared"])
def prepare(out, d_out, lse, d_lse, stats, sums, settled, counts, odd, n_rows, n_stored, n_cleared, ROWS: tl.constexpr,
            PIECES, D_V: tl.constexpr, WIDE: tl.constexpr, SUM_COLS: tl.constexpr, CHAINED: tl.constexpr):
    """The statistics of ROWS rows from the forward's output and LSE. Grid: (query heads, tiles of rows, batch).

    out, d_out: `memory.View`. lse, d_lse (or None): fp32, (batch, heads, n_rows), contiguous. A row without keys gets
    the rest inf and the delta 0, whatever the gradients hold there; so do the rows from n_rows to n_stored. An LSE for
    which the fused exponent is too coarse gets the rest NaN: that shows in the gradients of a tile, which is then
    computed again (backward.py). To be filled with 0, or None: sums, fp32, n_cleared heads of (n_stored, SUM_COLS);
    settled, int32, (batch, heads, n_stored / 64), with sums; counts, int32, (batch, heads, 2), with odd, int8, like
    settled. CHAINED: the next kernel may begin (its launch says so, and it waits for this one by itself).
    """
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    batch = tl.program_id(2)
    delta = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(len(PIECES)):
        o = memory.load_tile(out, batch, head, first, n_rows, D_V, ROWS, PIECES[i][1], True, WIDE, PIECES[i][0])
        g = memory.load_tile(d_out, batch, head, first, n_rows, D_V, ROWS, PIECES[i][1], True, WIDE, PIECES[i][0])
        delta += tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    rows = first + tl.arange(0, ROWS)
    inside = rows < n_rows
    index = tl.cast(batch * tl.num_programs(0) + head, tl.int64) * n_rows
    natural = tl.load(lse + index + rows, mask=inside, other=float("-inf"))
    if d_lse is not None:
        delta -= tl.load(d_lse + index + rows, mask=inside, other=0.0)
    empty = natural == float("-inf")
    rest = tl.where(empty, float("inf"), natural / softmax.LN2)
    inside = rows < n_stored
    to = stats.ptr + tl.cast(batch, tl.int64) * stats.batch_stride + tl.cast(head, tl.int64) * stats.head_stride + rows
    coarse = (tl.abs(rest) > softmax.FUSED_LIMIT) & (empty == 0)
    tl.store(to + REST * stats.plane, tl.where(coarse, float("nan"), rest), mask=inside)
    tl.store(to + DELTA * stats.plane, tl.where(empty, 0.0, delta), mask=inside)
    tl.store(to + EXACT_PIVOT * stats.plane, tl.zeros([ROWS], tl.float32), mask=inside)
    tl.store(to + EXACT_REST * stats.plane, rest, mask=inside)
    if sums is not None:
        at = batch * tl.num_programs(0) + head
        if at < n_cleared:
            place = (tl.cast(at, tl.int64) * n_stored + first) * SUM_COLS + tl.arange(0, ROWS * SUM_COLS)
            tl.store(sums + place, tl.zeros([ROWS * SUM_COLS], tl.float32))
        tile = at * (n_stored // 64) + first // 64
        tl.store(settled + tile, 0)  # twice, where a tile has two programs
        if counts is not None:
            tl.store(odd + tile, tl.full([], 0, tl.int8))
            if first == 0:
                tl.store(counts + 2 * at + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit
def probabilities(s, row, modifiers, span, head, first_row, first_col, scale_log2, config, EDGE: tl.constexpr,
                  EXACT: tl.constexpr, TURNED: tl.constexpr):
    """Raw products of a tile -> P."""
    s = scores.settle(s, modifiers, span, head, first_row, first_col, config, EDGE, True, TURNED)
    pivot = row.pivot
    if EXACT:
        pivot = masking.of_rows(pivot, TURNED)
    return softmax.recompute(s, pivot, masking.of_rows(row.rest, TURNED), scale_log2, EXACT)


@triton.jit
def kept(modifiers, span, head, first_row, first_col, ROWS: tl.constexpr, COLS: tl.constexpr, TURNED: tl.constexpr):
    """Which probabilities dropout keeps; True without dropout."""
    keep = True
    if modifiers.seed is not None:
        keep = dropout.keep(modifiers.seed, span.batch, head, first_row, first_col, modifiers.dropout_p, ROWS, COLS,
                            TURNED)
    return keep


@triton.jit
def of_scores(p, dp, keep, row, modifiers, config, EDGE: tl.constexpr, TURNED: tl.constexpr):
    """P, dO V^T and what dropout keeps -> dS, of the final scores. A hidden key has none, whatever its value holds."""
    if modifiers.seed is not None:
        dp = tl.where(keep, dp * modifiers.growth, 0.0)
    ds = p * (dp - masking.of_rows(row.delta, TURNED))
    if EDGE or config.CHOOSES or config.FLOAT_MASK:
        ds = tl.where(p == 0.0, 0.0, ds)
    return ds


@triton.jit
def of_biased(ds, s, modifiers, span, head, first_row, first_col, config, EDGE: tl.constexpr, TURNED: tl.constexpr):
    """dS, of the final scores -> the gradient of the scores that a score_mod gets. s: raw products."""
    if config.DERIVATIVE is not None:
        ROWS: tl.constexpr = s.shape[1] if TURNED else s.shape[0]
        COLS: tl.constexpr = s.shape[0] if TURNED else s.shape[1]
        place = scores.place_at(span, head, first_row, first_col, ROWS, COLS, EDGE)
        slope = config.DERIVATIVE(scores.biased(s, modifiers, span, place, config, TURNED), span.batch, head,
                                  masking.of_rows(place.rows, TURNED), masking.of_cols(place.cols, TURNED),
                                  *modifiers.score_args)
        ds = tl.where(ds == 0.0, 0.0, ds * slope.to(tl.float32))
    return ds


@triton.jit
def of_products(ds, s, modifiers, config):
    """The gradient of biased scores -> that of the scaled products s, raw here."""
    if modifiers.softcap_inverse is not None:
        t = scores.tanh(s * modifiers.scale * modifiers.softcap_inverse, config.LARGE_CAP)
        ds = tl.where(ds == 0.0, 0.0, ds * (1.0 - t * t))
    return ds


@triton.jit
def clean(pieces, CLEAN: tl.constexpr):
    """The pieces with 0 for NaN and inf, which a hidden key may hold: 0 times them is not 0."""
    result = ()
    for i in tl.static_range(len(pieces)):
        if CLEAN:
            x = pieces[i].to(tl.float32)
            result = result + (tl.where(x - x == 0.0, pieces[i], 0.0).to(pieces[i].dtype),)
        else:
            result = result + (pieces[i],)
    return result


@triton.jit
def suspect(acc):
    """1 if any element of the pieces is NaN or inf, else 0."""
    found = tl.max((acc[0] - acc[0] != 0.0).to(tl.int32))
    for i in tl.static_range(1, len(acc)):
        found = tl.maximum(found, tl.max((acc[i] - acc[i] != 0.0).to(tl.int32)))
    return found


@triton.jit
def zeros(ROWS: tl.constexpr, PIECES):
    """A tuple of fp32 tiles for an accumulation."""
    acc = ()
    for i in tl.static_range(len(PIECES)):
        acc = acc + (tl.zeros([ROWS, PIECES[i][1]], tl.float32),)
    return acc


@triton.jit
def store(view, span, head, row, row_end, acc, factor, N_COLS: tl.constexpr, PIECES, config):
    """Write the pieces, times the factor, in the tensor's dtype. 0 stays 0 whatever the factor."""
    for i in tl.static_range(len(acc)):
        tile = products.narrow(acc[i] * factor, view.ptr.dtype.element_ty, config.UPCAST)
        memory.store_tile(view, span.slab, head, row, row_end, tile, N_COLS, config.WIDE, PIECES[i][0])
