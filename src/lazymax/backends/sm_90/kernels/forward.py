"""The forward for Hopper, in Gluon: products of warpgroups, TMA, and a role for each warpgroup.

A persistent CTA is WARPGROUPS consumers with 64 query rows each and one producer warp. The producer streams K and V by
TMA through a ring whose slots hold K of block j and V of block j - 1 (in the order of visits), so that a block costs
one barrier in each direction. A consumer issues the product of Q with K of block j and of P with V of block j - 1
together, then runs the softmax of j while the second is on the tensor cores; P stays in registers.

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

from ....kernels.softmax import NEVER
from . import assembly, bounds, copies, guarded, layouts, softmax


class Config(NamedTuple):
    """What one build is specialised for; every field a `gl.constexpr`."""

    BLOCK_N: Any  # keys of a block
    WARPGROUPS: Any  # consumers, 64 rows each
    SLOTS: Any  # of the ring, a power of two: an index by division costs registers
    D: Any
    HAS_FIRST: Any  # the band has a left bound
    HAS_LAST: Any  # the band has a right bound
    NEGATE: Any  # the scale is negative: scores change sign
    STORE_LSE: Any
    TURNS: Any  # consumers take turns in issuing their products
    QUERY_REGISTERS: Any  # Q in registers instead of shared memory
    REGISTERS: Any  # of a thread of a consumer; the first gets what the others leave


class Call(NamedTuple):
    """The arguments of `attention_forward`, see there."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    q_tiles: Any
    k_tiles: Any
    v_tiles: Any
    out_tiles: Any
    schedule: Any
    rounds: Any
    scale_log2: Any
    threshold: Any
    q_len: Any
    kv_len: Any
    first_offset: Any
    last_offset: Any
    q_heads: Any
    group: Any


class Shared(NamedTuple):
    """Shared memory and its barriers."""

    q: Any  # a tile for each consumer
    out: Any
    k: Any  # a tile for each slot
    v: Any
    q_full: Any
    q_empty: Any
    full: Any
    empty: Any
    flags: Any  # see `softmax.suspect`


@gluon.jit
def _slot(count, config):
    return count & (config.SLOTS - 1)


