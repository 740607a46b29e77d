"""Layouts of tiles in registers, shared and tensor memory: 128 rows, each of one thread of four warps.

A Q tile of a pair of CTAs has 256 rows: each CTA has 128 of Q, S, P and O, half of the keys of K and half of the
columns of V, as products of a pair want them. To Gluon the pair is one program, whose tensors lie in both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, mbarrier, tensor_memory_descriptor

RENAMED = gl.constexpr(hasattr(tensor_memory_descriptor, "reinterpret"))  # Triton 3.9; `_reinterpret` before


@gluon.constexpr_function
def _pair(rows, basis):
    """Keyword of layouts: along which dimension the second CTA of a pair has its half; of zeros: it has all."""
    return {"cga_layout": [list(basis)]} if rows == 256 else {}


@gluon.constexpr_function
def _tile(rows, cols, second):
    bits = int(cols).bit_length() - 1
    columns = [[0, 1 << bit] for bit in range(bits)]
    lanes = [[1 << bit, 0] for bit in range(5)]
    return gl.DistributedLinearLayout(columns, lanes, [[32, 0], [64, 0]], second, [int(rows), int(cols)])


@gluon.constexpr_function
def tile(rows, cols):
    """Of a (rows, cols) tile in registers, as it comes from tensor memory."""
    return _tile(rows, cols, [[128, 0]] if rows == 256 else [])


@gluon.constexpr_function
def rows(count, cols=128):
    """Of a value for each row of such a tile."""
    return gl.SliceLayout(1, tile(count, cols))


@gluon.constexpr_function
def one(rows, warps):
    """Of a single number that all threads hold."""
    return gl.BlockedLayout([1], [32], [warps], [0], **_pair(rows, [0]))


@gluon.constexpr_function
def words(rows):
    """Of four numbers, each of one warp, of which every thread holds all."""
    return gl.BlockedLayout([4], [32], [4], [0], **_pair(rows, [0]))


@gluon.constexpr_function
def numbers(rows, split=False):
    """Of numbers in shared memory, of which each CTA has its own, or, split, half."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], **_pair(rows, [int(split)]))


@gluon.constexpr_function
def barriers(rows, shared):
    """Of barriers that each CTA has, or, shared, that the first has for both: there alone they are waited for."""
    return mbarrier.MBarrierLayout(**_pair(rows, [int(not shared)]))


@gluon.constexpr_function
def accumulator(rows, cols):
    """Of S and O in tensor memory."""
    two = {"two_ctas": True} if rows == 256 else {}
    return TensorMemoryLayout((128, int(cols)), col_stride=1, **_pair(rows, [1, 0]), **two)


@gluon.jit
def own_rows(x):
    """Of numbers for each row in the shared memory of a pair, those of this CTA. They pass for a tensor that both CTAs
    have, so that what is reduced of it is a scalar that each may branch on for itself: of all rows, one CTA would have
    to wait for the other."""
    L: gl.constexpr = gl.SliceLayout(1, _tile(128, 128, [[0, 0]]))
    return x.reinterpret(x.dtype, [128], numbers(256)).load(L)


@gluon.jit
def slot(kv, index, tiles, config):
    """Of the ring, which K and V share, for what `tiles` describes; those of a pair have halves of different shape."""
    if config.ROWS == 128:
        return kv.index(index)
    else:
        return kv.index(index).reinterpret(kv.dtype, [1, 1, 128, config.D], tiles.layout)


@gluon.jit
def to_rows(x, COLS: gl.constexpr):
    """A value for each row, for use beside a tile of COLS columns; moves no data."""
    return gl.convert_layout(x, rows(x.shape[0], COLS), assert_trivial=True)


@gluon.jit
def spread(x, COLS: gl.constexpr):
    """A value for each row, in every one of COLS columns."""
    return gl.full([x.shape[0], COLS], 0.0, gl.float32, tile(x.shape[0], COLS)) + to_rows(x, COLS)[:, None]


@gluon.jit
def split(x, COUNT: gl.constexpr):
    """COUNT tiles of columns side by side; names registers, moves no data."""
    if COUNT == 1:
        return (x,)
    else:
        HALF: gl.constexpr = x.shape[1] // 2
        a, b = x.reshape([x.shape[0], 2, HALF]).permute(0, 2, 1).split()
        a = gl.convert_layout(a, tile(x.shape[0], HALF), assert_trivial=True)
        b = gl.convert_layout(b, tile(x.shape[0], HALF), assert_trivial=True)
        return split(a, COUNT // 2) + split(b, COUNT // 2)


@gluon.jit
def join(tiles):
    """The inverse of `split`."""
    if len(tiles) == 1:
        return tiles[0]
    else:
        ROWS: gl.constexpr = tiles[0].shape[0]
        COLS: gl.constexpr = 2 * tiles[0].shape[1]
        pairs = ()
        for i in gl.static_range(len(tiles) // 2):
            x = gl.join(tiles[2 * i], tiles[2 * i + 1]).permute(0, 2, 1).reshape([ROWS, COLS])
            pairs = pairs + (gl.convert_layout(x, tile(ROWS, COLS), assert_trivial=True),)
        return join(pairs)


@gluon.jit
def regrouped(tiles, COLS: gl.constexpr):
    """The same columns in tiles of COLS."""
    OWN: gl.constexpr = tiles[0].shape[1]
    result = ()
    if COLS <= OWN:
        for i in gl.static_range(len(tiles)):
            result = result + split(tiles[i], OWN // COLS)
    else:
        EACH: gl.constexpr = COLS // OWN
        for i in gl.static_range(len(tiles) // EACH):
            some = ()
            for j in gl.static_range(EACH):
                some = some + (tiles[i * EACH + j],)
            result = result + (join(some),)
    return result


@gluon.jit
def probabilities(s, DTYPE: gl.constexpr):
    """P, 128 columns of 16 bits, in the lower half of the tensor memory of S."""
    ROWS: gl.constexpr = s.shape[0]
    if RENAMED:
        return s.reinterpret(DTYPE, [ROWS, 256], s.layout).slice(0, 128)
    else:
        return s._reinterpret(DTYPE, [ROWS, 256], s.layout).slice(0, 128)
