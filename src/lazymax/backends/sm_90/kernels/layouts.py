"""Layouts of tiles in registers. A warpgroup has 64 rows, each of its four warps 16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def width(dim):
    """Columns of a tile with `dim` columns of data; TMA fills the others with 0 and does not store them."""
    return max(64, 1 << (dim - 1).bit_length())


@gluon.constexpr_function
def out_width(dim, v_dim):
    """Columns of O that are stored at a time: beside Q, K and V above 128 columns shared memory has room for half."""
    return width(v_dim) if dim <= 128 else max(64, width(v_dim) // 2)


@gluon.constexpr_function
def queries(pack):
    """Queries that a consumer's 64 rows are of; row r is of head r // queries, in the tile, and query r % queries."""
    return 64 // pack


@gluon.constexpr_function
def query_box(pack, cols):
    """The block of the descriptors of Q and O, where heads share a tile of a view (batch, key head, head of its group,
    query, column)."""
    return [1, 1, 64, cols] if pack == 1 else [1, 1, pack, 64 // pack, cols]


@gluon.constexpr_function
def accumulator(cols):
    """Of a warpgroup's product, (64, cols)."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, cols, 16])


@gluon.constexpr_function
def left_operand(cols):
    """Of a left operand in registers, for a product (64, cols)."""
    return gl.DotOperandLayout(0, accumulator(cols), 2)


@gluon.constexpr_function
def small(ctas):
    """Of a product of single warps (`mma.sync`), for the cold path; each CTA of a pair has half of the rows."""
    pair = {"cga_layout": [[1, 0]]} if ctas == 2 else {}
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8], **pair)


@gluon.constexpr_function
def small_operand(side, ctas):
    return gl.DotOperandLayout(side, small(ctas), 2)
