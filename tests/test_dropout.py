"""`kernels.dropout.keep`, its torch twin and Philox itself: bit for bit, whatever the tiles."""

import itertools
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from by_hand import philox_by_hand

from lazymax import dropout as twin
from lazymax.kernels import dropout
from lazymax.testing import dropout_keep

SEEDS = (0, 1, -1, 2**31, 2**32 + 5, 2**62 + 17, -(2**63), 2**63 - 1)


@triton.jit
def _keep(out, seed, batch, head, first_row, first_col, dropout_p, ROWS: tl.constexpr, COLS: tl.constexpr):
    kept = dropout.keep(seed, batch, head, first_row, first_col, dropout_p, ROWS, COLS)
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out + at, kept.to(tl.int8))


@triton.jit
def _words(out, seed, c0, c1, c2, c3):
    zero = tl.zeros([1], tl.int32)
    a, b, c, d = tl.philox(tl.load(seed), zero + c0, zero + c1, zero + c2, zero + c3)
    at = out + tl.arange(0, 1)
    tl.store(at, a.to(tl.uint32).to(tl.int64))
    tl.store(at + 1, b.to(tl.uint32).to(tl.int64))
    tl.store(at + 2, c.to(tl.uint32).to(tl.int64))
    tl.store(at + 3, d.to(tl.uint32).to(tl.int64))


def keep(
    seed: int, batch: int, head: int, row: int, col: int, p: float, rows: int, cols: int, device: str
) -> torch.Tensor:
    out = torch.full((rows, cols), -1, dtype=torch.int8, device=device)
    _keep[(1,)](out, twin.seed_tensor(seed, device), batch, head, row, col, p, rows, cols)
    assert ((out == 0) | (out == 1)).all()
    return out.cpu() == 1


def expected(seed: int, batch: int, head: int, row: int, col: int, p: float, rows: int, cols: int) -> torch.Tensor:
    """Number by number, in Python's integers."""
    limit = torch.tensor(p, dtype=torch.float32).item()
    key = [seed % 2**32, seed // 2**32 % 2**32]
    words = [
        [philox_by_hand([(col + j) // 4, row + i, head, batch], key)[j % 4] for j in range(cols)] for i in range(rows)
    ]
    return torch.tensor([[(word >> 8) / 2**24 >= limit for word in line] for line in words])


@dataclass(frozen=True)
class Case:
    """A tile: where it begins and how large it is."""

    batch: int
    head: int
    row: int
    col: int
    rows: int = 16
    cols: int = 32


TILES = (
    Case(0, 0, 0, 0),
    Case(3, 7, 16, 32),
    Case(0, 1, 5, 64, 32, 16),
    Case(1, 0, 128, 0, 16, 64),
    Case(2, 31, 1, 4, 64, 16),
    Case(65534, 127, 1_000_000, 4_000_000),
    Case(0, 0, 2**31 - 64, 2**31 - 64),
)


@pytest.mark.parametrize("case, seed", list(zip(TILES, SEEDS, strict=False)), ids=str)
def test_a_tile_is_what_philox_says(case: Case, seed: int, device: str) -> None:
    place = (case.batch, case.head, case.row, case.col)
    got = keep(seed, *place, 0.4, case.rows, case.cols, device)
    assert torch.equal(got, expected(seed, *place, 0.4, case.rows, case.cols))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", TILES[:5], ids=str)
def test_a_tile_is_its_part_of_the_whole(case: Case, seed: int, device: str) -> None:
    rows, cols = slice(case.row, case.row + case.rows), slice(case.col, case.col + case.cols)
    whole = dropout_keep(seed, case.batch + 1, case.head + 1, rows.stop, cols.stop, 0.1)
    got = keep(seed, case.batch, case.head, case.row, case.col, 0.1, case.rows, case.cols, device)
    assert torch.equal(got, whole[case.batch, case.head, rows, cols])


@pytest.mark.parametrize("rows, cols", [(16, 16), (16, 64), (64, 16), (32, 32)], ids=str)
def test_the_shape_of_the_tiles_does_not_matter(rows: int, cols: int, device: str) -> None:
    """A head of 64 queries and 64 keys, put together from tiles, is what `testing.dropout_keep` shows of it."""
    parts = [
        torch.cat([keep(7, 1, 2, row, col, 0.3, rows, cols, device) for col in range(0, 64, cols)], 1)
        for row in range(0, 64, rows)
    ]
    assert torch.equal(torch.cat(parts), dropout_keep(7, 2, 3, 64, 64, 0.3)[1, 2])


# Salmon et al., Random123, kat_vectors: philox4x32-10 (counter, key -> words).
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)  # fmt: skip


@pytest.mark.parametrize("counter, key, want", KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...], device: str) -> None:
    assert tuple(philox_by_hand(list(counter), list(key))) == want
    words = twin.philox(*(torch.tensor(n) for n in (*counter, *key)))
    assert tuple(int(word) for word in words) == want
    out = torch.zeros(4, dtype=torch.int64, device=device)
    signed = [n - 2**32 if n >= 2**31 else n for n in counter]
    _words[(1,)](out, twin.seed_tensor(key[0] + (key[1] << 32), device), *signed)
    assert tuple(word % 2**32 for word in out.tolist()) == want


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.9, 1.0])
def test_how_many_are_kept(p: float) -> None:
    """Within 5 standard deviations; none dropped at 0, all at 1."""
    kept = dropout_keep(11, 2, 4, 128, 512, p)
    n = kept.numel()
    assert abs(kept.sum().item() - n * (1 - p)) <= 5 * (n * p * (1 - p)) ** 0.5
    if p in (0.0, 1.0):
        assert (kept == (p == 0.0)).all()


