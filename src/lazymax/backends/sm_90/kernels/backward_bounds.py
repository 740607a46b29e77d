"""Which key block of which head a CTA of the backward has, and the tiles of queries that see it."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS = gl.constexpr(128)  # of a CTA, half of them of each consumer


class Work(NamedTuple):
    """Of one CTA."""

    batch: Any
    kv_head: Any
    block: Any  # of 128 keys
    first: Any  # tiles of queries: [first, stop) of each head, `begin` visited first
    stop: Any
    begin: Any
    tiles: Any  # of all heads of the group; at least one, which is hidden then


@gluon.jit
def place(index, call, config):
    """(head, key block) of a CTA. Heads go `together` at a time, key block by key block, those with the most queries
    first: what they read stays in the L2, and the longest CTAs begin early."""
    of_group = call.together * call.n_blocks
    earlier = index // of_group * call.together
    side_by_side = gl.minimum(call.n_heads - earlier, call.together)
    rest = index % of_group
    block = rest // side_by_side
    if config.HAS_FIRST and not config.HAS_LAST:
        block = call.n_blocks - 1 - block
    return earlier + rest % side_by_side, block


@gluon.jit
def work(call, config):
    """The CTA's own. Without a mask each block begins at another tile, for fewer collisions in the sum of dQ."""
    ROWS: gl.constexpr = config.BLOCK_M
    head, block = place(gl.program_id(0), call, config)
    n_tiles = gl.cdiv(call.q_len, ROWS)
    first = 0
    stop = n_tiles
    if config.HAS_LAST:
        first = gl.minimum(gl.maximum(block * KEYS - call.last_offset, 0) // ROWS, n_tiles - 1)
    if config.HAS_FIRST:
        last_key = gl.minimum(block * KEYS + KEYS, call.kv_len) - 1
        seen = gl.minimum(gl.maximum(last_key - call.first_offset + 1, 0), call.q_len)
        stop = gl.maximum(gl.cdiv(seen, ROWS), first + 1)
    begin = first
    if not (config.HAS_FIRST or config.HAS_LAST):
        begin = block * (KEYS // ROWS) % n_tiles
    return Work(head // call.kv_heads, head % call.kv_heads, block, first, stop, begin, (stop - first) * call.group)


@gluon.jit
def tiles_before(of, call, config):
    """How many tiles of queries lie before those of the group in the ring of sums."""
    place = (of.batch * call.kv_heads + of.kv_head) % (call.ring * call.together)
    return place * call.group * gl.cdiv(call.q_len, config.BLOCK_M)


@gluon.jit
def after(head, tile, of, step):
    """(head, tile) that follow; step: from one head to the next."""
    tile += 1
    tile = gl.where(tile == of.stop, of.first, tile)
    return gl.where(tile == of.begin, head + step, head), tile


@gluon.jit
def cut(row, key, call, config):
    """Whether the band cuts the tile of the queries from `row` on and of 64 keys from `key` on. Keys past the last one
    are 0, and need no mask."""
    result = False
    if config.HAS_LAST:
        result |= row + call.last_offset < key + 63
    if config.HAS_FIRST:
        result |= row + config.BLOCK_M - 1 + call.first_offset > key
    return result
