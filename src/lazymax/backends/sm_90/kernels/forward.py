"""The forward for Hopper, in Gluon: products of warpgroups, TMA, and a role for each warpgroup.

A persistent CTA is WARPGROUPS consumers with 64 query rows each (see `bounds.py`) and one producer warp. The producer
streams K and V by TMA through a ring whose slots hold K of block j and V of block j - 1 (in the order of visits), so
that a block costs one barrier in each direction (two back, where K is given back first). A consumer issues the product
of Q with K of block j and of P with V of block j - 1 together, then runs the softmax of j while the second is on the
tensor cores; P stays in registers.

The maths is that of `kernels/softmax.py`; what is different is said where it is. Cycles: docs/notes/sm_90.md.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import assembly, bounds, guarded, layouts, producer, ring, softmax, store


class Config(NamedTuple):
    """What one build is specialised for; every field a `gl.constexpr`."""

    BLOCK_N: Any  # keys of a block
    WARPGROUPS: Any  # consumers, 64 rows each
    SLOTS: Any  # of the ring, a power of two: an index by division costs registers
    D: Any  # of q and k
    D_MAIN: Any  # columns of the first tile of Q and K
    D_TAIL: Any  # of a second one behind it, see `kernels.launch.pieces`; 0: there is none
    D_V: Any
    HAS_FIRST: Any  # the band has a left bound
    HAS_LAST: Any  # the band has a right bound
    RAGGED: Any  # every batch element or packed sequence has its own lengths
    PACKED: Any
    BOTTOM_RIGHT: Any  # the band's alignment, where ragged
    HEADS: Any  # heads in a tile: 1, or a power of two that holds a group; not if ragged
    SPLIT: Any  # the keys of a tile are split, see `bounds.py`; not if ragged
    NEGATE: Any  # the scale is negative: scores change sign
    SOFTCAP: Any
    SINKS: Any
    STORE_LSE: Any
    ASCENDING: Any  # key blocks from the first to the last; only under a right bound, and without SKIP
    KEYS_FIRST: Any  # the K of a slot is given back before the V
    TURNS: Any  # consumers take turns in issuing their products
    BY_SUM: Any  # pivots are raised by the sums, not by the maxima, see softmax.py
    SKIP: Any  # a consumer leaves out the blocks that none of its rows sees
    QUERY_TILES: Any  # of each consumer in shared memory, a power of two
    QUERY_REGISTERS: Any  # Q in registers instead of shared memory
    REGISTERS: Any  # of a thread of a consumer; the first gets what the others leave


class Modifiers(NamedTuple):
    """Arguments of features; those that a build lacks are not read."""

    sinks: Any  # (Hq,) or (B, Hq), one logit per head
    sinks_batch_stride: Any
    softcap: Any  # natural units
    cap_factor: Any  # 2 * log2(e) * |scale| / softcap


class Call(NamedTuple):
    """The arguments of `attention_forward`, see there."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    lse_rows: Any
    q_tiles: Any
    k_tiles: Any
    v_tiles: Any
    out_tiles: Any
    q_tail: Any
    k_tail: Any
    schedule: Any
    rounds: Any
    first_code: Any
    scale_log2: Any
    threshold: Any
    q_len: Any
    kv_len: Any
    first_offset: Any
    last_offset: Any
    q_heads: Any
    group: Any
    modifiers: Any


@gluon.jit
def _queries(shared, place, config):
    """Left operands of the scores: Q and its tail, which is not used where there is none."""
    q = shared.q.index(place).reshape([64, config.D_MAIN])
    q_tail = q
    if config.D_TAIL > 0:
        q_tail = shared.q_tail.index(place).reshape([64, config.D_TAIL])
    if config.QUERY_REGISTERS:
        q = q.load(layouts.left_operand(config.BLOCK_N))
        q_tail = q_tail.load(layouts.left_operand(config.BLOCK_N))
    return q, q_tail


@gluon.jit
def _issue_scores(q, shared, slot, config):
    """Q K^T, under way."""
    k = shared.k.index(slot).reshape([config.BLOCK_N, config.D_MAIN]).permute((1, 0))
    zeros = gl.zeros([64, config.BLOCK_N], gl.float32, layouts.accumulator(config.BLOCK_N))
    s = warpgroup_mma(q[0], k, zeros, use_acc=False, is_async=True)
    if config.D_TAIL > 0:
        k_tail = shared.k_tail.index(slot).reshape([config.BLOCK_N, config.D_TAIL]).permute((1, 0))
        s = warpgroup_mma(q[1], k_tail, s, is_async=True)
    return s


@gluon.jit
def _issue_values(p, acc, shared, slot, config):
    """acc + P V, under way."""
    v = shared.v.index(slot).reshape([config.BLOCK_N, layouts.width(config.D_V)])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _settle(s, call, config):
    """Raw scores of the kernel's own positive scale, or capped ones."""
    if config.NEGATE:
        s = -s
    if config.SOFTCAP:
        s = softmax.capped(s, call.modifiers)
    return s


