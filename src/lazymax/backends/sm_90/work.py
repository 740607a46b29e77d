"""How much work the tiles of `forward.py` are, and how a problem with few of them is divided. Pure Python.

Where queries are few, most rows of a tile are empty and most multiprocessors idle. The first is cured by packing: the
heads of a group, which see the same keys, share a tile. The second by splitting: several CTAs take a tile, each some of
its keys, and a second kernel joins what they found.
"""

import functools
import heapq
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...problem import Problem

if TYPE_CHECKING:
    from .rows import HopperTile

TILE_COST = 1.0  # of what a tile costs beside its key blocks, in key blocks: at head dim 64 1,800 cycles, see the notes
MOST_HEADS = 64  # in a tile: a row of each for every consumer
PACK_GAIN = 0.75  # at most so many tiles of those there were must be left
FULL = 0.8  # tiles for each multiprocessor from which on keys are not split
MOST_SPLITS = 16
MANY = 16  # tiles for each multiprocessor, from which on they count as dealt equally
LEAST_KEYS = 512  # of a split. From two key blocks on, its rows see a key in it if they see one at all
# What the number of splits is chosen by, beside a row's block_time, microseconds of an H200: to 10% of what was
# measured where products bind, a third too little where memory does; the number was the best in all of ten cases
# (docs/notes/sm_90.md).
SPLIT_TIME = 3.5  # until its first product, and from its last
MERGE_TIME = 2.5  # launch and latency of the second kernel
MERGE_BYTES = 3e6  # a microsecond, written and read


class Division(NamedTuple):
    """How a problem is divided over CTAs."""

    heads: int = 1  # in a tile: 1, or the power of two that holds a group
    splits: int = 1  # of the keys of the tile that has most of them


WHOLE = Division()


def queries(tile: "HopperTile", heads: int) -> int:
    """Of a tile, as many for each of its heads."""
    return tile.block_m // heads


