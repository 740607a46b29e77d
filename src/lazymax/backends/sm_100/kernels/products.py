"""The role that issues the products, one warp. tcgen05 executes them in the order of issue.

With two score buffers: P0 V(i), Q0 K(i + 1), P1 V(i), Q1 K(i + 1): each Q tile's softmax runs under the two products of
the other. With three (head dim 64) Q K runs three scores ahead of P V instead of two, so that the next scores of a Q
tile are there when its softmax asks for them; K(i + 1) is then used by Q tile 0 one block earlier than by 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tcgen05_commit, tcgen05_mma

from . import bounds, layouts, rings, schedule


@gluon.jit
def _scores(Q: gl.constexpr, slot, buffer, memory, bars, config):
    """S = Q K^T."""
    q = memory.q.index(Q).reshape([config.ROWS, config.D])
    k = memory.kv.index(slot).reshape([128, config.D])
    tcgen05_mma(q, k.permute((1, 0)), rings.of_scores(memory.s, Q, buffer, config), use_acc=False)
    tcgen05_commit(rings.of_scores(bars.s_full, Q, buffer, config))


@gluon.jit
def _values(Q: gl.constexpr, slot, buffer, phase, more, memory, bars, call, config):
    """O += P V, or O = P V. The first EARLY columns of P may start before the rest is there. The contracted size of a
    product must be a power of two, so 96 are two."""
    v = layouts.slot(memory.kv, slot, call.v_tiles, config).reshape([128, config.D])
    p = layouts.probabilities(rings.of_scores(memory.s, Q, buffer, config), call.out.ptr.dtype.element_ty)
    o = memory.o.index(Q)
    mbarrier.wait(rings.of_scores(bars.p_full, Q, buffer, config), phase)
    if config.EARLY == 128:
        tcgen05_mma(p, v, o, use_acc=more)
    else:
        tcgen05_mma(p.slice(0, 64), v.slice(0, 64, dim=0), o, use_acc=more)
        if config.EARLY == 96:
            tcgen05_mma(p.slice(64, 32), v.slice(64, 32, dim=0), o)
        REST: gl.constexpr = 128 - config.EARLY
        mbarrier.wait(rings.of_scores(bars.p_rest, Q, buffer, config), phase)
        tcgen05_mma(p.slice(config.EARLY, REST), v.slice(config.EARLY, REST, dim=0), o)


@gluon.jit
def _visits_in_two(visits, slot, phase, p_phase, memory, bars, call, config):
    more = False
    for _ in range(visits - 1):
        v_slot = slot
        mbarrier.wait(bars.full.index(v_slot), phase)
        _values(0, v_slot, 0, p_phase, more, memory, bars, call, config)
        slot, phase = rings.advance(slot, phase, config.SLOTS)
        mbarrier.wait(bars.full.index(slot), phase)
        _scores(0, slot, 0, memory, bars, config)
        _values(1, v_slot, 1, p_phase, more, memory, bars, call, config)
        tcgen05_commit(bars.empty.index(v_slot))
        _scores(1, slot, 1, memory, bars, config)
        tcgen05_commit(bars.empty.index(slot))
        slot, phase = rings.advance(slot, phase, config.SLOTS)
        more = True
        p_phase = p_phase ^ 1
    tcgen05_commit(bars.q_empty.index(0))
    tcgen05_commit(bars.q_empty.index(1))
    mbarrier.wait(bars.full.index(slot), phase)
    _values(0, slot, 0, p_phase, more, memory, bars, call, config)
    tcgen05_commit(bars.o_full.index(0))
    _values(1, slot, 1, p_phase, more, memory, bars, call, config)
    tcgen05_commit(bars.o_full.index(1))
    tcgen05_commit(bars.empty.index(slot))
    slot, phase = rings.advance(slot, phase, config.SLOTS)
    return slot, phase, p_phase ^ 1


@gluon.jit
def _following(buffer):
    return gl.where(buffer == 2, 0, buffer + 1)


@gluon.jit
def _visits_in_three(visits, slot, phase, s_buffer, p_buffer, p_phase, memory, bars, call, config):
    k_slot = slot
    if visits > 1:
        mbarrier.wait(bars.full.index(slot), phase)
        _scores(0, slot, s_buffer, memory, bars, config)
        s_buffer = _following(s_buffer)
        slot, phase = rings.advance(slot, phase, config.SLOTS)
    more = False
    for visit in range(visits):
        v_slot = slot
        mbarrier.wait(bars.full.index(v_slot), phase)
        slot, phase = rings.advance(slot, phase, config.SLOTS)
        _values(0, v_slot, p_buffer, p_phase, more, memory, bars, call, config)
        tcgen05_commit(bars.o_full.index(0))
        p_buffer, p_phase = rings.advance(p_buffer, p_phase, 3)
        if visit + 1 < visits:
            _scores(1, k_slot, s_buffer, memory, bars, config)
            s_buffer = _following(s_buffer)
            tcgen05_commit(bars.empty.index(k_slot))
        if visit == gl.maximum(visits - 2, 0):
            tcgen05_commit(bars.q_empty.index(0))
            tcgen05_commit(bars.q_empty.index(1))
        _values(1, v_slot, p_buffer, p_phase, more, memory, bars, call, config)
        tcgen05_commit(bars.o_full.index(1))
        tcgen05_commit(bars.empty.index(v_slot))
        p_buffer, p_phase = rings.advance(p_buffer, p_phase, 3)
        if visit + 2 < visits:
            k_slot = slot
            mbarrier.wait(bars.full.index(slot), phase)
            _scores(0, slot, s_buffer, memory, bars, config)
            s_buffer = _following(s_buffer)
            slot, phase = rings.advance(slot, phase, config.SLOTS)
        more = True
    return slot, phase, s_buffer, p_buffer, p_phase


@gluon.jit
def products(memory, bars, call, config):
    slot = gl.to_tensor(0)  # of the ring of K and V
    phase = gl.to_tensor(0)
    s_buffer = gl.to_tensor(0)  # of the next scores; with two buffers a Q tile has its own
    p_buffer = gl.to_tensor(0)  # of the next P V
    p_phase = gl.to_tensor(0)
    count = gl.to_tensor(0)
    t = schedule.first()
    while t < bounds.tiles(call, config):
        first, stop = bounds.key_blocks(bounds.tile(t, call, config), config)
        mbarrier.wait(bars.q_full.index(0), count & 1)
        mbarrier.wait(bars.full.index(slot), phase)
        _scores(0, slot, s_buffer, memory, bars, config)
        s_buffer = _following(s_buffer)
        mbarrier.wait(bars.q_full.index(1), count & 1)
        _scores(1, slot, s_buffer, memory, bars, config)
        s_buffer = _following(s_buffer)
        tcgen05_commit(bars.empty.index(slot))
        slot, phase = rings.advance(slot, phase, config.SLOTS)
        if config.S_BUFFERS == 2:
            slot, phase, p_phase = _visits_in_two(stop - first, slot, phase, p_phase, memory, bars, call, config)
        else:
            slot, phase, s_buffer, p_buffer, p_phase = _visits_in_three(
                stop - first, slot, phase, s_buffer, p_buffer, p_phase, memory, bars, call, config)
        t = schedule.following(count, memory, bars, call, config)
        count += 1
