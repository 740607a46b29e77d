"""The gradient of a float mask: dS of the final scores, summed over the batch elements and heads that share an element
of the mask, in registers and in a fixed order. A program computes a tile of it; where all queries (or all keys) share
an element it leaves the sum of its tile, and the host adds those up.

Recomputes S and dP, two more products than the main kernels take: dS of every head would not fit into memory.
"""

import triton
import triton.language as tl

from . import bounds, gradients, memory, products, sequences
from .backward import Tiles


@triton.jit
def _of_head(inputs, stats, span, head, first_row, first_col, scale_log2, modifiers, config):
    """dS of one tile of one head."""
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    tiles = Tiles((None, None), (None, None), (None, None), (None, None))
    at, row_end = span.q_row + first_row, span.q_row + span.q_len
    k_row, key_end = span.k_row + first_col, span.k_row + span.kv_len
    kv_head = head // config.GROUP
    q = memory.load_pieces(inputs.q, tiles.q, span.slab, head, at, row_end, BLOCK_M, True, config, config.D,
                           config.D_PIECES, False)
    k = memory.load_pieces(inputs.k, tiles.k, span.slab, kv_head, k_row, key_end, BLOCK_N, True, config, config.D,
                           config.D_PIECES, False)
    row = gradients.load_row(stats, span, head, first_row, BLOCK_M, True, True)
    s = products.scores(q, k, config.PRECISION, config.UPCAST)
    p = gradients.probabilities(s, row, modifiers, span, head, first_row, first_col, scale_log2, config, True, True,
                                False)
    d_out = memory.load_pieces(inputs.d_out, tiles.d_out, span.slab, head, at, row_end, BLOCK_M, True, config,
                               config.D_V, config.DV_PIECES, False)
    v = memory.load_pieces(inputs.v, tiles.v, span.slab, kv_head, k_row, key_end, BLOCK_N, True, config, config.D_V,
                           config.DV_PIECES, False)
    keep = gradients.kept(modifiers, span, head, first_row, first_col, BLOCK_M, BLOCK_N, False)
    dp = products.scores(d_out, v, config.PRECISION, config.UPCAST)
    ds = gradients.of_scores(p, dp, keep, row, modifiers, config, True, False)
    ds = gradients.of_biased(ds, s, modifiers, span, head, first_row, first_col, config, True, False)
    # Rows outside may see a key that no row inside does, and that holds NaN.
    return tl.where((first_row + tl.arange(0, BLOCK_M) < span.q_len)[:, None], ds, 0.0)


@triton.jit(do_not_specialize=["q_len", "kv_len", "first_offset", "last_offset", "n_cols", "n_heads", "n_batches"])
def attention_backward_mask(inputs, d_mask, stats, scale_log2, q_len, kv_len, first_offset, last_offset, n_cols,
                            n_heads, n_batches, lengths, modifiers, config, ONE_ROW: tl.constexpr,
                            ONE_COL: tl.constexpr):
    """One tile of d_mask, a `memory.View` (fp32, contiguous). Grid: (tiles of rows * n_cols, heads of the mask, batch
    elements of the mask). n_heads, n_batches: over how many of them it sums. ONE_ROW, ONE_COL: it has one row (column)
    for each tile. Statistics must be the exact ones, as `attention_backward_queries` leaves them."""
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    row_tile, col_tile = tl.program_id(0) // n_cols, tl.program_id(0) % n_cols
    first_row, first_col = row_tile * BLOCK_M, col_tile * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, n_heads * n_batches, disable_licm=True):
        head = tl.program_id(1) + i % n_heads
        span = sequences.span_of(tl.program_id(2) + i // n_heads, q_len, kv_len, first_offset, last_offset, lengths,
                                 config.BOTTOM_RIGHT)
        start, _, _, stop = bounds.kv_range(first_row, tl.minimum(first_row + BLOCK_M, span.q_len) - 1, span.kv_len,
                                            span.first_offset, span.last_offset, BLOCK_N, config.HAS_FIRST,
                                            config.HAS_LAST)
        if (first_col >= start) & (first_col < stop):
            acc += _of_head(inputs, stats, span, head, first_row, first_col, scale_log2, modifiers, config)
    base = d_mask.ptr + tl.cast(tl.program_id(2), tl.int64) * d_mask.batch_stride
    base += tl.cast(tl.program_id(1), tl.int64) * d_mask.head_stride
    rows = first_row + tl.arange(0, BLOCK_M)
    cols = first_col + tl.arange(0, BLOCK_N)
    if ONE_ROW and ONE_COL:
        tl.store(base + row_tile * d_mask.row_stride + col_tile, tl.sum(tl.sum(acc, 1), 0))
    elif ONE_ROW:
        tl.store(base + tl.cast(row_tile, tl.int64) * d_mask.row_stride + cols, tl.sum(acc, 0), mask=cols < kv_len)
    elif ONE_COL:
        tl.store(base + rows.to(tl.int64) * d_mask.row_stride + col_tile, tl.sum(acc, 1), mask=rows < q_len)
    else:
        to = base + (rows.to(tl.int64) * d_mask.row_stride)[:, None] + cols[None, :]
        tl.store(to, acc, mask=(rows < q_len)[:, None] & (cols < kv_len)[None, :])
