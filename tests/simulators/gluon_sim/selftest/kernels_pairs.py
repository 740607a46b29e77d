"""Two products in a row by a pair of CTAs (Triton 3.9): O += fp16(Q K^T) V over blocks of 128 keys, without a softmax.

Each CTA has 128 rows of Q, S and O, half of the keys of K and half of the columns of V. Roles: conversion (default),
products, loads. FAULT selects one deliberate bug; 0 is the correct pipeline.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import tma

BYTES = gl.constexpr(128 * 128)  # of a block of K or V in one CTA


@gluon.constexpr_function
def bars(shared):
    """Of barriers that the first CTA has for both, or that each has."""
    return mbarrier.MBarrierLayout(cga_layout=[[0 if shared else 1]])


@gluon.constexpr_function
def rows():
    columns = [[0, 1 << bit] for bit in range(7)]
    lanes = [[1 << bit, 0] for bit in range(5)]
    return gl.DistributedLinearLayout(columns, lanes, [[32, 0], [64, 0]], [[128, 0]], [256, 128])


@gluon.jit
def _made(COUNT: gl.constexpr, SHARED: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1 if SHARED else 2], bars(SHARED))
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def _loads(q_desc, k_desc, v_desc, q, k, v, q_full, full, empty, blocks, FAULT: gl.constexpr):
    mbarrier.expect(q_full.index(0), 2 * BYTES)
    tma.async_load(q_desc, [0, 0], q_full.index(0), q)
    for j in range(blocks):
        if FAULT != 2:
            mbarrier.wait(empty.index(0), (j & 1) ^ 1)
        mbarrier.expect(full.index(0), (4 if FAULT == 3 else 2) * BYTES)
        tma.async_load(k_desc, [j * 128, 0], full.index(0), k)
        tma.async_load(v_desc, [j * 128, 0], full.index(0), v)


@gluon.jit
def _products(q, k, v, s, o, q_full, full, empty, s_full, p_full, o_full, blocks, FAULT: gl.constexpr):
    mbarrier.wait(q_full.index(0), 0)
    p = s.reinterpret(gl.float16, [256, 256], s.layout).slice(0, 128)
    for j in range(blocks):
        mbarrier.wait(full.index(0), j & 1)
        tcgen05_mma(q, k.permute((1, 0)), s, use_acc=False)
        tcgen05_commit(s_full.index(0))
        if FAULT != 4:
            mbarrier.wait(p_full.index(0), j & 1)
        tcgen05_mma(p, v, o, use_acc=j > 0)
        if FAULT != 5:
            tcgen05_commit(empty.index(0))
    tcgen05_commit(o_full.index(0))


@gluon.jit
def _conversion(s, o, s_full, p_full, o_full, out, blocks, FAULT: gl.constexpr):
    L: gl.constexpr = rows()
    p = s.reinterpret(gl.float16, [256, 256], s.layout).slice(0, 128)
    for j in range(blocks):
        mbarrier.wait(s_full.index(0), j & 1)
        p.store(s.load(L).to(gl.float16))
        mbarrier.arrive(p_full.index(0), count=1)
    mbarrier.wait(o_full.index(0), 0)
    i = gl.arange(0, 256, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    gl.store(out + i * 128 + column, o.load(L))


@gluon.jit
def two_products(q_desc, k_desc, v_desc, out, blocks, FAULT: gl.constexpr):
    """out: (256, 128) fp32. q_desc, k_desc: rows in halves, v_desc: columns in halves."""
    q = gl.allocate_shared_memory(gl.float16, [256, 128], q_desc.layout)
    k = gl.allocate_shared_memory(gl.float16, [128, 128], k_desc.layout)
    v = gl.allocate_shared_memory(gl.float16, [128, 128], v_desc.layout)
    L: gl.constexpr = TensorMemoryLayout((128, 128), col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    s = allocate_tensor_memory(gl.float32, [256, 128], L)
    o = allocate_tensor_memory(gl.float32, [256, 128], L)
    q_full = _made(1, True)
    full = _made(1, FAULT != 6)
    empty = _made(1, False)
    s_full = _made(1, False)
    p_full = _made(1, FAULT != 1)
    o_full = _made(1, False)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_conversion, (s, o, s_full, p_full, o_full, out, blocks, FAULT)),
            (_products, (q, k, v, s, o, q_full, full, empty, s_full, p_full, o_full, blocks, FAULT)),
            (_loads, (q_desc, k_desc, v_desc, q, k, v, q_full, full, empty, blocks, FAULT)),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def maximum(src, dst):
    """Of numbers of which each CTA has half."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[1]])
    place = gl.arange(0, 256, L)
    gl.store(dst + place, gl.load(src + place) + gl.max(gl.load(src + place), 0))


@gluon.jit
def numbered(dst):
    """Each CTA writes its half of the first numbers; what both have, the first writes."""
    HALVES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[1]])
    SAME: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[0]])
    halves = gl.arange(0, 256, HALVES)
    gl.store(dst + halves, halves)
    same = gl.arange(0, 128, SAME)
    gl.store(dst + 256 + same, same + 1000 * (gl.program_id(0) + 1) + gl.num_programs(0))