@gluon.jit
def _narrow(p, dtype: gl.constexpr, config):
    """P as the left operand of its product; moves no data."""
    return gl.convert_layout(p.to(dtype), layouts.left_operand(layouts.width(config.D_V)))


@gluon.jit
def _skip(shared, count, i, call, config, W: gl.constexpr):
    """Give back the blocks that this consumer leaves out: count."""
    _, _, skipped, _, _, _, _ = bounds.visits(i, call, config, W)
    for _ in range(skipped):
        ring.wait_full(shared, count, config)
        if config.TURNS:  # of the visit after this one
            assembly.turn(True, W)
            assembly.turn(False, (W + 1) % config.WARPGROUPS)
        ring.give_back_keys(shared, count, config)
        mbarrier.arrive(shared.empty.index(ring.slot(count, config)), count=1)
        count += 1
    return count


@gluon.jit
def _open(q, shared, count, i, call, config, W: gl.constexpr):
    """The first block of a tile, with nothing to overlap: acc (still 0), p, m, l, count."""
    if config.SKIP:
        count = _skip(shared, count, i, call, config, W)
    ring.wait_full(shared, count, config)
    s = warpgroup_mma_wait(0, [_issue_scores(q, shared, ring.slot(count, config), config)])
    if config.QUERY_REGISTERS:
        # Not sooner: without this fence, and a product that had to have Q, TMA overtook the loads of it. A tile of one
        # block with another tile behind it was wrong in 3 of 1,000 calls on an H200.
        fence_async_shared()
        mbarrier.arrive(shared.q_empty.index(ring.query_tile(i, config, W)), count=1)
    ring.give_back_keys(shared, count, config)
    mbarrier.arrive(shared.empty.index(ring.slot(count, config)), count=1)
    span, _, skipped, begin, end, row, key = bounds.visits(i, call, config, W)
    s = _settle(s, call, config)
    key = bounds.key_of(skipped, key, config)
    if config.ASCENDING:
        cut = (begin > 0) | (end <= 0)
    else:
        cut = config.HAS_FIRST or config.HAS_LAST or key + config.BLOCK_N > span.kv_len
    if cut:
        s = softmax.hide(s, row, key, span, config)
    m = softmax.opened(s, gl.SliceLayout(1, layouts.accumulator(config.BLOCK_N)), call.scale_log2)
    p, l = softmax.probabilities(s, m, call.scale_log2)
    p = _narrow(p, shared.v.dtype, config)
    WIDTH: gl.constexpr = layouts.width(config.D_V)
    acc = gl.zeros([64, WIDTH], gl.float32, layouts.accumulator(WIDTH))
    ring.wait_full(shared, count + 1, config)
    return acc, p, m, l, count + 1


@gluon.jit
def _visit(state, q, shared, i, call, config, W: gl.constexpr):
    """The blocks after the first. In each slot K of this one, V of the one before; the softmax in between.

    One loop with a branch around the mask: P goes from one loop to the next as single 16-bit values, 64 instructions a
    block to take apart and put together again (451 become 515 at head dim 128).
    """
    acc, p, m, l, count = state
    span, visits, skipped, begin, end, row, key = bounds.visits(i, call, config, W)
    factor = gl.full_like(m, 1.0)  # of what was summed before
    for visit in range(skipped + 1, visits):
        slot = ring.slot(count, config)
        if config.BY_SUM:
            m = softmax.lifted(m, factor)
        if config.TURNS:
            assembly.turn(True, W)
        s_issued = _issue_scores(q, shared, slot, config)
        acc_issued = _issue_values(p, acc, shared, slot, config)
        if config.TURNS:
            assembly.turn(False, (W + 1) % config.WARPGROUPS)
        s = warpgroup_mma_wait(1, [s_issued])
        ring.give_back_keys(shared, count, config)
        s = _settle(s, call, config)
        alpha = factor
        if config.HAS_FIRST or config.HAS_LAST:
            if (visit < begin) | (visit >= end):
                s = softmax.hide(s, row, bounds.key_of(visit, key, config), span, config)
                # A row that saw no key yet has no sum; from the first key on, only a left bound hides it that long.
                if config.BY_SUM and (config.HAS_FIRST or not config.ASCENDING):
                    m, more = softmax.raised(s, m, call)
                    alpha *= more
        if not config.BY_SUM:
            m, alpha = softmax.raised(s, m, call)
        p_wide, sums = softmax.probabilities(s, m, call.scale_log2)
        l = softmax.add(l, alpha, sums)
        if config.BY_SUM:
            # At this place its shuffles keep ptxas from moving the exponentials behind the wait for the product.
            factor = softmax.outgrown(m, l)
        # To wait for the next slot here keeps ptxas from hoisting the wait for the product above the exponentials. P
        # goes through that wait so that it is not written while the product reads the last one: ptxas would then
        # serialise every product of the kernel (C7513).
        ring.wait_full(shared, count + 1, config)
        acc, p_wide = warpgroup_mma_wait(0, [acc_issued, p_wide])
        mbarrier.arrive(shared.empty.index(slot), count=1)
        p = _narrow(p_wide, shared.v.dtype, config)
        acc = assembly.rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout)))
        count += 1
    return acc, p, m, l, count


