"""The sum of dQ in memory: fp32, 16 bytes at a time, in the order in which a warpgroup's accumulator lies in registers.

A tile of 64 queries is (columns / 64) squares of 64 x 64. Within one a thread's four numbers (two rows, two columns)
are 16 contiguous bytes and a warp's 512: `red.v4`, where atomics in the order of rows took twice the time of the whole
backward.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
