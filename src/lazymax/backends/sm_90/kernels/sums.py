"""The sums of dQ in memory: fp32, 16 bytes at a time, in the order in which an accumulator lies in registers.

A tile of 64 queries is (columns / 64) squares of 64 x 64. Within one a thread's four numbers (two rows, two columns)
are 16 contiguous bytes and a warp's 512: `red.v4`, where atomics in the order of rows took twice the time of the whole
backward.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from . import assembly, backward_bounds, copies

SQUARE = gl.constexpr(4096)  # numbers of 64 x 64


@gluon.jit
def add(square, to):
    """Add a (64, 64) accumulator to the 4,096 numbers from `to` on. A statement for every four: one of all eight takes
    450 bytes of spills."""
    L: gl.constexpr = square.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    col = gl.arange(0, 64, gl.SliceLayout(0, L))
    places = to + (row // 16 * 128 + row % 8 * 16)[:, None] + (col // 8 * 512 + col % 8 // 2 * 4)[None, :]
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0;", "=r,f,f,f,f,l,l,l,l",
        [square, places.to(gl.int64, bitcast=True)], dtype=gl.int8, is_pure=False, pack=4,
    )  # fmt: skip


class Shared(NamedTuple):
    """Shared memory and barriers of `finish`."""

    cleared: Any  # the sum of the CTA's own head
    added: Any  # all that the CTA's consumers have for it
    square: Any  # of a sum
    square_full: Any
    dq: Any  # 64 rows of it, 8 columns at a time


@gluon.jit
def allocate(call):
    """The barriers ready, but for a fence."""
    L: gl.constexpr = mbarrier.MBarrierLayout()
    square = gl.allocate_shared_memory(gl.float32, [1, 64, 64], call.sum_tiles.layout)
    dq = gl.allocate_shared_memory(call.dq_tiles.dtype, [8, 1, 1, 64, 8], call.dq_tiles.layout)
    cleared = gl.allocate_shared_memory(gl.int64, [1], L)
    added = gl.allocate_shared_memory(gl.int64, [1], L)
    square_full = gl.allocate_shared_memory(gl.int64, [1], L)
    mbarrier.init(cleared, count=1)
    mbarrier.init(added, count=2)
    mbarrier.init(square_full, count=1)
    return Shared(cleared, added, square, square_full, dq)


@gluon.jit
def finish(shared, call, config):
    """The role of a warp: tell the consumers when the sum that they add to is 0 again; then make dQ of a part of an
    earlier head's sum, and clear it for the head that has it next. So sums are read and cleared where they lie in the
    L2, beside products, and not by passes over memory before and behind.

    CTAs begin in the order of their numbers, and both waits are for CTAs with lower ones."""
    assembly.chain("wait")
    of_group = call.together * call.n_blocks
    own = gl.program_id(0) // of_group
    if own >= call.ring:
        _wait(call.counts + 2 * own + 1, of_group)
    mbarrier.arrive(shared.cleared, count=1)
    group = gl.maximum(gl.program_id(0) - call.lead, 0) // of_group
    if (gl.program_id(0) >= call.lead) & (group < call.finished):
        _wait(call.counts + 2 * group, of_group)
        _finish_part(shared, call, config)
        if (group + call.ring) * call.together < call.n_heads:
            copies.barrier()
            gl.atomic_add(call.counts + 2 * (group + call.ring) + 1, 1, sem="release", scope="gpu")
    mbarrier.wait(shared.added, 0)
    gl.atomic_add(call.counts + 2 * own, 1, sem="release", scope="gpu")


@gluon.jit
def _wait(counter, wanted):
    """Every thread by itself. With an atomic of a scalar and its barrier ptxas spilled registers of the consumers."""
    found = gl.to_tensor(0)
    while found < wanted:
        found = gl.inline_asm_elementwise("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l",
                                          [counter.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _finish_part(shared, call, config):
    """What the CTA `lead` before this one has of its head: an equal share of the squares."""
    L: gl.constexpr = gl.BlockedLayout([4, 1, 4], [1, 32, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    LANES: gl.constexpr = gl.SliceLayout(2, L)
    ACROSS: gl.constexpr = config.WIDTH // 64
    head, block = backward_bounds.place(gl.program_id(0) - call.lead, call, config)
    n_tiles = gl.cdiv(call.q_len, config.BLOCK_M) * (config.BLOCK_M // 64)
    squares = n_tiles * call.group * ACROSS
    each = gl.cdiv(n_tiles * call.group, call.n_blocks) * ACROSS
    first = block * each
    place = head % (call.ring * call.together) * squares
    parts = copies.view_as(shared.square, gl.float32, [8, 4, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    # Threads have added, TMA reads.
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
                              is_pure=False, pack=1)
    for i in range(0, gl.minimum(each, squares - first)):
        square = first + i
        mbarrier.expect(shared.square_full, 4 * SQUARE)
        copies.load(call.sum_tiles, [(place + square) * 64, 0], shared.square_full, shared.square.index(0))
        q_head = head % call.kv_heads * call.group + square // (n_tiles * ACROSS)
        row = square // ACROSS % n_tiles * 64
        col = square % ACROSS * 64
        odd = gl.zeros([4, 32], gl.float32, LANES)
        tma.store_wait(0)
        mbarrier.wait(shared.square_full, i & 1)
        for c in range(8):  # of 8 columns each: 4 times 16 rows, lanes, their four numbers
            x = parts.index(c).load(L)
            odd += gl.sum(x * 0.0, 2)  # NaN where any is NaN or inf
            dq = (x * call.scale).to(call.dq_tiles.dtype).reshape([4, 8, 4, 2, 2]).permute((0, 3, 1, 2, 4))
            shared.dq.index(c).reshape([64, 8]).store(dq.reshape([64, 8]))
            to = call.d_queries + (place + square).to(gl.int64) * SQUARE + c * 512
            gl.store(to + gl.arange(0, 512, FLAT), gl.zeros([512], gl.float32, FLAT))
        fence_async_shared()
        for c in range(8):
            copies.store(call.dq_tiles, [head // call.kv_heads, q_head, row, col + c * 8], shared.dq.index(c))
        flag = call.odd + ((head * squares + square) // ACROSS).to(gl.int64)
        gl.store(flag + gl.zeros([4, 32], gl.int32, LANES), gl.full([4, 32], 1, gl.int8, LANES), mask=odd != 0.0)
    tma.store_wait(0)
