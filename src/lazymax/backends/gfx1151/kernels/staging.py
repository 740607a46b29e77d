"""How Q, K and V come to the products of forward.py: from memory through registers into LDS, in the order they need.

A head dimension that is no power of two is held in pieces, see `launch.pieces`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3

from . import layouts


@gluon.jit
def sigma(r):
    """The order inside 16, see layouts.py."""
    return (r & ~15) | ((r & 1) << 3) | ((r >> 1) & 7)


@gluon.jit
def _query_tile(pointers, inside, FIRST: gl.constexpr, COLS: gl.constexpr, config):
    """Columns [FIRST, FIRST + COLS) of Q^T (columns, BLOCK_M), in registers or in LDS."""
    column = FIRST + gl.arange(0, COLS, layout=gl.SliceLayout(1, gl.DotOperandLayout(1, config.W, 16)))
    if config.D % 16 != 0:
        inside = inside & (column < config.D)[:, None]
    tile = gl.load(pointers + column[:, None], mask=inside, other=0.0)
    if config.NEGATE:
        tile = -tile
    if config.QUERY_LDS:
        L: gl.constexpr = layouts.key_shared(config.BLOCK_M, COLS)
        memory = gl.allocate_shared_memory(tile.dtype, [config.BLOCK_M, COLS], L).permute([1, 0])
        memory.store(tile)
        tile = memory
    return tile


@gluon.jit
def load_query(q, batch, kv_head, first_row, q_len, config):
    """Q^T as operand B, a tile for each piece; rows past the end are 0."""
    GROUP: gl.constexpr = config.GROUP
    row = first_row + gl.arange(0, config.BLOCK_M, layout=gl.SliceLayout(0, gl.DotOperandLayout(1, config.W, 16)))
    inside = (row < q_len * GROUP)[None, :]
    base = q.ptr + gl.cast(batch, gl.int64) * q.batch_stride + gl.cast(kv_head, gl.int64) * GROUP * q.head_stride
    offset = (row // GROUP).to(gl.int64) * q.row_stride + (row % GROUP).to(gl.int64) * q.head_stride
    tiles = ()
    for i in gl.static_range(len(config.PIECES)):
        tiles = tiles + (_query_tile(base + offset[None, :], inside, config.PIECES[i][0], config.PIECES[i][1], config),)
    return tiles


@gluon.jit
def _key_tile(k, FIRST: gl.constexpr, COLS: gl.constexpr, config):
    """Offsets of a block's keys from its first, the key of each in the block (in the order inside 16), the tile's place
    in LDS, the columns."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    L: gl.constexpr = layouts.key_load(BLOCK_N, COLS, config.WAVES)
    row = sigma(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, L)))
    column = FIRST + gl.arange(0, COLS, layout=gl.SliceLayout(0, L))
    memory = gl.allocate_shared_memory(k.ptr.dtype.element_ty, [BLOCK_N, COLS], layouts.key_shared(BLOCK_N, COLS))
    return row[:, None] * k.row_stride + column[None, :], row, memory, column


@gluon.jit
def _value_tile(v, FIRST: gl.constexpr, COLS: gl.constexpr, config):
    """The same for V by rows."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    ROWS: gl.constexpr = BLOCK_N // 16 * COLS
    L: gl.constexpr = layouts.value_load(BLOCK_N, COLS, config.WAVES)
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, L))
    column = FIRST + gl.arange(0, COLS, layout=gl.SliceLayout(0, L))
    memory = gl.allocate_shared_memory(v.ptr.dtype.element_ty, [ROWS, 16], layouts.fragment_shared(ROWS, True))
    return row[:, None] * v.row_stride + column[None, :], row, memory, column


@gluon.jit
def _fragment_tile(v, FIRST: gl.constexpr, COLS: gl.constexpr, config):
    """The same for V in fragment order; without VALUE_LDS as operand A of 16 keys, and no place in LDS."""
    ROWS: gl.constexpr = (config.BLOCK_N // 16 if config.VALUE_LDS else 1) * COLS
    A: gl.constexpr = gl.DotOperandLayout(0, config.W, 16)
    L: gl.constexpr = layouts.fragment_load(ROWS, config.WAVES) if config.VALUE_LDS else A
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    key = gl.arange(0, 16, layout=gl.SliceLayout(0, L))
    column = FIRST + row % COLS
    offset = (row // COLS * 16 * config.D + column // 16 * 256 + column % 16 * 8)[:, None]
    offset = gl.max_contiguous(gl.multiple_of(offset + (key // 8 * 128 + key % 8)[None, :], [1, 8]), [1, 8])
    memory = row  # stands for nothing
    if config.VALUE_LDS:
        memory = gl.allocate_shared_memory(v.ptr.dtype.element_ty, [ROWS, 16], layouts.fragment_shared(ROWS, False))
    return offset, row, memory, column


@gluon.jit
def tiles(k, v, config):
    """(tiles of K, tiles of V), one for each piece."""
    k_tiles = ()
    v_tiles = ()
    for i in gl.static_range(len(config.PIECES)):
        k_tiles = k_tiles + (_key_tile(k, config.PIECES[i][0], config.PIECES[i][1], config),)
        if config.FRAGMENTS:
            v_tiles = v_tiles + (_fragment_tile(v, config.PIECES[i][0], config.PIECES[i][1], config),)
        else:
            v_tiles = v_tiles + (_value_tile(v, config.PIECES[i][0], config.PIECES[i][1], config),)
    return k_tiles, v_tiles


@gluon.jit
def _fetch_tile(pointer, tile, left, config):
    """Without `other`, a masked buffer load reads past the end of its buffer, which gives 0: a promise of the hardware,
    not of Gluon, held by the tests. `other=0.0` costs a select for every register, 1.2% of the loop."""
    offset, row, _, column = tile
    inside = (row < left)[:, None]
    if config.D % 16 != 0:
        inside = inside & (column < config.D)[None, :]
    return cdna3.buffer_load(pointer, offset, mask=inside)


@gluon.jit
def fetch(k_ptr, v_ptr, k_tiles, v_tiles, left, config):
    """A block of K and V into registers. left: keys that remain from its first on; those past the end read as 0."""
    k_in = ()
    v_in = ()
    for i in gl.static_range(len(config.PIECES)):
        k_in = k_in + (_fetch_tile(k_ptr, k_tiles[i], left, config),)
        if config.FRAGMENTS and config.VALUE_LDS:
            v_in = v_in + (cdna3.buffer_load(v_ptr, v_tiles[i][0]),)
        elif config.VALUE_LDS:
            v_in = v_in + (_fetch_tile(v_ptr, v_tiles[i], left, config),)
    return k_in, v_in


@gluon.jit
def _columns_first(tile, COLS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rows of V (BLOCK_N, COLS) to (columns of 16 keys, 16): registers change names, nothing moves."""
    tile = tile.reshape([BLOCK_N // 16, 16, COLS // 16, 2, 8]).permute([0, 2, 4, 3, 1])
    return tile.reshape([BLOCK_N // 16 * COLS, 16])


@gluon.jit
def keep(k_tiles, v_tiles, k_in, v_in, config):
    """Registers to LDS. Rows of V are transposed on the way, each key of a column is a store of its own."""
    for i in gl.static_range(len(config.PIECES)):
        k_tiles[i][2].store(k_in[i])
        if not config.FRAGMENTS:
            v_tiles[i][2].store(_columns_first(v_in[i], config.PIECES[i][1], config.BLOCK_N))
        elif config.VALUE_LDS:
            v_tiles[i][2].store(v_in[i])
