"""Small kernels, each for one property."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.language.core import _aggregate as aggregate

from .compat import copy_async, tma_load, tma_store, tmem_columns_as, tmem_registers


@gluon.jit
def add_one(src, dst, n, BLOCK: gl.constexpr, MASK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    if MASK:
        gl.store(dst + i, gl.load(src + i, mask=i < n) + 1, mask=i < n)
    else:
        gl.store(dst + i, gl.load(src + i) + 1)


@gluon.jit
def same_output(dst, BLOCK: gl.constexpr, ATOMIC: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, BLOCK, layout)
    one = gl.full([BLOCK], 1.0, gl.float32, layout)
    if ATOMIC:
        gl.atomic_add(dst + i, one)
    else:
        gl.store(dst + i, one)


@gluon.jit
def from_block_to_block(x, BLOCK: gl.constexpr, SOURCE: gl.constexpr, TARGET: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    gl.store(x + TARGET * BLOCK + i, gl.load(x + SOURCE * BLOCK + i))


@gluon.jit
def overflow(dst, a, b):
    gl.store(dst, a * b)


@gluon.jit
def uninit_shared(dst, WRITE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    buf = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if WRITE:
        buf.store(gl.full([128], 3.0, gl.float32, layout))
    gl.store(dst + gl.arange(0, 128, layout), buf.load(layout))


@gluon.jit
def tmem_alias(dst, dst16):
    """16-bit data written over the first half of a 32-bit tile; the second half must survive."""
    N: gl.constexpr = 128
    lay: gl.constexpr = TensorMemoryLayout((128, N), col_stride=1)
    reg: gl.constexpr = tmem_registers(gl.float32, (128, N), lay, 4)
    reg16: gl.constexpr = tmem_registers(gl.float16, (128, N), lay, 4)
    s = allocate_tensor_memory(gl.float32, [128, N], lay)
    r = gl.arange(0, 128, gl.SliceLayout(1, reg))
    c = gl.arange(0, N, gl.SliceLayout(0, reg))
    v = (r[:, None] * N + c[None, :]).to(gl.float32)
    s.store(v)
    p = tmem_columns_as(s, gl.float16, 2 * N, lay).slice(0, N)
    p.store(gl.full([128, N], 1.0, gl.float16, reg16))
    gl.store(dst + r[:, None] * N + c[None, :], s.load(reg))
    r16 = gl.arange(0, 128, gl.SliceLayout(1, reg16))
    c16 = gl.arange(0, N, gl.SliceLayout(0, reg16))
    gl.store(dst16 + r16[:, None] * N + c16[None, :], p.load(reg16))


@gluon.jit
def tma_edge(src, dst, ROW: gl.constexpr):
    """One TMA box that hangs over the edge of the tensor."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(src.dtype, [64, 64], src.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, src.block_type.nbytes)
    tma_load(src, [ROW, 0], bar, buf)
    mbarrier.wait(bar, 0)
    x = buf.load(layout)
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    c = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(dst + r[:, None] * 64 + c[None, :], x)
    mbarrier.invalidate(bar)