@gluon.jit
def _close(state, shared, i, call, config, W: gl.constexpr):
    """The product of the last block, then O and LSE of the 64 rows. Where they lie is read once more, so that the loops
    before need not hold it."""
    acc, p, m, l, count = state
    span = bounds.tile(i, call, config)
    row = bounds.own_row(span, config, W)
    slot = ring.slot(count, config)
    acc_issued = _issue_values(p, acc, shared, slot, config)
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    L: gl.constexpr = m.type.layout
    query, head, inside = bounds.rows(span, row, L, call, config)
    factor, lse = softmax.finish(m, l, 1.0, call, span, config)
    tma.store_wait(0)
    acc = warpgroup_mma_wait(0, [acc_issued])
    ring.give_back_keys(shared, count, config)
    mbarrier.arrive(shared.empty.index(slot), count=1)  # also the barrier between the wait and the next store
    if softmax.suspect(m, l, acc, inside, bounds.has_keys(span, query, config), shared.flags.index(W)) > 0:
        guarded.rewrite(i, call, config, W)
    else:
        if config.STORE_LSE:
            gl.store(softmax.lse_row(call, span) + head * call.lse_rows + query, lse, mask=inside)
        o = (acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None])
        o = o.to(call.out.ptr.dtype.element_ty)
        store.store(o, row, span, shared.out.index(W), call, config)
    return count + 1


@gluon.jit
def _consume(shared, call, config, W: gl.constexpr):
    """Consumer W: 64 rows of every tile of this CTA."""
    count = 0
    if config.TURNS and W == config.WARPGROUPS - 1:
        assembly.turn(False, 0)
    for i in range(call.rounds):
        if bounds.tile(i, call, config).head >= 0:
            place = ring.query_tile(i, config, W)
            mbarrier.wait(shared.q_full.index(place), ring.query_phase(i, config))
            # By itself, or ptxas keeps the descriptors of Q in some 20 vector registers.
            q = _queries(shared, assembly.here(place), config)
            state = _open(q, shared, count, i, call, config, W)
            state = _visit(state, q, shared, i, call, config, W)
            if not config.QUERY_REGISTERS:
                mbarrier.arrive(shared.q_empty.index(ring.query_tile(i, config, W)), count=1)
            count = _close(state, shared, i, call, config, W)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["lse_rows", "rounds", "first_lap", "q_len", "kv_len", "first_offset", "last_offset",
                              "q_heads", "group"])
def attention_forward(q, k, v, out, lse, lse_rows, q_tiles, k_tiles, v_tiles, out_tiles, q_tail, k_tail, schedule,
                      rounds, first_lap, scale_log2, threshold, q_len, kv_len, first_offset, last_offset, q_heads,
                      group, modifiers, config):
    """out = softmax(scale * q @ k^T inside the band) @ v. Grid: (CTAs,), 4 warps and those of the other roles.

    q, out (B, Hq, Sq, D), k, v (B, Hkv, Sk, D): `memory.View`s, fp16 or bf16, used where TMA cannot be, and descriptors
    with blocks of 64 rows (q, out; see `layouts.query_box`) or BLOCK_N; q_tail, k_tail: of q and k, for the columns
    from D_MAIN on, if there is a D_TAIL. v and out have D_V columns. lse: (B, Hq, lse_rows) fp32, contiguous. Under
    SPLIT out is fp32, without a descriptor, and B of out and lse is splits * B of q.
    schedule: (rounds, CTAs) tiles, see `launch.schedule`, or records, see `launch.split_schedule` and, for ragged
    lengths, `schedule.py`. first_lap: see `launch.first_lap`.
    scale_log2: |scale| * log2(e), not 0; log2(e) under a softcap. threshold: of the lazy rescale, log2 units. q_len,
    kv_len: unless ragged. Query i sees keys i + first_offset to i + last_offset, as far as the band has bounds. group:
    query heads per key head.
    """
    first_code = bounds.first_code(schedule, first_lap, q_len, group, config)
    call = Call(q, k, v, out, lse, lse_rows, q_tiles, k_tiles, v_tiles, out_tiles, q_tail, k_tail, schedule, rounds,
                first_code, scale_log2, threshold, q_len, kv_len, first_offset, last_offset, q_heads, group, modifiers)
    # The first loads before the roles part: half a microsecond.
    span = bounds.tile(0, call, config)
    shared = ring.allocate(call, config)
    if span.head >= 0:
        producer.produce_first(shared, call, span, 0, 0, config, True)
    R: gl.constexpr = config.REGISTERS
    if config.WARPGROUPS == 2:
        gl.warp_specialize([(_consume, (shared, call, config, 0)), (_consume, (shared, call, config, 1)),
                            (producer.produce, (shared, call, config))], [4, 1], [R, 24])
    else:
        gl.warp_specialize([(_consume, (shared, call, config, 0)), (_consume, (shared, call, config, 1)),
                            (_consume, (shared, call, config, 2)), (producer.produce, (shared, call, config))],
                           [4, 4, 1], [R, R, 24])
