"""`kernels.masking.keep` and its torch twin `reference.keep` are one predicate."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from lazymax import reference
from lazymax.kernels import masking

ROWS, COLS = 32, 16


@triton.jit
def _keep(out, row, col, kv_len, first, last, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, ROWS: tl.constexpr,
          COLS: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    inside = masking.keep(row + rows, col + cols, kv_len, first, last, HAS_FIRST, HAS_LAST, TURNED)
    if TURNED:
        inside = inside.T
    tl.store(out + rows[:, None] * COLS + cols[None, :], inside.to(tl.int8))


@pytest.mark.parametrize("first", [None, -40, -3, 0, 7])
@pytest.mark.parametrize("last", [None, -40, -3, 0, 7, 40])
@pytest.mark.parametrize("kv_len", [1, 16, 21, 64])
@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
def test_keep_equals_reference(turned, kv_len, first, last, device):
    """Tile by tile, also tiles that begin past the last key."""
    for row, col in itertools.product((0, ROWS), (0, COLS, 4 * COLS)):
        out = torch.full((ROWS, COLS), -1, dtype=torch.int8, device=device)
        _keep[(1,)](
            out, row, col, kv_len, first or 0, last or 0, first is not None, last is not None, ROWS, COLS, turned
        )
        expected = torch.zeros(ROWS, 5 * COLS, dtype=torch.bool)  # keys past kv_len never count
        expected[:, :kv_len] = reference.keep(torch.arange(row, row + ROWS), kv_len, first, last)
        assert torch.equal(out.cpu(), expected[:, col : col + COLS].to(torch.int8)), (row, col)


@pytest.mark.parametrize("first", [None, -2, 0, 3])
@pytest.mark.parametrize("last", [None, -2, 0, 3])
def test_reference_keep_in_words(first, last):
    """The twin itself, against the sentence of the docstring: i + first <= j <= i + last, both inclusive."""
    got = reference.keep(torch.arange(2, 8), 9, first, last)
    for i, j in itertools.product(range(6), range(9)):
        low = -99 if first is None else 2 + i + first
        high = 99 if last is None else 2 + i + last
        assert got[i, j].item() == (low <= j <= high), (i, j)
