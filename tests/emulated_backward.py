"""The portable backward of gfx1151 in the emulator: whole calls, as `BackwardLaunch` makes them on a GPU."""

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from lazymax import reference
from lazymax.extras import Extras
from lazymax.problem import Problem
from lazymax.testing import Budget, check_gradients

if TYPE_CHECKING:
    from emulated import Emulated, Job


def prepared(row: Any, problem: Problem) -> Any:
    """The row's launch object for the problem."""
    from lazymax import arch
    from lazymax.compiling_backward import plan_of

    return row.prepare(problem, plan_of("gfx1151", row, arch.by_name("gfx1151")))


def upstream(out: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of an output and of its LSE."""
    from emulated import laid_out

    generator = torch.Generator().manual_seed(11)
    d_out = torch.randn(out.shape, generator=generator).to(out.dtype)
    return laid_out(d_out, layout, 8), torch.randn(out.shape[:3], generator=generator)


def run_backward(
    emulated: "Emulated", job: "Job", inputs: tuple[torch.Tensor, ...], extras: Extras, problem: Problem
) -> tuple[int, list[Budget]]:
    """(instructions, budgets) of the gradients of q, k, v, a float mask and slopes; every kernel of the call is built
    and executed, `gradients.prepare` too. Output and LSE are the reference's: the forward has tests of its own."""
    from emulated import laid_out
    from simulators.gfx1151 import aligned
    from simulators.gfx1151 import launch as execute

    from lazymax.kernels import backward_launch
    from lazymax.ops_backward import _per_head

    executed = []

    def run(kernel: Any, grid: tuple[int, ...], binary: Any, arguments: tuple[Any, ...], **options: Any) -> None:
        executed.append(execute(emulated.build(kernel, arguments, options), grid, arguments).executed)

    q, k, v = inputs
    out, lse = map(aligned, reference.fallback(q, k, v, problem, extras))
    d_out, d_lse = map(aligned, upstream(out, job.layout))
    of_mask = extras.mask is not None and extras.mask.is_floating_point()
    d_slopes = None if extras.alibi_slopes is None else torch.zeros(lse.shape)
    grads = [aligned(laid_out(torch.full(t.shape, torch.nan, dtype=t.dtype), job.layout, 1)) for t in inputs]
    launch = prepared(job.row, problem)
    with patch.object(backward_launch, "run", run):
        _, d_mask = launch((*inputs, d_out), out, lse, d_lse, grads, extras, d_slopes, of_mask)
    others = [torch.empty(0)] * 3
    if d_mask is not None:
        others[0] = d_mask
    if d_slopes is not None:
        others[1] = _per_head(d_slopes, extras.alibi_slopes, extras)
    needs = (of_mask, d_slopes is not None, False, False)
    budgets = check_gradients([*grads, *others], d_out, d_lse, q, k, v, problem, extras, needs, out=out)
    return sum(executed), budgets
