"""Programs that order each other: what a backward does whose sum is zeroed, added to and read within one launch.

The first two programs zero the rows of a sum ahead, the consumers of the others add to all of them, and the last
program reads the sum when all have added. No program waits for a later one, so any number of them may be resident.
FAULT selects one deliberate bug; 0 is right.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .compat import copy_async, partition_barrier, tma_load

HALF = gl.constexpr(512)  # of a row: what a consumer adds


@gluon.constexpr_function
def _sem(right, fault, faults):
    return "relaxed" if fault in faults else right


@gluon.jit
def _poll(count, least, SEM: gl.constexpr, SCOPE: gl.constexpr):
    seen = gl.to_tensor(-1)
    while seen < least:
        seen = gl.atomic_add(count, 0, sem=SEM, scope=SCOPE)


@gluon.jit
def _copy(source, target, vectors):
    """vectors: by assembly."""
    if vectors:
        value = gl.inline_asm_elementwise(
            "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=f,=f,=f,=f,l,l,l,l",
            [source.to(gl.int64, bitcast=True)],
            dtype=gl.float32,
            is_pure=False,
            pack=4,
        )
        gl.inline_asm_elementwise(
            "st.global.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0;",
            "=r,f,f,f,f,l,l,l,l",
            [value, target.to(gl.int64, bitcast=True)],
            dtype=gl.int8,
            is_pure=False,
            pack=4,
        )
    else:
        gl.store(target, gl.load(source))


@gluon.jit
def _produce(sums, out, ready, done, go, rows, FAULT: gl.constexpr):
    RELEASE: gl.constexpr = _sem("release", FAULT, (1,))
    ACQUIRE: gl.constexpr = _sem("acquire", FAULT, (2,))
    LAST: gl.constexpr = _sem("acquire", FAULT, (7,))
    SCOPE: gl.constexpr = "cta" if FAULT == 11 else "gpu"
    L: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    program, programs = gl.program_id(0), gl.num_programs(0)
    i = gl.arange(0, 2 * HALF, L)
    if program < 2:
        for row in range(program, rows, 2):
            gl.store(sums + row * 2 * HALF + i, gl.zeros([2 * HALF], gl.float32, L))
        if FAULT != 3:
            partition_barrier()
        gl.atomic_add(ready, 1, sem=RELEASE, scope=SCOPE)
    else:
        if FAULT != 5:
            _poll(ready, 2 + (FAULT == 13) - (FAULT == 14), ACQUIRE, SCOPE)
        if FAULT != 4:
            mbarrier.arrive(go, count=1)
        if program == programs - 1:
            if FAULT != 9:
                _poll(done, 2 * (programs - 2) - (FAULT == 12), LAST, "gpu")
            for row in range(rows):
                _copy(sums + row * 2 * HALF + i, out + row * 2 * HALF + i, row % 2 == 0)


@gluon.jit
def _consume(sums, done, go, rows, FAULT: gl.constexpr, W: gl.constexpr):
    RELEASE: gl.constexpr = _sem("release", FAULT, (6,))
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    i = W * HALF + gl.arange(0, HALF, L)
    program = gl.program_id(0)
    if program > 1:
        if FAULT == 10:
            gl.atomic_add(done, 1, sem="release", scope="gpu")
        if FAULT != 4:
            mbarrier.wait(go, 0)
        for row in range(rows):
            gl.inline_asm_elementwise(
                "red.relaxed.gpu.global.add.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0;",
                "=r,f,f,f,f,l,l,l,l",
                [(i + program).to(gl.float32), (sums + row * 2 * HALF + i).to(gl.int64, bitcast=True)],
                dtype=gl.int8,
                is_pure=False,
                pack=4,
            )
        if FAULT != 8:
            partition_barrier()
        if FAULT != 10:
            gl.atomic_add(done, 1, sem=RELEASE, scope="gpu")


@gluon.jit
def sum_in_turn(sums, out, ready, done, rows, FAULT: gl.constexpr):
    """Each row of out: the sum of (column + p) over the programs p from 2 on. ready, done: 0."""
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(go, count=1)
    gl.warp_specialize(
        [
            (_consume, (sums, done, go, rows, FAULT, 0)),
            (_consume, (sums, done, go, rows, FAULT, 1)),
            (_produce, (sums, out, ready, done, go, rows, FAULT)),
        ],
        [4, 1],
        [120, 24],
    )


@gluon.jit
def hand_on(x, flag, FAULT: gl.constexpr):
    """Program 0 writes, program 1 only counts, program 2 reads what 0 wrote, program 3 writes it."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, L)
    program = gl.program_id(0)
    if program == 0:
        gl.store(x + i, gl.full([128], 1.0, gl.float32, L))
        partition_barrier()
        gl.atomic_add(flag, 1, sem="release")
    elif program == 1:
        _poll(flag, 1, "relaxed", "gpu")
        gl.atomic_add(flag, 1, sem="relaxed")
        if FAULT == 3:
            gl.store(x + i, gl.full([128], 1.0, gl.float32, L))
    elif program == 2:
        _poll(flag, 2, "acquire", "gpu")
        gl.store(x + 128 + i, gl.load(x + i))
        if FAULT != 1:
            partition_barrier()
        gl.atomic_add(flag, 1, sem=_sem("release", FAULT, (2,)))
    else:
        _poll(flag, 3, "acquire", "sys")
        gl.store(x + i, gl.full([128], 2.0, gl.float32, L))


@gluon.jit
def _poll_by_load(count, least, ACQUIRE: gl.constexpr):
    TEXT: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];" if ACQUIRE else "ld.relaxed.gpu.global.b32 $0, [$1];"
    seen = gl.to_tensor(-1)
    while seen < least:
        seen = gl.inline_asm_elementwise(
            TEXT, "=r,l", [count.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def stage(x, x_tiles, out, flag, BY_TMA: gl.constexpr, FAULT: gl.constexpr):
    """Program 0 writes x, program 1 copies it by way of shared memory, program 2 writes it again. FAULT: 1 a poll that
    acquires nothing, 2 no fence before TMA, 3 x given up before the copy is waited for."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    at = gl.arange(0, 1, gl.SliceLayout(1, L))[:, None] + gl.arange(0, 128, gl.SliceLayout(0, L))[None, :]
    smem = gl.allocate_shared_memory(gl.float32, [1, 128], x_tiles.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    if gl.program_id(0) == 0:
        gl.store(x + at, gl.full([1, 128], 1.0, gl.float32, L))
        partition_barrier()
        gl.atomic_add(flag, 1, sem="release")
    elif gl.program_id(0) == 1:
        _poll_by_load(flag, 1, FAULT != 1)
        if BY_TMA:
            if FAULT != 2:
                gl.inline_asm_elementwise(
                    "fence.proxy.async.global; mov.b32 $0, 0;",
                    "=r,r",
                    [gl.to_tensor(0)],
                    dtype=gl.int32,
                    is_pure=False,
                    pack=1,
                )
            mbarrier.expect(bar, 512)
            tma_load(x_tiles, [0, 0], bar, smem)
        else:
            copy_async(smem, x + at)
            async_copy.commit_group()
        if FAULT == 3:
            partition_barrier()
            gl.atomic_add(flag, 1, sem="release")
        if BY_TMA:
            mbarrier.wait(bar, 0)
        else:
            async_copy.wait_group(0)
        partition_barrier()
        gl.store(out + at, smem.load(L))
        if FAULT != 3:
            gl.atomic_add(flag, 1, sem="release")
    else:
        _poll_by_load(flag, 2, True)
        gl.store(x + at, gl.full([1, 128], 2.0, gl.float32, L))
