"""How the tiles of forward.py lie in registers and LDS. Sizes are powers of two; waves lie side by side along the rows.

The order inside 16. WMMA's result gives a lane every second row of 16: with keys (or columns of V) in their own order,
a lane of the lower half-wave would hold keys 0, 2, 4, ..., one of the upper half 1, 3, 5, .... Rows are permuted
(`sigma` in forward.py: row r holds key r // 2 + 8 * (r % 2)), so that a half-wave owns 8 adjacent keys: P then finds
its way into the next product by one exchange between the halves for two keys, and O leaves 16 bytes at a time.
"""

import triton
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def _bits(n: int) -> int:
    return n.bit_length() - 1


@triton.constexpr_function
def key_load(block_n: int, cols: int, waves: int) -> gl.BlockedLayout:
    """Rows of K (block_n, cols) as they come from memory: 16 bytes a lane, a row's lanes adjacent."""
    return gl.BlockedLayout([1, 8], [32 * 8 // cols, cols // 8], [waves, 1], [1, 0])


@triton.constexpr_function
def key_shared(rows: int, cols: int) -> gl.PaddedSharedLayout:
    """K or Q (rows, cols) in LDS; 16 bytes of padding a row keep the 16 lanes apart that read 16 bytes of a column."""
    return gl.PaddedSharedLayout.with_identity_for([[cols, 8]], [rows, cols], [1, 0])


@triton.constexpr_function
def value_load(block_n: int, cols: int, waves: int) -> gl.DistributedLinearLayout:
    """Rows of V (block_n, cols): 16 bytes a lane, and where lanes are left the lowest bits of the key as well, so that
    they are adjacent when the tile is transposed."""
    columns: list[list[int]] = [[0, 8 << bit] for bit in range(_bits(cols // 8))]
    keys: list[list[int]] = [[1 << bit, 0] for bit in range(_bits(block_n))]
    others = 5 - len(columns)
    own = max(0, len(keys) - others - _bits(waves))
    rest = keys[own:] + [[0, 0]] * 8  # a tile with fewer elements than lanes is loaded more than once
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *keys[:own]],
        lane_bases=columns + rest[:others],
        warp_bases=rest[others : others + _bits(waves)],
        block_bases=[],
        shape=[block_n, cols],
    )


@triton.constexpr_function
def _fragments(rows: int) -> list[list[int]]:
    """Order of a tensor (rows, 16) in fragments of 16 x 16: what the lanes of a half-wave read lies side by side."""
    inner: list[list[int]] = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0], [0, 8]]
    return inner + [[16 << bit, 0] for bit in range(_bits(rows // 16))]


@triton.constexpr_function
def fragment_load(rows: int, waves: int) -> gl.DistributedLinearLayout:
    """V in fragment order (rows, 16) as it comes from memory, 16 bytes a lane."""
    bases, w = _fragments(rows), _bits(waves)
    spread = bases[8 : 8 + w] + [[0, 0]] * w
    return gl.DistributedLinearLayout(
        reg_bases=bases[:3] + bases[8 + w :], lane_bases=bases[3:8], warp_bases=spread[:w], block_bases=[],
        shape=[rows, 16],
    )  # fmt: skip


@triton.constexpr_function
def fragment_shared(rows: int, transposed: bool) -> gl.PaddedSharedLayout:
    """V in fragment order in LDS. transposed: stored from rows, element by element; 32 bytes of padding for every
    fragment keep those stores apart."""
    padding = [[256, 16]] if transposed else [[rows * 16, 8]]
    return gl.PaddedSharedLayout(padding, _fragments(rows), [], [rows, 16])


@triton.constexpr_function
def out_store(cols: int, block_m: int, waves: int) -> gl.DistributedLinearLayout:
    """O^T (cols, block_m) in its own order of columns: 8 adjacent ones in a lane, rows along the lanes."""
    tiles = block_m // (16 * waves)
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0]]
        + [[16 << bit, 0] for bit in range(_bits(cols // 16))]
        + [[0, 16 * waves << bit] for bit in range(_bits(tiles))],
        lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        warp_bases=[[0, 16 << bit] for bit in range(_bits(waves))],
        block_bases=[],
        shape=[cols, block_m],
    )
