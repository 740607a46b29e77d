"""`kernels.sequences` against brute force: which program works on which sequence and rows, and nobody outside."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from lazymax.kernels import sequences
from lazymax.problem import Problem

WIDTH = 64
FIELDS = (*sequences.Span._fields, "tile")


@triton.jit
def _store(span, tile, out, at, WIDTH: tl.constexpr):
    zero = tl.zeros([WIDTH], tl.int32)
    for i in tl.static_range(9):
        tl.store(out + i * WIDTH + at, zero + span[i])
    tl.store(out + 9 * WIDTH + at, zero + tile)


@triton.jit
def _locate_packed(cu_q, cu_k, out, count, steps, total_q, total_k, first, last, BLOCK_M: tl.constexpr,
                   BOTTOM_RIGHT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """`locate` of WIDTH slots at once: it is element-wise, so that a vector of slots does what a scalar one would."""
    slots = tl.arange(0, WIDTH)
    lengths = sequences.Lengths(None, cu_q, cu_k, tl.zeros([WIDTH], tl.int32) + count, steps)
    span, tile = sequences.locate((slots, 0), total_q, total_k, first, last, lengths, BLOCK_M, BOTTOM_RIGHT)
    _store(span, tile, out, slots, WIDTH)


@triton.jit
def _locate(seqlens_k, out, q_len, kv_len, first, last, tile, BLOCK_M: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
            WIDTH: tl.constexpr):  # fmt: skip
    """`locate` of one tile of WIDTH batch elements; seqlens_k may be None."""
    batch = tl.arange(0, WIDTH)
    lengths = sequences.Lengths(seqlens_k, None, None, None, None)
    span, tile = sequences.locate((tile, batch), q_len, kv_len, first, last, lengths, BLOCK_M, BOTTOM_RIGHT)
    _store(span, tile, out, batch, WIDTH)


@dataclass(frozen=True)
class Packed:
    """Offsets of a packed call as the launcher has them."""

    q: list[int]
    k: list[int]
    total_q: int
    total_k: int
    block_m: int
    dtype: torch.dtype = torch.int32

    @property
    def count(self) -> int:
        return len(self.q) - 1

    @property
    def slots(self) -> int:
        """Of the grid; what `Problem.q_tiles` says for the same call."""
        rows, keys = (torch.zeros(1, 1, total, 8, device="meta") for total in (self.total_q, self.total_k))
        ends = torch.zeros(len(self.q), dtype=torch.int32, device="meta")
        return Problem.from_call(rows, keys, keys, cu_seqlens_q=ends, cu_seqlens_k=ends).q_tiles(self.block_m)

    def locate(self, device: str, bottom_right: bool = False, first: int = 0, last: int = 0) -> list[dict[str, int]]:
        """The span and the tile of every slot."""
        assert self.slots <= WIDTH
        out = torch.full((len(FIELDS), WIDTH), -777, dtype=torch.int32, device=device)
        cu_q, cu_k = (torch.tensor(ends, dtype=self.dtype, device=device) for ends in (self.q, self.k))
        _locate_packed[(1,)](
            cu_q, cu_k, out, self.count, self.count.bit_length(), self.total_q, self.total_k, first, last,
            self.block_m, bottom_right, WIDTH,
        )  # fmt: skip
        found = [dict(zip(FIELDS, column, strict=True)) for column in out.T.tolist()]
        return found[: self.slots]


def offsets(generator: random.Random, count: int, total: int, full: bool) -> list[int]:
    """Rising from 0, with empty sequences among them; up to `total`, or not as far."""
    ends = sorted(generator.choice((0, total, generator.randint(0, total))) for _ in range(count))
    if full and ends:
        ends[-1] = total
    return [0, *ends]


def random_packed(seed: int) -> Packed:
    generator = random.Random(seed)
    count, block_m = generator.choice((0, 1, 2, 3, 5, 8, 17)), generator.choice((1, 4, 16))
    total_q, total_k = generator.randint(0, 40 if block_m > 1 else 20), generator.randint(0, 50)
    dtype = generator.choice((torch.int32, torch.int64))
    q = offsets(generator, count, total_q, generator.random() < 0.5)
    return Packed(q, offsets(generator, count, total_k, generator.random() < 0.5), total_q, total_k, block_m, dtype)


CASES = {
    "B82: lengths 1, 64, 65": Packed([0, 1, 65, 130], [0, 1, 65, 130], 130, 130, 16),
    "no sequence": Packed([0], [0], 20, 7, 16),
    "no rows": Packed([0, 0, 0], [0, 3, 7], 0, 7, 16),
    "no keys": Packed([0, 5, 9], [0, 0, 0], 9, 0, 4),
    "one sequence": Packed([0, 33], [0, 7], 33, 7, 16, torch.int64),
    "one row each": Packed(list(range(21)), list(range(21)), 20, 20, 16),
    "every second one empty": Packed([0, 0, 16, 16, 32, 32], [0, 4, 4, 8, 8, 9], 32, 9, 16, torch.int64),
    "rows of no sequence": Packed([0, 5, 17], [0, 4, 9], 60, 30, 16),
    **{f"random {seed}": random_packed(seed) for seed in range(40)},
}


def check_cover(case: Packed, spans: list[dict[str, int]]) -> None:
    """Every row of every sequence, and every row behind the last, in exactly one place."""
    seen: dict[tuple[int, int], int] = {}
    for span in spans:
        for row in range(span["tile"] * case.block_m, min((span["tile"] + 1) * case.block_m, span["q_len"])):
            key = (span["batch"], row)
            seen[key] = seen.get(key, 0) + 1
    lengths = [stop - start for start, stop in zip(case.q, [*case.q[1:], case.total_q], strict=True)]
    assert seen == {(i, row): 1 for i, length in enumerate(lengths) for row in range(length)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_row_is_in_one_tile_of_its_own_sequence(case: Packed, device: str) -> None:
    for bottom_right in (False, True):
        spans = case.locate(device, bottom_right, -3, 2)
        check_cover(case, spans)
        ends_q, ends_k = [*case.q, case.total_q], [*case.k, case.k[-1]]
        for span in spans:
            i = span["batch"]
            q_len, kv_len = ends_q[i + 1] - ends_q[i], ends_k[i + 1] - ends_k[i]  # of the last one: no keys
            inside = span["tile"] * case.block_m < q_len
            assert span["tile"] >= 0 and span["slab"] == 0
            assert (span["q_row"], span["q_len"]) == (ends_q[i], q_len)
            assert span["kv_len"] == (kv_len if inside else 0), "a slot too many has no keys"
            assert span["k_row"] == ends_k[i] or span["kv_len"] == 0
            shift = kv_len - q_len if bottom_right else 0
            assert span["shift"] == shift
            assert (span["first_offset"], span["last_offset"]) == (shift - 3, shift + 2)


BAD = {
    "falling": [0, 30, 10, 40],
    "falling to 0": [0, 40, 0, 0],
    "all negative": [-5, -4, -3, -2],
    "not from 0": [35, 36, 38, 40],
    "beyond the rows": [0, 50, 60, 70],
    "beyond 32 bits": [0, 2**40, -(2**40), 2**62],
    "up and down": [7, 39, 3, 25, 1, 40, 0, 12],
}


def check_inside(case: Packed, spans: list[dict[str, int]]) -> None:
    for span in spans:
        start = span["q_row"] + span["tile"] * case.block_m
        stop = min(start + case.block_m, span["q_row"] + span["q_len"])
        assert start >= 0 and stop <= case.total_q, span
        assert span["k_row"] >= 0 and span["kv_len"] >= 0 and span["k_row"] + span["kv_len"] <= case.total_k, span


@pytest.mark.parametrize("which", ["q", "k", "both"])
@pytest.mark.parametrize("name", BAD)
def test_wrong_offsets_stay_inside_the_tensors(name: str, which: str, device: str) -> None:
    """Whose rows they are nobody can say; that they are rows of the tensors must hold."""
    bad, good = BAD[name], [min(40, 6 * i) for i in range(len(BAD[name]))]
    for block_m in (4, 16):
        ends = (bad if which != "k" else good, bad if which != "q" else good)
        case = Packed(*ends, 40, 40, block_m, torch.int64)
        check_inside(case, case.locate(device))


def test_random_offsets_stay_inside_the_tensors(device: str) -> None:
    generator = random.Random(5)
    for _ in range(60):
        count = generator.randint(1, 9)
        ends = [[generator.randint(-20, 60) for _ in range(count + 1)] for _ in "qk"]
        case = Packed(*ends, 40, 33, generator.choice((4, 16)))
        check_inside(case, case.locate(device, generator.random() < 0.5))


@dataclass(frozen=True)
class Padded:
    id: str
    lengths: list[int] | None  # of the keys, one per batch element
    dtype: torch.dtype = torch.int32


PADDED = (
    Padded("all alike", None),
    Padded("lengths", [0, 1, 7, 20]),
    Padded("lengths in int64", [20, 3, 0, 9], torch.int64),
    Padded("negative and beyond", [-3, 99, 20, 21]),
    Padded("beyond 32 bits", [2**40, -(2**40), 5, 2**31], torch.int64),
)


@pytest.mark.parametrize("bottom_right", [False, True], ids=["top-left", "bottom-right"])
@pytest.mark.parametrize("case", PADDED, ids=lambda case: case.id)
def test_batch_elements(case: Padded, bottom_right: bool, device: str) -> None:
    """Of 13 queries over 20 keys at most, in tiles of 4: each batch element its own keys and its own diagonal."""
    own = ([20] * 4 if case.lengths is None else case.lengths) * (WIDTH // 4)
    lengths: Any = None if case.lengths is None else torch.tensor(own, dtype=case.dtype, device=device)
    for tile in (0, 3):
        out = torch.full((len(FIELDS), WIDTH), -777, dtype=torch.int32, device=device)
        _locate[(1,)](lengths, out, 13, 20, -2, 1, tile, 4, bottom_right, WIDTH)
        for batch, column in enumerate(out.T.tolist()):
            span = dict(zip(FIELDS, column, strict=True))
            kv_len = min(max(own[batch], 0), 20)
            shift = kv_len - 13 if bottom_right else 0
            # What all batch elements share the host has added already.
            added = shift if case.lengths is not None else 0
            assert span == dict(
                batch=batch, slab=batch, q_row=0, k_row=0, q_len=13, kv_len=kv_len, first_offset=added - 2,
                last_offset=added + 1, shift=shift, tile=tile,
            )  # fmt: skip
