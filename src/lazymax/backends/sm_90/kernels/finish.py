"""Behind `attention_backward`: dQ from its sum, and by the portable kernels what the fast path could not compute."""

import triton
import triton.language as tl

from ....kernels import backward, backward_keys, bounds, gradients, memory, products, sequences
from .backward_bounds import KEYS

ROWS = tl.constexpr(64)  # of a program of finish_queries
TILES = tl.constexpr(32)  # of 64 queries, of a program of finish_queries that looks at what `sums.finish` found
BLOCKS = tl.constexpr(32)  # of a program of finish_keys


@triton.jit
def _load_sum(sums, tile, COLS: tl.constexpr):
    """(64, COLS): the tile-th of the tensor, see `sums.py`."""
    x = tl.load(sums + tl.cast(tile, tl.int64) * (ROWS * COLS) + tl.arange(0, ROWS * COLS))
    # Square of 64 columns, 8 columns, warp, row of 8, pair of columns, which 8 of 16 rows, column of the pair.
    x = x.reshape([COLS // 64, 8, 4, 8, 4, 2, 2])
    return x.permute(2, 5, 3, 0, 1, 4, 6).reshape([ROWS, COLS])


@triton.jit
def _guard_queries(unit, n_tiles, n_heads, inputs, out, stats, scale_log2, scale, q_len, kv_len, first_offset,
                   last_offset, lengths, modifiers, config):
    """dQ of the unit-th tile of all heads once more, by the careful path."""
    batch, head, tile = unit // (n_heads * n_tiles), unit // n_tiles % n_heads, unit % n_tiles
    span, _ = sequences.locate((tile, batch), q_len, kv_len, first_offset, last_offset, lengths, ROWS,
                               config.BOTTOM_RIGHT)
    row = tile * ROWS
    start, _, _, stop = bounds.kv_range(row, tl.minimum(row + ROWS, q_len) - 1, kv_len, first_offset, last_offset,
                                        backward.GUARD_N, config.HAS_FIRST, config.HAS_LAST)
    backward.guarded_queries(inputs, out, None, stats, span, head, row, start, stop, scale_log2, scale, lengths,
                             modifiers, config)


@triton.jit(do_not_specialize=["n_done", "n_left", "n_tiles", "n_heads", "ring", "q_len", "kv_len", "first_offset",
                               "last_offset"])
def finish_queries(sums, odd, n_done, n_left, n_tiles, n_heads, ring, COLS: tl.constexpr, inputs, out, stats,
                   scale_log2, scale, q_len, kv_len, first_offset, last_offset, lengths, modifiers, config,
                   CHAINED: tl.constexpr):
    """dQ of 64 queries of a head whose sum is left, for the first n_left programs, the last heads first: the L2 has
    their sums still. A program behind those looks at 32 tiles that `sums.finish` made. Grid: (n_left + n_done / 32,
    1, 1), n_done + n_left: all tiles of 64 queries, in the order of heads.

    sums: fp32 (ring, n_tiles, 64 * COLS): head i has the (i % ring)-th. odd: int8, for each tile: 1 if its dQ has NaN
    or inf; None where n_done is 0. inputs: `backward.Inputs`. out: `memory.View` of dQ. n_heads: query heads of one
    batch element. CHAINED: launched before `attention_backward` has ended. The rest as in
    `attention_backward_queries`.
    """
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0)
    if index < n_left:
        unit = n_done + n_left - 1 - index
        place = unit // n_tiles % ring * n_tiles + unit % n_tiles
        dq = _load_sum(sums, place, COLS)
        narrow = products.narrow(dq * scale, out.ptr.dtype.element_ty, config.UPCAST)
        memory.store_tile(out, unit // (n_heads * n_tiles), unit // n_tiles % n_heads, unit % n_tiles * ROWS, q_len,
                          narrow, config.D, config.WIDE)
        first, stop = unit, unit + gradients.suspect((dq,))
    else:
        first = (index - n_left) * TILES
        stop = first
        if odd is not None:
            flags = first + tl.arange(0, TILES)
            within = flags < n_done
            if tl.max(tl.load(odd + flags, mask=within, other=0).to(tl.int32)) != 0:
                stop = tl.minimum(first + TILES, n_done)
    for unit in tl.range(first, stop):
        wanted = index < n_left
        if odd is not None:
            wanted = wanted or tl.load(odd + unit) != 0
        if wanted:
            _guard_queries(unit, n_tiles, n_heads, inputs, out, stats, scale_log2, scale, q_len, kv_len, first_offset,
                           last_offset, lengths, modifiers, config)


@triton.jit(do_not_specialize=["n_blocks", "n_heads", "total", "q_len", "kv_len", "first_offset", "last_offset"])
def finish_keys(found, n_blocks, n_heads, total, inputs, d_k, d_v, stats, scale_log2, scale, q_len, kv_len,
                first_offset, last_offset, lengths, modifiers, config, CHAINED: tl.constexpr):
    """dK and dV of those of 32 blocks of 128 keys in which `attention_backward` has found NaN or inf; after
    finish_queries, which leaves the exact statistics of all rows that it computes again. Grid: (total / 32, 1, 1).

    found: (batch, n_heads, n_blocks, 128) int8. total: how many blocks. CHAINED: launched before finish_queries has
    ended. The rest as in `attention_backward_keys`.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * BLOCKS
    stop = tl.minimum(first + BLOCKS, total)
    flags = tl.arange(0, BLOCKS * KEYS)
    found += tl.cast(first, tl.int64) * KEYS
    if tl.max(tl.load(found + flags, mask=flags < (stop - first) * KEYS, other=0).to(tl.int32)) > 0:
        for index in tl.range(first, stop):
            own = tl.load(found + (index - first) * KEYS + tl.arange(0, KEYS))
            if tl.max(own.to(tl.int32)) > 0:
                batch, head = index // (n_blocks * n_heads), index // n_blocks % n_heads
                tile = index % n_blocks
                span, _, end = sequences.locate_keys((tile, batch), q_len, kv_len, first_offset, last_offset, lengths,
                                                     KEYS, config.BOTTOM_RIGHT)
                backward_keys.guarded_keys(inputs, d_k, d_v, stats, span, head, tile * KEYS, end, scale_log2, scale,
                                           modifiers, config)
