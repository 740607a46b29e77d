"""From a problem and a row to the arguments of this backend's kernel, for a launch or a compile without a GPU."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...compat.tritons import release
from ...extras import NO_EXTRAS, Extras
from ...kernels.launch import (
    LOG2E,
    constant,
    lengths_of,
    per_head,
    pieces,
    plain,
    plain_views,
    positive_scale,
    rebased,
    rebaser,
    run,
    start,
    view_strides,
    views,
)
from ...kernels.memory import View
from ...kernels.tma import describe, described, multiprocessors
from ...problem import Problem, default_threshold
from .kernels.forward import Config, Modifiers, attention_forward
from .kernels.layouts import out_width, query_box, width
from .kernels.merge import ROWS, merge
from .kernels.schedule import CHUNK, arrange
from .rows import HopperTile
from .work import TILE_COST, WHOLE, Division, cost, deal, first_heads, queries, splits_of

USUAL = "sm_90"  # whose card's multiprocessors count where there is none
LEAST_TAIL = 32  # columns: a swizzle of 64 bytes
L2_BUDGET = 24 << 20  # bytes of K and V that heads worked on side by side may have; the L2 has 50 MB


@functools.lru_cache(maxsize=64)
def schedule(
    costs: tuple[float, ...], heads: range, side_by_side: int, ctas: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    """(rounds, CTAs) int32: the tile that each CTA takes in each round, head << 16 | row block, -1 for none; and the
    `first_lap` of it.

    costs: key blocks of each row block. heads: of every tile the first. They go in groups of `side_by_side`, whose K
    and V stay in the L2; in a group the longest row blocks come first, each to the CTA with the least to do so far. The
    short ones of the last groups come after all others, and make equal what is left of every CTA at the end: up to 15%
    at head dim 256. One group of all heads lost 20% at 1024 keys; a round-robin of unequal tiles, which beats against
    the number of CTAs, took up to 1.7 times as long.
    """
    blocks = sorted(range(len(costs)), key=lambda block: -costs[block])
    long = [block for block in blocks if costs[block] > max(costs) / 2]
    short, groups = blocks[len(long) :], torch.split(torch.tensor(heads, dtype=torch.int32), side_by_side)
    held_back = _enough(groups, sum(costs[block] for block in short), max(costs) * ctas / 2)
    turns = [(blocks, group) for group in groups[:-held_back]] + [(long, group) for group in groups[-held_back:]]
    turns.append((short, torch.cat(groups[-held_back:])))
    order = torch.cat([(torch.tensor(of, dtype=torch.int32)[:, None] | group << 16).flatten() for of, group in turns])
    if len(set(costs)) == 1 or len(order) <= ctas:
        rounds = -(-len(order) // ctas)
        table = torch.nn.functional.pad(order, (0, rounds * ctas - len(order)), value=-1).view(rounds, ctas)
    else:
        table = _dealt([costs[code & 0xFFFF] + TILE_COST for code in order.tolist()], ctas, order, order.new_tensor(-1))
    return table.to(device), first_lap(table[0], heads, side_by_side, len(costs))


def first_lap(tiles: torch.Tensor, heads: range, side_by_side: int, blocks: int) -> int:
    """How the kernel may compute the first tile of each CTA instead of looking it up: CTA n takes head n %
    side_by_side of `heads`, and row block n / side_by_side, if positive; counted from the last, if negative. 0: the
    schedule has another order."""
    cta = torch.arange(len(tiles), dtype=torch.int32)
    head, rank = cta % side_by_side * heads.step, cta // side_by_side
    for sign, block in ((1, rank), (-1, blocks - 1 - rank)):
        if torch.equal(tiles, head << 16 | block):
            return sign * side_by_side
    return 0


def _enough(groups: tuple[torch.Tensor, ...], each: float, total: float) -> int:
    """How many groups, at least one, hold `total` work, if each of their heads has `each`; all, if these do not."""
    found = 0.0
    for count, group in enumerate(reversed(groups), 1):
        found += each * len(group)
        if found >= total:
            return count
    return len(groups)


def _dealt(costs: list[float], ctas: int, records: torch.Tensor, none: torch.Tensor) -> torch.Tensor:
    """(rounds, CTAs, ...): records, each of a cost and longest first, dealt to the CTAs; `none` fills the gaps."""
    given, _ = deal(costs, ctas)
    rounds = max(map(len, given))
    places = torch.tensor([indices + [-1] * (rounds - len(indices)) for indices in given])
    return torch.cat([records, none[None]])[places].transpose(0, 1).contiguous()


@functools.lru_cache(maxsize=64)
def split_schedule(
    problem: Problem, tile: HopperTile, division: Division, ctas: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rounds, CTAs, 4) int32 records: tile as in `schedule`, split * batch, first key, end of the keys; and (row
    blocks,) int32, how many splits each has. The longest come first. With so few tiles nothing is gained by an order of
    heads: all are worked on at once."""
    by_block = splits_of(problem, tile, division)
    splits = [(block, split, *keys) for block, of in enumerate(by_block) for split, keys in enumerate(of)]
    splits.sort(key=lambda record: record[2] - record[3])
    records, costs = [], []
    for block, split, begin, end in splits:
        for head in first_heads(problem, division.heads):
            keys = begin * tile.block_n, min(end * tile.block_n, problem.kv_len)
            records.append((head << 16 | block, split * problem.batch, *keys))
            costs.append(end - begin + TILE_COST)
    none = torch.tensor([-1, 0, 0, 0], dtype=torch.int32)
    table = _dealt(costs, min(len(records), ctas), torch.tensor(records, dtype=torch.int32), none)
    return table.to(device), torch.tensor([len(of) for of in by_block], dtype=torch.int32, device=device)


