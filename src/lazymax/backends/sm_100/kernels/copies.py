"""The roles of two single warps: TMA loads of Q, K and V, and TMA stores of O. TMA fills rows past the end with 0 and
does not store them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tma

from ...sm_90.kernels.copies import load, store
from . import bounds, layouts, rings, schedule


@gluon.jit
def _load_queries(Q: gl.constexpr, phase, span, memory, bars, call, config):
    full = bars.q_full.index(Q)
    mbarrier.wait(bars.q_empty.index(Q), phase)
    mbarrier.expect(full, 128 * config.D * 2)
    load(call.q_tiles, [span.slab, span.head, span.first_row + Q * config.ROWS, 0], full, memory.q.index(Q))


@gluon.jit
def _load_block(tiles, block, slot, phase, span, memory, bars, call, config):
    """Of K or V; the next place in the ring."""
    full = bars.full.index(slot)
    mbarrier.wait(bars.empty.index(slot), phase)
    mbarrier.expect(full, bounds.KEYS * config.D * 2 * 128 // config.ROWS)  # of this CTA
    load(tiles, [span.slab, span.head // call.group, block * bounds.KEYS, 0], full,
         layouts.slot(memory.kv, slot, tiles, config))
    return rings.advance(slot, phase, config.SLOTS)


@gluon.jit
def loads(memory, bars, call, config):
    """Q, then K and V in the order in which `products` takes them: with three score buffers K runs a block ahead."""
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    count = gl.to_tensor(0)
    t = schedule.first()
    while t < bounds.tiles(call, config):
        schedule.draw(count, memory, bars, call, config)
        span = bounds.tile(t, call, config)
        first, stop = bounds.key_blocks(span, config)
        q_phase = (count & 1) ^ 1
        _load_queries(0, q_phase, span, memory, bars, call, config)
        slot, phase = _load_block(call.k_tiles, stop - 1, slot, phase, span, memory, bars, call, config)
        _load_queries(1, q_phase, span, memory, bars, call, config)
        for visit in range(stop - first):
            block = stop - 1 - visit
            if config.S_BUFFERS == 3:
                if visit + 1 < stop - first:
                    slot, phase = _load_block(call.k_tiles, block - 1, slot, phase, span, memory, bars, call, config)
            slot, phase = _load_block(call.v_tiles, block, slot, phase, span, memory, bars, call, config)
            if config.S_BUFFERS == 2:
                if visit + 1 < stop - first:
                    slot, phase = _load_block(call.k_tiles, block - 1, slot, phase, span, memory, bars, call, config)
        t = schedule.following(count, memory, bars, call, config)
        count += 1


@gluon.jit
def _store_queries(Q: gl.constexpr, phase, span, memory, bars, call, config):
    """Unless the correction stored these rows itself, see `correction.py`."""
    mbarrier.wait(bars.out_full.index(Q), phase)
    rewritten = gl.max(memory.flags.index(Q).load(layouts.one(config.ROWS, gl.num_warps())), 0)
    if rewritten == 0:
        store(call.out_tiles, [span.slab, span.head, span.first_row + Q * config.ROWS, 0], memory.out.index(Q))


@gluon.jit
def stores(memory, bars, call, config):
    count = gl.to_tensor(0)
    t = schedule.first()
    while t < bounds.tiles(call, config):
        span = bounds.tile(t, call, config)
        _store_queries(0, count & 1, span, memory, bars, call, config)
        _store_queries(1, count & 1, span, memory, bars, call, config)
        tma.store_wait(0)
        mbarrier.arrive(bars.out_empty.index(0), count=1)
        mbarrier.arrive(bars.out_empty.index(1), count=1)
        t = schedule.following(count, memory, bars, call, config)
        count += 1
