"""V in fragment order, for caches that are written once and read many times.

The order of a block of 16 keys: for each 16 columns, then for each 8 keys, the columns in the order inside 16
(layouts.py), and of each its 8 keys. What a half-wave reads for one product is then 256 bytes in a row. It saves the
forward 14 LDS stores for 32 keys, and lets it read V without LDS at all; the default row needs none of this.
"""

import torch

from .kernels.fragments import value_fragments
from .launch import pieces

KEYS = 64  # of a program; the tensor ends with a full one


def empty_fragments(v: torch.Tensor) -> torch.Tensor:
    """(B, Hkv, blocks of 16 keys, 16, D) for a v (B, Hkv, Sk, D); whole programs of keys."""
    batch, heads, length, dim = v.shape
    return torch.empty(batch, heads, -(-length // KEYS) * (KEYS // 16), 16, dim, dtype=v.dtype, device=v.device)


def arguments(v: torch.Tensor, fragments: torch.Tensor, first: int, cols: int) -> tuple[object, ...]:
    """Positional arguments of `value_fragments` for one piece of the head dimension."""
    _, heads, length, dim = v.shape
    steps = (*v.stride()[:3], fragments.stride(1))
    return (v, fragments, heads, length, *steps, dim, cols, first, KEYS)


def grid(v: torch.Tensor) -> tuple[int, int]:
    """Programs of `value_fragments` for one piece."""
    return -(-v.shape[2] // KEYS), v.shape[0] * v.shape[1]


def to_fragments(v: torch.Tensor) -> torch.Tensor:
    """v (B, Hkv, Sk, D), fp16 or bf16, D a multiple of 16 -> its fragments (see `empty_fragments`), for
    `lowlevel.forward(..., v_order="fragments")`. Raises ValueError for another shape or dtype."""
    if v.dim() != 4 or v.shape[3] % 16 or v.dtype not in (torch.float16, torch.bfloat16) or v.stride(3) != 1:
        raise ValueError(
            f"v: got {v.dtype} {tuple(v.shape)} with strides {v.stride()}, expected float16 or bfloat16 "
            "(B, Hkv, Sk, D), D a multiple of 16 and contiguous"
        )
    fragments = empty_fragments(v)
    if v.numel():
        for first, cols in pieces(v.shape[3]):
            value_fragments[grid(v)](*arguments(v, fragments, first, cols), num_warps=4)
    return fragments
