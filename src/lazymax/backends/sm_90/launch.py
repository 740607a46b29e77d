"""From a problem and a row to the arguments of this backend's kernel, for a launch or a compile without a GPU."""

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...arch import by_name
from ...compat.tritons import release
from ...extras import NO_EXTRAS, Extras
from ...kernels.launch import LOG2E, constant, per_head, positive_scale, start, view_strides
from ...kernels.memory import View
from ...kernels.sequences import Lengths
from ...problem import Problem, default_threshold
from .kernels.forward import Config, Modifiers, attention_forward
from .kernels.layouts import out_width, width
from .kernels.schedule import CHUNK, arrange
from .rows import HopperTile

L2_BUDGET = 24 << 20  # bytes of K and V that heads worked on side by side may have; the L2 has 50 MB
TILE_COST = 0.3  # of what a tile costs beside its key blocks, in key blocks


def key_blocks(first_row: int, problem: Problem, tile: HopperTile) -> int:
    """Key blocks that a tile visits; the twin of `bounds.key_blocks`."""
    p, first, end = problem, 0, problem.kv_len
    if p.last_offset is not None:
        end = min(end, max(min(first_row + tile.block_m, p.q_len) + p.last_offset, 0))
    if p.first_offset is not None:
        first = min(max(first_row + p.first_offset, 0), end) // tile.block_n
    return max(-(-end // tile.block_n) - first, 1)


def cost(first_row: int, problem: Problem, tile: HopperTile) -> float:
    """Of a tile, in key blocks. Those that some consumers leave out take less time, though not in proportion."""
    visits = key_blocks(first_row, problem, tile)
    if not tile.skip:
        return visits
    stop = -(-_keys_before(first_row + tile.block_m, problem) // tile.block_n)
    own = 0
    for row in range(first_row, first_row + tile.block_m, 64):
        inside = row < problem.q_len
        left_out = stop - -(-_keys_before(row + 64, problem) // tile.block_n) if inside else visits
        own += visits - max(0, min(left_out, visits - 1))
    return round(0.4 * visits + 0.6 * own / tile.warpgroups, 2)


def _keys_before(stop_row: int, problem: Problem) -> int:
    """The end of the keys that the rows before stop_row see."""
    p = problem
    return p.kv_len if p.last_offset is None else min(p.kv_len, max(min(stop_row, p.q_len) + p.last_offset, 0))


@functools.lru_cache(maxsize=64)
def schedule(costs: tuple[float, ...], heads: int, side_by_side: int, ctas: int, device: torch.device) -> torch.Tensor:
    """(rounds, CTAs) int32: the tile that each CTA takes in each round, head << 16 | row block, -1 for none.

    costs: key blocks of each row block. Heads go in groups of `side_by_side`, whose K and V stay in the L2; in a group
    the longest row blocks come first, each to the CTA with the least to do so far. One group of all heads lost 20% at
    1024 keys; a round-robin of unequal tiles, which beats against the number of CTAs, took up to 1.7 times as long.
    """
    blocks = sorted(range(len(costs)), key=lambda block: -costs[block])
    row_blocks = torch.tensor(blocks, dtype=torch.int32)[:, None]
    groups = torch.split(torch.arange(heads, dtype=torch.int32), side_by_side)
    order = torch.cat([(row_blocks | group << 16).flatten() for group in groups])
    if len(set(costs)) == 1 or len(order) <= ctas:
        rounds = -(-len(order) // ctas)
        table = torch.nn.functional.pad(order, (0, rounds * ctas - len(order)), value=-1).view(rounds, ctas)
    else:
        table = _longest_first(order.tolist(), costs, ctas)
    return table.to(device)


def _longest_first(order: list[int], costs: tuple[float, ...], ctas: int) -> torch.Tensor:
    """Each tile to the CTA with the least to do."""
    given: list[list[int]] = [[] for _ in range(ctas)]
    load = [(0.0, cta) for cta in range(ctas)]
    for code in order:
        busy, cta = load[0]
        given[cta].append(code)
        heapq.heapreplace(load, (busy + costs[code & 0xFFFF] + TILE_COST, cta))
    rounds = max(map(len, given))
    return torch.tensor([tiles + [-1] * (rounds - len(tiles)) for tiles in given], dtype=torch.int32).T.contiguous()


def multiprocessors(device: torch.device) -> int:
    """Of the GPU that will run it; without one, of the usual card."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return by_name("sm_90").multiprocessors


def keeps_queries() -> bool:
    """Whether Q stays in registers. Triton 3.9.0 copies a left operand in registers before every product, so that Q
    takes them twice: 39 moves more in the loop at head dim 128, and 8 to 16 bytes of spills. 3.7 and 3.8 not tried."""
    return release(triton.__version__) < (3, 7)


def describe(t: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Descriptor whose blocks are `rows` x `cols` of one head. Dimensions of size 1 get a stride that the hardware
    accepts (it is never used)."""
    strides = [stride if size > 1 else 64 for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], [1, 1, rows, cols], _shared_layout(cols))


def rebased(descriptor: TensorDescriptor, t: torch.Tensor) -> TensorDescriptor:
    """The same of another tensor of that shape, strides and alignment, past the checks of the constructor: 0.4 us
    instead of 3.6. A new object, for calls may come from several threads."""
    copy = object.__new__(TensorDescriptor)
    copy.__dict__.update(descriptor.__dict__)
    copy.base = t
    return copy


@functools.cache
def _shared_layout(dim: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(min(128, 2 * dim), 16, rank=4)


@dataclass(slots=True)
class HopperLaunch:
    """The kernel, ready for every call with the same problem on one device; see `kernels.launch.ForwardLaunch`."""

    kernel: ClassVar[Any] = attention_forward
    problem: Problem
    tile: HopperTile
    config: Config
    options: dict[str, Any]
    ctas: int | None = None  # at most, side by side; None: one for each multiprocessor
    table: torch.Tensor | None = None  # see `schedule`; ragged problems have another in every call
    side_by_side: int | None = None  # CTAs of a call
    heads_together: int | None = None  # at most, see `schedule`
    strides: tuple[tuple[int, ...], ...] | None = None  # of the views of q, k, v, out
    descriptors: tuple[TensorDescriptor, ...] | None = None  # of the first call's tensors
    binary: Callable[..., None] | None = None
    arranging: Callable[..., None] | None = None  # binary of `arrange`

    @classmethod
    def of_forward(cls, problem: Problem, tile: HopperTile) -> "HopperLaunch":
        p = problem
        assert tile.warpgroups in (2, 3) and tile.num_stages & (tile.num_stages - 1) == 0
        config = Config(
            BLOCK_N=tile.block_n,
            WARPGROUPS=tile.warpgroups,
            SLOTS=tile.num_stages,
            D=p.head_dim,
            D_V=p.v_head_dim,
            HAS_FIRST=p.first_offset is not None,
            HAS_LAST=p.last_offset is not None,
            RAGGED=p.ragged,
            PACKED=p.packed is not None,
            BOTTOM_RIGHT=p.align == "bottom_right",
            NEGATE=p.scale < 0,
            SOFTCAP=p.softcap > 0,
            SINKS=p.sinks,
            STORE_LSE=p.return_lse,
            TURNS=tile.turns,
            # The sums raise a pivot lazily, whatever the threshold is; fp16 has not the range for it.
            BY_SUM=p.dtype == "bfloat16" and p.rescale_threshold == default_threshold(None),
            SKIP=tile.skip,
            QUERY_TILES=tile.query_tiles,
            QUERY_REGISTERS=tile.query_registers and keeps_queries() and not p.softcap,  # which needs the registers
            REGISTERS=tile.max_registers,
        )
        # Triton's default for fusion flips in 3.10; the fused exponent wants it.
        return cls(p, tile, constant(config), dict(num_warps=tile.num_warps, enable_fp_fusion=True))

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

    def _schedule(self, device: torch.device) -> torch.Tensor:
        p, tile = self.problem, self.tile
        costs = tuple(cost(row, p, tile) for row in range(0, p.q_len, tile.block_m))
        heads = p.batch * p.q_heads
        ctas = min(len(costs) * heads, self.ctas or multiprocessors(device))
        return schedule(costs, heads, self._heads_together(heads), ctas, device)

    def _arrange(self, extras: Extras, device: torch.device) -> torch.Tensor:
        """The schedule of a ragged problem, made on the device in every call."""
        p, tile, config = self.problem, self.tile, self.config
        slots = p.q_tiles(tile.block_m)
        tiles = slots * p.q_heads
        ctas = min(tiles, self.ctas or multiprocessors(device))
        rounds = -(-tiles // ctas)
        table = torch.empty(rounds, ctas, 8, dtype=torch.int32, device=device)
        if device.type != "meta":
            lengths = Lengths(extras.seqlens_k)
            if p.packed:
                lengths = Lengths(None, extras.cu_seqlens_q, extras.cu_seqlens_k, p.batch, p.batch.bit_length())
            band = (p.first_offset or 0, p.last_offset or 0)
            arguments = (
                table, slots, p.slots(tile.block_m), p.q_heads, self._heads_together(p.q_heads), ctas, rounds * ctas,
                *(p.packed or (p.q_len, p.kv_len)), *band, lengths, tile.block_m, tile.block_n, config.HAS_FIRST,
                config.HAS_LAST, config.BOTTOM_RIGHT,
            )  # fmt: skip
            if self.arranging is not None:
                self.arranging(*arguments)
            else:
                grid = (-(-slots // CHUNK.value), 1, 1)
                built = arrange[grid](*arguments)
                self.arranging = built[grid] if built is not None else None
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
        """Positional arguments of the kernel; the first call makes the schedule, of ragged problems every call."""
        p, tensors = self.problem, (q, k, v, out)
        table = self.table
        if p.ragged:
            table = self._arrange(extras, q.device)
        elif table is None:
            table = self.table = self._schedule(q.device)
        self.side_by_side = table.shape[1]
        if self.strides is None:
            self.strides = tuple(view_strides(t) for t in tensors)
        views = (View(t, *steps) for t, steps in zip(tensors, self.strides, strict=True))
        if self.descriptors is None:
            keys, dim, v_dim = self.tile.block_n, width(p.head_dim), width(p.v_head_dim)
            self.descriptors = (
                describe(q, 64, dim), describe(k, keys, dim), describe(v, keys, v_dim),
                describe(out, 64, out_width(p.v_head_dim)),
            )  # fmt: skip
        tiles = (rebased(descriptor, t) for descriptor, t in zip(self.descriptors, tensors, strict=True))
        band = (p.first_offset or 0, p.last_offset or 0)
        return (
            *views, lse, q.shape[2], *tiles, table, table.shape[0], LOG2E if p.softcap else positive_scale(p),
            p.rescale_threshold, p.q_len, p.kv_len, *band, p.q_heads, p.group, self._modifiers(lse, extras),
            self.config,
        )  # fmt: skip

    def _modifiers(self, unused: torch.Tensor, extras: Extras) -> Modifiers:
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
        start(self, self.arguments(q, k, v, out, lse, extras))
