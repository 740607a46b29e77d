"""Shared memory and its barriers: the ring of K and V, the tiles of Q, and what is on its way out.

A slot of the ring holds K of one block and V of the block visited before, so that a block costs one barrier in each
direction. Under KEYS_FIRST its K has a barrier of its own on the way back: it has been read 1,000 cycles before V, and
with two slots a load that comes from beyond the L2 needs them.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from . import layouts


class Shared(NamedTuple):
    """Shared memory and its barriers."""

    q: Any  # QUERY_TILES for each consumer
    q_tail: Any  # the columns behind; see D_TAIL
    out: Any  # a tile for each consumer, or half of one; not of splits
    k: Any  # a tile for each slot
    k_tail: Any
    v: Any
    q_full: Any
    q_empty: Any
    full: Any
    empty: Any
    keys_empty: Any  # of the K in it; without KEYS_FIRST the same
    flags: Any  # see `softmax.suspect`


@gluon.jit
def slot(count, config):
    return count & (config.SLOTS - 1)


@gluon.jit
def wait_full(shared, count, config):
    """Until the `count`-th filling of the ring has landed."""
    mbarrier.wait(shared.full.index(slot(count, config)), (count // config.SLOTS) & 1)


@gluon.jit
def wait_empty(shared, count, config):
    """Until the slot of the `count`-th filling of the ring is free."""
    mbarrier.wait(shared.empty.index(slot(count, config)), ((count // config.SLOTS) & 1) ^ 1)


@gluon.jit
def wait_keys_empty(shared, count, config):
    """Until K may be written there."""
    mbarrier.wait(shared.keys_empty.index(slot(count, config)), ((count // config.SLOTS) & 1) ^ 1)


@gluon.jit
def give_back_keys(shared, count, config):
    """K has been read, in the `count`-th filling. Every consumer says so once in each filling, be there a K or not."""
    if config.KEYS_FIRST:
        mbarrier.arrive(shared.keys_empty.index(slot(count, config)), count=1)


@gluon.jit
def query_tile(i, config, W: gl.constexpr):
    """Where Q of consumer W lies for the i-th tile."""
    return (i & (config.QUERY_TILES - 1)) * config.WARPGROUPS + W


@gluon.jit
def query_phase(i, config):
    return (i // config.QUERY_TILES) & 1


@gluon.jit
def allocate(call, config):
    """Shared memory and barriers, ready."""
    N: gl.constexpr = config.WARPGROUPS
    TILES: gl.constexpr = N * config.QUERY_TILES
    SLOTS: gl.constexpr = config.SLOTS
    KEYS: gl.constexpr = config.BLOCK_N
    D: gl.constexpr = config.D_MAIN
    TAIL: gl.constexpr = config.D_TAIL
    D_V: gl.constexpr = layouts.width(config.D_V)
    L: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(call.q_tiles.dtype, [TILES] + layouts.query_box(config.HEADS, D), call.q_tiles.layout)
    q_tail = q
    if TAIL > 0:
        TAIL_BOX: gl.constexpr = [TILES] + layouts.query_box(config.HEADS, TAIL)
        q_tail = gl.allocate_shared_memory(call.q_tiles.dtype, TAIL_BOX, call.q_tail.layout)
    out = q  # not used: splits are stored from the registers
    if not config.SPLIT:
        OUT: gl.constexpr = [N] + layouts.query_box(config.HEADS, layouts.out_width(config.D, config.D_V))
        out = gl.allocate_shared_memory(call.q_tiles.dtype, OUT, call.out_tiles.layout)
    k = gl.allocate_shared_memory(call.q_tiles.dtype, [SLOTS, 1, 1, KEYS, D], call.k_tiles.layout)
    k_tail = k
    if TAIL > 0:
        k_tail = gl.allocate_shared_memory(call.q_tiles.dtype, [SLOTS, 1, 1, KEYS, TAIL], call.k_tail.layout)
    v = gl.allocate_shared_memory(call.q_tiles.dtype, [SLOTS, 1, 1, KEYS, D_V], call.v_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], L)
    q_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], L)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], L)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], L)
    keys_empty = empty
    if config.KEYS_FIRST:
        keys_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], L)
    for w in gl.static_range(TILES):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=N)
        if config.KEYS_FIRST:
            mbarrier.init(keys_empty.index(i), count=N)
    fence_async_shared()
    flags = gl.allocate_shared_memory(gl.int32, [N, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Shared(q, q_tail, out, k, k_tail, v, q_full, q_empty, full, empty, keys_empty, flags)
