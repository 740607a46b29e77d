"""From a problem and a row to the launches of this backend's backward."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...backends import BackwardTile
from ...compat import tritons
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
from .kernels.finish import BLOCKS, ROWS, TILES, Band, Sizes, finish
from .launch import USUAL

if TYPE_CHECKING:
    from ...dispatch_backward import BackwardPlan

# CTAs, as waves of them: from the end of a group of heads to the first one that finishes a part of their sums, and from
# the last one that does to the first that adds to them again.
TO_FINISH, TO_ADD = 1.5, 1.0
SIDE = 64  # of a square of a sum
KERNELS = 3  # of a call
DESCRIPTORS = 9  # that `attention_backward` takes
MOST_TOGETHER = 16  # heads: more took 5% at S=1024
# Registers: the paths that hardly anybody takes want 210, which would be two CTAs a multiprocessor for four.
FINISH_OPTIONS = launch_options(4, 1, 128)
CHAINED = {"launch_pdl": True}  # a kernel begins while the one before it ends, and waits for its results by itself


@dataclass(slots=True)
class _Work:
    """Tensors of one call between its kernels."""

    stats: torch.Tensor  # fp32, (PLANES, B, Hq, whole tiles of queries)
    sums: torch.Tensor  # fp32, (heads with a sum, group, whole tiles of queries, width), see kernels/sums.py
    # Where CTAs finish sums, see `attention_backward`:
    counts: torch.Tensor | None  # int32, (B, Hq, 2)
    odd: torch.Tensor | None  # int8, (B, Hq, tiles of 64 queries): 1 where dQ has NaN or inf
    settled: torch.Tensor  # int32, (B, Hq, tiles of 64 queries), and ...
    found: torch.Tensor  # int8, see `finish`


@dataclass(slots=True)
class HopperBackwardLaunch:
    """The backward, ready for every call with the same problem; see `kernels.backward_launch.BackwardLaunch`."""

    problem: Problem
    config: Config
    portable: BackwardLaunch  # of the same problem: numbers and builds of the cold paths
    options: dict[str, Any]
    to_finish: dict[str, Any]  # options of the kernel behind the main one
    chained: Any  # a constexpr: whether kernels begin before those in front of them have ended
    width: int
    rows: int  # of a head, in whole tiles
    blocks: int  # of keys, of a head
    # See `arrange`.
    together: int = 1  # heads that are worked on side by side, a group
    lead: int = 0  # how many CTAs later a part of a sum is finished
    finished: int = 0  # groups, from the first on, whose dQ later CTAs make; the rest is left to `finish`
    ring: int = 0  # groups that have sums at a time
    strides: list[tuple[int, ...]] | None = None  # of the views of q, k, v, d_out, out, dq, dk and dv
    tiles: list[TensorDescriptor] | None = None  # of the first call's tensors
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
            FINISHES=False,  # see `arrange`
            ROUNDED=tile.rounded,
            REGISTERS=tile.keys.max_registers or 240,
        )
        heads, blocks = p.batch * p.kv_heads, -(-p.kv_len // KEYS)
        banded = p.first_offset is not None or p.last_offset is not None
        together = max(1, min(heads, MOST_TOGETHER, ROWS_TOGETHER // (p.q_len * p.group))) if banded else 1
        chained = not tritons.interpreting()
        made = cls(
            problem=p,
            config=constant(config),
            portable=BackwardLaunch.prepare(problem, plan),
            # Triton's default for fusion flips in 3.10; the fused exponent wants it.
            options=dict(num_warps=4, enable_fp_fusion=True) | CHAINED,
            to_finish=FINISH_OPTIONS | (CHAINED if chained else {}),
            chained=constant(chained),
            width=tile.width,
            rows=-(-p.q_len // block_m) * block_m,
            blocks=blocks,
        )
        made.arrange(together, multiprocessors(USUAL), tile.finishes)
        return made

    def arrange(self, together: int, side_by_side: int, finishes: bool) -> None:
        """Decide which sums CTAs finish, if any, and how many sums there are at a time. side_by_side: CTAs that run."""
        heads, of_group = self.problem.batch * self.problem.kv_heads, together * self.blocks
        self.together, self.lead, self.finished, self.ring = together, 0, 0, -(-heads // together)
        if finishes:
            self.lead = of_group + int(TO_FINISH * side_by_side)
            self.finished = max(0, heads * self.blocks - self.lead) // of_group
            self.ring = min(self.ring, -(-(of_group + self.lead + int(TO_ADD * side_by_side)) // of_group))
        self.config = self.config._replace(FINISHES=constant(self.finished > 0))
        self.tiles = self.binaries = None

    @property
    def sums(self) -> int:
        """How many key heads have a sum at a time."""
        return min(self.problem.batch * self.problem.kv_heads, self.ring * self.together)

    def work(self, device: torch.device) -> _Work:
        p = self.problem
        stats = torch.empty(PLANES, p.batch, p.q_heads, self.rows, dtype=torch.float32, device=device)
        sums = torch.empty(self.sums, p.group, self.rows, self.width, dtype=torch.float32, device=device)
        found = torch.empty(p.batch, p.kv_heads, self.blocks, KEYS, dtype=torch.int8, device=device)
        settled = torch.empty(p.batch, p.q_heads, self.rows // ROWS.value, dtype=torch.int32, device=device)
        counts = odd = None
        if self.finished:
            counts = torch.empty(p.batch, p.q_heads, 2, dtype=torch.int32, device=device)
            odd = torch.empty(p.batch, p.q_heads, self.rows // ROWS.value, dtype=torch.int8, device=device)
        return _Work(stats, sums, counts, odd, settled, found)

    def arguments(
        self, inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], work: _Work
    ) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
        """(grid, arguments) of `attention_backward`. inputs: q, k, v, d_out. grads: dq, dk, dv."""
        p = self.problem
        block_m = self.config.BLOCK_M.value
        stats = work.stats.view(-1, block_m)
        sources = [*inputs, stats, *grads[1:]]
        if self.finished:
            sources += [grads[0], work.sums.view(-1, SIDE)]
        if self.tiles is None:
            self.tiles = self._describe(*sources)
        tiles = [rebased(of, t) for of, t in zip(self.tiles, sources, strict=True)]
        tiles += [None] * (DESCRIPTORS - len(tiles))
        heads = p.batch * p.kv_heads
        numbers = (
            p.scale * LOG2E, p.scale, p.q_len, p.kv_len, p.first_offset or 0, p.last_offset or 0, p.kv_heads, p.group,
            self.blocks, heads, self.together, self.lead, self.finished, self.ring,
        )  # fmt: skip
        to_add = (work.sums, work.counts, work.odd, work.found)
        return (heads * self.blocks, 1, 1), (*tiles, *to_add, *numbers, self.config)

    def _describe(self, q: Any, k: Any, v: Any, d_out: Any, stats: Any, dk: Any, dv: Any, *of_sums: Any) -> list[Any]:
        """Descriptors of tensors. of_sums: dQ and the squares of its sums, if CTAs make some of it."""

        def flat(t: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
            layout = gl.NVMMASharedLayout(0, 32, rank=2)
            return TensorDescriptor(t, list(t.shape), [t.stride(0), 1], [rows, cols], layout)

        rows = stats.shape[1]
        heads = [describe(t, n, self.width) for t, n in ((q, rows), (k, KEYS), (v, KEYS), (d_out, rows))]
        grads = [describe(t, KEYS // 2, self.width) for t in (dk, dv)]
        more = [describe(of_sums[0], SIDE, 8), flat(of_sums[1], SIDE, SIDE)] if of_sums else []
        return [*heads, flat(stats, 1, rows), *grads, *more]

    def launches(
        self,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        d_lse: torch.Tensor | None,
        grads: Sequence[torch.Tensor],
        work: _Work,
        extras: Extras = NO_EXTRAS,
    ) -> Iterator[tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]]:
        """(kernel, grid, arguments, options) of every kernel, in their order; the arguments of one are made when the
        one before has been launched and the GPU has work."""
        p, portable = self.problem, self.portable
        tensors = (*inputs, out, *grads)
        if self.strides is None:
            self.strides = [view_strides(t) for t in tensors]
        views = [View(t, *steps) for t, steps in zip(tensors, self.strides, strict=True)]
        of_inputs, (of_out, dq, dk, dv) = backward.Inputs(*views[:4]), views[4:]
        stats = stats_of(work.stats)
        to_clear = (work.sums, work.settled, work.counts, work.odd)
        to_prepare = (of_out, of_inputs.d_out, lse, d_lse, stats, *to_clear, p.q_len, self.rows, self.sums * p.group,
                      *portable.prepared, constant(self.width), self.chained)  # fmt: skip
        yield gradients.prepare, (p.q_heads, self.rows // PREPARED_ROWS, p.batch), to_prepare, PREPARE_OPTIONS
        grid, main = self.arguments(inputs, grads, work)
        yield attention_backward, grid, main, self.options
        sizes, programs = self.to_look_at()
        modifiers = NO_MODIFIERS if extras is NO_EXTRAS else modifiers_of(p, extras)
        scale_log2, scale, *band = portable.scalars
        to_finish = (work.sums, work.odd, work.found, work.settled, of_inputs, dq, dk, dv, stats, modifiers, sizes,
                     Band(*band), scale_log2, scale, NO_LENGTHS, portable.queries.config, constant(self.width),
                     self.chained)  # fmt: skip
        yield finish, (programs, 1, 1), to_finish, self.to_finish

    def to_look_at(self) -> tuple[Sizes, int]:
        """What `finish` has to look at, and how many programs do."""
        p = self.problem
        tiles, heads = self.rows // ROWS.value, p.batch * p.kv_heads
        done = self.finished * self.together * p.group * tiles
        left = heads * p.group * tiles - done
        keys = heads * self.blocks
        sizes = Sizes(done, left, tiles, self.sums * p.group, self.blocks, keys, p.kv_heads)
        return sizes, left + -(-done // TILES.value) + -(-keys // BLOCKS.value)

    def to_compile(self, tensors: Sequence[torch.Tensor], extras: Extras, tile: BackwardTile) -> list[ToCompile]:
        """As `BackwardLaunch.to_compile`; the kernels behind the main one have no products but on their cold paths."""
        q, k, v, d_out = tensors
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        launches = self.launches(tensors, d_out, lse, None, (q, k, v), self.work(q.device), extras)
        _, (kernel, _, arguments, options), *_ = launches
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
        binaries = self.binaries or [None] * KERNELS
        self.binaries = [
            run(kernel, grid, binary, arguments, **options)
            for (kernel, grid, arguments, options), binary in zip(launches, binaries, strict=True)
        ]
        return work.stats[gradients.DELTA.value, :, :, : self.problem.q_len], None
