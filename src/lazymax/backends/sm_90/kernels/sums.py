"""The sum of dQ in memory: fp32, 16 bytes at a time, in the order in which a warpgroup's accumulator lies in registers.

A tile of 64 queries is (columns / 64) squares of 64 x 64. Within one a thread's four numbers (two rows, two columns)
are 16 contiguous bytes and a warp's 512: `red.v4`, where atomics in the order of rows took twice the time of the whole
backward.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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


class Parts(NamedTuple):
    """What a CTA waits for, and what it does for later ones."""

    own: Any  # pointer to how many parts of its own head's sum are 0
    wanted: Any  # parts; 0: its sum has been cleared before the kernel
    to: Any  # pointer to the part of a later head's sum that it clears
    count: Any  # of numbers there; -1: none
    later: Any  # pointer to how many parts of that sum are 0


@gluon.jit
def parts(call, config):
    """A CTA clears, of the head of the CTA `lead` behind it, that CTA's part. CTAs begin in the order of their numbers,
    and those that wait for a head's parts come after all that clear them: nobody waits for one that does not run."""
    head, _ = backward_bounds.place(gl.program_id(0), call, config)
    index, total = gl.program_id(0) + call.lead, call.n_heads * call.n_blocks
    later, block = backward_bounds.place(gl.minimum(index, total - 1), call, config)
    squares = call.group * gl.cdiv(call.q_len, config.BLOCK_M) * (config.BLOCK_M * config.WIDTH // SQUARE)
    each = gl.cdiv(squares, call.n_blocks)
    first = block * each
    count = gl.maximum(gl.minimum(first + each, squares) - first, 0) * SQUARE
    return Parts(call.ready + head, gl.where(gl.program_id(0) >= call.lead, call.n_blocks, 0),
                 call.d_queries + (later.to(gl.int64) * squares + first) * SQUARE,
                 gl.where(index < total, count, -1), call.ready + later)


@gluon.jit
def clear(cleared, of):
    """The role of a warp: tell the consumers when the sum that they add to is 0, then clear a part of a later head's,
    and tell so. A pass over memory before the kernel becomes stores beside products."""
    found = gl.to_tensor(0)
    while found < of.wanted:
        found = gl.atomic_add(of.own, 0, sem="acquire", scope="gpu")
    mbarrier.arrive(cleared, count=1)
    if of.count >= 0:
        L: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        lanes = gl.arange(0, CHUNK, L)
        for at in range(0, of.count, CHUNK):
            gl.store(of.to + at + lanes, gl.zeros([CHUNK], gl.float32, L))
        copies.barrier()
        gl.atomic_add(of.later, 1, sem="release", scope="gpu")
