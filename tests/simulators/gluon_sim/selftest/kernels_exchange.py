"""What a backward on sm_90 does between its two warpgroups: each writes half of the rows of a tile to shared memory,
multiplies all of the transposed tile by half of the columns of B, and adds the product to what other programs have.

Named barriers order the two, by ids in registers: one for each direction and slot of the ring. FAULT selects one
deliberate bug; 0 is right.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .compat import tma_add, tma_load


@gluon.jit
def add_vectors(tile, out):
    """An accumulator of 64 by 64 to 4096 floats, in the order of its fragments: the four of a thread are neighbours."""
    L: gl.constexpr = tile.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, L))
    c = gl.arange(0, 64, gl.SliceLayout(0, L))
    at = out + ((r // 16 * 32 + r % 8 * 4) * 4)[:, None] + ((c // 8 * 128 + c % 8 // 2) * 4)[None, :]
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0;",
        "=r,f,f,f,f,l,l,l,l",
        [tile, at.to(gl.int64, bitcast=True)],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _add_plainly(tile, out):
    L: gl.constexpr = tile.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, L))
    c = gl.arange(0, 64, gl.SliceLayout(0, L))
    at = out + r[:, None] * 64 + c[None, :]
    gl.store(at, gl.load(at) + tile)


@gluon.constexpr_function
def _text(sync):
    return ("bar.sync" if sync else "bar.arrive") + " $1, 256; mov.b32 $0, 0;"


@gluon.jit
def _meet(SYNC: gl.constexpr, WRITER: gl.constexpr, t, FAULT: gl.constexpr):
    """WRITER's half of tile t is there."""
    TEXT: gl.constexpr = _text(SYNC)
    ident = 8 + WRITER + t % 2 * 2
    if FAULT == 6:
        ident = 8 + WRITER + t * 0
    gl.inline_asm_elementwise(TEXT, "=r,r", [ident], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _half(x, b_s, st_s, ring, stage, bar, out, out_desc, n, W: gl.constexpr, TMA: gl.constexpr, FAULT: gl.constexpr):
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    r = gl.program_id(0) * 128 + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, SL))
    c = gl.arange(0, 64, gl.SliceLayout(0, SL))
    b = b_s.slice(W * 64, 64, 1)
    if FAULT == 5:
        gl.store(out + W * 4096 + c, gl.zeros([64], gl.float32, gl.SliceLayout(0, SL)))
    mbarrier.wait(bar, 0)
    for t in range(n):
        factor = st_s.index(t).reshape([64]).load(gl.SliceLayout(0, SL))
        tile = gl.load(x + r[:, None] * (n * 64) + (t * 64 + c)[None, :]).to(gl.float32) * factor[None, :]
        # the first 8 columns are left out, where a column is 8 times one index and the other
        cut = tile.reshape([64, 8, 8])
        eighth = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, cut.type.layout)))
        cut = gl.where(eighth[None, :, None] > 0, cut, 0.0)
        tile = gl.convert_layout(cut.reshape([64, 64]), SL).to(b_s.dtype)
        both = ring.index(t % 2)
        if FAULT == 3:
            _meet(False, W, t, FAULT)
        both.slice(W * 64, 64, 0).store(tile)
        if FAULT != 4:
            fence_async_shared()
        if FAULT != 3 and FAULT != 2:
            _meet(False, W, t, FAULT)
        if FAULT != 1:
            _meet(True, 1 - W, t, FAULT)
        acc = warpgroup_mma(both.permute((1, 0)), b, gl.zeros([64, 64], gl.float32, SL), use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if TMA:
            if FAULT != 8:
                tma.store_wait(0)
            stage.index(W).store(acc)
            if FAULT != 9:
                fence_async_shared()
            tma_add(out_desc, [t * 64, W * 64], stage.index(W))
        elif FAULT == 7:
            _add_plainly(acc, out + (t * 2 + W) * 4096)
        else:
            add_vectors(acc, out + (t * 2 + W) * 4096)
    if TMA:
        tma.store_wait(0)


@gluon.jit
def exchange(x, b_desc, st_desc, out, out_desc, n, N: gl.constexpr, TMA: gl.constexpr, FAULT: gl.constexpr):
    """out[t] += (x[:, t] st[t])^T B for each of n tiles, by all programs. N: n."""
    b_s = gl.allocate_shared_memory(b_desc.dtype, [128, 128], b_desc.layout)
    st_s = gl.allocate_shared_memory(gl.float32, [N, 1, 64], st_desc.layout)
    ring = gl.allocate_shared_memory(b_desc.dtype, [2, 128, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    stage = gl.allocate_shared_memory(gl.float32, [2, 64, 64], out_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, 128 * 128 * 2 + N * 256)
    tma_load(b_desc, [gl.program_id(0) * 128, 0], bar, b_s)
    for t in gl.static_range(N):
        tma_load(st_desc, [t, 0], bar, st_s.index(t))
    gl.warp_specialize(
        [
            (_half, (x, b_s, st_s, ring, stage, bar, out, out_desc, n, 0, TMA, FAULT)),
            (_half, (x, b_s, st_s, ring, stage, bar, out, out_desc, n, 1, TMA, FAULT)),
        ],
        [4],
        [120],
    )
