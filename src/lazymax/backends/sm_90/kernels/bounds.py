"""Which tile is next, which key blocks it visits, and which of them the band or the length cuts.

A tile is 64 query rows for each consumer warpgroup, of one head. Blocks are visited from the last to the first, so that
the one cut by the length, and under a causal mask by the diagonal, comes first.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Span(NamedTuple):
    """A tile, and the batch element or packed sequence that it is part of. Rows and keys count from its first."""

    head: Any  # negative: there is no tile
    batch: Any  # index of the batch element or sequence
    slab: Any  # its index in the tensors' batch dimension: 0 if packed
    first_row: Any  # of the tile
    q_row: Any  # row of the tensors where it begins: 0 unless packed
    k_row: Any
    q_len: Any
    kv_len: Any
    first_offset: Any  # the band, see `attention_forward`
    last_offset: Any


@gluon.jit
def tile(i, call, config):
    """The i-th tile of this CTA."""
    place = i * gl.num_programs(0) + gl.program_id(0)
    if config.RAGGED:
        record = call.schedule + place * 8  # see schedule.py
        batch = gl.load(record + 1)
        q_len = gl.load(record + 4)
        kv_len = gl.load(record + 6)
        first_offset = call.first_offset
        last_offset = call.last_offset
        if config.BOTTOM_RIGHT:
            first_offset += kv_len - q_len
            last_offset += kv_len - q_len
        slab = batch
        if config.PACKED:
            slab = 0 * batch
        span = Span(gl.load(record), batch, slab, gl.load(record + 2), gl.load(record + 3), gl.load(record + 5), q_len,
                    kv_len, first_offset, last_offset)
    else:
        code = gl.load(call.schedule + place)
        index = code >> 16  # of the head in the whole batch, negative where there is no tile
        batch = index // call.q_heads
        first_row = (code & 0xFFFF) * (64 * config.WARPGROUPS)
        span = Span(index - batch * call.q_heads, batch, batch, first_row, 0 * index, 0 * index, call.q_len,
                    call.kv_len, call.first_offset, call.last_offset)
    return span


@gluon.jit
def key_blocks(span, config):
    """Key blocks [first, stop) that the tile visits: all that its rows can see, and at least one."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    first = 0 * span.kv_len
    end = span.kv_len
    if config.HAS_LAST:
        last_row = gl.minimum(span.first_row + 64 * config.WARPGROUPS, span.q_len) - 1
        end = gl.minimum(end, gl.maximum(last_row + span.last_offset + 1, 0))
    if config.HAS_FIRST:
        first = gl.minimum(gl.maximum(span.first_row + span.first_offset, 0), end) // BLOCK_N
    return first, gl.maximum((end + BLOCK_N - 1) // BLOCK_N, first + 1)


@gluon.jit
def visits(i, call, config, W: gl.constexpr):
    """Of consumer W in the i-th tile: (span, count, skipped, begin, end, row, key). Visit n of `count` is to the keys
    from key - n * BLOCK_N on; row is its first of 64. The first `skipped` visits it leaves out, for none of its rows
    sees a key there. In the visits [begin, end) every row sees every key, and has seen one before.

    The tile is read anew, so that what comes before need not hold what is computed here.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    span = tile(i, call, config)
    first, stop = key_blocks(span, config)
    row = span.first_row + W * 64
    skipped = 0 * first
    if config.SKIP:
        seen = span.kv_len
        if config.HAS_LAST:
            seen = gl.minimum(seen, gl.maximum(gl.minimum(row + 64, span.q_len) + span.last_offset, 0))
        seen = gl.where(row < span.q_len, seen, 0)
        skipped = gl.minimum(stop - (seen + BLOCK_N - 1) // BLOCK_N, stop - first - 1)
    begin = skipped + 1
    end = stop - first
    if config.HAS_LAST:
        inner_stop = gl.minimum(span.kv_len, gl.maximum(row + span.last_offset, 0)) // BLOCK_N
        begin = gl.minimum(stop - first, gl.maximum(stop - inner_stop, begin))
    if config.HAS_FIRST:
        inner_first = (gl.maximum(row + 63 + span.first_offset, 0) + BLOCK_N - 1) // BLOCK_N
        end = gl.maximum(begin, gl.minimum(stop - inner_first, stop - first))
    return span, stop - first, skipped, begin, end, row, (stop - 1) * BLOCK_N
