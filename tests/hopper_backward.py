"""Calls for the backward of sm_90, on a GPU and in the simulator, and in torch what its other kernels do."""

from typing import Any

import torch
from hopper import CAUSAL, Call

from lazymax import arch as arches
from lazymax import reference
from lazymax.backends import registry
from lazymax.backends.sm_90.backward_launch import HopperBackwardLaunch
from lazymax.backends.sm_90.backward_rows import HopperBackwardTile
from lazymax.compiling_backward import plan_of
from lazymax.extras import Extras
from lazymax.kernels.launch import LOG2E
from lazymax.problem import Problem

ARCH = arches.by_name("sm_90")
WINDOW = {"window": (100, 30), "window_align": "bottom_right"}


def rows() -> list[HopperBackwardTile]:
    table = registry()["sm_90"]
    return [row for row in (*table.backward, *table.backward_alternatives) if isinstance(row, HopperBackwardTile)]


def head_dims(row: HopperBackwardTile) -> list[tuple[int, int]]:
    """(D, D_v): full tiles first, then tiles with columns to spare."""
    others = {64: [(40, 64), (56, 8)], 128: [(72, 128), (96, 96), (104, 32)]}
    return [(row.width, row.width), *others[row.width]]


def prepared(row: HopperBackwardTile, problem: Problem) -> HopperBackwardLaunch:
    launch = row.prepare(problem, plan_of("sm_90", row, ARCH))
    assert isinstance(launch, HopperBackwardLaunch)
    return launch


def one_by_one(row: HopperBackwardTile, problem: Problem) -> HopperBackwardLaunch:
    """Heads one after the other, so that in small problems too CTAs finish sums of others and few sums are in use."""
    launch = prepared(row, problem)
    launch.arrange(1, 0, row.finishes)
    return launch


def upstream(call: Call, q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the output and of the LSE."""
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(*q.shape[:3], v.shape[3], generator=generator).to(q.dtype).to(q.device)
    if call.layout == "bshd":
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    return grad, torch.randn(q.shape[:3], generator=generator).to(q.device)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, extras: Extras
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE as a kernel leaves them."""
    out, lse = reference.attention(q, k, v, problem, reference.compute_dtype(q.dtype), p_dtype=q.dtype, extras=extras)
    return out.to(q.dtype), lse.float().contiguous()


def prepare(
    launch: HopperBackwardLaunch, work: Any, out: torch.Tensor, d_out: torch.Tensor, lse: torch.Tensor, d_lse: Any
) -> None:
    """`gradients.prepare`: the two planes that the kernel reads, and those sums that it does not clear itself."""
    q_len = launch.problem.q_len
    empty = lse == -torch.inf
    work.stats.fill_(torch.nan)
    work.stats[0, ..., q_len:], work.stats[1, ..., q_len:] = torch.inf, 0.0
    work.stats[0, ..., :q_len] = torch.where(empty, torch.inf, lse * LOG2E)
    delta = (out.float() * d_out.float()).sum(-1) - (0.0 if d_lse is None else d_lse)
    work.stats[1, ..., :q_len] = torch.where(empty, 0.0, delta)
    for t in (work.settled, work.counts, work.odd, work.sums):
        if t is not None:
            t.zero_()


def finished(launch: HopperBackwardLaunch, work: Any, dq: torch.Tensor) -> torch.Tensor:
    """dQ of all heads, what `finish` does for those that are left."""
    p = launch.problem
    heads = p.batch * p.kv_heads
    done = dq.reshape(heads, p.group, p.q_len, p.head_dim).clone()
    left = torch.arange(launch.finished * launch.together, heads)
    done[left] = (rows_of(work.sums)[left % launch.sums, :, : p.q_len, : p.head_dim] * p.scale).to(dq.dtype)
    return done.view_as(dq)


SQUARE = (8, 4, 8, 4, 2, 2)  # 8 columns, warp, row of 8, pair of columns, which 8 of 16 rows, column of the pair
TO_ROWS = (0, 1, 2, 5, 8, 6, 3, 4, 7, 9)  # of (batch, head, tile, square, *SQUARE)


def rows_of(sums: torch.Tensor) -> torch.Tensor:
    """(heads, group, rows, columns) of a sum in the order of `kernels/sums.py`."""
    batch, heads, length, cols = sums.shape
    x = sums.reshape(batch, heads, length // 64, cols // 64, *SQUARE).permute(TO_ROWS)
    return x.reshape(batch, heads, length, cols)


def sum_of(dq: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    batch, heads, length, cols = dq.shape
    order = [TO_ROWS[i] for i in range(10)]
    shape = [(batch, heads, length // 64, cols // 64, *SQUARE)[i] for i in order]
    back = [order.index(i) for i in range(10)]
    return dq.reshape(shape).permute(back).reshape(batch, heads, length, cols)


# In turn causal with more keys, rows without keys, bands, groups; each ring goes round more than twice.
SIMULATED = (
    Call((1, 4, 2, 330, 400), CAUSAL),
    Call((1, 4, 2, 200, 300), {}, "normal", "bshd"),
    Call((2, 1, 1, 300, 150), CAUSAL, sinks=True),
    Call((1, 1, 1, 500, 260), WINDOW),
    Call((1, 2, 2, 64, 128), {"scale": -0.2}, "large"),
    Call((1, 3, 1, 130, 129), {"causal": "top_left"}, "normal", "padded"),
    Call((1, 3, 3, 250, 320), {"window": (None, 40)}),
    Call((1, 2, 2, 250, 300), {"window": (50, None), "window_align": "top_left"}),
    Call((1, 1, 1, 1, 1), CAUSAL),
    Call((1, 5, 5, 300, 130), {}),
)
