"""From a problem and a row to the launches of this backend's backward."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...backends import BackwardTile
from ...compat import tritons
from ...extras import NO_EXTRAS, Extras
from ...kernels import backward, gradients
from ...kernels.backward_launch import PLANES, PREPARE_OPTIONS, PREPARED_ROWS, BackwardLaunch, ToCompile
from ...kernels.launch import (
    LOG2E,
    NO_LENGTHS,
    NO_MODIFIERS,
    PLAIN_MODIFIERS,
    Address,
    constant,
    launch_options,
    leaves,
    modifiers_of,
    plain,
    plain_views,
    rebased,
    rebaser,
    run,
    view_strides,
    views,
)
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
ALIGNMENT = 512  # bytes, of a part of a call's memory, as torch's allocator has it
DESCRIPTORS = 9  # that `attention_backward` takes
MOST_TOGETHER = 16  # heads under a band, where their CTAs do not fill the GPU: more took 5% at S=1024
# Registers: the paths that hardly anybody takes want 210, which would be two CTAs a multiprocessor for four.
FINISH_OPTIONS = launch_options(4, 1, 128)
CHAINED = {"launch_pdl": True}  # a kernel begins while the one before it ends, and waits for its results by itself


class Work(NamedTuple):
    """What one call has between its kernels: tensors in one piece of memory, or their addresses."""

    stats: Any  # fp32, (PLANES, B, Hq, whole tiles of queries)
    sums: Any  # fp32, (heads with a sum, group, whole tiles of queries, width), see kernels/sums.py
    found: Any  # int8, (B, Hkv, blocks, KEYS), see `finish`
    settled: Any  # int32, (B, Hq, tiles of 64 queries), see `finish`
    # Where CTAs finish sums, see `attention_backward`:
    counts: Any  # int32, (B, Hq, 2)
    odd: Any  # int8, (B, Hq, tiles of 64 queries): 1 where dQ has NaN or inf


class _Form(NamedTuple):
    """How the kernels get their arguments: Triton's JIT wants tensors and names, a launcher neither."""

    tensor: Callable[[torch.Tensor], Any]
    views: Callable[[Sequence[torch.Tensor], Sequence[tuple[int, ...]]], list[Any]]  # see `memory.View`
    inputs: Callable[..., Any]
    stats: Callable[..., Any]
    modifiers: Any  # of a call without extras
    tiles: Sequence[Callable[[Any], Any]]  # tensors to descriptors, see `_describe`
    fixed: tuple[tuple[Any, ...], ...]  # the last arguments of each kernel, which are the same in every call


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
    parts: Sequence[tuple[int, tuple[int, ...], torch.dtype] | None] = ()  # of `Work`: first byte, shape, dtype
    size: int = 0  # bytes of all of them
    grids: tuple[tuple[int, int, int], ...] = ()
    # Made of the first call.
    strides: list[tuple[int, ...]] | None = None  # of the views of q, k, v, d_out, out, dq, dk and dv
    named: _Form | None = None
    plain: _Form | None = None
    launchers: list[Callable[..., None]] | None = None  # once all kernels are built

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
            REGISTERS=tile.keys.max_registers or 240,
        )
        heads, blocks = p.batch * p.kv_heads, -(-p.kv_len // KEYS)
        banded = p.first_offset is not None or p.last_offset is not None
        side_by_side = multiprocessors(USUAL)
        together = max(1, min(heads, MOST_TOGETHER, side_by_side // blocks)) if banded else 1
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
        made.arrange(together, side_by_side, tile.finishes)
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
        self._lay_out()
        self.named = self.plain = self.launchers = None

    @property
    def sums(self) -> int:
        """How many key heads have a sum at a time."""
        return min(self.problem.batch * self.problem.kv_heads, self.ring * self.together)

    def _lay_out(self) -> None:
        """Where in the memory of a call each part of it is."""
        p, tiles, finishes = self.problem, self.rows // ROWS.value, self.finished > 0
        heads = p.batch, p.q_heads
        wanted = Work(
            stats=((PLANES, *heads, self.rows), torch.float32),
            sums=((self.sums, p.group, self.rows, self.width), torch.float32),
            found=((p.batch, p.kv_heads, self.blocks, KEYS), torch.int8),
            settled=((*heads, tiles), torch.int32),
            counts=((*heads, 2), torch.int32) if finishes else None,
            odd=((*heads, tiles), torch.int8) if finishes else None,
        )
        self.parts, self.size = [], 0
        for part in wanted:
            self.parts.append(part and (self.size, *part))
            if part is not None:
                self.size += -(-math.prod(part[0]) * part[1].itemsize // ALIGNMENT) * ALIGNMENT

    def _fix(self, sources: Sequence[Any]) -> _Form:
        """What is decided by the first call. sources: of the descriptors."""
        p, portable = self.problem, self.portable
        tiles, heads, width = self.rows // ROWS.value, p.batch * p.kv_heads, constant(self.width)
        ring, keys = self.sums * p.group, heads * self.blocks
        to_prepare = (p.q_len, self.rows, ring, *portable.prepared, width, self.chained)
        main = (
            p.scale * LOG2E, p.scale, p.q_len, p.kv_len, p.first_offset or 0, p.last_offset or 0, p.kv_heads, p.group,
            self.blocks, heads, self.together, self.lead, self.finished, self.ring, self.config,
        )  # fmt: skip
        done = self.finished * self.together * p.group * tiles
        left = heads * p.group * tiles - done
        sizes = Sizes(done, left, tiles, ring, self.blocks, keys, p.kv_heads)
        scale_log2, scale, *band = portable.scalars
        to_finish = (sizes, Band(*band), scale_log2, scale, NO_LENGTHS, portable.queries.config, width, self.chained)
        programs = left + -(-done // TILES.value) + -(-keys // BLOCKS.value)
        self.grids = (p.q_heads, self.rows // PREPARED_ROWS, p.batch), (keys, 1, 1), (programs, 1, 1)
        described, fixed = self._describe(*sources), (to_prepare, main, to_finish)
        again = [partial(rebased, of) for of in described]
        bare = [rebaser(of) for of in described]
        self.plain = _Form(torch.Tensor.data_ptr, plain_views, leaves, leaves, PLAIN_MODIFIERS, bare, plain(fixed))
        return _Form(lambda t: t, views, backward.Inputs, gradients.Stats, NO_MODIFIERS, again, fixed)

    def work(self, device: torch.device) -> Work:
        memory = torch.empty(self.size, dtype=torch.uint8, device=device)

        def part(first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return memory[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        return Work(*[of and part(*of) for of in self.parts])

    def arguments(
        self, inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], work: Work
    ) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
        """(grid, arguments) of `attention_backward`. inputs: q, k, v, d_out. grads: dq, dk, dv."""
        form = self._named(inputs, grads, work)
        return self.grids[1], self._main(form, inputs, grads, work)

    def _named(self, inputs: Sequence[Any], grads: Sequence[Any], work: Work) -> _Form:
        if self.named is None:
            self.named = self._fix(self._sources(inputs, grads, work))
        return self.named

    def _sources(self, inputs: Sequence[Any], grads: Sequence[Any], work: Work) -> tuple[Any, ...]:
        """What the descriptors are of."""
        more = (grads[0], work.sums) if self.finished else ()
        return (*inputs, work.stats, *grads[1:], *more)

    def _main(self, form: _Form, inputs: Sequence[Any], grads: Sequence[Any], work: Work) -> tuple[Any, ...]:
        sources = self._sources(inputs, grads, work)
        tiles = [of(t) for of, t in zip(form.tiles, sources, strict=True)]
        missing = (None,) * (DESCRIPTORS - len(tiles))
        return (*tiles, *missing, work.sums, work.counts, work.odd, work.found, *form.fixed[1])

    def _describe(self, q: Any, k: Any, v: Any, d_out: Any, stats: Any, dk: Any, dv: Any, *of_sums: Any) -> list[Any]:
        """Descriptors of tensors. of_sums: dQ and its sums, in squares, if CTAs make some of it."""

        def flat(t: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
            layout = gl.NVMMASharedLayout(0, 32, rank=2)
            return TensorDescriptor(t, [t.numel() // cols, cols], [cols, 1], [rows, cols], layout)

        rows = self.config.BLOCK_M.value
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
        work: Work,
        extras: Extras = NO_EXTRAS,
    ) -> Iterator[tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]]:
        """(kernel, grid, arguments, options) of every kernel, in their order."""
        form = self._named(inputs, grads, work)
        if self.strides is None:
            self.strides = [view_strides(t) for t in (*inputs, out, *grads)]
        modifiers = NO_MODIFIERS if extras is NO_EXTRAS else modifiers_of(self.problem, extras)
        of_each = self._of_each(form, inputs, out, lse, d_lse, grads, work, modifiers)
        kernels = (gradients.prepare, PREPARE_OPTIONS), (attention_backward, self.options), (finish, self.to_finish)
        for (kernel, options), grid, arguments in zip(kernels, self.grids, of_each, strict=True):
            yield kernel, grid, arguments, options

    def _of_each(
        self,
        form: _Form,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        d_lse: torch.Tensor | None,
        grads: Sequence[torch.Tensor],
        work: Work,
        modifiers: Any,
    ) -> Iterator[tuple[Any, ...]]:
        """Arguments of every kernel; those of one are made when the one before has been launched and the GPU has
        work."""
        assert self.strides is not None
        p, tensor = self.problem, form.tensor
        of = form.views((*inputs, out, *grads), self.strides)
        stats = form.stats(work.stats, p.batch * p.q_heads * self.rows, p.q_heads * self.rows, self.rows)
        to_clear = (work.sums, work.settled, work.counts, work.odd)
        of_lse = tensor(lse), None if d_lse is None else tensor(d_lse)
        yield (of[4], of[3], *of_lse, stats, *to_clear, *form.fixed[0])
        yield self._main(form, inputs, grads, work)
        to_read = (work.sums, work.odd, work.found, work.settled)
        yield (*to_read, form.inputs(*of[:4]), *of[5:], stats, modifiers, *form.fixed[2])

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
    ) -> tuple[torch.Tensor | None, None]:
        """As `BackwardLaunch`; of the extras sinks at most, which are in the LSE. Delta is for their gradient alone:
        None without extras."""
        assert d_slopes is None and not of_mask
        if self.launchers is not None and self.plain is not None and extras is NO_EXTRAS:
            memory = torch.empty(self.size, dtype=torch.uint8, device=out.device)
            first = memory.data_ptr()
            work = Work(*[part and Address(first + part[0]) for part in self.parts])
            of_each = self._of_each(self.plain, inputs, out, lse, d_lse, grads, work, self.plain.modifiers)
            for launch, arguments in zip(self.launchers, of_each, strict=True):
                launch(*arguments)
            return None, None
        work = self.work(out.device)
        launches = self.launches(inputs, out, lse, d_lse, grads, work, extras)
        launchers: Sequence[Any] = self.launchers if self.launchers is not None else [None] * KERNELS
        made = [
            run(kernel, grid, launcher, arguments, **options)
            for (kernel, grid, arguments, options), launcher in zip(launches, launchers, strict=True)
        ]
        self.launchers = made if all(made) else None
        return work.stats[gradients.DELTA.value, :, :, : self.problem.q_len], None
