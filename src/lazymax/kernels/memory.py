"""Tiles in and out of memory: one argument per tensor, 64-bit bases, masked edges.

Every tensor comes as a `View` (any strides). K and V may come as tensor descriptors (TMA) beside it, made on the host
where the GPU has them and the strides allow. Rows and columns outside the tensor read as 0 and are never written.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class View(NamedTuple):
    """A (batch, head, row, column) tensor as one kernel argument; the column stride is 1, the others are free."""

    ptr: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any


@triton.jit
def tile_pointers(view, batch, head, start, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr):
    """Pointers to rows [start, start + ROWS) of one head.

    An index is 64-bit before it meets a stride: one that fits in 32 bits times a stride that does need not (fused QKV
    buffers pass 2**31 at video lengths). Inside a tile 32 bits do, unless WIDE: rows 2**23 elements apart or more.
    """
    base = view.ptr + tl.cast(batch, tl.int64) * view.batch_stride + tl.cast(head, tl.int64) * view.head_stride
    base += tl.cast(start, tl.int64) * view.row_stride
    rows = tl.arange(0, ROWS)
    if WIDE:
        rows = rows.to(tl.int64)
    return base + (rows * view.row_stride)[:, None] + tl.arange(0, COLS)[None, :]


@triton.jit
def load_tile(view, batch, head, start, n_rows, N_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
              CHECK_ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Rows [start, start + ROWS) and columns [0, COLS) of one head; 0 where the tensor has none."""
    pointers = tile_pointers(view, batch, head, start, ROWS, COLS, WIDE)
    row_inside = (start + tl.arange(0, ROWS) < n_rows)[:, None]
    col_inside = (tl.arange(0, COLS) < N_COLS)[None, :]
    if CHECK_ROWS and N_COLS != COLS:
        tile = tl.load(pointers, mask=row_inside & col_inside, other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=row_inside, other=0.0)
    elif N_COLS != COLS:
        tile = tl.load(pointers, mask=col_inside, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_described(descriptor, batch, head, start, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The same through a tensor descriptor over (batch, head, row, column); the hardware fills in the zeros."""
    return descriptor.load([batch, head, start, 0]).reshape([ROWS, COLS])


@triton.jit
def store_tile(view, batch, head, start, n_rows, tile, N_COLS: tl.constexpr, WIDE: tl.constexpr):
    """Write the rows and columns of `tile` that the tensor has."""
    pointers = tile_pointers(view, batch, head, start, tile.shape[0], tile.shape[1], WIDE)
    row_inside = (start + tl.arange(0, tile.shape[0]) < n_rows)[:, None]
    col_inside = (tl.arange(0, tile.shape[1]) < N_COLS)[None, :]
    tl.store(pointers, tile, mask=row_inside & col_inside)
