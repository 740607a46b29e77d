"""Lists of the key blocks that a query tile has to visit, for masks that are known by position alone.

Two small kernels run before the forward: `classify` says of every tile of scores whether the mask keeps no pair of it,
all or some; `compact` turns a row of those into two lists. Only tiles that band and length leave whole are listed: the
few at the edges are visited as ever. The idea is FlexAttention's BlockMask (Dong et al., 2024), made anew for every
call, so that it never goes stale.

A row of the list, int32: the number of full blocks, the number of partial ones, then room for every block of keys: full
ones from the front in rising order, partial ones from the end in falling order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import bounds, scores, sequences

HEADER = tl.constexpr(2)
CHUNK = tl.constexpr(256)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)


class List(NamedTuple):
    """Rows by (batch, head, slot); stride 0 where all batch elements or heads share one."""

    ptr: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any


@triton.jit
def row_of(blocks, batch, head, slot):
    """Pointer to the row of a query tile. batch: of the grid, not of a packed sequence."""
    row = blocks.ptr + tl.cast(batch, tl.int64) * blocks.batch_stride + tl.cast(head, tl.int64) * blocks.head_stride
    return row + tl.cast(slot, tl.int64) * blocks.row_stride


@triton.jit(do_not_specialize=["n_blocks", "q_len", "kv_len", "first_offset", "last_offset"])
def classify(kinds, n_blocks, q_len, kv_len, first_offset, last_offset, lengths, modifiers, config):
    """kinds[batch, head, slot, block] = 0, PARTIAL or FULL, int8. Grid: (heads * n_blocks, slots, batches)."""
    block = tl.program_id(0) % n_blocks
    head = tl.program_id(0) // n_blocks
    slot = tl.program_id(1)
    batch = tl.program_id(2)
    span, tile = sequences.locate((slot, batch), q_len, kv_len, first_offset, last_offset, lengths, config.BLOCK_M,
                                  config.BOTTOM_RIGHT)
    first_row = tile * config.BLOCK_M
    n = block * config.BLOCK_N
    _, inner_start, inner_stop, _ = bounds.kv_range(
        first_row, tl.minimum(first_row + config.BLOCK_M, span.q_len) - 1, span.kv_len, span.first_offset,
        span.last_offset, config.BLOCK_N, config.HAS_FIRST, config.HAS_LAST)
    kind = 0
    if (n >= inner_start) & (n < inner_stop):
        place = scores.place_at(span, head, first_row, n, config.BLOCK_M, config.BLOCK_N, False)
        kept = scores.allowed(modifiers, span, place, config) & tl.full([config.BLOCK_M, config.BLOCK_N], 1, tl.int1)
        count = tl.sum(kept.to(tl.int32))
        kind = tl.where(count == config.BLOCK_M * config.BLOCK_N, FULL, tl.where(count > 0, PARTIAL, 0))
    tl.store(row_of(kinds, batch, head, slot) + block, kind.to(tl.int8))


@triton.jit(do_not_specialize=["n_blocks"])
def compact(kinds, blocks, n_blocks):
    """One row of `classify`'s kinds -> one row of the list. Grid: (slots, heads, batches)."""
    slot = tl.program_id(0)
    of = row_of(kinds, tl.program_id(2), tl.program_id(1), slot)
    to = row_of(blocks, tl.program_id(2), tl.program_id(1), slot)
    n_full = 0
    n_partial = 0
    for first in tl.range(0, n_blocks, CHUNK):
        index = first + tl.arange(0, CHUNK)
        kind = tl.load(of + index, mask=index < n_blocks, other=0)
        full = (kind == FULL).to(tl.int32)
        partial = (kind == PARTIAL).to(tl.int32)
        tl.store(to + HEADER + n_full + tl.cumsum(full, 0) - 1, index, mask=full != 0)
        tl.store(to + HEADER + n_blocks - n_partial - tl.cumsum(partial, 0), index, mask=partial != 0)
        n_full += tl.sum(full, 0)
        n_partial += tl.sum(partial, 0)
    tl.store(to, n_full)
    tl.store(to + 1, n_partial)