def key_range(first_row: int, problem: Problem, tile: "HopperTile", heads: int = 1) -> tuple[int, int]:
    """Key blocks [first, stop) that a tile visits; the twin of `bounds.key_blocks`."""
    p, first, end = problem, 0, _keys_before(first_row + queries(tile, heads), problem)
    if p.first_offset is not None:
        first = min(max(first_row + p.first_offset, 0), end) // tile.block_n
    return first, max(-(-end // tile.block_n), first + 1)


def key_blocks(first_row: int, problem: Problem, tile: "HopperTile", heads: int = 1) -> int:
    """How many."""
    first, stop = key_range(first_row, problem, tile, heads)
    return stop - first


def cost(first_row: int, problem: Problem, tile: "HopperTile", heads: int = 1) -> float:
    """Of a tile, in key blocks. Those that some consumers leave out take less time, though not in proportion."""
    visits = key_blocks(first_row, problem, tile, heads)
    if not tile.skip:
        return visits
    rows, own_rows = queries(tile, heads), 64 // heads
    stop = -(-_keys_before(first_row + rows, problem) // tile.block_n)
    own = 0
    for row in range(first_row, first_row + rows, own_rows):
        inside = row < problem.q_len
        left_out = stop - -(-_keys_before(row + own_rows, problem) // tile.block_n) if inside else visits
        own += visits - max(0, min(left_out, visits - 1))
    return round(0.4 * visits + 0.6 * own / tile.warpgroups, 2)


def _keys_before(stop_row: int, problem: Problem) -> int:
    """The end of the keys that the rows before stop_row see."""
    p = problem
    return p.kv_len if p.last_offset is None else min(p.kv_len, max(min(stop_row, p.q_len) + p.last_offset, 0))


def deal(costs: Sequence[float], ctas: int) -> tuple[list[list[int]], float]:
    """In their order, each to the CTA with the least to do so far: the indices that each CTA takes, the largest sum."""
    given: list[list[int]] = [[] for _ in range(ctas)]
    load = [(0.0, cta) for cta in range(ctas)]
    for index, own in enumerate(costs):
        busy, cta = load[0]
        given[cta].append(index)
        heapq.heapreplace(load, (busy + own, cta))
    return given, max(busy for busy, _ in load)


def first_heads(problem: Problem, heads: int) -> range:
    """The first head of every tile, counted over the batch."""
    return range(0, problem.batch * problem.q_heads, problem.group if heads > 1 else 1)


def splits_of(problem: Problem, tile: "HopperTile", division: Division) -> list[list[tuple[int, int]]]:
    """For each row block, the key blocks [begin, end) of its splits: as equal as can be, about as many blocks in those
    of any row block."""
    ranges = [key_range(row, problem, tile, division.heads) for row in _first_rows(problem, tile, division.heads)]
    longest = max(stop - first for first, stop in ranges)
    size, least = -(-longest // division.splits), -(-LEAST_KEYS // tile.block_n)
    found = []
    for first, stop in ranges:
        blocks = stop - first
        count = max(1, min(-(-blocks // size), blocks // least))
        ends = [first + blocks * i // count for i in range(count + 1)]
        found.append(list(itertools.pairwise(ends)))
    return found


def programs(problem: Problem, tile: "HopperTile", division: Division) -> int:
    """Tiles, or splits of them."""
    if problem.ragged:
        return problem.q_tiles(tile.block_m) * problem.q_heads
    return sum(map(len, splits_of(problem, tile, division))) * len(first_heads(problem, division.heads))


@functools.lru_cache(maxsize=4096)
def divide(problem: Problem, tile: "HopperTile", multiprocessors: int) -> Division:
    """The division that a row makes."""
    p = problem
    if p.ragged:  # lengths are known on the device only
        return WHOLE
    whole = Division(_heads(p, tile))
    tiles = _tiles(p, tile, whole.heads)
    if not tile.split or tiles >= FULL * multiprocessors:
        return whole
    best, least = whole, _time(p, tile, whole, multiprocessors)
    for most in range(2, MOST_SPLITS + 1):
        tried = Division(whole.heads, most)
        splits = max(map(len, splits_of(p, tile, tried)))
        if splits == most and (time := _time(p, tile, tried, multiprocessors)) < least:
            best, least = tried, time
    return best


def duration(problem: Problem, tile: "HopperTile", multiprocessors: int) -> float:
    """An estimate of all tiles, undivided, in microseconds. Ragged problems count as if all were as long as the
    longest, for lengths are known on the device only."""
    p = problem
    if p.ragged:
        each, times = [-(-p.kv_len // tile.block_n) + TILE_COST], p.q_tiles(tile.block_m) * p.q_heads
    else:
        each = sorted((cost(row, p, tile) + TILE_COST for row in _first_rows(p, tile, 1)), reverse=True)
        times = len(first_heads(p, 1))
    if len(each) * times > MANY * multiprocessors:
        return tile.block_time * sum(each) * times / multiprocessors
    return tile.block_time * deal([own for own in each for _ in range(times)], multiprocessors)[1]


def _heads(p: Problem, tile: "HopperTile") -> int:
    heads = 1 << (p.group - 1).bit_length()
    if not tile.pack_gqa or heads > MOST_HEADS or _tiles(p, tile, heads) > PACK_GAIN * _tiles(p, tile, 1):
        return 1
    return heads


def _first_rows(p: Problem, tile: "HopperTile", heads: int) -> range:
    return range(0, p.q_len, queries(tile, heads))


def _tiles(p: Problem, tile: "HopperTile", heads: int) -> int:
    return len(_first_rows(p, tile, heads)) * len(first_heads(p, heads))


def _time(p: Problem, tile: "HopperTile", division: Division, multiprocessors: int) -> float:
    """An estimate, in microseconds."""
    blocks = sorted((end - begin for of in splits_of(p, tile, division) for begin, end in of), reverse=True)
    each = len(first_heads(p, division.heads))
    _, time = deal([SPLIT_TIME + tile.block_time * n for n in blocks for _ in range(each)], multiprocessors)
    if division.splits > 1:
        parts = sum(map(len, splits_of(p, tile, division))) / len(_first_rows(p, tile, division.heads))
        moved = 2.0 * parts * p.batch * p.q_heads * p.q_len * p.v_head_dim * 4
        time += MERGE_TIME + moved / MERGE_BYTES
    return time
