"""Layouts of tiles in registers and tensor memory: 128 rows, each of one thread of four warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, tensor_memory_descriptor

RENAMED = gl.constexpr(hasattr(tensor_memory_descriptor, "reinterpret"))  # Triton 3.9; `_reinterpret` before


@gluon.constexpr_function
def tile(cols):
    """Of a (128, cols) tile in registers, as it comes from tensor memory."""
    bits = int(cols).bit_length() - 1
    columns = [[0, 1 << bit] for bit in range(bits)]
    lanes = [[1 << bit, 0] for bit in range(5)]
    return gl.DistributedLinearLayout(columns, lanes, [[32, 0], [64, 0]], [], [128, int(cols)])


@gluon.constexpr_function
def rows(cols=128):
    """Of a value for each row of such a tile."""
    return gl.SliceLayout(1, tile(cols))


@gluon.constexpr_function
def one(warps):
    """Of a single number that all threads hold."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def to_rows(x, COLS: gl.constexpr):
    """A value for each row, for use beside a tile of COLS columns; moves no data."""
    return gl.convert_layout(x, rows(COLS), assert_trivial=True)


@gluon.jit
def spread(x, COLS: gl.constexpr):
    """A value for each row, in every one of COLS columns."""
    return gl.full([128, COLS], 0.0, gl.float32, tile(COLS)) + to_rows(x, COLS)[:, None]


@gluon.jit
def split(x, COUNT: gl.constexpr):
    """COUNT tiles of columns side by side; names registers, moves no data."""
    if COUNT == 1:
        return (x,)
    else:
        HALF: gl.constexpr = x.shape[1] // 2
        a, b = x.reshape([x.shape[0], 2, HALF]).permute(0, 2, 1).split()
        a = gl.convert_layout(a, tile(HALF), assert_trivial=True)
        b = gl.convert_layout(b, tile(HALF), assert_trivial=True)
        return split(a, COUNT // 2) + split(b, COUNT // 2)


@gluon.jit
def join(tiles):
    """The inverse of `split`."""
    if len(tiles) == 1:
        return tiles[0]
    else:
        COLS: gl.constexpr = 2 * tiles[0].shape[1]
        pairs = ()
        for i in gl.static_range(len(tiles) // 2):
            x = gl.join(tiles[2 * i], tiles[2 * i + 1]).permute(0, 2, 1).reshape([128, COLS])
            pairs = pairs + (gl.convert_layout(x, tile(COLS), assert_trivial=True),)
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
    L: gl.constexpr = TensorMemoryLayout((128, 128), col_stride=1)
    if RENAMED:
        return s.reinterpret(DTYPE, [128, 256], L).slice(0, 128)
    else:
        return s._reinterpret(DTYPE, [128, 256], L).slice(0, 128)
