"""From a problem, a row for the backward and the tensors of a call to the launches of its kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from .. import mods
from ..backends import BackwardTile, Half
from ..dispatch_backward import BackwardPlan
from ..extras import NO_EXTRAS, Extras
from ..problem import Problem
from . import backward, backward_keys, backward_mask, gradients
from .launch import (
    LOG2E,
    NO_LENGTHS,
    NO_MODIFIERS,
    constant,
    describe,
    launch_options,
    lengths_of,
    modifiers_of,
    narrowed,
    positive_scale,
    rebased,
    run,
    shared_config,
    view_strides,
)
from .memory import View

PLANES = 4  # of gradients.Stats
PREPARED_ROWS = 32  # of a program of gradients.prepare
PREPARE_OPTIONS = launch_options(4, 1, None)
NO_TILES = (None,) * 8
NO_SUMS = (None,) * 4
ALONE = constant(0), constant(False)  # no columns of sums, no kernel that begins early
# Rows of the heads that run side by side: about what two of their tensors keep of a large L2.
ROWS_TOGETHER = 65536


class ToCompile(NamedTuple):
    """One of the kernels of a launch, for a compile without a GPU."""

    name: str
    row: str
    kernel: Any
    arguments: Callable[[], tuple[Any, ...]]
    options: dict[str, Any]


@dataclass(slots=True)
class _Kernel:
    """A launch of one of the two main kernels."""

    function: Any
    config: backward.Config
    grid: tuple[int, int]
    shape: tuple[int, int, int]  # tiles of a head, heads, heads side by side
    options: dict[str, Any]
    tiles: tuple[Any, ...] | None = None  # the descriptors of the first call
    binary: Callable[..., None] | None = None


@dataclass(slots=True)
class BackwardLaunch:
    """The portable backward, ready for every call with the same problem; made once, called often."""

    problem: Problem
    queries: _Kernel
    keys: tuple[_Kernel, ...]  # of dK and dV, or of dV and of dK
    of_mask: Half
    mask_config: backward.Config
    descriptors: bool
    scalars: tuple[Any, ...]
    prepared: tuple[Any, ...]  # constexprs of gradients.prepare
    binary: Callable[..., None] | None = None  # of gradients.prepare
    mask_binary: Callable[..., None] | None = None
    strides: list[tuple[int, ...]] | None = None  # of the views of q, k, v, d_out, out, dq, dk and dv

    @classmethod
    def prepare(cls, problem: Problem, plan: BackwardPlan) -> "BackwardLaunch":
        p, tile = problem, plan.tile
        assert tile is not None
        shared = shared_config(p, plan.least_columns) | {"DESCRIPTOR": tile.descriptors}
        shared["DERIVATIVE"] = mods.get("score_mod", p.score_mod).derivative if p.score_mod else None
        shared["EXACT"] = shared["FLOAT_MASK"] or p.dtype == "float32"
        q_len, kv_len = p.packed or (p.q_len, p.kv_len)
        batches = 1 if p.packed else p.batch

        def config(half: Half, **options: Any) -> backward.Config:
            own = {name: narrowed(shared[name], half.columns) for name in ("D_PIECES", "DV_PIECES")}
            own |= dict(BLOCK_M=half.block_m, BLOCK_N=half.block_n, RELOAD=half.reload, LICM=half.licm)
            own |= dict(ONE_LOOP=half.reload or half.one_loop)
            return constant(backward.Config(**shared | own | options))

        def kernel(function: Any, half: Half, tiles: int, heads: int, rows: int) -> _Kernel:
            assert not (tile.descriptors and (half.reload or half.columns))
            together = max(1, min(heads, ROWS_TOGETHER // max(1, rows)))
            options = options_of(half)
            return _Kernel(function, config(half), (heads * tiles, batches), (tiles, heads, together), options)

        by_keys = p.slots(tile.keys.block_n, of_keys=True)
        by_queries = p.slots(tile.queries.block_m)
        scale_log2 = LOG2E if p.modified else positive_scale(p)
        of_mask = tile.mask or replace(tile.queries, num_stages=1, reload=False)
        of_keys = partial(kernel, backward_keys.attention_backward_keys, tile.keys, by_keys, p.kv_heads, kv_len)
        return cls(
            problem=p,
            queries=kernel(backward.attention_backward_queries, tile.queries, by_queries, p.q_heads, q_len),
            keys=(of_keys(), of_keys()) if tile.keys.separate else (of_keys(),),
            of_mask=of_mask,
            mask_config=config(of_mask, DESCRIPTOR=False),
            descriptors=tile.descriptors,
            scalars=(scale_log2, p.scale, q_len, kv_len, p.first_offset or 0, p.last_offset or 0),
            prepared=tuple(map(constant, (PREPARED_ROWS, shared["DV_PIECES"], p.v_head_dim, p.wide))),
        )  # fmt: skip

    def arguments(
        self,
        kernel: _Kernel,
        inputs: Sequence[View],
        outputs: tuple[Any, Any],
        stats: gradients.Stats,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Any, ...]:
        """Arguments of one of the two main kernels. inputs: q, k, v, d_out. outputs: the two behind the descriptors."""
        lengths, modifiers = NO_LENGTHS, NO_MODIFIERS
        if extras is not NO_EXTRAS or self.problem.modified:
            lengths, modifiers = lengths_of(self.problem, extras), modifiers_of(self.problem, extras)
        made = (backward.Inputs(*inputs), *self._described(kernel, inputs), *outputs, stats)
        return (*made, *self.scalars, *kernel.shape, lengths, modifiers, kernel.config)

    def of_keys(self, dk: Any, dv: Any) -> list[tuple[str, _Kernel, tuple[Any, Any]]]:
        """(name, kernel, outputs) of the launches that fill dk and dv."""
        if len(self.keys) == 1:
            return [("dkdv", self.keys[0], (dk, dv))]
        return [("dv", self.keys[0], (None, dv)), ("dk", self.keys[1], (dk, None))]

    def _described(self, kernel: _Kernel, inputs: Sequence[View]) -> tuple[Any, ...]:
        """Descriptors of the first pieces of q, k, v and d_out, then of their tails."""
        if not self.descriptors:
            return NO_TILES
        if kernel.tiles is not None:
            again = zip(kernel.tiles, (*inputs, *inputs), strict=True)
            return tuple(of and rebased(of, view.ptr) for of, view in again)
        config = kernel.config
        rows, keys = config.BLOCK_M.value, config.BLOCK_N.value
        sizes = ((rows, config.D_PIECES), (keys, config.D_PIECES), (keys, config.DV_PIECES), (rows, config.DV_PIECES))
        made = [
            [*(describe(view.ptr, height, cols.value) for _, cols in of), None][:2]
            for view, (height, of) in zip(inputs, sizes, strict=True)
        ]
        kernel.tiles = (*(first for first, _ in made), *(tail for _, tail in made))
        return kernel.tiles

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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fill grads: dq, dk, dv. inputs: q, k, v, d_out; all of them and out with a contiguous head dimension, lse and
        d_lse contiguous. d_slopes: fp32 (B, Hq, Sq), each row's share of the gradient of the slopes, or None. Returns
        each row's delta, (B, Hq, Sq), and, with of_mask, the gradient of the float mask."""
        q = inputs[0]
        tensors = (*inputs, out, *grads)
        if self.strides is None:
            self.strides = [view_strides(t) for t in tensors]
        views = [View(t, *steps) for t, steps in zip(tensors, self.strides, strict=True)]
        of_inputs, (of_out, dq, dk, dv) = views[:4], views[4:]
        stats = torch.empty((PLANES, *q.shape[:3]), dtype=torch.float32, device=q.device)
        of_stats, of_slopes = stats_of(stats), None if d_slopes is None else stats_of(d_slopes[None])
        grid = (q.shape[1], -(-q.shape[2] // PREPARED_ROWS), q.shape[0])
        n_rows = q.shape[2]
        numbers = n_rows, n_rows, 0
        arguments = (of_out, of_inputs[3], lse, d_lse, of_stats, *NO_SUMS, *numbers, *self.prepared, *ALONE)
        self.binary = run(gradients.prepare, grid, self.binary, arguments, **PREPARE_OPTIONS)
        for _, kernel, outputs in (("dq", self.queries, (dq, of_slopes)), *self.of_keys(dk, dv)):
            arguments = self.arguments(kernel, of_inputs, outputs, of_stats, extras)
            kernel.binary = run(kernel.function, (*kernel.grid, 1), kernel.binary, arguments, **kernel.options)
        d_mask = self._of_mask(of_inputs, of_stats, extras) if of_mask else None
        return stats[gradients.DELTA.value], d_mask

    def _of_mask(self, inputs: Sequence[View], stats: gradients.Stats, extras: Extras) -> torch.Tensor:
        """After the main kernels."""
        total, grid, arguments = self.mask_arguments(inputs, stats, extras)
        kernel = backward_mask.attention_backward_mask
        self.mask_binary = run(kernel, grid, self.mask_binary, arguments, **options_of(self.of_mask))
        one_row, one_col = arguments[-2:]
        if one_row.value:
            total = total.sum(2, keepdim=True)
        return total.sum(3, keepdim=True) if one_col.value else total

    def to_compile(self, tensors: Sequence[torch.Tensor], extras: Extras, tile: BackwardTile) -> list[ToCompile]:
        """What a call with tensors (on the meta device: q, k, v, d_out) of the problem would launch, but for
        `gradients.prepare`, which is the same for all rows."""
        q, k, v, _ = inputs = [View(t, *view_strides(t)) for t in tensors]
        stats = stats_of(torch.empty(PLANES, *tensors[0].shape[:3], dtype=torch.float32, device="meta"))
        d_slopes = None if extras.alibi_slopes is None else stats
        loads = "tma" if self.descriptors else "ptr"

        def main(name: str, half: Half, kernel: _Kernel, outputs: tuple[Any, Any]) -> ToCompile:
            make = partial(self.arguments, kernel, inputs, outputs, stats, extras)
            return ToCompile(name, f"{name}-{half.name}-{loads}", kernel.function, make, kernel.options)

        found = [main(name, tile.keys, kernel, outputs) for name, kernel, outputs in self.of_keys(k, v)]
        found.append(main("dq", tile.queries, self.queries, (q, d_slopes)))
        if extras.mask is not None and extras.mask.is_floating_point():
            kernel = backward_mask.attention_backward_mask
            make = partial(self._to_fill_mask, inputs, stats, extras)
            found.append(ToCompile("dmask", f"dmask-{self.of_mask.name}-ptr", kernel, make, options_of(self.of_mask)))
        return found

    def _to_fill_mask(self, *arguments: Any) -> tuple[Any, ...]:
        return self.mask_arguments(*arguments)[2]

    def mask_arguments(
        self, inputs: Sequence[View], stats: gradients.Stats, extras: Extras
    ) -> tuple[torch.Tensor, tuple[int, int, int], tuple[Any, ...]]:
        """(sums, grid, arguments) of `attention_backward_mask`. The sums are the mask's gradient, but that of one row
        (column) for all queries (keys) has one for each tile of them."""
        mask, p, config = extras.mask, self.problem, self.mask_config
        assert mask is not None
        batches, heads, one_row, one_col = (n == 1 for n in mask.shape)
        tiles = triton.cdiv(p.q_len, config.BLOCK_M.value), triton.cdiv(p.kv_len, config.BLOCK_N.value)
        size = (*mask.shape[:2], tiles[0] if one_row else p.q_len, tiles[1] if one_col else p.kv_len)
        total = torch.empty(size, dtype=torch.float32, device=mask.device)
        summed = p.q_heads if heads else 1, p.batch if batches else 1
        arguments = (
            backward.Inputs(*inputs), View(total, *total.stride()[:3]), stats, self.scalars[0], *self.scalars[2:],
            tiles[1], *summed, lengths_of(p, extras), modifiers_of(p, extras),
            config, constant(one_row), constant(one_col),
        )  # fmt: skip
        return total, (tiles[0] * tiles[1], mask.shape[1], mask.shape[0]), arguments


def options_of(half: Half) -> dict[str, Any]:
    """Launch options of its kernel."""
    return launch_options(half.num_warps, half.num_stages, half.max_registers)


def stats_of(t: torch.Tensor) -> gradients.Stats:
    """A (planes, B, Hq, Sq) tensor as the kernels take it."""
    return gradients.Stats(t, *t.stride()[:3])