def keeps_queries() -> bool:
    """Whether Q stays in registers. Triton 3.9.0 copies a left operand in registers before every product, so that Q
    takes them twice: 39 moves more in the loop at head dim 128, and 8 to 16 bytes of spills. 3.7 and 3.8 not tried."""
    return release(triton.__version__) < (3, 7)


def describe_rows(t: torch.Tensor, problem: Problem, config: Config, cols: int) -> TensorDescriptor:
    """Of Q or O, with the rows of a consumer as blocks: of one head, or of a group of heads in a view with five
    dimensions. There is no row past the group, nor past the last query: such rows read as 0 and are not stored."""
    if config.HEADS.value == 1:
        return describe(t, 64, cols)
    shape = [t.shape[0], problem.kv_heads, problem.group, *t.shape[2:]]
    steps = t.stride(0), t.stride(1) * problem.group, t.stride(1), t.stride(2)
    return described(t, shape, steps, query_box(config.HEADS.value, cols))


@dataclass(slots=True)
class HopperLaunch:
    """The kernel, ready for every call with the same problem on one device; see `kernels.launch.ForwardLaunch`."""

    kernel: ClassVar[Any] = attention_forward
    problem: Problem
    tile: HopperTile
    config: Config
    options: dict[str, Any]
    ctas: int | None = None  # at most, side by side; None: one for each multiprocessor
    division: Division = WHOLE
    numbers: tuple[Any, ...] | None = None  # see `_numbers`; not of ragged problems
    counts: torch.Tensor | None = None  # of splits, see `split_schedule`
    side_by_side: int | None = None  # CTAs of a call
    heads_together: int | None = None  # at most, see `schedule`
    strides: tuple[tuple[int, ...], ...] | None = None  # of the views of q, k, v, out
    descriptors: tuple[TensorDescriptor | None, ...] | None = None  # of the first call's tensors, see `_describe`
    binary: Callable[..., None] | None = None
    bare: tuple[tuple[Any, ...], Any] | None = None  # for the binary: what makes its descriptors, and the config
    arranging: Callable[..., None] | None = None  # binary of `arrange`
    merging: Callable[..., None] | None = None  # binary of `merge`

    @classmethod
    def of_forward(cls, problem: Problem, tile: HopperTile, division: Division = WHOLE) -> "HopperLaunch":
        p, split = problem, division.splits > 1
        widths = [columns for _, columns in pieces(p.head_dim, 64, LEAST_TAIL)] + [0]
        assert not p.ragged or division == WHOLE
        assert not (tile.ascending and tile.skip)
        assert tile.warpgroups in (2, 3) and tile.num_stages & (tile.num_stages - 1) == 0
        config = Config(
            BLOCK_N=tile.block_n,
            WARPGROUPS=tile.warpgroups,
            SLOTS=tile.num_stages,
            D=p.head_dim,
            D_MAIN=widths[0],
            D_TAIL=widths[1],
            D_V=p.v_head_dim,
            HAS_FIRST=p.first_offset is not None,
            HAS_LAST=p.last_offset is not None,
            RAGGED=p.ragged,
            PACKED=p.packed is not None,
            BOTTOM_RIGHT=p.align == "bottom_right",
            HEADS=division.heads,
            SPLIT=split,
            NEGATE=p.scale < 0,
            SOFTCAP=p.softcap > 0,
            SINKS=p.sinks and not split,  # else they count once, in `merge`
            STORE_LSE=p.return_lse or split,
            ASCENDING=tile.ascending and problem.last_offset is not None,
            KEYS_FIRST=tile.keys_first,
            TURNS=tile.turns,
            # The sums raise a pivot lazily, whatever the threshold is; fp16 has not the range for it.
            BY_SUM=p.dtype == "bfloat16" and p.rescale_threshold == default_threshold(None),
            SKIP=tile.skip,
            QUERY_TILES=tile.query_tiles,
            QUERY_REGISTERS=tile.query_registers and keeps_queries() and not p.softcap,  # which needs the registers
            REGISTERS=tile.max_registers,
        )
        # Triton's default for fusion flips in 3.10; the fused exponent wants it.
        options = dict(num_warps=tile.num_warps, enable_fp_fusion=True)
        return cls(p, tile, constant(config), options, division=division)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Known once the first arguments are."""
        assert self.side_by_side is not None
        return self.side_by_side, 1, 1

    def _heads_together(self, heads: int) -> int:
        """Of `heads`, those worked on side by side."""
        p = self.problem
        bytes_of_head = p.kv_len * (p.head_dim + p.v_head_dim) * 2 // p.group
        return max(1, min(heads, self.heads_together or heads, L2_BUDGET // max(1, bytes_of_head)))

    def _schedule(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """The table and its `first_lap`."""
        p, tile, packed = self.problem, self.tile, self.division.heads
        ctas = self.ctas or multiprocessors(USUAL, device)
        if self.division.splits > 1:
            table, self.counts = split_schedule(p, tile, self.division, ctas, device)
            return table, 0
        costs = tuple(cost(row, p, tile, packed) for row in range(0, p.q_len, queries(tile, packed)))
        heads = first_heads(p, packed)
        tiles, together = len(costs) * len(heads), len(heads)
        if tiles > ctas:
            together = max(1, self._heads_together(p.batch * p.q_heads) // heads.step)
        return schedule(costs, heads, together, min(tiles, ctas), device)

    def _arrange(self, extras: Extras, device: torch.device) -> torch.Tensor:
        """The schedule of a ragged problem, made on the device in every call."""
        p, tile, config = self.problem, self.tile, self.config
        slots = p.q_tiles(tile.block_m)
        tiles = slots * p.q_heads
        ctas = min(tiles, self.ctas or multiprocessors(USUAL, device))
        rounds = -(-tiles // ctas)
        table = torch.empty(rounds, ctas, 8, dtype=torch.int32, device=device)
        if device.type != "meta":
            band = (p.first_offset or 0, p.last_offset or 0)
            arguments = (
                table, slots, p.slots(tile.block_m), p.q_heads, self._heads_together(p.q_heads), ctas, rounds * ctas,
                *(p.packed or (p.q_len, p.kv_len)), *band, lengths_of(p, extras), tile.block_m, tile.block_n,
                config.HAS_FIRST, config.HAS_LAST, config.BOTTOM_RIGHT,
            )  # fmt: skip
            self.arranging = run(arrange, (-(-slots // CHUNK.value), 1, 1), self.arranging, arguments)
        return table

    def arguments(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Any, ...]:
        """Positional arguments of the kernel; the first call makes the schedule, of ragged problems every call. Where
        keys are split, what the splits are stored in takes the place of out and lse."""
        p = self.problem
        if self.division.splits > 1:
            slabs = self.division.splits * p.batch
            out = torch.empty(slabs, *out.shape[1:], dtype=torch.float32, device=q.device)
            lse = torch.empty(slabs, *out.shape[1:3], dtype=torch.float32, device=q.device)
        tensors = (q, k, v, out)
        if self.strides is None or self.descriptors is None:
            self.strides, self.descriptors = tuple(view_strides(t) for t in tensors), self._describe(*tensors)
        numbers = self.numbers
        if numbers is None:
            table, lap = (self._arrange(extras, q.device), 0) if p.ragged else self._schedule(q.device)
            self.side_by_side, numbers = table.shape[1], self._numbers(table, lap)
            if not p.ragged:  # the table of a ragged call is its own: calls may come from several threads
                self.numbers = numbers
        sources = (*tensors, q, k)
        if self.binary is None or self.division.splits > 1:  # which keeps its tensors for `merge`
            tiles = [of and rebased(of, t) for of, t in zip(self.descriptors, sources, strict=True)]
            modifiers = self._modifiers(lse, extras)
            return *views(tensors, self.strides), lse, q.shape[2], *tiles, *numbers, modifiers, self.config
        if self.bare is None:
            self.bare = tuple(of and rebaser(of) for of in self.descriptors), plain(self.config)
        makers, config = self.bare
        tiles = [make and make(t) for make, t in zip(makers, sources, strict=True)]
        of_lse = lse.data_ptr()
        given = *tiles, *numbers, tuple(self._modifiers(of_lse, extras))
        return *plain_views(tensors, self.strides), of_lse, q.shape[2], *given, config

    def _numbers(self, table: torch.Tensor, lap: int) -> tuple[Any, ...]:
        """The arguments from the schedule on, as far as they are the same in every call."""
        p = self.problem
        return (
            table, table.shape[0], lap, LOG2E if p.softcap else positive_scale(p), p.rescale_threshold, p.q_len,
            p.kv_len, p.first_offset or 0, p.last_offset or 0, p.q_heads, p.group,
        )  # fmt: skip

    def _describe(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> tuple[TensorDescriptor | None, ...]:
        """Of q, k, v and out, and of the tails of q and k. Splits have none of out, most head dims no tail."""
        p, keys = self.problem, self.tile.block_n
        first, rest = self.config.D_MAIN.value, self.config.D_TAIL.value
        of_q, of_k = describe_rows(q, p, self.config, first), describe(k, keys, first)
        columns = out_width(p.head_dim, p.v_head_dim)
        of_out = describe_rows(out, p, self.config, columns) if self.division.splits == 1 else None
        tails = (describe_rows(q, p, self.config, rest), describe(k, keys, rest)) if rest else (None, None)
        return of_q, of_k, describe(v, keys, width(p.v_head_dim)), of_out, *tails

    def _modifiers(self, unused: Any, extras: Extras) -> Modifiers:
        p = self.problem
        sinks, batch_stride = per_head(extras.sinks) if extras.sinks is not None else (unused, 0)
        factor = 2.0 * LOG2E * abs(p.scale) / p.softcap if p.softcap else 0.0
        return Modifiers(sinks, batch_stride, p.softcap, factor)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        arguments = self.arguments(q, k, v, out, lse, extras)
        start(self, arguments)
        if self.division.splits > 1:
            self._merge(arguments[3].ptr, arguments[4], out, lse, extras)

    def _merge(
        self, parts: torch.Tensor, parts_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, extras: Extras
    ) -> None:
        p, (heads, splits) = self.problem, self.division
        rows = p.batch * p.q_heads * p.q_len
        modifiers = self._modifiers(lse, extras)
        arguments = (
            parts, parts_lse, self.counts, View(out, *view_strides(out)), lse, modifiers.sinks,
            modifiers.sinks_batch_stride, rows, p.q_heads, p.q_len, queries(self.tile, heads), p.v_head_dim,
            triton.next_power_of_2(p.v_head_dim), triton.next_power_of_2(splits), p.sinks, p.return_lse,
        )  # fmt: skip
        self.merging = run(merge, (-(-rows // ROWS.value), 1, 1), self.merging, arguments, num_warps=ROWS.value)
