"""The producer warp: Q, K and V by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import bounds, copies, layouts, ring


@gluon.jit
def _produce_queries(shared, call, span, i, config, FRESH: gl.constexpr, W: gl.constexpr):
    """Of consumer W."""
    place = ring.query_tile(i, config, W)
    full = shared.q_full.index(place)
    if not FRESH:
        mbarrier.wait(shared.q_empty.index(place), ring.query_phase(i, config) ^ 1)
    mbarrier.expect(full, 64 * (config.D_MAIN + config.D_TAIL) * 2)
    row = span.q_row + bounds.own_row(span, config, W)
    q_at = (span.slab, span.head, row)
    if config.HEADS > 1:
        q_at = (span.slab, span.head // call.group, 0, row)
    copies.load(call.q_tiles, q_at + (0,), full, shared.q.index(place))
    if config.D_TAIL > 0:
        copies.load(call.q_tail, q_at + (config.D_MAIN,), full, shared.q_tail.index(place))


@gluon.jit
def _load_keys(shared, call, span, block, slot, full, config):
    k_at = (span.slab, span.head // call.group, span.k_row + block * config.BLOCK_N)
    copies.load(call.k_tiles, k_at + (0,), full, shared.k.index(slot))
    if config.D_TAIL > 0:
        copies.load(call.k_tail, k_at + (config.D_MAIN,), full, shared.k_tail.index(slot))


@gluon.jit
def produce_first(shared, call, span, i, count, config, FRESH: gl.constexpr):
    """Q of the i-th tile and K of its first block, the `count`-th filling of the ring. FRESH: the first of all. What
    consumer 0 needs comes first."""
    _produce_queries(shared, call, span, i, config, FRESH, 0)
    first, stop = bounds.key_blocks(span, config)
    if not FRESH:
        ring.wait_keys_empty(shared, count, config)
    slot = ring.slot(count, config)
    full = shared.full.index(slot)
    mbarrier.expect(full, config.BLOCK_N * (config.D_MAIN + config.D_TAIL) * 2)
    _load_keys(shared, call, span, bounds.block(0, first, stop, config), slot, full, config)
    for w in gl.static_range(1, config.WARPGROUPS):
        _produce_queries(shared, call, span, i, config, FRESH, w)


@gluon.jit
def produce(shared, call, config):
    """All tiles of this CTA, but for what the entry asked for."""
    K_BYTES: gl.constexpr = config.BLOCK_N * (config.D_MAIN + config.D_TAIL) * 2
    V_BYTES: gl.constexpr = config.BLOCK_N * layouts.width(config.D_V) * 2
    count = 0
    for i in range(call.rounds):
        span = bounds.tile(i, call, config)
        if span.head >= 0:
            if i > 0:
                produce_first(shared, call, span, i, count, config, False)
            count += 1
            first, stop = bounds.key_blocks(span, config)
            # The last slot of a tile has V only.
            for visit in range(1, stop - first + 1):
                slot = ring.slot(count, config)
                full = shared.full.index(slot)
                ring.wait_keys_empty(shared, count, config)
                if visit == stop - first:
                    mbarrier.expect(full, V_BYTES)
                else:
                    mbarrier.expect(full, K_BYTES + V_BYTES)
                    _load_keys(shared, call, span, bounds.block(visit, first, stop, config), slot, full, config)
                if config.KEYS_FIRST:
                    ring.wait_empty(shared, count, config)
                v_row = span.k_row + bounds.block(visit - 1, first, stop, config) * config.BLOCK_N
                copies.load(call.v_tiles, [span.slab, span.head // call.group, v_row, 0], full, shared.v.index(slot))
                count += 1
