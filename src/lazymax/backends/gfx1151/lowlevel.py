"""The kernel of this folder by itself, for callers who lay out their caches: V in fragment order, a row of choice."""

from typing import Any

import torch

from ... import arch as arches
from ...problem import Problem, output_strides
from .launch import WmmaLaunch
from .rows import WmmaTile
from .tiles import FRAGMENTS, WMMA

ORDERS = ("rows", "fragments")


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, v_order: str = "rows", row: WmmaTile | None = None, **rules: Any
) -> WmmaLaunch:
    """The launch that `forward` makes; arguments and errors as there."""
    if v_order not in ORDERS:
        raise ValueError(f"v_order: got {v_order!r}, expected one of {', '.join(ORDERS)}")
    as_rows = v
    if v_order == "fragments":
        batch, heads, length, dim = k.shape
        if v.dim() != 5 or v.shape[:2] != (batch, heads) or v.shape[3:] != (16, dim) or v.shape[2] * 16 < length:
            raise ValueError(
                f"v: got shape {tuple(v.shape)}, expected that of fragments.to_fragments(v) for k of {tuple(k.shape)}: "
                f"({batch}, {heads}, blocks of 16 keys, 16, {dim})"
            )
        if v[0, 0].numel() and not v[0, 0].is_contiguous():
            raise ValueError(f"v: got strides {v.stride()}, expected the fragments of a head to be contiguous")
        as_rows = k  # of the same shape and dtype as the rows were
    if q.dtype != v.dtype:
        raise ValueError(f"v: got {v.dtype}, expected that of q, {q.dtype}")
    problem = Problem.from_call(q, k, as_rows, **rules)
    if problem.copied:
        raise ValueError(f"{', '.join(problem.copied)}: the head dimension must be contiguous")
    if row is not None and row.fragments != (v_order == "fragments"):
        raise ValueError(f"row: got {row.name}, expected one for v_order={v_order!r}")
    refused = []
    for tile in (row,) if row else FRAGMENTS if v_order == "fragments" else WMMA:
        why = tile.refusal(problem, arches.by_name("gfx1151"))
        if why is None:
            return WmmaLaunch.of_forward(problem, tile)
        refused.append(f"{tile.name}: {why}")
    raise NotImplementedError(f"no row takes the problem; {'; '.join(refused)}")


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    v_order: str = "rows",
    row: WmmaTile | None = None,
    return_lse: bool = False,
    **rules: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention on a gfx11 GPU. Not differentiable, no operator, no fallback: `lazymax.attention` has all of these.

    Args:
        q: (B, Hq, Sq, D), fp16 or bf16, D as the rows say.
        k: (B, Hkv, Sk, D).
        v: (B, Hkv, Sk, D); with v_order="fragments" what `fragments.to_fragments` made of it.
        v_order: "rows" or "fragments".
        row: a row of `tiles.WMMA`, `ALTERNATIVES` or `FRAGMENTS`; None: the first that takes the problem.
        return_lse: also return the logsumexp, (B, Hq, Sq) fp32, natural log.
        **rules: causal, window, window_align, scale, rescale_threshold as in `lazymax.attention`.

    Raises ValueError for arguments that do not go together, NotImplementedError if no row takes the problem.
    """
    launch = prepare(q, k, v, v_order, row, return_lse=return_lse, **rules)
    out = torch.empty_strided(q.shape, output_strides(q, q.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32, device=q.device)
    if out.numel():
        launch(q, k, v, out, lse)
    return (out, lse) if return_lse else out
