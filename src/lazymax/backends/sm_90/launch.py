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
from ...kernels.launch import constant, positive_scale, start, view_strides
from ...kernels.memory import View
from ...problem import Problem
from .kernels.forward import Config, attention_forward
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


@functools.lru_cache(maxsize=64)
def schedule(costs: tuple[int, ...], heads: int, side_by_side: int, ctas: int, device: torch.device) -> torch.Tensor:
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


def _longest_first(order: list[int], costs: tuple[int, ...], ctas: int) -> torch.Tensor:
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


def describe(t: torch.Tensor, rows: int) -> TensorDescriptor:
    """Descriptor whose blocks are `rows` rows of one head. Dimensions of size 1 get a stride that the hardware accepts
    (it is never used)."""
    dim = t.shape[3]
    strides = [stride if size > 1 else dim for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], [1, 1, rows, dim], _shared_layout(dim))


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
    table: torch.Tensor | None = None  # see `schedule`
    strides: tuple[tuple[int, ...], ...] | None = None  # of the views of q, k, v, out
    descriptors: tuple[TensorDescriptor, ...] | None = None  # of the first call's tensors
    binary: Callable[..., None] | None = None

    @classmethod
    def of_forward(cls, problem: Problem, tile: HopperTile) -> "HopperLaunch":
        p = problem
        assert tile.warpgroups in (2, 3) and tile.num_stages & (tile.num_stages - 1) == 0
        config = Config(
            BLOCK_N=tile.block_n,
            WARPGROUPS=tile.warpgroups,
            SLOTS=tile.num_stages,
            D=p.head_dim,
            HAS_FIRST=p.first_offset is not None,
            HAS_LAST=p.last_offset is not None,
            NEGATE=p.scale < 0,
            STORE_LSE=p.return_lse,
            TURNS=tile.turns,
            QUERY_REGISTERS=tile.query_registers and keeps_queries(),
            REGISTERS=tile.max_registers,
        )
        # Triton's default for fusion flips in 3.10; the fused exponent wants it.
        return cls(p, tile, constant(config), dict(num_warps=tile.num_warps, enable_fp_fusion=True))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Known once the schedule is."""
        assert self.table is not None
        return self.table.shape[1], 1, 1

    def _schedule(self, device: torch.device) -> torch.Tensor:
        p, tile = self.problem, self.tile
        costs = tuple(key_blocks(row, p, tile) for row in range(0, p.q_len, tile.block_m))
        heads = p.batch * p.q_heads
        bytes_of_head = p.kv_len * (p.head_dim + p.v_head_dim) * 2 // p.group
        side_by_side = max(1, min(heads, L2_BUDGET // max(1, bytes_of_head)))
        ctas = min(len(costs) * heads, self.ctas or multiprocessors(device))
        return schedule(costs, heads, side_by_side, ctas, device)

    def arguments(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Any, ...]:
        """Positional arguments of the kernel; the first call makes the schedule."""
        p, tensors = self.problem, (q, k, v, out)
        if self.table is None:
            self.table = self._schedule(q.device)
        if self.strides is None:
            self.strides = tuple(view_strides(t) for t in tensors)
        views = (View(t, *steps) for t, steps in zip(tensors, self.strides, strict=True))
        if self.descriptors is None:
            keys = self.tile.block_n
            self.descriptors = tuple(describe(t, n) for t, n in zip(tensors, (64, keys, keys, 64), strict=True))
        tiles = (rebased(descriptor, t) for descriptor, t in zip(self.descriptors, tensors, strict=True))
        band = (p.first_offset or 0, p.last_offset or 0)
        return (
            *views, lse, *tiles, self.table, self.table.shape[0], positive_scale(p), p.rescale_threshold, p.q_len,
            p.kv_len, *band, p.q_heads, p.group, self.config,
        )  # fmt: skip

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        start(self, self.arguments(q, k, v, out, lse))
