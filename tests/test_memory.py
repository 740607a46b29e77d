"""`kernels.memory`: tiles in and out, their edges, strides and 64-bit offsets."""

import math
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from lazymax.kernels import memory
from lazymax.kernels.launch import describe, pieces, view_strides
from lazymax.problem import Problem, output_strides
from lazymax.testing import moat

ROWS, COLS = 16, 32


@triton.jit
def _load(source, out, batch, head, start, n_rows, N_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
          CHECK_ROWS: tl.constexpr, WIDE: tl.constexpr, CLAMP: tl.constexpr = False):  # fmt: skip
    tile = memory.load_tile(source, batch, head, start, n_rows, N_COLS, ROWS, COLS, CHECK_ROWS, WIDE, 0, CLAMP)
    tl.store(out + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], tile)


@triton.jit
def _load_described(source, out, batch, head, start, ROWS: tl.constexpr, COLS: tl.constexpr):
    tile = memory.load_described(source, batch, head, start, ROWS, COLS)
    tl.store(out + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], tile)


@triton.jit
def _store(target, batch, head, start, n_rows, N_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
           WIDE: tl.constexpr):  # fmt: skip
    """Cell (row, column) of the tile holds 100 * row + column."""
    tile = (tl.arange(0, ROWS)[:, None] * 100 + tl.arange(0, COLS)[None, :]).to(tl.float32)
    memory.store_tile(target, batch, head, start, n_rows, tile, N_COLS, WIDE)


@triton.jit
def _pieces(source, described, out, batch, head, start, n_rows, config, PIECES, N_COLS: tl.constexpr,
            ROWS: tl.constexpr, ALL: tl.constexpr, CHECK_ROWS: tl.constexpr, DESCRIBED: tl.constexpr):  # fmt: skip
    """Store the tuple of tiles side by side, each at its first column, into (ROWS, ALL)."""
    tiles = memory.load_pieces(source, described, batch, head, start, n_rows, ROWS, CHECK_ROWS, config, N_COLS, PIECES,
                               DESCRIBED)  # fmt: skip
    for i in tl.static_range(len(tiles)):
        cols = PIECES[i][0] + tl.arange(0, PIECES[i][1])
        tl.store(out + tl.arange(0, ROWS)[:, None] * ALL + cols[None, :], tiles[i])


@triton.jit
def _store_pieces(source, target, batch, head, start, n_rows, config, PIECES, N_COLS: tl.constexpr, ROWS: tl.constexpr):
    tiles = memory.load_pieces(source, None, batch, head, start, n_rows, ROWS, True, config, N_COLS, PIECES, False)
    for i in tl.static_range(len(tiles)):
        memory.store_tile(target, batch, head, start, n_rows, tiles[i], N_COLS, config.WIDE, PIECES[i][0])


@triton.jit
def _offsets(source, out, batch, head, start, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr):
    """Bytes from the tensor's first cell to every cell of the tile; nothing is read."""
    pointers = memory.tile_pointers(source, batch, head, start, ROWS, COLS, WIDE)
    moved = pointers.to(tl.int64) - source.ptr.to(tl.int64)
    tl.store(out + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], moved)


def view(t):
    """As the launcher passes it."""
    return memory.View(t, *view_strides(t))


def numbered(*shape, dtype=torch.float32):
    """Every cell a different small integer, none of them 0: a wrong cell, and a zero that was read, show."""
    return (torch.arange(math.prod(shape)) % 1999 + 1).reshape(shape).to(dtype)


def expected_tile(t, batch, head, start):
    """Rows [start, start + ROWS) of one head, 0 where the tensor has none."""
    tile = torch.zeros(ROWS, COLS, dtype=t.dtype)
    rows = t[batch, head, start : start + ROWS]
    tile[: rows.shape[0], : rows.shape[1]] = rows
    return tile


