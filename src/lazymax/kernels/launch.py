"""From a problem and a tile row to the arguments of the portable kernel, for a launch or a compile without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compat import tritons
from ..dispatch import Plan
from ..problem import Problem
from .forward import Config, attention_forward
from .memory import View

MAX_GRID = 65535  # of the second and third dimension of a grid, on CUDA and HIP
LOG2E = 1.4426950408889634
TINY_SCALE = 2.0**-126  # for a scale of 0: its products with scores vanish, but -inf (masked) stays -inf


def block_width(dim: int, least: int) -> int:
    """Columns of a tile that holds `dim` columns: tensor shapes are powers of two."""
    return max(least, triton.next_power_of_2(dim))


def view_strides(t: torch.Tensor) -> tuple[int, ...]:
    """Strides of a `View`. Those of dimensions of size 1 are free; 0 keeps them from making another build."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True))


def describe(t: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Descriptor whose blocks are `rows` x `cols` of one head. Dimensions of size 1 get a stride that the hardware
    accepts (it is never used)."""
    strides = [s if n > 1 else 16 for n, s in zip(t.shape[:3], t.stride()[:3], strict=True)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], [1, 1, rows, cols])


def is_build_failure(error: Exception) -> bool:
    """Whether the kernel could not be built for this GPU, as opposed to a fault while it ran."""
    return isinstance(error, OutOfResources | PTXASError | CompilationError) or "PassManager" in str(error)


@dataclass(slots=True)
class ForwardLaunch:
    """The portable kernel, ready for every call with the same problem; made once, called often.

    The first call goes through Triton's JIT, which specialises the arguments and finds or builds the binary. Later
    calls have the same strides, alignments and scalars, hence the same binary, and launch it directly: that saves most
    of the host time of a call.
    """

    batch: int
    grid: tuple[int, int, int]
    config: Config
    scalars: tuple[Any, ...]
    options: dict[str, Any]
    descriptors: bool
    strides: tuple[tuple[int, ...], ...] | None = None  # of the views of q, k, v, out
    binary: Callable[..., None] | None = None

    @classmethod
    def prepare(cls, problem: Problem, plan: Plan) -> "ForwardLaunch":
        tile = plan.tile
        assert tile is not None
        first, last = problem.first_offset, problem.last_offset
        config = Config(
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=block_width(problem.head_dim, plan.least_columns),
            BLOCK_DV=block_width(problem.v_head_dim, plan.least_columns),
            D=problem.head_dim,
            D_V=problem.v_head_dim,
            GROUP=problem.group,
            HAS_FIRST=first is not None,
            HAS_LAST=last is not None,
            DESCRIPTOR=tile.descriptors,
            BRANCH=plan.rescale == "branch",
            PRECISION=problem.fp32_precision,
            UPCAST=tritons.interpreter_needs_upcast(problem.dtype),
            WIDE=problem.wide,
            NEGATE=problem.scale < 0,
            STORE_LSE=problem.return_lse,
        )
        scale_log2 = max(abs(problem.scale) * LOG2E, TINY_SCALE)
        scalars = (scale_log2, problem.rescale_threshold, problem.q_len, problem.kv_len, first or 0, last or 0)
        # Triton's default for fusion flips in 3.10; softmax.exponent wants it.
        options: dict[str, Any] = dict(num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True)
        if tile.max_registers is not None:
            options["maxnreg"] = tile.max_registers
        q_tiles = triton.cdiv(problem.q_len, tile.block_m)
        return cls(
            batch=problem.batch,
            grid=(problem.q_heads, q_tiles, min(problem.batch, MAX_GRID)),
            config=Config(*map(tl.constexpr, config)),
            scalars=scalars,
            options=options,
            descriptors=tile.descriptors,
        )

    def arguments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[Any, ...]:
        """Positional arguments of `attention_forward`."""
        if self.strides is None:
            self.strides = tuple(view_strides(t) for t in (q, k, v, out))
        q_tiles = k_tiles = v_tiles = None
        if self.descriptors:
            rows = self.config.BLOCK_N.value
            q_tiles = describe(q, self.config.BLOCK_M.value, self.config.BLOCK_D.value)
            k_tiles = describe(k, rows, self.config.BLOCK_D.value)
            v_tiles = describe(v, rows, self.config.BLOCK_DV.value)
        of_q, of_k, of_v, of_out = self.strides
        views = View(q, *of_q), View(k, *of_k), View(v, *of_v), View(out, *of_out)
        return (*views, lse, q_tiles, k_tiles, v_tiles, *self.scalars, self.config)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        if self.batch > MAX_GRID:
            self._in_slices(q, k, v, out, lse)
        elif self.binary is not None:
            self.binary(*self.arguments(q, k, v, out, lse))
        else:
            kernel = attention_forward[self.grid](*self.arguments(q, k, v, out, lse), **self.options)
            self.binary = kernel[self.grid] if kernel is not None else None  # the interpreter has none

    def _in_slices(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """A batch that is larger than the third dimension of a grid may be."""
        for start in range(0, self.batch, MAX_GRID):
            part = [t[start : start + MAX_GRID] for t in (q, k, v, out)]
            part_lse = lse[start : start + MAX_GRID] if lse.numel() else lse
            grid = (*self.grid[:2], part[0].shape[0])
            attention_forward[grid](*self.arguments(*part, part_lse), **self.options)
