"""Behind `attention_backward`: dQ from its sum, and by the portable kernels what the fast path could not compute."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....kernels import backward, backward_keys, bounds, gradients, memory, products, sequences
from .backward_bounds import KEYS

ROWS = tl.constexpr(64)  # queries of a tile
TILES = tl.constexpr(32)  # of a program that looks at what `sums.finish` found
BLOCKS = tl.constexpr(32)  # of keys, of a program that looks at those


class Sizes(NamedTuple):
    """What there is to look at."""

    n_done: Any  # tiles of queries whose dQ `sums.finish` made, from the first on, in the order of heads
    n_left: Any  # the rest of them, all batches and heads
    n_tiles: Any  # of a head
    ring: Any  # heads that have a sum: head i the (i % ring)-th
    n_blocks: Any  # of keys, of a head
    n_keys: Any  # of keys, all batches and heads
    kv_heads: Any  # of a batch element


class Band(NamedTuple):
    """As in `attention_backward_queries`."""

    q_len: Any
    kv_len: Any
    first_offset: Any
    last_offset: Any


@triton.jit
def _load_sum(sums, tile, COLS: tl.constexpr):
    """(64, COLS): the tile-th of the tensor, see `sums.py`."""
    x = tl.load(sums + tl.cast(tile, tl.int64) * (ROWS * COLS) + tl.arange(0, ROWS * COLS))
    # Square of 64 columns, 8 columns, warp, row of 8, pair of columns, which 8 of 16 rows, column of the pair.
    x = x.reshape([COLS // 64, 8, 4, 8, 4, 2, 2])
    return x.permute(2, 5, 3, 0, 1, 4, 6).reshape([ROWS, COLS])


@triton.jit
def _guard_queries(unit, inputs, out, stats, sizes, band, scale_log2, scale, lengths, modifiers, config):
    """dQ of the unit-th tile of all heads once more, by the careful path."""
    n_heads = sizes.kv_heads * config.GROUP
    batch, head, tile = unit // (n_heads * sizes.n_tiles), unit // sizes.n_tiles % n_heads, unit % sizes.n_tiles
    span, _ = sequences.locate((tile, batch), *band, lengths, ROWS, config.BOTTOM_RIGHT)
    row = tile * ROWS
    start, _, _, stop = bounds.kv_range(row, tl.minimum(row + ROWS, band.q_len) - 1, band.kv_len, band.first_offset,
                                        band.last_offset, backward.GUARD_N, config.HAS_FIRST, config.HAS_LAST)
    backward.guarded_queries(inputs, out, None, stats, span, head, row, start, stop, scale_log2, scale, lengths,
                             modifiers, config)


@triton.jit
def _finish_queries(index, sums, odd, settled, inputs, out, stats, sizes, band, scale_log2, scale, lengths, modifiers,
                    config, COLS: tl.constexpr):
    """dQ of 64 queries of a head whose sum is left, for the first n_left programs, the last heads first: the L2 has
    their sums still. A program behind those looks at 32 tiles that `sums.finish` made."""
    if index < sizes.n_left:
        unit = sizes.n_done + sizes.n_left - 1 - index
        n_heads = sizes.kv_heads * config.GROUP
        place = unit // sizes.n_tiles % sizes.ring * sizes.n_tiles + unit % sizes.n_tiles
        dq = _load_sum(sums, place, COLS)
        narrow = products.narrow(dq * scale, out.ptr.dtype.element_ty, config.UPCAST)
        memory.store_tile(out, unit // (n_heads * sizes.n_tiles), unit // sizes.n_tiles % n_heads,
                          unit % sizes.n_tiles * ROWS, band.q_len, narrow, config.D, config.WIDE)
        first, end = unit, unit + 1
        stop = unit + gradients.suspect((dq,))
    else:
        first = (index - sizes.n_left) * TILES
        end = tl.minimum(first + TILES, sizes.n_done)
        stop = first
        if odd is not None:
            flags = first + tl.arange(0, TILES)
            if tl.max(tl.load(odd + flags, mask=flags < end, other=0).to(tl.int32)) != 0:
                stop = end
    for unit in tl.range(first, stop):
        wanted = index < sizes.n_left
        if odd is not None:
            wanted = wanted or tl.load(odd + unit) != 0
        if wanted:
            _guard_queries(unit, inputs, out, stats, sizes, band, scale_log2, scale, lengths, modifiers, config)
    units = first + tl.arange(0, TILES)
    if stop > first:  # statistics were written, by all threads
        tl.debug_barrier()
        tl.atomic_xchg(settled + units, 1, mask=units < end, sem="release")
    else:
        tl.store(settled + units, 1, mask=units < end)


@triton.jit
def _wait(settled, first, count):
    """Until the statistics of so many tiles from `first` on are final."""
    for at in tl.range(0, count, KEYS):
        tiles = at + tl.arange(0, KEYS)
        done = 0
        while done == 0:
            flags = tl.atomic_add(settled + first + tiles, 0, mask=tiles < count, sem="acquire")
            done = tl.min(tl.where(tiles < count, flags, 1))


@triton.jit
def _finish_keys(index, found, settled, inputs, d_k, d_v, stats, sizes, band, scale_log2, scale, lengths, modifiers,
                 config):
    """dK and dV of those of 32 blocks of 128 keys in which `attention_backward` has found NaN or inf. The exact
    statistics of queries that are computed again come from programs in front of this one, which have begun before it:
    so it may wait for them."""
    first = index * BLOCKS
    stop = tl.minimum(first + BLOCKS, sizes.n_keys)
    flags = tl.arange(0, BLOCKS * KEYS)
    found += tl.cast(first, tl.int64) * KEYS
    if tl.max(tl.load(found + flags, mask=flags < (stop - first) * KEYS, other=0).to(tl.int32)) > 0:
        for block in tl.range(first, stop):
            own = tl.load(found + (block - first) * KEYS + tl.arange(0, KEYS))
            if tl.max(own.to(tl.int32)) > 0:
                of_all = block // sizes.n_blocks
                batch, head, tile = of_all // sizes.kv_heads, of_all % sizes.kv_heads, block % sizes.n_blocks
                n_tiles = config.GROUP * sizes.n_tiles
                _wait(settled, of_all * n_tiles, n_tiles)
                span, _, end = sequences.locate_keys((tile, batch), *band, lengths, KEYS, config.BOTTOM_RIGHT)
                backward_keys.guarded_keys(inputs, d_k, d_v, stats, span, head, tile * KEYS, end, scale_log2, scale,
                                           modifiers, config)


@triton.jit(do_not_specialize=["sizes", "band"])
def finish(sums, odd, found, settled, inputs, d_q, d_k, d_v, stats, modifiers, sizes, band, scale_log2, scale, lengths,
           config, COLS: tl.constexpr, CHAINED: tl.constexpr):
    """dQ, and what is to be computed again of all gradients. Grid: (n_left + n_done / 32 + n_keys / 32, 1, 1), each
    rounded up: first the programs of queries, then those of keys.

    sums: fp32 (ring, n_tiles, 64 * COLS). odd: int8, for each tile of queries: 1 if its dQ, made by `sums.finish`, has
    NaN or inf; None where n_done is 0. found: int8 (batch, kv_heads, n_blocks, 128), 1 for keys whose dK or dV has.
    settled: int32, for each tile of queries, 0; 1 when its dQ and its statistics are final. inputs: `backward.Inputs`.
    d_q, d_k, d_v: `memory.View`. sizes: `Sizes`. band: `Band`. CHAINED: launched before `attention_backward` has ended.
    The rest as in `attention_backward_queries`.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    index = tl.program_id(0)
    of_queries = sizes.n_left + tl.cdiv(sizes.n_done, TILES)
    if index < of_queries:
        _finish_queries(index, sums, odd, settled, inputs, d_q, stats, sizes, band, scale_log2, scale, lengths,
                        modifiers, config, COLS)
    else:
        _finish_keys(index - of_queries, found, settled, inputs, d_k, d_v, stats, sizes, band, scale_log2, scale,
                     lengths, modifiers, config)