def bshd(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def broadcast(t):
    return t[:1, :1].expand(t.shape)


LAYOUTS = {
    "contiguous": lambda t: t,
    "bshd": bshd,
    "nan-moat": lambda t: moat(t, 1, 1, ROWS, COLS),
    "stride-0": broadcast,
    "heads-last": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n_cols", [1, 8, 31, 32])
@pytest.mark.parametrize("n_rows", [1, 15, 16, 17, 35])
def test_load_tile(n_rows, n_cols, layout, device):
    """Every tile of every head, the last one with its tail; what lies around the tensor is NaN in "nan-moat"."""
    plain = numbered(2, 3, n_rows, n_cols)
    t = LAYOUTS[layout](plain.to(device))
    for batch, head in ((0, 0), (1, 2)):
        for start in range(0, n_rows + ROWS, ROWS):  # one tile wholly past the end as well
            out = torch.full((ROWS, COLS), math.nan, device=device)
            _load[(1,)](view(t), out, batch, head, start, n_rows, n_cols, ROWS, COLS, True, False)
            assert torch.equal(out.cpu(), expected_tile(t.cpu(), batch, head, start)), (batch, head, start)


@pytest.mark.parametrize("layout", ["contiguous", "bshd", "nan-moat"])
@pytest.mark.parametrize("n_cols", [31, 32])
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("n_rows", [1, 15, 16, 17, 35])
def test_load_tile_with_the_last_row_for_those_behind(n_rows, wide, n_cols, layout, device):
    t = LAYOUTS[layout](numbered(2, 3, n_rows, n_cols).to(device))
    for start in range(0, n_rows, ROWS):
        out = torch.full((ROWS, COLS), math.nan, device=device)
        _load[(1,)](view(t), out, 1, 2, start, n_rows, n_cols, ROWS, COLS, True, wide, True)
        rows = torch.arange(start, start + ROWS).clamp(max=n_rows - 1)
        assert torch.equal(out.cpu(), torch.nn.functional.pad(t[1, 2].cpu()[rows], (0, COLS - n_cols)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n_cols", [8, 32])
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_load_full_rows_without_check(wide, n_cols, dtype, device):
    """CHECK_ROWS off: the unmasked stretch of the loop, columns still cut."""
    t = moat(numbered(1, 2, 2 * ROWS, n_cols, dtype=dtype).to(device), 0, 0, ROWS, COLS)
    out = torch.full((ROWS, COLS), math.nan, dtype=dtype, device=device)
    _load[(1,)](view(t), out, 0, 1, ROWS, 2 * ROWS, n_cols, ROWS, COLS, False, wide)
    assert torch.equal(out.cpu(), expected_tile(t.cpu(), 0, 1, ROWS))


@pytest.mark.parametrize("layout", ["contiguous", "bshd", "nan-moat"])
@pytest.mark.parametrize("n_cols", [8, 24, 32])
@pytest.mark.parametrize("n_rows", [1, 16, 17, 35])
def test_load_described(n_rows, n_cols, layout, device):
    """The descriptor path fills in the same zeros, although the cells past the tensor hold NaN."""
    t = LAYOUTS[layout](numbered(2, 3, n_rows, n_cols, dtype=torch.float16).to(device))
    if layout == "nan-moat":
        assert Problem.from_tensors(t, t, t).descriptor_refusal is None
    for batch, head in ((0, 0), (1, 2)):
        for start in range(0, n_rows, ROWS):
            out = torch.full((ROWS, COLS), math.nan, dtype=torch.float16, device=device)
            _load_described[(1,)](describe(t, ROWS, COLS), out, batch, head, start, ROWS, COLS)
            assert torch.equal(out.cpu(), expected_tile(t.cpu(), batch, head, start)), (batch, head, start)


def test_describe_gives_the_hardware_a_stride_for_single_dimensions():
    """Strides of size-1 dimensions are arbitrary in torch (here 5); the hardware wants multiples of 16 bytes."""
    t = torch.zeros(64, dtype=torch.float16).as_strided((1, 1, 4, 8), (5, 5, 8, 1))
    descriptor = describe(t, ROWS, COLS)
    assert isinstance(descriptor, TensorDescriptor)
    assert descriptor.strides == [16, 16, 8, 1] and descriptor.block_shape == [1, 1, ROWS, COLS]


@pytest.mark.parametrize("layout", ["contiguous", "bshd", "nan-moat", "heads-last"])
@pytest.mark.parametrize("n_cols", [1, 31, 32])
@pytest.mark.parametrize("n_rows", [1, 16, 21])
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_store_tile_leaves_the_rest_alone(wide, n_rows, n_cols, layout, device):
    t = LAYOUTS[layout](torch.full((2, 3, n_rows, n_cols), -5.0, device=device))
    for start in range(0, n_rows, ROWS):
        _store[(1,)](view(t), 1, 2, start, n_rows, n_cols, ROWS, COLS, wide)
    expected = torch.full((2, 3, n_rows, n_cols), -5.0)
    expected[1, 2] = torch.arange(n_rows)[:, None] % ROWS * 100.0 + torch.arange(n_cols)
    assert torch.equal(t.cpu(), expected)
    cells = torch.empty(0, device=device).set_(t.untyped_storage())
    touched = torch.zeros(cells.numel(), dtype=torch.bool)
    touched.as_strided(t.size(), t.stride()).fill_(True)
    assert cells.cpu()[~touched].isnan().all()  # the moat


STRIDES = [
    pytest.param((0, 0, 2**24), (0, 0, 130), True, id="B06-row-2**24"),
    pytest.param((0, 0, 2**31 + 16), (0, 0, 1), True, id="row-past-2**31"),
    pytest.param((0, 0, 2**23 - 16), (0, 0, 2048), False, id="row-below-2**23-narrow"),
    pytest.param((2**30, 64, 128), (4, 3, 16), False, id="B65-batch-2**30"),
    pytest.param((2**20, 2**28, 64), (1, 24, 0), False, id="B08-head-2**28"),
    pytest.param((2**33, 2**32, 3 * 64 * 128), (3, 5, 100_000), False, id="B37-all-three"),
]


@pytest.mark.parametrize("strides, index, wide", STRIDES)
def test_offsets_do_not_wrap(strides, index, wide, device):
    """Addresses in a tensor too large to allocate, computed and not read."""
    cell = torch.zeros(1, dtype=torch.float16, device=device)
    out = torch.zeros(128, COLS, dtype=torch.int64, device=device)
    _offsets[(1,)](memory.View(cell, *strides), out, *index, 128, COLS, wide)
    batch, head, start = index
    base = batch * strides[0] + head * strides[1]
    row = base + (start + torch.arange(128))[:, None] * strides[2]
    assert torch.equal(out.cpu(), 2 * (row + torch.arange(COLS)))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("stride, wide", [(2**23 - 8, False), (2**23, True)], ids=["below", "at-2**23"])
def test_problem_is_wide_from_the_stride_on(stride, wide, name):
    tensors = {n: torch.empty(1, 1, 32, 8, dtype=torch.float16, device="meta") for n in "qkv"}
    tensors[name] = torch.empty(32 * stride, dtype=torch.float16, device="meta").as_strided(
        (1, 1, 32, 8), (32 * stride, 32 * stride, stride, 1)
    )
    assert Problem.from_tensors(*tensors.values()).wide is wide


def test_problem_is_wide_when_the_output_is():
    """The output follows q's order of dimensions with D_v for D: its rows can lie further apart than q's."""
    q, k = (torch.empty(128, 2**18, 1, 8, dtype=torch.float16, device="meta").permute(1, 2, 0, 3) for _ in "qk")
    v = torch.empty(2**18, 1, 128, 256, dtype=torch.float16, device="meta")
    assert output_strides(q, 256)[2] == 2**26  # 64 rows of this pass 2**31
    assert Problem.from_tensors(q, k, v).wide


def test_view_frees_the_strides_of_single_dimensions():
    """Otherwise a batch of 1 with another stride would build the kernel again."""
    t = torch.zeros(1, 2, 1, 8).as_strided((1, 2, 1, 8), (77, 8, 33, 1))
    assert view_strides(t) == (0, 8, 0)


# ---- head dimensions in pieces ----


class Config(NamedTuple):
    """What `load_pieces` asks of the launcher's."""

    WIDE: tl.constexpr = tl.constexpr(False)


def constant(parts):
    return tuple(tuple(tl.constexpr(n) for n in part) for part in parts)


@pytest.mark.parametrize("dim, least, want", [
    (64, 16, ((0, 64),)), (96, 16, ((0, 64), (64, 32))), (80, 16, ((0, 64), (64, 16))), (40, 64, ((0, 64),)),
    (192, 16, ((0, 128), (128, 64))), (40, 16, ((0, 32), (32, 16))), (1, 16, ((0, 16),)), (17, 16, ((0, 32),)),
    (72, 64, ((0, 64), (64, 16))), (576, 64, ((0, 512), (512, 64))), (576, 16, ((0, 512), (512, 64))),
])  # fmt: skip
def test_pieces(dim, least, want):
    assert pieces(dim, least) == want


@pytest.mark.parametrize("least", [16, 64])
def test_pieces_of_every_head_dim(least):
    """Powers of two, one behind the other, that hold every column and never multiply more than one tile would."""
    for dim in range(1, 577):
        parts = pieces(dim, least)
        whole = max(least, triton.next_power_of_2(dim))
        assert [first for first, _ in parts] == [0, *(parts[0][1],) * (len(parts) - 1)]
        assert all(n & (n - 1) == 0 and n >= 16 for _, n in parts) and parts[0][1] >= least
        columns = sum(n for _, n in parts)
        assert dim <= columns <= whole and (len(parts) == 1 or (parts[0][1] < dim and columns < whole)), (dim, parts)


DIMS = [(48, ((0, 32), (32, 16))), (40, ((0, 32), (32, 16))), (33, ((0, 32), (32, 16))), (31, ((0, 32),))]


@pytest.mark.parametrize("layout", ["contiguous", "bshd", "nan-moat"])
@pytest.mark.parametrize("n_cols, parts", DIMS, ids=str)
@pytest.mark.parametrize("n_rows", [16, 21])
def test_load_pieces(n_rows, n_cols, parts, layout, device):
    """The same rows as in one tile; 0 behind the last row and the last column, whatever lies there."""
    t = LAYOUTS[layout](numbered(2, 3, n_rows, n_cols).to(device))
    width = sum(n for _, n in parts)
    for batch, head, start in ((0, 0, 0), (1, 2, 16)):
        out = torch.full((ROWS, width), math.nan, device=device)
        _pieces[(1,)](view(t), None, out, batch, head, start, n_rows, Config(), constant(parts), n_cols, ROWS, width,
                      True, False)  # fmt: skip
        expected = torch.zeros(ROWS, width)
        rows = t[batch, head, start : start + ROWS].cpu()
        expected[: len(rows), :n_cols] = rows
        assert torch.equal(out.cpu(), expected)


def test_load_pieces_of_whole_rows_without_check(device):
    t = moat(numbered(1, 2, 2 * ROWS, 40).to(device), 0, 0, ROWS, 8)
    out = torch.full((ROWS, 48), math.nan, device=device)
    _pieces[(1,)](view(t), None, out, 0, 1, ROWS, 2 * ROWS, Config(tl.constexpr(True)), constant(DIMS[1][1]), 40, ROWS,
                  48, False, False)  # fmt: skip
    assert torch.equal(out.cpu(), torch.nn.functional.pad(t[0, 1, ROWS:].cpu(), (0, 8)))


@pytest.mark.parametrize("n_rows", [16, 21])
@pytest.mark.parametrize("n_cols", [40, 48])
def test_load_described_pieces(n_cols, n_rows, device):
    """A descriptor for each piece; the second begins in the middle of a row."""
    t = moat(numbered(2, 3, n_rows, n_cols, dtype=torch.float16).to(device), 1, 1, ROWS, 24)
    parts = ((0, 32), (32, 16))
    described = tuple(describe(t, ROWS, cols) for _, cols in parts)
    for batch, head, start in ((0, 0, 0), (1, 2, 16)):
        out = torch.full((ROWS, 48), math.nan, dtype=torch.float16, device=device)
        _pieces[(1,)](view(t), described, out, batch, head, start, n_rows, Config(), constant(parts), n_cols, ROWS, 48,
                      True, True)  # fmt: skip
        expected = torch.zeros(ROWS, 48, dtype=torch.float16)
        rows = t[batch, head, start : start + ROWS].cpu()
        expected[: len(rows), :n_cols] = rows
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("n_cols, parts", DIMS, ids=str)
def test_store_pieces_leaves_the_rest_alone(n_cols, parts, device):
    source = numbered(2, 3, 21, n_cols).to(device)
    target = moat(torch.full((2, 3, 21, n_cols), -5.0, device=device), 1, 1, ROWS, 24)
    for start in (0, 16):
        _store_pieces[(1,)](view(source), view(target), 1, 2, start, 21, Config(), constant(parts), n_cols, ROWS)
    expected = torch.full((2, 3, 21, n_cols), -5.0)
    expected[1, 2] = source[1, 2].cpu()
    assert torch.equal(target.cpu(), expected)
    assert target._base.isnan().sum() == target._base.numel() - target.numel()