@gluon.jit
def refilled(src, dst, FENCE: gl.constexpr):
    """By TMA what generic loads have just read."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(src.dtype, [64, 64], src.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    x = gl.zeros([64, 64], src.dtype, layout)
    for i in gl.static_range(2):
        mbarrier.expect(bar, src.block_type.nbytes)
        tma_load(src, [64 * i, 0], bar, buf)
        mbarrier.wait(bar, i)
        x += buf.load(layout)
        if FENCE:
            fence_async_shared()
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    c = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(dst + r[:, None] * 64 + c[None, :], x)
    mbarrier.invalidate(bar)


@gluon.jit
def device_descriptor(src, dst, M, N):
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    a = tma.make_tensor_descriptor(src, [M, N], [N, 1], [64, 64], layout)
    b = tma.make_tensor_descriptor(dst, [M, N], [N, 1], [64, 64], layout)
    buf = gl.allocate_shared_memory(gl.float16, [64, 64], layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    row = gl.program_id(0) * 64
    mbarrier.expect(bar, a.block_type.nbytes)
    tma_load(a, [row, 0], bar, buf)
    mbarrier.wait(bar, 0)
    tma_store(b, [row, 0], buf)
    tma.store_wait(0)


@gluon.jit
def pipelined_mma_v2(a_ptr, b_ptr, c_ptr, K, BK: gl.constexpr, EARLY: gl.constexpr):
    """cp.async double buffering. EARLY waits for one group too few."""
    M: gl.constexpr = 32
    N: gl.constexpr = 32
    ld: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    sh: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    a_s = gl.allocate_shared_memory(gl.float16, [2, M, BK], sh)
    b_s = gl.allocate_shared_memory(gl.float16, [2, BK, N], sh)
    rm = gl.arange(0, M, gl.SliceLayout(1, ld))
    rk = gl.arange(0, BK, gl.SliceLayout(0, ld))
    rk2 = gl.arange(0, BK, gl.SliceLayout(1, ld))
    rn = gl.arange(0, N, gl.SliceLayout(0, ld))
    acc = gl.zeros([M, N], gl.float32, mma)
    copy_async(a_s.index(0), a_ptr + rm[:, None] * K + rk[None, :])
    copy_async(b_s.index(0), b_ptr + rk2[:, None] * N + rn[None, :])
    async_copy.commit_group()
    n = K // BK
    for j in range(n):
        nxt = j + 1
        if nxt < n:
            copy_async(a_s.index(nxt % 2), a_ptr + rm[:, None] * K + nxt * BK + rk[None, :])
            copy_async(b_s.index(nxt % 2), b_ptr + (nxt * BK + rk2[:, None]) * N + rn[None, :])
        async_copy.commit_group()
        if EARLY:
            async_copy.wait_group(2)
        else:
            async_copy.wait_group(1)
        a = a_s.index(j % 2).load(gl.DotOperandLayout(0, mma, 2))
        b = b_s.index(j % 2).load(gl.DotOperandLayout(1, mma, 2))
        acc = mma_v2(a, b, acc)
    async_copy.wait_group(0)
    om = gl.arange(0, M, gl.SliceLayout(1, mma))
    on = gl.arange(0, N, gl.SliceLayout(0, mma))
    gl.store(c_ptr + om[:, None] * N + on[None, :], acc)


@aggregate
class Params:
    n: gl.tensor
    SCALE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, n, SCALE):
        self.n = n
        self.SCALE = gl.constexpr(SCALE)

    @gluon.jit
    def apply(self, x):
        return x * self.SCALE + self.n


@gluon.constexpr_function
def _double(x):
    return 2 * x


@gluon.jit
def compile_time(dst, n, S: gl.constexpr):
    """Aggregates, constexpr functions, static_range, tuples, early exit and while."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    p = Params(gl.to_tensor(n), _double(S))
    i = gl.arange(0, 128, layout)
    x = gl.zeros([128], gl.int32, layout)
    for k in gl.static_range(3):
        x += p.apply(i) + k
    steps = 0
    left = n
    while left > 1:
        left = left // 2
        steps += 1
    pair = (x, steps)
    gl.store(dst + i, pair[0] + pair[1])


@gluon.jit
def two_writers(dst, SYNC: gl.constexpr):
    """Worker writes a shared buffer that the default partition reads."""
    buf = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(_reader, (dst, buf, bar, SYNC)), (_writer, (buf, bar))], [4], [64])


@gluon.jit
def _reader(dst, buf, bar, SYNC: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if SYNC:
        mbarrier.wait(bar, 0)
    gl.store(dst + gl.arange(0, 128, layout), buf.load(layout))


@gluon.jit
def _writer(buf, bar):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    buf.store(gl.full([128], 7.0, gl.float32, layout))
    mbarrier.arrive(bar, count=1)


@gluon.jit
def named_barrier(dst, SYNC: gl.constexpr):
    buf = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(_nb_read, (dst, buf, SYNC)), (_nb_write, (buf,))], [4], [64])


