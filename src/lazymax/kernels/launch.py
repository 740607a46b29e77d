"""From a problem and a tile row to the arguments of the portable kernel, for a launch or a compile without a GPU."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import compat
from ..dispatch import Plan
from ..problem import Problem
from .forward import Config, attention_forward
from .memory import View

LOG2E = 1.4426950408889634
TINY_SCALE = 1e-38  # for a scale of 0: products of it with scores vanish, but -inf (masked) stays -inf


def block_width(dim: int) -> int:
    """Columns of a tile that holds `dim` columns: tensor shapes are powers of two, products take 16 at least."""
    return max(16, triton.next_power_of_2(dim))


def view(t: torch.Tensor) -> View:
    """Strides of dimensions of size 1 are free; 0 keeps them from making another build of the kernel."""
    strides = (stride if size > 1 else 0 for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True))
    return View(t, *strides)


def describe(t: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Descriptor whose blocks are `rows` x `cols` of one head. Dimensions of size 1 get a stride that the hardware
    accepts (it is never used)."""
    strides = [s if n > 1 else 16 for n, s in zip(t.shape[:3], t.stride()[:3], strict=True)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], [1, 1, rows, cols])


@dataclass(slots=True)
class ForwardLaunch:
    """The portable kernel, ready for every call with the same problem; made once, called often."""

    grid: tuple[int, int, int]
    config: Config
    scalars: tuple[Any, ...]
    options: dict[str, Any]
    descriptors: bool

    @classmethod
    def prepare(cls, problem: Problem, plan: Plan) -> "ForwardLaunch":
        tile = plan.tile
        assert tile is not None
        first, last = problem.first_offset, problem.last_offset
        # Triton's default for fusion flips in 3.10; softmax.exponent wants it.
        options: dict[str, Any] = dict(num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True)
        if tile.max_registers is not None:
            options["maxnreg"] = tile.max_registers
        block_d, block_dv = block_width(problem.head_dim), block_width(problem.v_head_dim)
        config = Config(
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            D=problem.head_dim,
            D_V=problem.v_head_dim,
            GROUP=problem.group,
            HAS_FIRST=first is not None,
            HAS_LAST=last is not None,
            DESCRIPTOR=tile.descriptors,
            BRANCH=plan.rescale == "branch",
            PRECISION=problem.fp32_precision,
            UPCAST=compat.interpreter_needs_upcast(problem.dtype),
            WIDE=problem.wide,
            NEGATE=problem.scale < 0,
            STORE_LSE=problem.return_lse,
        )
        return cls(
            grid=(problem.q_heads, triton.cdiv(problem.q_len, tile.block_m), problem.batch),
            config=Config(*map(tl.constexpr, config)),
            scalars=(
                max(abs(problem.scale) * LOG2E, TINY_SCALE),
                problem.rescale_threshold,
                problem.q_len,
                problem.kv_len,
                first or 0,
                last or 0,
            ),
            options=options,
            descriptors=tile.descriptors,
        )

    def arguments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[Any, ...]:
        """Positional arguments of `attention_forward`."""
        q_tiles = k_tiles = v_tiles = None
        if self.descriptors:
            rows = self.config.BLOCK_N.value
            q_tiles = describe(q, self.config.BLOCK_M.value, self.config.BLOCK_D.value)
            k_tiles = describe(k, rows, self.config.BLOCK_D.value)
            v_tiles = describe(v, rows, self.config.BLOCK_DV.value)
        return (view(q), view(k), view(v), view(out), lse, q_tiles, k_tiles, v_tiles, *self.scalars, self.config)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        attention_forward[self.grid](*self.arguments(q, k, v, out, lse), **self.options)
