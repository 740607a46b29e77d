"""A small warp-specialised attention forward for sm_100: TMA, tcgen05 with P aliasing S in tensor memory, correction.

One query tile of 128 rows per program; K and V share a ring. Roles: correction (default), softmax, mma, load.
FAULT selects one deliberate bug; 0 is the correct pipeline.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

from .compat import tma_load, tma_store, tmem_columns_as, tmem_registers

clc = getattr(blackwell, "clc", None)  # from Triton 3.9 on


@gluon.jit
def _load(q_desc, k_desc, v_desc, q_s, kv_s, q_bar, kv_full, kv_empty, off_q, n_kv, FAULT: gl.constexpr):
    NS: gl.constexpr = kv_s.type.shape[0]
    BN: gl.constexpr = k_desc.block_type.shape[0]
    mbarrier.expect(q_bar, q_desc.block_type.nbytes)
    tma_load(q_desc, [off_q, 0], q_bar, q_s)
    it = 0
    for j in range(n_kv):
        for kv in gl.static_range(2):
            slot = it % NS
            if FAULT != 5:
                mbarrier.wait(kv_empty.index(slot), ((it // NS) & 1) ^ 1)
            mbarrier.expect(kv_full.index(slot), k_desc.block_type.nbytes)
            desc = k_desc if kv == 0 else v_desc
            tma_load(desc, [j * BN, 0], kv_full.index(slot), kv_s.index(slot))
            it += 1


@gluon.jit
def _mma(q_s, kv_s, s_t, o_t, q_bar, kv_full, kv_empty, s_bar, p_bar, o_bar, n_kv, FAULT: gl.constexpr):
    NS: gl.constexpr = kv_s.type.shape[0]
    BN: gl.constexpr = s_t.type.shape[1]
    dtype: gl.constexpr = q_s.dtype
    p_t = tmem_columns_as(s_t, dtype, 2 * BN, TensorMemoryLayout((128, BN), col_stride=1)).slice(0, BN)
    if FAULT == 3:
        p_t = tmem_columns_as(s_t, dtype, 2 * BN, TensorMemoryLayout((128, BN), col_stride=1)).slice(BN, BN)
    mbarrier.wait(q_bar, 0)
    it = 0
    for j in range(n_kv):
        slot = it % NS
        mbarrier.wait(kv_full.index(slot), (it // NS) & 1)
        tcgen05_mma(q_s, kv_s.index(slot).permute((1, 0)), s_t, use_acc=(FAULT == 11))
        tcgen05_commit(s_bar)
        if FAULT != 10:
            tcgen05_commit(kv_empty.index(slot))
        it += 1
        slot = it % NS
        mbarrier.wait(kv_full.index(slot), (it // NS) & 1)
        if FAULT == 7:
            mbarrier.wait(p_bar, (j & 1) ^ 1)
        elif FAULT != 2:
            mbarrier.wait(p_bar, j & 1)
        tcgen05_mma(p_t, kv_s.index(slot), o_t, use_acc=j > 0)
        if FAULT != 10:
            tcgen05_commit(kv_empty.index(slot))
        if FAULT != 6:
            tcgen05_commit(o_bar)
        it += 1


@gluon.jit
def _softmax(s_t, alpha_s, l_s, s_bar, p_bar, a_full, a_empty, n_kv, sl2, SK, dtype: gl.constexpr, FAULT: gl.constexpr):
    BN: gl.constexpr = s_t.type.shape[1]
    reg: gl.constexpr = tmem_registers(gl.float32, (128, BN), s_t.type.layout, 4)
    row: gl.constexpr = gl.SliceLayout(1, reg)
    p_t = tmem_columns_as(s_t, dtype, 2 * BN, TensorMemoryLayout((128, BN), col_stride=1)).slice(0, BN)
    m = gl.full([128], -float("inf"), gl.float32, row)
    l = gl.full([128], 0.0, gl.float32, row)
    for j in range(n_kv):
        if FAULT != 1:
            mbarrier.wait(s_bar, j & 1)
        s = s_t.load(reg) * sl2
        cols = j * BN + gl.arange(0, BN, gl.SliceLayout(0, reg))
        s = gl.where((cols < SK)[None, :], s, -float("inf"))
        m_new = gl.maximum(m, gl.max(s, 1))
        alpha = gl.exp2(m - m_new)
        p = gl.exp2(s - m_new[:, None])
        p_t.store(gl.convert_layout(p.to(dtype), tmem_registers(dtype, (128, BN), p_t.type.layout, 4)))
        mbarrier.wait(a_empty, (j & 1) ^ 1)
        if FAULT == 9:
            mbarrier.arrive(a_full, count=1)
            alpha_s.store(alpha)
        else:
            alpha_s.store(alpha)
            mbarrier.arrive(a_full, count=1)
        mbarrier.arrive(p_bar, count=1)
        l = l * alpha + gl.sum(p, 1)
        m = m_new
    l_s.store(l)
    mbarrier.wait(a_empty, (n_kv & 1) ^ 1)
    mbarrier.arrive(a_full, count=1)


@gluon.jit
def _correction(o_desc, o_t, o_s, alpha_s, l_s, a_full, a_empty, p_bar, o_bar, off_q, n_kv, FAULT: gl.constexpr):
    D: gl.constexpr = o_t.type.shape[1]
    reg: gl.constexpr = tmem_registers(gl.float32, (128, D), o_t.type.layout, 4)
    row: gl.constexpr = gl.SliceLayout(1, reg)
    for j in range(n_kv):
        mbarrier.wait(a_full, j & 1)
        alpha = alpha_s.load(row)
        mbarrier.arrive(a_empty, count=1)
        if j > 0:
            mbarrier.wait(o_bar, (j - 1) & 1)
            o_t.store(o_t.load(reg) * alpha[:, None])
        mbarrier.arrive(p_bar, count=1)
    mbarrier.wait(a_full, n_kv & 1)
    l = l_s.load(row)
    if FAULT != 4:
        mbarrier.wait(o_bar, (n_kv - 1) & 1)
    o_s.store((o_t.load(reg) / l[:, None]).to(o_desc.dtype))
    if FAULT != 8:
        fence_async_shared()
    tma_store(o_desc, [off_q, 0], o_s)
    tma.store_wait(0)


@gluon.jit
def _bars(N: gl.constexpr, COUNT: gl.constexpr):
    b = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(b.index(i), count=COUNT)
    return b


@gluon.jit
def attn_fwd(q_desc, k_desc, v_desc, o_desc, sl2, SK, NS: gl.constexpr, FAULT: gl.constexpr):
    D: gl.constexpr = q_desc.block_type.shape[1]
    BN: gl.constexpr = k_desc.block_type.shape[0]
    dtype: gl.constexpr = q_desc.dtype
    n_kv = (SK + BN - 1) // BN
    off_q = gl.program_id(0) * 128
    q_s = gl.allocate_shared_memory(dtype, [128, D], q_desc.layout)
    kv_s = gl.allocate_shared_memory(dtype, [NS, BN, D], k_desc.layout)
    o_s = gl.allocate_shared_memory(dtype, [128, D], o_desc.layout)
    vec: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    alpha_s = gl.allocate_shared_memory(gl.float32, [128], vec)
    l_s = gl.allocate_shared_memory(gl.float32, [128], vec)
    s_t = allocate_tensor_memory(gl.float32, [128, BN], TensorMemoryLayout((128, BN), col_stride=1))
    o_t = allocate_tensor_memory(gl.float32, [128, D], TensorMemoryLayout((128, D), col_stride=1))
    q_bar = _bars(1, 1).index(0)
    kv_full = _bars(NS, 1)
    kv_empty = _bars(NS, 1)
    s_bar = _bars(1, 1).index(0)
    p_bar = _bars(1, 2).index(0)
    o_bar = _bars(1, 1).index(0)
    a_full = _bars(1, 1).index(0)
    a_empty = _bars(1, 1).index(0)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_correction, (o_desc, o_t, o_s, alpha_s, l_s, a_full, a_empty, p_bar, o_bar, off_q, n_kv, FAULT)),
            (_softmax, (s_t, alpha_s, l_s, s_bar, p_bar, a_full, a_empty, n_kv, sl2, SK, dtype, FAULT)),
            (_mma, (q_s, kv_s, s_t, o_t, q_bar, kv_full, kv_empty, s_bar, p_bar, o_bar, n_kv, FAULT)),
            (_load, (q_desc, k_desc, v_desc, q_s, kv_s, q_bar, kv_full, kv_empty, off_q, n_kv, FAULT)),
        ],
        [4, 1, 1],
        [128, 48, 24],
    )


@gluon.jit
def product(a_desc, b_desc, dst):
    """One tcgen05 product whose barrier goes with it."""
    M: gl.constexpr = a_desc.block_type.shape[0]
    K: gl.constexpr = a_desc.block_type.shape[1]
    N: gl.constexpr = b_desc.block_type.shape[1]
    a = gl.allocate_shared_memory(a_desc.dtype, [M, K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [K, N], b_desc.layout)
    layout: gl.constexpr = TensorMemoryLayout((M, N), col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [M, N], layout)
    bars = _bars(2, 1)
    loaded, done = bars.index(0), bars.index(1)
    fence_async_shared()
    mbarrier.expect(loaded, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma_load(a_desc, [0, 0], loaded, a)
    tma_load(b_desc, [0, 0], loaded, b)
    mbarrier.wait(loaded, 0)
    tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 0)
    reg: gl.constexpr = tmem_registers(gl.float32, (M, N), layout, 4)
    i = gl.arange(0, M, gl.SliceLayout(1, reg))
    j = gl.arange(0, N, gl.SliceLayout(0, reg))
    gl.store(dst + i[:, None] * N + j[None, :], acc.load(reg))


@gluon.jit
def cancel(dst, FAULT: gl.constexpr):
    """Every program counts itself and those that it cancels."""
    answer = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = _bars(1, 1).index(0)
    fence_async_shared()
    at = gl.program_id(0) * 4 + gl.program_id(1)
    phase = gl.to_tensor(0)
    more = gl.to_tensor(True)
    while more:
        mbarrier.expect(bar, 8 if FAULT == 1 else 16)
        clc.try_cancel(answer, bar)
        gl.atomic_add(dst + at, 1)
        if FAULT != 2:
            mbarrier.wait(bar, phase)
        said = clc.load_result(answer)
        if FAULT != 3:
            fence_async_shared()
        more = said.is_canceled()
        if FAULT == 4:  # noqa: SIM114 (known when it is compiled, the other when it runs)
            at = said.program_id(0) * 4 + said.program_id(1)
        elif more:
            at = said.program_id(0) * 4 + said.program_id(1)
        if FAULT == 5:
            more = gl.to_tensor(True)
        phase = phase ^ 1
