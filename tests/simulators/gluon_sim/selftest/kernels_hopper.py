"""A warp-specialised TMA + mbarrier + wgmma GEMM for sm_90, with seeded faults.

FAULT selects one deliberate bug; 0 is the correct pipeline.
"""

# mypy: ignore-errors
# ruff: noqa: SIM113

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .compat import tma_load, tma_store


@gluon.jit
def _producer(a_desc, b_desc, a_bufs, b_bufs, ready, empty, off_m, off_n, K, FAULT: gl.constexpr):
    BK: gl.constexpr = a_desc.block_type.shape[1]
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    nbytes: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    it = 0
    for k in range(0, K, BK):
        slot = it % STAGES
        phase = (it // STAGES) & 1
        if FAULT != 2:
            mbarrier.wait(empty.index(slot), phase ^ 1)
        bar = ready.index(slot)
        if FAULT == 6:
            mbarrier.expect(bar, nbytes // 2)
        elif FAULT == 10:
            mbarrier.expect(bar, nbytes * 2)
        else:
            mbarrier.expect(bar, nbytes)
        tma_load(a_desc, [off_m, k], bar, a_bufs.index(slot))
        tma_load(b_desc, [k, off_n], bar, b_bufs.index(slot))
        it += 1


@gluon.jit
def _consumer(c_desc, a_bufs, b_bufs, c_buf, ready, empty, off_m, off_n, K, BK: gl.constexpr, FAULT: gl.constexpr):
    BM: gl.constexpr = c_desc.block_type.shape[0]
    BN: gl.constexpr = c_desc.block_type.shape[1]
    STAGES: gl.constexpr = a_bufs.type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([BM, BN], gl.float32, layout)
    it = 0
    for _ in range(0, K, BK):
        slot = it % STAGES
        phase = (it // STAGES) & 1
        if FAULT == 3:
            mbarrier.wait(ready.index(slot), phase ^ 1)
        elif FAULT != 1:
            mbarrier.wait(ready.index(slot), phase)
        acc = warpgroup_mma(a_bufs.index(slot), b_bufs.index(slot), acc, is_async=True)
        if FAULT == 4:
            mbarrier.arrive(empty.index(slot), count=1)
            acc = warpgroup_mma_wait(0, deps=(acc,))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if FAULT != 7:
                mbarrier.arrive(empty.index(slot), count=1)
            if FAULT == 9:
                mbarrier.arrive(empty.index(slot), count=1)
        it += 1
    c_buf.store(acc.to(c_desc.dtype))
    if FAULT != 5:
        fence_async_shared()
    tma_store(c_desc, [off_m, off_n], c_buf)
    if FAULT != 8:
        tma.store_wait(pendings=0)


@gluon.jit
def ws_gemm(a_desc, b_desc, c_desc, K, STAGES: gl.constexpr, FAULT: gl.constexpr):
    BM: gl.constexpr = c_desc.block_type.shape[0]
    BN: gl.constexpr = c_desc.block_type.shape[1]
    BK: gl.constexpr = a_desc.block_type.shape[1]
    off_m = gl.program_id(0) * BM
    off_n = gl.program_id(1) * BN
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BK, BN], b_desc.layout)
    c_buf = gl.allocate_shared_memory(c_desc.dtype, [BM, BN], c_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (c_desc, a_bufs, b_bufs, c_buf, ready, empty, off_m, off_n, K, BK, FAULT)),
            (_producer, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, off_m, off_n, K, FAULT)),
        ],
        [1],
        [24],
    )
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(ready.index(i))
        mbarrier.invalidate(empty.index(i))