@gluon.jit
def _wait_full(shared, count, config):
    """Until the `count`-th filling of the ring has landed."""
    mbarrier.wait(shared.full.index(_slot(count, config)), (count // config.SLOTS) & 1)


@gluon.jit
def _produce_queries(shared, call, batch, head, first_row, i, config):
    for w in gl.static_range(config.WARPGROUPS):
        mbarrier.wait(shared.q_empty.index(w), (i & 1) ^ 1)
        mbarrier.expect(shared.q_full.index(w), 64 * config.D * 2)
        copies.load(call.q_tiles, [batch, head, first_row + w * 64, 0], shared.q_full.index(w),
                                        shared.q.index(w))


@gluon.jit
def _produce(shared, call, config):
    """The producer warp: Q, K and V of all tiles of this CTA."""
    BYTES: gl.constexpr = config.BLOCK_N * config.D * 2
    count = 0
    for i in range(call.rounds):
        row_block, head_index = bounds.tile(i, call)
        if head_index >= 0:
            batch = head_index // call.q_heads
            head = head_index % call.q_heads
            kv_head = head // call.group
            first_row = row_block * (64 * config.WARPGROUPS)
            first, stop = bounds.key_blocks(first_row, call, config)
            _produce_queries(shared, call, batch, head, first_row, i, config)
            # The first slot of a tile has K only, the last V only.
            for visit in range(stop - first + 1):
                row = (stop - 1 - visit) * config.BLOCK_N
                slot = _slot(count, config)
                full = shared.full.index(slot)
                mbarrier.wait(shared.empty.index(slot), ((count // config.SLOTS) & 1) ^ 1)
                if visit == 0:
                    mbarrier.expect(full, BYTES)
                    copies.load(call.k_tiles, [batch, kv_head, row, 0], full, shared.k.index(slot))
                elif visit == stop - first:
                    mbarrier.expect(full, BYTES)
                    copies.load(call.v_tiles, [batch, kv_head, row + config.BLOCK_N, 0], full,
                                                    shared.v.index(slot))
                else:
                    mbarrier.expect(full, 2 * BYTES)
                    copies.load(call.k_tiles, [batch, kv_head, row, 0], full, shared.k.index(slot))
                    copies.load(call.v_tiles, [batch, kv_head, row + config.BLOCK_N, 0], full,
                                                    shared.v.index(slot))
                count += 1


@gluon.jit
def _issue_scores(q, shared, slot, config):
    """Q K^T, under way."""
    k = shared.k.index(slot).reshape([config.BLOCK_N, config.D]).permute((1, 0))
    zeros = gl.zeros([64, config.BLOCK_N], gl.float32, layouts.accumulator(config.BLOCK_N))
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_values(p, acc, shared, slot, config):
    """acc + P V, under way."""
    return warpgroup_mma(p, shared.v.index(slot).reshape([config.BLOCK_N, config.D]), acc, is_async=True)


@gluon.jit
def _settle(s, config):
    """Raw scores of the kernel's own positive scale."""
    if config.NEGATE:
        s = -s
    return s


@gluon.jit
def _narrow(p, q, config):
    """P as the left operand of its product; moves no data."""
    return gl.convert_layout(p.to(q.dtype), layouts.left_operand(config.D))


@gluon.jit
def _open(q, shared, count, i, call, config, W: gl.constexpr):
    """The first block of a tile, with nothing to overlap: acc (still 0), p, m, l, count."""
    _wait_full(shared, count, config)
    s = warpgroup_mma_wait(0, [_issue_scores(q, shared, _slot(count, config), config)])
    mbarrier.arrive(shared.empty.index(_slot(count, config)), count=1)
    _, _, _, row, key = bounds.visits(i, call, config, W)
    s = softmax.hide(_settle(s, config), row, key, call, config)
    ROWS: gl.constexpr = gl.SliceLayout(1, layouts.accumulator(config.BLOCK_N))
    m = gl.maximum(softmax.row_maximum(s, ROWS), NEVER)
    p, l = softmax.probabilities(s, m, call.scale_log2)
    p = _narrow(p, q, config)
    acc = gl.zeros([64, config.D], gl.float32, layouts.accumulator(config.D))
    _wait_full(shared, count + 1, config)
    return acc, p, m, l, count + 1


@gluon.jit
def _visit(state, q, shared, i, call, config, W: gl.constexpr):
    """The blocks after the first. In each slot K of this one, V of the one before; the softmax in between.

    One loop with a branch around the mask: P goes from one loop to the next as single 16-bit values, 64 instructions a
    block to take apart and put together again (451 become 515 at head dim 128).
    """
    acc, p, m, l, count = state
    visits, begin, end, row, key = bounds.visits(i, call, config, W)
    for visit in range(1, visits):
        slot = _slot(count, config)
        if config.TURNS:
            assembly.turn(True, W)
        s_issued = _issue_scores(q, shared, slot, config)
        acc_issued = _issue_values(p, acc, shared, slot, config)
        if config.TURNS:
            assembly.turn(False, (W + 1) % config.WARPGROUPS)
        s = _settle(warpgroup_mma_wait(1, [s_issued]), config)
        if config.HAS_FIRST or config.HAS_LAST:
            if (visit < begin) | (visit >= end):
                s = softmax.hide(s, row, key - visit * config.BLOCK_N, call, config)
        p_wide, alpha, m, l = softmax.step(s, m, l, call.scale_log2, call.threshold)
        # To wait for the next slot here keeps ptxas from hoisting the wait for the product above the exponentials. P
        # goes through that wait so that it is not written while the product reads the last one: ptxas would then
        # serialise every product of the kernel (C7513).
        _wait_full(shared, count + 1, config)
        acc, p_wide = warpgroup_mma_wait(0, [acc_issued, p_wide])
        mbarrier.arrive(shared.empty.index(slot), count=1)
        p = _narrow(p_wide, q, config)
        acc = assembly.rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout)))
        count += 1
    return acc, p, m, l, count


@gluon.jit
def _close(state, shared, i, call, config, W: gl.constexpr):
    """The product of the last block, then O and LSE of the 64 rows. Where they lie is read once more, so that the loops
    before need not hold it."""
    acc, p, m, l, count = state
    row_block, head_index = bounds.tile(i, call)
    row = row_block * (64 * config.WARPGROUPS) + W * 64
    slot = _slot(count, config)
    acc_issued = _issue_values(p, acc, shared, slot, config)
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    rows = row + gl.arange(0, 64, m.type.layout)
    inside = rows < call.q_len
    inverse = gl.convert_layout(1.0 / gl.where(l == 0.0, 1.0, l), gl.SliceLayout(1, acc.type.layout))
    tma.store_wait(0)
    acc = warpgroup_mma_wait(0, [acc_issued])
    mbarrier.arrive(shared.empty.index(slot), count=1)  # also the barrier between the wait and the next store
    if softmax.suspect(m, l, acc, inside, call.scale_log2, shared.flags.index(W)) > 0:
        guarded.rewrite(row_block, head_index, call, config, W)
    else:
        if config.STORE_LSE:
            place = call.lse + gl.cast(head_index, gl.int64) * call.q_len + rows
            gl.store(place, softmax.lse(m, l, call.scale_log2), mask=inside)
        out = shared.out.index(W)
        out.reshape([64, config.D]).store((acc * inverse[:, None]).to(out.dtype))
        fence_async_shared()
        copies.store(call.out_tiles, [head_index // call.q_heads, head_index % call.q_heads, row, 0],
                                        out)
    return count + 1


@gluon.jit
def _consume(shared, call, config, W: gl.constexpr):
    """Consumer W: 64 rows of every tile of this CTA."""
    queries = shared.q.index(W).reshape([64, config.D])
    count = 0
    if config.TURNS and W == config.WARPGROUPS - 1:
        assembly.turn(False, 0)
    for i in range(call.rounds):
        _, head_index = bounds.tile(i, call)
        if head_index >= 0:
            mbarrier.wait(shared.q_full.index(W), i & 1)
            q = queries
            if config.QUERY_REGISTERS:
                q = queries.load(layouts.left_operand(config.BLOCK_N))
                mbarrier.arrive(shared.q_empty.index(W), count=1)
            state = _open(q, shared, count, i, call, config, W)
            state = _visit(state, q, shared, i, call, config, W)
            if not config.QUERY_REGISTERS:
                mbarrier.arrive(shared.q_empty.index(W), count=1)
            count = _close(state, shared, i, call, config, W)
    tma.store_wait(0)


@gluon.jit
def _allocate(call, config):
    """Shared memory and barriers, ready."""
    N: gl.constexpr = config.WARPGROUPS
    SLOTS: gl.constexpr = config.SLOTS
    KEYS: gl.constexpr = config.BLOCK_N
    D: gl.constexpr = config.D
    L: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(call.q_tiles.dtype, [N, 1, 1, 64, D], call.q_tiles.layout)
    out = gl.allocate_shared_memory(call.q_tiles.dtype, [N, 1, 1, 64, D], call.out_tiles.layout)
    k = gl.allocate_shared_memory(call.q_tiles.dtype, [SLOTS, 1, 1, KEYS, D], call.k_tiles.layout)
    v = gl.allocate_shared_memory(call.q_tiles.dtype, [SLOTS, 1, 1, KEYS, D], call.v_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [N, 1], L)
    q_empty = gl.allocate_shared_memory(gl.int64, [N, 1], L)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], L)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], L)
    for w in gl.static_range(N):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=N)
    fence_async_shared()
    flags = gl.allocate_shared_memory(gl.int32, [N, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Shared(q, out, k, v, q_full, q_empty, full, empty, flags)


@gluon.jit(do_not_specialize=["rounds", "q_len", "kv_len", "first_offset", "last_offset", "q_heads", "group"])
def attention_forward(q, k, v, out, lse, q_tiles, k_tiles, v_tiles, out_tiles, schedule, rounds, scale_log2, threshold,
                      q_len, kv_len, first_offset, last_offset, q_heads, group, config):
    """out = softmax(scale * q @ k^T inside the band) @ v. Grid: (CTAs,), 4 warps and those of the other roles.

    q, out (B, Hq, Sq, D), k, v (B, Hkv, Sk, D): `memory.View`s, fp16 or bf16, used by the cold path only, and
    descriptors with blocks of 64 (q, out) or BLOCK_N rows. lse: (B, Hq, Sq) fp32, contiguous. schedule: (rounds, CTAs)
    tiles, see `launch.schedule`. scale_log2: |scale| * log2(e), not 0. threshold: of the lazy rescale, log2 units.
    Query i sees keys i + first_offset to i + last_offset, as far as the band has bounds. group: query heads per key
    head.
    """
    call = Call(q, k, v, out, lse, q_tiles, k_tiles, v_tiles, out_tiles, schedule, rounds, scale_log2, threshold, q_len,
                kv_len, first_offset, last_offset, q_heads, group)
    shared = _allocate(call, config)
    R: gl.constexpr = config.REGISTERS
    if config.WARPGROUPS == 2:
        gl.warp_specialize([(_consume, (shared, call, config, 0)), (_consume, (shared, call, config, 1)),
                            (_produce, (shared, call, config))], [4, 1], [R, 24])
    else:
        gl.warp_specialize([(_consume, (shared, call, config, 0)), (_consume, (shared, call, config, 1)),
                            (_consume, (shared, call, config, 2)), (_produce, (shared, call, config))],
                           [4, 4, 1], [R, R, 24])
