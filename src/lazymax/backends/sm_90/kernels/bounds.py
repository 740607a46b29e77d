"""Which tile is next, which key blocks it visits, and which of them the band or the length cuts.

A tile is 64 query rows for each consumer warpgroup, of one head or, where there are few queries, of HEADS heads that
share a key head. Where there are few tiles, the keys are split: each split is a tile whose keys, and band, count from
its first key, with results of its own, which `merge.py` joins. Blocks are visited from the last to the first, so that
the one cut by the length, and under a causal mask by the diagonal, comes first; ASCENDING, from the first to the last:
tiles that run side by side then read the same keys at the same time, where else each begins at a diagonal of its own.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import layouts


class Span(NamedTuple):
    """A tile, and the batch element or packed sequence that it is part of. Rows and keys count from its first."""

    head: Any  # the first of the tile; negative: there is no tile
    batch: Any  # index of the batch element or sequence
    slab: Any  # its index in the batch dimension of q, k and v: 0 if packed
    out_slab: Any  # and in that of the results
    first_row: Any  # of the tile
    q_row: Any  # row of the tensors where it begins: 0 unless packed
    k_row: Any  # where its keys, or those of the split, begin
    q_len: Any
    kv_len: Any
    first_offset: Any  # the band, see `attention_forward`
    last_offset: Any


@gluon.jit
def first_code(schedule, first_lap, q_len, group, config):
    """The entry of `launch.schedule` for the first tile of this CTA. It is computed where it can be, for nothing starts
    before it is there, and after other kernels the schedule is in no cache: 0.8 us of an H200."""
    place = gl.program_id(0)
    code = 0 * place
    if config.SPLIT or config.RAGGED:  # in records, see `tile`
        pass
    elif first_lap != 0:
        together = gl.abs(first_lap)
        rank = place // together
        head = place - rank * together
        if config.HEADS > 1:
            head *= group
        if first_lap < 0:
            ROWS: gl.constexpr = layouts.queries(config.HEADS) * config.WARPGROUPS
            rank = (q_len - 1) // ROWS - rank
        code = head << 16 | rank
    else:
        code = gl.load(schedule + place)
    return code


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
        span = Span(gl.load(record), batch, slab, slab, gl.load(record + 2), gl.load(record + 3), gl.load(record + 5),
                    q_len, kv_len, first_offset, last_offset)
    else:
        record = call.schedule + place
        if config.SPLIT:
            record = call.schedule + place * 4  # see `launch.split_schedule`
            code = gl.load(record)
        else:
            code = call.first_code
            if i > 0:
                code = gl.load(record)
        index = code >> 16  # of the head in the whole batch, negative where there is no tile
        batch = index // call.q_heads
        first_row = (code & 0xFFFF) * (layouts.queries(config.HEADS) * config.WARPGROUPS)
        head = index - batch * call.q_heads
        if config.SPLIT:
            begin = gl.load(record + 2)
            span = Span(head, batch, batch, gl.load(record + 1) + batch, first_row, 0 * index, begin, call.q_len,
                        gl.load(record + 3) - begin, call.first_offset - begin, call.last_offset - begin)
        else:
            span = Span(head, batch, batch, batch, first_row, 0 * index, 0 * index, call.q_len, call.kv_len,
                        call.first_offset, call.last_offset)
    return span


@gluon.jit
def own_row(span, config, W: gl.constexpr):
    """The first query of consumer W."""
    return span.first_row + W * layouts.queries(config.HEADS)


@gluon.jit
def rows(span, row, L: gl.constexpr, call, config):
    """(query, head, inside) of a consumer's 64 rows, in layout L: the query, which for the first is `row`, the head,
    counted from the tile's first, and whether there is such a row. A pair of CTAs has two times 64 rows, 128 apart."""
    return numbered(span, row, gl.arange(0, 64 * gl.num_ctas(), L), call, config)


@gluon.jit
def numbered(span, row, own, call, config):
    """The same of rows whose numbers, from 0 on, are `own`."""
    if gl.num_ctas() == 2:
        own += own // 64 * 64
    if config.HEADS == 1:
        query = row + own
        head = 0 * span.head
        inside = query < span.q_len
    else:
        query = row + own % layouts.queries(config.HEADS)
        head = own // layouts.queries(config.HEADS)
        inside = (query < span.q_len) & (head < call.group)
    return query, head, inside


