"""Layouts of tiles in registers. A warpgroup has 64 rows, each of its four warps 16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def accumulator(cols):
    """Of a warpgroup's product, (64, cols)."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, cols, 16])


@gluon.constexpr_function
def left_operand(cols):
    """Of a left operand in registers, for a product (64, cols)."""
    return gl.DotOperandLayout(0, accumulator(cols), 2)


@gluon.constexpr_function
def small():
    """Of a product of single warps (`mma.sync`), for the cold path."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def small_operand(side):
    return gl.DotOperandLayout(side, small(), 2)
