"""Tiles in and out of memory: one argument per tensor, 64-bit bases, masked edges.

Every tensor comes as a `View` (any strides). Q, K and V may come as tensor descriptors (TMA) beside it, made on the
host where the GPU has them and the strides allow. Rows and columns outside the tensor read as 0 and are never written.
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
def tile_pointers(view, batch, head, start, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
                  FIRST: tl.constexpr = 0, end=None):
    """Pointers to rows [start, start + ROWS) and columns [FIRST, FIRST + COLS) of one head; with an end, of which there
    must be rows, to the last one before it instead of those behind.

    An index is 64-bit before it meets a stride: one that fits in 32 bits times a stride that does need not (fused QKV
    buffers pass 2**31 at video lengths). Inside a tile 32 bits do, unless WIDE: rows 2**23 elements apart or more.
    """
    base = view.ptr + tl.cast(batch, tl.int64) * view.batch_stride + tl.cast(head, tl.int64) * view.head_stride
    base += tl.cast(start, tl.int64) * view.row_stride
    rows = tl.arange(0, ROWS)
    if end is not None:
        rows = tl.minimum(rows, end - 1 - start)
    if WIDE:
        rows = rows.to(tl.int64)
    return base + (rows * view.row_stride)[:, None] + (tl.arange(0, COLS) + FIRST)[None, :]


@triton.jit
def load_tile(view, batch, head, start, n_rows, N_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
              CHECK_ROWS: tl.constexpr, WIDE: tl.constexpr, FIRST: tl.constexpr = 0, CLAMP: tl.constexpr = False):
    """Rows [start, start + ROWS) and columns [FIRST, FIRST + COLS) of one head; 0 from row n_rows and column N_COLS
    on. CLAMP: row n_rows - 1 from row n_rows on, for callers who hide the scores of such rows; there must be one. That
    takes no mask, of which Triton 3.6 makes a branch on AMD: what the many blocks of such a loop load is in registers
    together (dK on gfx1151 at D = 128 spilled 37 to 44 with masks, none without)."""
    MASK_ROWS: tl.constexpr = CHECK_ROWS and not CLAMP
    pointers = tile_pointers(view, batch, head, start, ROWS, COLS, WIDE, FIRST,
                             n_rows if CHECK_ROWS and CLAMP else None)
    row_inside = (start + tl.arange(0, ROWS) < n_rows)[:, None]
    col_inside = (tl.arange(0, COLS) + FIRST < N_COLS)[None, :]
    if MASK_ROWS and N_COLS < FIRST + COLS:
        tile = tl.load(pointers, mask=row_inside & col_inside, other=0.0)
    elif MASK_ROWS:
        tile = tl.load(pointers, mask=row_inside, other=0.0)
    elif N_COLS < FIRST + COLS:
        tile = tl.load(pointers, mask=col_inside, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_described(descriptor, batch, head, start, ROWS: tl.constexpr, COLS: tl.constexpr, FIRST: tl.constexpr = 0):
    """The same through a tensor descriptor over (batch, head, row, column); the hardware fills in the zeros."""
    return descriptor.load([batch, head, start, FIRST]).reshape([ROWS, COLS])


@triton.jit
def load_pieces(view, tiles, batch, head, start, n_rows, ROWS: tl.constexpr, CHECK_ROWS: tl.constexpr, config,
                N_COLS: tl.constexpr, PIECES, DESCRIBED: tl.constexpr, CLAMP: tl.constexpr = False):
    """Rows [start, start + ROWS) of one head, all columns, as a tuple of tiles. PIECES: (first column, columns) of
    each; tile shapes are powers of two, head dimensions need not be. tiles: a descriptor for each, if DESCRIBED.
    CLAMP: without a descriptor, as in `load_tile`."""
    pieces = ()
    for i in tl.static_range(len(PIECES)):
        if DESCRIBED:
            pieces = pieces + (load_described(tiles[i], batch, head, start, ROWS, PIECES[i][1], PIECES[i][0]),)
        else:
            pieces = pieces + (load_tile(view, batch, head, start, n_rows, N_COLS, ROWS, PIECES[i][1], CHECK_ROWS,
                                         config.WIDE, PIECES[i][0], CLAMP),)
    return pieces


class Rows(NamedTuple):
    """Rows of one head from start on, to be loaded through pointers; the last one again from end on."""

    view: Any
    batch: Any
    head: Any
    start: Any
    end: Any


@triton.jit
def load_piece(rows, ROWS: tl.constexpr, CHECK: tl.constexpr, config, N_COLS: tl.constexpr, PIECE):
    return load_tile(rows.view, rows.batch, rows.head, rows.start, rows.end, N_COLS, ROWS, PIECE[1], CHECK, config.WIDE,
                     PIECE[0], True)


@triton.jit
def store_tile(view, batch, head, start, n_rows, tile, N_COLS: tl.constexpr, WIDE: tl.constexpr,
               FIRST: tl.constexpr = 0):
    """Write the rows and columns of `tile`, which begins at column FIRST, that the tensor has."""
    pointers = tile_pointers(view, batch, head, start, tile.shape[0], tile.shape[1], WIDE, FIRST)
    row_inside = (start + tl.arange(0, tile.shape[0]) < n_rows)[:, None]
    col_inside = (tl.arange(0, tile.shape[1]) + FIRST < N_COLS)[None, :]
    tl.store(pointers, tile, mask=row_inside & col_inside)