@gluon.jit
def has_keys(span, query, config):
    """Whether queries see a key at all."""
    last = span.kv_len - 1 + 0 * query
    if config.HAS_LAST:
        last = gl.minimum(last, query + span.last_offset)
    first = 0 * query
    if config.HAS_FIRST:
        first = gl.maximum(query + span.first_offset, 0)
    return first <= last


@gluon.jit
def seen_blocks(span, stop_row, BLOCK_N: gl.constexpr, config):
    """Key blocks [first, stop) of the rows from the tile's first to stop_row: all that they can see, at least one."""
    first = 0 * span.kv_len
    end = span.kv_len
    if config.HAS_LAST:
        last_row = gl.minimum(stop_row, span.q_len) - 1
        end = gl.minimum(end, gl.maximum(last_row + span.last_offset + 1, 0))
    if config.HAS_FIRST:
        first = gl.minimum(gl.maximum(span.first_row + span.first_offset, 0), end) // BLOCK_N
    return first, gl.maximum((end + BLOCK_N - 1) // BLOCK_N, first + 1)


@gluon.jit
def key_blocks(span, config):
    """Those that the tile visits."""
    return seen_blocks(span, own_row(span, config, config.WARPGROUPS), config.BLOCK_N, config)


@gluon.jit
def block(visit, first, stop, config):
    """The key block of a visit to [first, stop)."""
    if config.ASCENDING:
        found = first + visit
    else:
        found = stop - 1 - visit
    return found


@gluon.jit
def key_of(visit, key, config):
    """The first key of a visit, if that of the first is `key`."""
    if config.ASCENDING:
        found = key + visit * config.BLOCK_N
    else:
        found = key - visit * config.BLOCK_N
    return found


@gluon.jit
def visits(i, call, config, W: gl.constexpr):
    """Of consumer W in the i-th tile: (span, count, skipped, begin, end, row, key). Visit n of `count` is to the block
    whose first key is `key_of(n, key)`; row is its first query. The first `skipped` visits it leaves out, for none of
    its rows sees a key there. In the visits [begin, end) every row sees every key, and has seen one before, if any came
    before.

    The tile is read anew, so that what comes before need not hold what is computed here.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    QUERIES: gl.constexpr = layouts.queries(config.HEADS)
    span = tile(i, call, config)
    first, stop = key_blocks(span, config)
    row = own_row(span, config, W)
    skipped = 0 * first
    if config.SKIP:
        seen = span.kv_len
        if config.HAS_LAST:
            seen = gl.minimum(seen, gl.maximum(gl.minimum(row + QUERIES, span.q_len) + span.last_offset, 0))
        seen = gl.where(row < span.q_len, seen, 0)
        skipped = gl.minimum(stop - (seen + BLOCK_N - 1) // BLOCK_N, stop - first - 1)
    begin = skipped + 1
    end = stop - first
    if config.ASCENDING:
        begin = 0 * first
        end = gl.minimum(span.kv_len, gl.maximum(row + span.last_offset + 1, 0)) // BLOCK_N - first
        if config.HAS_FIRST:
            begin = (gl.maximum(row + QUERIES + span.first_offset, 0) + BLOCK_N - 1) // BLOCK_N - first
    elif config.HAS_LAST:
        inner_stop = gl.minimum(span.kv_len, gl.maximum(row + span.last_offset, 0)) // BLOCK_N
        begin = gl.minimum(stop - first, gl.maximum(stop - inner_stop, begin))
    if config.HAS_FIRST and not config.ASCENDING:
        inner_first = (gl.maximum(row + (QUERIES - 1) + span.first_offset, 0) + BLOCK_N - 1) // BLOCK_N
        end = gl.maximum(begin, gl.minimum(stop - inner_first, stop - first))
    if config.ASCENDING:
        key = first * BLOCK_N
    else:
        key = (stop - 1) * BLOCK_N
    return span, stop - first, skipped, begin, end, row, key