@gluon.jit
def _nb_read(dst, buf, SYNC: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if SYNC:
        gl.inline_asm_elementwise(
            "bar.sync 8, 256; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
        )
    gl.store(dst + gl.arange(0, 128, layout), buf.load(layout))


@gluon.jit
def _nb_write(buf):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    buf.store(gl.full([128], 7.0, gl.float32, layout))
    gl.inline_asm_elementwise(
        "bar.arrive 8, 256; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _bar(sync, ident, count):
    return ("bar.sync " if sync else "bar.arrive ") + ident + ", " + str(count) + "; mov.b32 $0, 0;"


@gluon.jit
def barrier_of(src, IDENT: gl.constexpr, COUNT: gl.constexpr):
    """A named barrier whose id is written, or what each thread read ("$1")."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    TEXT: gl.constexpr = _bar(True, IDENT, COUNT)
    ident = gl.load(src + gl.arange(0, 128, layout))
    gl.inline_asm_elementwise(TEXT, "=r,r", [ident], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def two_barriers(dst):
    """Both halves of a handshake, two barriers in one block of assembly."""
    buf = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(_back_and_forth, (dst, buf, 0)), (_back_and_forth, (dst, buf, 1))], [4], [64])


@gluon.constexpr_function
def _swap(first, second):
    return f"bar.arrive {first}, 256; bar.sync {second}, 256; mov.b32 $0, 0;"


@gluon.jit
def _both(W: gl.constexpr, FIRST: gl.constexpr):
    TEXT: gl.constexpr = _swap(FIRST + W, FIRST + 1 - W)
    gl.inline_asm_elementwise(TEXT, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _back_and_forth(dst, buf, W: gl.constexpr):
    """Each writes twice, in turn, what the other reads."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for k in gl.static_range(4):
        if k % 2 == W:
            buf.store(gl.full([128], k + 1.0, gl.float32, layout))
        _both(W, 8)
        if k % 2 != W:
            gl.store(dst + k * 128 + gl.arange(0, 128, layout), buf.load(layout))
        _both(W, 10)


@gluon.jit
def add_pairs(dst, LANES: gl.constexpr):
    """Two ones to each pair of `dst`, by every thread that holds them."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    i = gl.arange(0, 2 * LANES, layout)
    one = gl.full([2 * LANES], 1.0, gl.float32, layout)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.f32 p, $1, 0f00000000; @p red.gpu.global.add.v2.f32 [$3 + 8], {$1, $2}; "
        "mov.b32 $0, 0; }",
        "=r,f,f,l,l",
        [one, (dst + i).to(gl.int64, bitcast=True)],
        dtype=gl.int16,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def add_and_touch(dst, BLOCK: gl.constexpr, WHAT: gl.constexpr):
    """Program 0 uses atomics, program 1 a load (0), a store (1) or atomics (2) of the same place."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, BLOCK, layout)
    if gl.program_id(0) == 0:
        gl.atomic_add(dst + i, gl.full([BLOCK], 1.0, gl.float32, layout))
    elif WHAT == 0:
        gl.store(dst + BLOCK + i, gl.load(dst + i))
    elif WHAT == 1:
        gl.store(dst + i, gl.full([BLOCK], 1.0, gl.float32, layout))
    else:
        gl.atomic_add(dst + i, gl.full([BLOCK], 1.0, gl.float32, layout))


@gluon.jit
def packed_asm(src, dst, L: gl.constexpr):
    """Two elements per call; the second is negated, so the register order of the layout shows."""
    i = gl.arange(0, 256, gl.SliceLayout(1, L))
    j = gl.arange(0, 4, gl.SliceLayout(0, L))
    x = gl.load(src + i[:, None] * 4 + j[None, :])
    y = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; neg.f32 $1, $3;", "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )
    gl.store(dst + i[:, None] * 4 + j[None, :], y)


@gluon.jit
def spin(flag):
    """Program 1 waits for program 0; needs both resident."""
    if gl.program_id(0) == 0:
        gl.atomic_xchg(flag, 1)
    else:
        seen = gl.atomic_add(flag, 0)
        while seen == 0:
            seen = gl.atomic_add(flag, 0)


@gluon.jit
def dead_barrier(dst):
    """The compiler reuses the memory of a barrier that nothing waits on."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    a = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(a, count=1)
    b = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(b, count=1)
    mbarrier.arrive(b, count=1)
    mbarrier.wait(b, 0)
    gl.store(dst + gl.arange(0, 128, layout), gl.full([128], 1.0, gl.float32, layout))


@gluon.jit
def ring_slot(dst, SLOTS: gl.constexpr, n):
    """Writes slot n - 1 of a ring."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ring = gl.allocate_shared_memory(gl.float32, [SLOTS, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    slot = ring.index(n - 1)
    slot.store(gl.full([128], 2.0, gl.float32, layout))
    gl.store(dst + gl.arange(0, 128, layout), slot.load(layout))


@gluon.jit
def big_buffer(dst, ROWS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    buf = gl.allocate_shared_memory(gl.float32, [ROWS, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    buf.store(gl.zeros([ROWS, 128], gl.float32, layout))
    gl.store(dst, gl.sum(gl.sum(buf.load(layout), 1), 0))


@gluon.jit
def config_sum(dst, config):
    """A tuple of run-time values and constants."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout)
    gl.store(dst + i, i * config[1] + config[0])
