"""From a problem and a row to the launches of this backend's backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...backends import BackwardTile
from ...extras import NO_EXTRAS, Extras
from ...kernels import backward, gradients
from ...kernels.backward_launch import (
    PLANES,
    PREPARE_OPTIONS,
    PREPARED_ROWS,
    ROWS_TOGETHER,
    BackwardLaunch,
    ToCompile,
    stats_of,
)
from ...kernels.launch import (
    LOG2E,
    NO_LENGTHS,
    NO_MODIFIERS,
    constant,
    launch_options,
    modifiers_of,
    rebased,
    run,
    view_strides,
)
from ...kernels.memory import View
from ...kernels.tma import describe, multiprocessors
from ...problem import Problem
from .backward_rows import KEYS, HopperBackwardTile
from .kernels.backward import Config, attention_backward
from .kernels.finish import BLOCKS, ROWS, finish_keys, finish_queries
from .launch import USUAL

if TYPE_CHECKING:
    from ...dispatch_backward import BackwardPlan

WAVES = 2  # of CTAs at least, from one that clears a part to those that add to it
FINISH_OPTIONS = launch_options(4, 1, None)


@dataclass(slots=True)
class _Work:
    """Tensors of one call between its kernels."""

    stats: torch.Tensor  # fp32, (PLANES, B, Hq, whole tiles of queries)
    sums: torch.Tensor  # fp32, see kernels/sums.py
    ready: torch.Tensor  # int32, for each head, how many parts of its sum have been cleared; as many as query heads
    found: torch.Tensor  # int8, see `finish_keys`


@dataclass(slots=True)
class HopperBackwardLaunch:
    """The backward, ready for every call with the same problem; see `kernels.backward_launch.BackwardLaunch`."""

    problem: Problem
    config: Config
    portable: BackwardLaunch  # of the same problem: numbers and builds of the cold paths
    options: dict[str, Any]
    width: int
    rows: int  # of a head, in whole tiles
    blocks: int  # of keys, of a head
    together: int  # heads that are worked on side by side
    lead: int  # CTAs, see `sums.clear`: a multiple of those of `together` heads
    strides: list[tuple[int, ...]] | None = None  # of the views of q, k, v, d_out, out, dq, dk and dv
    tiles: tuple[TensorDescriptor, ...] | None = None  # of the first call's tensors
    binaries: list[Callable[..., None] | None] | None = None

    @classmethod
    def prepare(cls, problem: Problem, tile: HopperBackwardTile, plan: "BackwardPlan") -> "HopperBackwardLaunch":
        p, block_m = problem, tile.keys.block_m
        config = Config(
            BLOCK_M=block_m,
            WIDTH=tile.width,
            SLOTS=tile.keys.num_stages,
            HAS_FIRST=p.first_offset is not None,
            HAS_LAST=p.last_offset is not None,
            PIPELINED=tile.pipelined,
            CLEARS=tile.clears,
            ROUNDED=tile.rounded,
            REGISTERS=tile.keys.max_registers or 240,
        )
        heads, blocks = p.batch * p.kv_heads, -(-p.kv_len // KEYS)
        banded = p.first_offset is not None or p.last_offset is not None
        together = max(1, min(heads, ROWS_TOGETHER // (p.q_len * p.group))) if banded else 1
        least = WAVES * multiprocessors(USUAL) if tile.clears else heads * blocks
        return cls(
            problem=p,
            config=constant(config),
            portable=BackwardLaunch.prepare(problem, plan),
            # Triton's default for fusion flips in 3.10; the fused exponent wants it.
            options=dict(num_warps=4, enable_fp_fusion=True),
            width=tile.width,
            rows=-(-p.q_len // block_m) * block_m,
            blocks=blocks,
            together=together,
            lead=-(-least // (together * blocks)) * together * blocks,
        )

    def work(self, device: torch.device) -> _Work:
        p = self.problem
        stats = torch.empty(PLANES, p.batch, p.q_heads, self.rows, dtype=torch.float32, device=device)
        sums = torch.empty(p.batch, p.q_heads, self.rows, self.width, dtype=torch.float32, device=device)
        found = torch.empty(p.batch, p.kv_heads, self.blocks, KEYS, dtype=torch.int8, device=device)
        ready = torch.empty(p.batch, p.q_heads, dtype=torch.int32, device=device)
        return _Work(stats, sums, ready, found)

    def arguments(
        self, inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], work: _Work
    ) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
        """(grid, arguments) of `attention_backward`. inputs: q, k, v, d_out. grads: dq, dk, dv."""
        p = self.problem
        block_m = self.config.BLOCK_M.value
        stats = work.stats.view(-1, block_m)
        sources = (*inputs, stats, *grads[1:])
        if self.tiles is None:
            rows = (block_m, KEYS, KEYS, block_m, None, KEYS // 2, KEYS // 2)
            layout = gl.NVMMASharedLayout(0, 32, rank=2)
            self.tiles = tuple(
                TensorDescriptor(t, list(t.shape), [block_m, 1], [1, block_m], layout)
                if n is None
                else describe(t, n, self.width)
                for t, n in zip(sources, rows, strict=True)
            )
        tiles = [rebased(of, t) for of, t in zip(self.tiles, sources, strict=True)]
        heads = p.batch * p.kv_heads
        numbers = (
            p.scale * LOG2E, p.scale, p.q_len, p.kv_len, p.first_offset or 0, p.last_offset or 0, p.kv_heads, p.group,
            self.blocks, heads, self.together, self.lead,
        )  # fmt: skip
        return (heads * self.blocks, 1, 1), (*tiles, work.sums, work.ready, work.found, *numbers, self.config)

    def launches(
        self,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        d_lse: torch.Tensor | None,
        grads: Sequence[torch.Tensor],
        work: _Work,
        extras: Extras = NO_EXTRAS,
    ) -> list[tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]]:
        """(kernel, grid, arguments, options) of every kernel, in their order."""
        p, portable = self.problem, self.portable
        tensors = (*inputs, out, *grads)
        if self.strides is None:
            self.strides = [view_strides(t) for t in tensors]
        views = [View(t, *steps) for t, steps in zip(tensors, self.strides, strict=True)]
        of_inputs, (of_out, dq, dk, dv) = backward.Inputs(*views[:4]), views[4:]
        stats = stats_of(work.stats)
        cleared = min(p.batch * p.kv_heads, self.lead // self.blocks) * p.group
        to_prepare = (of_out, of_inputs.d_out, lse, d_lse, stats, (work.sums, work.ready), p.q_len, self.rows, cleared,
                      *portable.prepared, constant(self.width))  # fmt: skip
        grid, main = self.arguments(inputs, grads, work)
        tiles = self.rows // ROWS.value
        modifiers = NO_MODIFIERS if extras is NO_EXTRAS else modifiers_of(p, extras)
        rest = (*portable.scalars, NO_LENGTHS, modifiers)
        to_sum = (work.sums, tiles, p.q_heads, constant(self.width))
        of_queries = (*to_sum, of_inputs, dq, stats, *rest, portable.queries.config)
        blocks = p.batch * p.kv_heads * self.blocks
        to_find = (work.found, self.blocks, p.kv_heads, blocks)
        of_keys = (*to_find, of_inputs, dk, dv, stats, *rest, portable.keys[0].config)
        return [
            (gradients.prepare, (p.q_heads, self.rows // PREPARED_ROWS, p.batch), to_prepare, PREPARE_OPTIONS),
            (attention_backward, grid, main, self.options),
            (finish_queries, (tiles * p.q_heads, 1, p.batch), of_queries, FINISH_OPTIONS),
            (finish_keys, (-(-blocks // BLOCKS.value), 1, 1), of_keys, FINISH_OPTIONS),
        ]

    def to_compile(self, tensors: Sequence[torch.Tensor], extras: Extras, tile: BackwardTile) -> list[ToCompile]:
        """As `BackwardLaunch.to_compile`; the kernels behind the main one have no products but on their cold paths."""
        q, k, v, d_out = tensors
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        launches = self.launches(tensors, d_out, lse, None, (q, k, v), self.work(q.device), extras)
        kernel, _, arguments, options = launches[1]
        return [ToCompile("all", f"all-{tile.name}", kernel, partial(tuple, arguments), options)]

    def __call__(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        d_lse: torch.Tensor | None,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        extras: Extras = NO_EXTRAS,
        d_slopes: torch.Tensor | None = None,
        of_mask: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """As `BackwardLaunch`; of the extras sinks at most, which are in the LSE."""
        assert d_slopes is None and not of_mask
        work = self.work(out.device)
        launches = self.launches(inputs, out, lse, d_lse, grads, work, extras)
        binaries = self.binaries or [None] * len(launches)
        self.binaries = [
            run(kernel, grid, binary, arguments, **options)
            for (kernel, grid, arguments, options), binary in zip(launches, binaries, strict=True)
        ]
        return work.stats[gradients.DELTA.value, :, :, : self.problem.q_len], None
