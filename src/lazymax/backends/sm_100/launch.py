"""From a problem and a row to the arguments of this backend's kernel, for a launch or a compile without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...extras import NO_EXTRAS, Extras
from ...kernels.launch import constant, positive_scale, rebased, start, view_strides
from ...kernels.memory import View
from ...kernels.tma import describe, multiprocessors
from ...problem import Problem
from .kernels.forward import Config, attention_forward
from .rows import BlackwellTile

L2_BUDGET = 50 << 20  # bytes of K and V that heads worked on side by side may have; the L2 has 126 MB
LSE_DEGREE = 5  # of the polynomial, where the LSE, which is fp32, would show the 8.6e-5 of degree 3
REGISTERS = 128  # of a thread when the kernel starts: 65536 for 512 threads; the roles then deal them anew


@dataclass(slots=True)
class BlackwellLaunch:
    """The kernel, ready for every call with the same problem on one device; see `kernels.launch.ForwardLaunch`."""

    kernel: ClassVar[Any] = attention_forward
    problem: Problem
    tile: BlackwellTile
    config: Config
    options: dict[str, Any]
    heads_together: int  # see `bounds.tile`
    ctas: int | None = None  # at most, or pairs, side by side; None: one for each multiprocessor, or two
    side_by_side: int | None = None  # CTAs, or pairs, of a call; with CLC one a tile, most of which never start
    strides: tuple[tuple[int, ...], ...] | None = None  # of the views of q, k, v, out
    descriptors: tuple[TensorDescriptor, ...] | None = None  # of the first call's tensors
    binary: Callable[..., None] | None = None

    @classmethod
    def of_forward(cls, problem: Problem, tile: BlackwellTile) -> "BlackwellLaunch":
        p = problem
        assert p.head_dim == p.v_head_dim == tile.head_dim and not p.ragged
        assert tile.s_buffers == 2 or (tile.s_buffers == 3 and tile.head_dim == 64 and tile.num_stages >= 3)
        assert tile.early in (64, 96, 128) and tile.early % tile.chunk == 0
        assert not tile.pair or (p.first_offset, p.last_offset, tile.head_dim, tile.s_buffers) == (None, None, 128, 2)
        assert tile.split or not tile.pair
        draws = tile.draws(p, triton.__version__)
        config = Config(
            ROWS=tile.block_m // 2,
            D=p.head_dim,
            D_V=p.v_head_dim,
            HAS_FIRST=p.first_offset is not None,
            HAS_LAST=p.last_offset is not None,
            NEGATE=p.scale < 0,
            STORE_LSE=p.return_lse,
            SLOTS=tile.num_stages,
            S_BUFFERS=tile.s_buffers,
            COUNTER=draws == "counter",
            CLC=draws == "clc",
            SOFTWARE=tile.software,
            DEGREE=LSE_DEGREE if p.return_lse else tile.degree,
            EARLY=tile.early,
            CHUNK=tile.chunk,
            ORDER=tile.order,
            MAX3=tile.max3,
            READS=tile.reads,
            BRANCH=tile.branch,
            SPLIT=tile.split,
            REGISTERS=tile.max_registers,
            HEADS=1,
            SOFTCAP=False,
            SINKS=False,
        )
        # Triton's default for fusion flips in 3.10; the fused exponent wants it.
        options = dict(num_warps=tile.num_warps, num_ctas=tile.ctas, maxnreg=REGISTERS, enable_fp_fusion=True)
        return cls(p, tile, constant(config), options, _heads_together(p, config))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Known once the first arguments are."""
        assert self.side_by_side is not None
        return self.side_by_side, 1, 1

    def arguments(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Any, ...]:
        """Positional arguments of the kernel; a new counter for every call, for calls may run side by side."""
        p = self.problem
        tensors = (q, k, v, out)
        if self.strides is None or self.descriptors is None:
            tiles = p.q_tiles(self.tile.block_m) * p.q_heads
            most = self.ctas or multiprocessors("sm_100", q.device) // self.tile.ctas
            self.side_by_side = tiles if self.config.CLC.value else min(tiles, most)
            self.strides = tuple(view_strides(t) for t in tensors)
            self.descriptors = tuple(self._describe(t, which) for which, t in enumerate(tensors))
        views = (View(t, *steps) for t, steps in zip(tensors, self.strides, strict=True))
        tiles_of = (rebased(descriptor, t) for descriptor, t in zip(self.descriptors, tensors, strict=True))
        counter = None
        if self.config.COUNTER.value:
            counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        band = (p.first_offset or 0, p.last_offset or 0)
        return (
            *views, lse, *tiles_of, counter, self.heads_together, positive_scale(p), p.rescale_threshold, p.q_len,
            p.kv_len, *band, p.batch * p.q_heads, p.q_heads, p.group, self.config,
        )  # fmt: skip

    def _describe(self, t: torch.Tensor, which: int) -> TensorDescriptor:
        """Of q, k, v or out. Of the values each CTA of a pair has half of the columns, of all else half of the rows."""
        rows = 128 if which in (1, 2) else self.tile.block_m // 2
        return describe(t, rows, self.problem.head_dim, (2, 2, 3, 2)[which] if self.tile.pair else None)

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


def _heads_together(p: Problem, config: Config) -> int:
    """A static order balances only over all heads: in sections it left 10 to 38% idle (docs/notes/sm_100.md)."""
    heads = p.batch * p.q_heads
    if not (config.CLC or config.COUNTER):
        return heads
    bytes_of_group = p.kv_len * (p.head_dim + p.v_head_dim) * 2
    return min(heads, max(1, L2_BUDGET // max(1, bytes_of_group)) * p.group)