def test_what_is_dropped_depends_on_every_coordinate_and_on_the_seed() -> None:
    """Any two of batch elements, heads, queries, keys or seeds agree as often as chance has it: half of 4096."""
    kept = dropout_keep(3, 2, 2, 64, 64, 0.5)
    other = dropout_keep(4, 2, 2, 64, 64, 0.5)
    high = dropout_keep(3 + 2**32, 2, 2, 64, 64, 0.5)
    pairs = {
        "batch": (kept[0, 0], kept[1, 0]),
        "head": (kept[0, 0], kept[0, 1]),
        "query": (kept[0, 0, 1:], kept[0, 0, :-1]),
        "key": (kept[0, 0, :, 1:], kept[0, 0, :, :-1]),
        "key, four further": (kept[0, 0, :, 4:], kept[0, 0, :, :-4]),
        "query and key exchanged": (kept[0, 0], kept[0, 0].T),
        "seed": (kept[0, 0], other[0, 0]),
        "upper half of the seed": (kept[0, 0], high[0, 0]),
    }
    for name, (x, y) in pairs.items():
        share = (x == y).float().mean().item()
        assert abs(share - 0.5) <= 5 * 0.5 / x.numel() ** 0.5, f"{name}: {share}"


def test_more_is_dropped_as_p_grows() -> None:
    """One random number per position: what a smaller p drops, a larger one drops too."""
    kept = [dropout_keep(5, 1, 1, 32, 64, p) for p in (0.1, 0.3, 0.8)]
    assert all((x >= y).all() for x, y in itertools.pairwise(kept))


def test_lengths_off_the_groups_of_four() -> None:
    whole = dropout_keep(5, 1, 2, 9, 33, 0.5)
    for kv_len in (0, 1, 3, 4, 5, 32):
        assert torch.equal(dropout_keep(5, 1, 2, 9, kv_len, 0.5), whole[..., :kv_len])


@pytest.mark.parametrize("seed", [*SEEDS, 2**64 - 1, 2**70 + 3], ids=str)
def test_seeds_of_any_size_are_their_lowest_64_bits(seed: int) -> None:
    t = twin.seed_tensor(seed, "cpu")
    assert t.dtype == torch.int64 and t.shape == (1,) and int(t) % 2**64 == seed % 2**64
    assert torch.equal(dropout_keep(seed, 1, 1, 4, 16, 0.5), dropout_keep(t, 1, 1, 4, 16, 0.5))


def test_a_seed_tensor_of_another_dtype_is_cast() -> None:
    for given in (torch.tensor(7, dtype=torch.int32), torch.tensor([7]), torch.tensor([[7]])):
        assert twin.seed_tensor(given, "cpu").tolist() == [7]
