"""The sum of dQ in memory: fp32, 16 bytes at a time, in the order in which a warpgroup's accumulator lies in registers.

A tile of 64 queries is (columns / 64) squares of 64 x 64. Within one a thread's four numbers (two rows, two columns)
are 16 contiguous bytes and a warp's 512: `red.v4`, where atomics in the order of rows took twice the time of the whole
backward.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import backward_bounds, copies

SQUARE = gl.constexpr(4096)  # numbers of 64 x 64
CHUNK = gl.constexpr(512)  # numbers that a warp clears at a time


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


@gluon.jit
def clear(call, config):
    """The role of a warp: fill with 0 a part of the sum of a later head, that of the CTA `lead` behind this one, and
    tell so. A pass over memory before the kernel becomes stores beside products.

    CTAs begin in the order of their numbers, and those that wait for a head's parts come after all that clear them: so
    nobody waits for one that does not run.
    """
    index = gl.program_id(0) + call.lead
    if index < call.n_heads * call.n_blocks:
        head, block = backward_bounds.place(index, call, config)
        squares = call.group * gl.cdiv(call.q_len, config.BLOCK_M) * (config.BLOCK_M * config.WIDTH // SQUARE)
        part = gl.cdiv(squares, call.n_blocks)
        L: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        to = call.d_queries + head.to(gl.int64) * squares * SQUARE + gl.arange(0, CHUNK, L)
        for at in range(block * part * SQUARE, gl.minimum((block + 1) * part, squares) * SQUARE, CHUNK):
            gl.store(to + at, gl.zeros([CHUNK], gl.float32, L))
        copies.barrier()
        gl.atomic_add(call.ready + head, 1, sem="release", scope="gpu")


@gluon.jit
def wait_clear(work, call):
    """Until all parts of the head's sum are 0. Those of the first heads are before the kernel begins."""
    head = work.batch * call.kv_heads + work.kv_head
    if head * call.n_blocks >= call.lead:
        parts = gl.to_tensor(-1)
        while parts < call.n_blocks:
            parts = gl.atomic_add(call.ready + head, 0, sem="acquire", scope="gpu")
