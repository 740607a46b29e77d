"""From a problem and a row to the arguments of this backend's kernels, for a launch or a compile without a GPU."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...compat.gluon import wmma_layout
from ...extras import NO_EXTRAS, Extras
from ...kernels.launch import constant, positive_scale, start, view_strides
from ...kernels.memory import View
from ...problem import Problem
from .kernels.forward import HALF_UNIT, MEAN_CUT, Config, attention_forward
from .kernels.guarded import Guard
from .kernels.singlewave import SinglewaveConfig, attention_forward_singlewave
from .rows import WmmaTile


def pieces(dim: int) -> tuple[tuple[int, int], ...]:
    """(first column, columns) of the tiles of a head dimension: the powers of two that make up the next multiple of
    16."""
    dim = -(-dim // 16) * 16
    found: list[tuple[int, int]] = []
    for size in (256, 128, 64, 32, 16):
        done = sum(cols for _, cols in found)
        if dim - done >= size:
            found.append((done, size))
    return tuple(found)


@dataclass(slots=True)
class WmmaLaunch:
    """A kernel, ready for every call with the same problem; see `kernels.launch.ForwardLaunch`."""

    problem: Problem
    kernel: Any
    grid: tuple[int, int, int]
    config: Any
    options: dict[str, Any]
    strides: tuple[tuple[int, ...], ...] | None = None  # of the views of q, k, v, out
    binary: Callable[..., None] | None = None

    @classmethod
    def of_forward(cls, problem: Problem, tile: WmmaTile) -> "WmmaLaunch":
        p = problem
        cut = math.log2(1 + MEAN_CUT * HALF_UNIT[p.dtype]) if tile.assembly else 0.0
        config = Config(
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            WAVES=tile.num_warps,
            W=wmma_layout(tile.num_warps),
            PIECES=pieces(p.head_dim),
            D=p.head_dim,
            GROUP=p.group,
            HAS_FIRST=p.first_offset is not None,
            HAS_LAST=p.last_offset is not None,
            NEGATE=p.scale < 0,
            STORE_LSE=p.return_lse,
            BF16=p.dtype == "bfloat16",
            CUT=cut,
            ASM=tile.assembly,
            LAZY=tile.lazy and tile.assembly,
            FRAGMENTS=tile.fragments,
            VALUE_LDS=tile.value_lds,
            QUERY_LDS=tile.query_lds,
            PREFETCH=tile.prefetch,
            PRIORITY=tile.priority,
        )
        grid = (p.kv_heads, tile.programs(p), p.batch)
        return cls(p, attention_forward, grid, constant(config), _options(tile.num_warps))

    @classmethod
    def of_singlewave(cls, problem: Problem, pipelined: bool) -> "WmmaLaunch":
        p, layout = problem, wmma_layout(1)
        band = p.first_offset is not None, p.last_offset is not None
        guard = Guard(16, layout, p.head_dim, 1, *band, p.scale < 0, p.return_lse, False)
        config = SinglewaveConfig(
            p.head_dim, p.group, *band, p.scale < 0, p.return_lse, PIPELINED=pipelined, W=layout, GUARD=guard
        )
        grid = (p.q_heads, -(-p.q_len // 16), p.batch)
        return cls(p, attention_forward_singlewave, grid, constant(config), _options(1))

    def arguments(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Any, ...]:
        """Positional arguments of the kernel. v in fragment order: (B, Hkv, blocks of 16 keys, 16, D), as
        `fragments.to_fragments` returns it."""
        p = self.problem
        if self.strides is None:
            of_v = (*v.stride()[:2], p.head_dim) if v.dim() == 5 else view_strides(v)
            self.strides = view_strides(q), view_strides(k), of_v, view_strides(out)
        views = (View(t, *steps) for t, steps in zip((q, k, v, out), self.strides, strict=True))
        band = (p.first_offset or 0, p.last_offset or 0)
        return (*views, lse, positive_scale(p), p.rescale_threshold, p.q_len, p.kv_len, *band, self.config)

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


def _options(waves: int) -> dict[str, Any]:
    return dict(num_warps=waves, num_stages=1, enable_fp_fusion=True)
