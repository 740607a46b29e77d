"""`--backward`: the gradients of the same candidates, checked before any time is taken.

A candidate's forward is run once on tensors that require gradients, and its graph kept: what is timed is
`torch.autograd.grad`, from the gradient of the output, which has the strides of that candidate's output. Checked are
all rows of some heads, sampled where all of them would take too long: everyone by the relative Frobenius error of dq,
dk and dv, lazymax also by the float64 error budget of `lazymax.testing`. Single rows are not looked at otherwise: under
a causal mask the first ones have gradients that are nothing but rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._functorch import config as functorch_config

from .. import arch as arches
from .. import reference
from ..dispatch import plan
from ..dispatch_backward import plan_backward
from ..problem import Problem
from ..testing import check_gradients
from .cases import Case
from .check import OK, SCORES_FP32, SCORES_FP64, WRONG, Verdict
from .clock import Clock, GraphClock
from .measure import Examined, Row, examine, measure
from .peers import LAZYMAX, LeftOut, Make, Ready

WORK = 2.5, 2.0  # of a forward's flops: five products for two; of its bytes: the same again as gradients
FROBENIUS = 2e-2
MOST_HEADS = 8  # checked
NO_EXTRAS = [torch.empty(0)] * 3  # mask, slopes and sinks have no gradients


def measure_backward(
    case: Case, dtype: torch.dtype, candidates: Mapping[str, Make], clock: Clock, **options: Any
) -> list[Row]:
    """`measure` of the backward; its rows have a suite of their own."""
    case = replace(case, suite=f"{case.suite} backward")
    return measure(case, dtype, candidates, clock, check=checked, work=WORK, **options)


def checked(
    case: Case, dtype: torch.dtype, candidates: Mapping[str, Make], clock: Clock, *, impl: str, rows: str
) -> tuple[Problem, Examined, dict[str, str]]:
    """As `measure.checked`: run every candidate's backward once and judge it; what lazymax runs. rows: those that
    lazymax chooses only."""
    q, k, v = case.tensors(dtype, clock.device)
    problem = Problem.from_call(q, k, v, causal=case.causal, window=case.window, return_lse=True)
    generator = torch.Generator(clock.device).manual_seed(1)
    size = (*q.shape[:3], v.shape[3])
    grad_out = torch.randn(size, generator=generator, device=clock.device, dtype=torch.float32).to(dtype)
    oracle = Oracle(problem, q, k, v, grad_out)
    # autograd runs a backward on the stream of its forward: a graph is captured on that one.
    stream = None
    if isinstance(clock, GraphClock):
        stream = torch.cuda.Stream(clock.device)  # type: ignore[no-untyped-call]
    made = {name: backward_of(make, grad_out, stream) for name, make in candidates.items()}
    makes = {name: partial(make, case, problem, q, k, v) for name, make in made.items()}
    arch = arches.of(clock.device)
    chosen = plan_backward(problem, arch, plan(problem, arch, impl)).describe()
    return problem, examine(makes, oracle, clock), {LAZYMAX: chosen}


def backward_of(make: Make, grad_out: torch.Tensor, stream: "torch.cuda.Stream | None" = None) -> Make:
    """The backward of a candidate, of a forward on the stream. Raises LeftOut if it has none."""

    def made(case: Case, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ready:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        forward = make(case, problem, *leaves)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())  # which makes the inputs
        # A compiled backward would reuse what the graph keeps for the next run.
        with torch.cuda.stream(stream), forward.context(), functorch_config.patch(donated_buffer=False):
            out = forward.run()
            if not out.requires_grad:
                raise LeftOut("its output has no gradient")
            own = torch.empty_like(out).copy_(grad_out)

            def run() -> tuple[torch.Tensor, ...]:
                return torch.autograd.grad(out, leaves, own, retain_graph=True)

            def whole() -> tuple[torch.Tensor, ...]:
                again = forward.run()
                return (again.detach(), *torch.autograd.grad(again, leaves, own))

            run()  # compiles what is compiled
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        return Ready(run, forward.context, whole, stream)

    return made


def heads(problem: Problem, limit: int) -> list[tuple[int, int]]:
    """(batch element, key head) of those that are checked, about `limit` scores, at least one."""
    p = problem
    count = max(1, min(p.batch * p.kv_heads, limit // max(1, p.group * p.q_len * p.kv_len), MOST_HEADS))
    step = max(1, (p.batch * p.kv_heads - 1) // max(1, count - 1))
    return [divmod(unit * step, p.kv_heads) for unit in range(count)]


class Oracle:
    """The exact gradients of some heads of one problem, and a judge of others'."""

    def __init__(
        self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor
    ) -> None:
        self.problem, self.inputs = problem, (grad_out, q, k, v)
        self.exact = {at: self._reference(at) for at in heads(problem, SCORES_FP32)}

    def _part(self, at: tuple[int, int]) -> tuple[list[torch.Tensor], Problem]:
        """grad_out, q, k and v of one key head."""
        grad_out, q, k, v = self.inputs
        part = replace(self.problem, batch=1, q_heads=self.problem.group, kv_heads=1)
        return [self._queries(grad_out, at), *self._cut((q, k, v), at)], part

    def _queries(self, t: torch.Tensor, at: tuple[int, int]) -> torch.Tensor:
        group, (batch, head) = self.problem.group, at
        return t[batch : batch + 1, head * group : (head + 1) * group]

    def _cut(self, of: Sequence[torch.Tensor], at: tuple[int, int]) -> list[torch.Tensor]:
        """Of q, k and v, or of their gradients, what belongs to one key head."""
        batch, head = at
        return [self._queries(of[0], at), *(t[batch : batch + 1, head : head + 1] for t in of[1:])]

    def _reference(self, at: tuple[int, int]) -> list[torch.Tensor]:
        tensors, part = self._part(at)
        dtype = reference.compute_dtype(tensors[0].dtype)
        grad_out, q, k, v = (t.to(dtype) for t in tensors)
        return reference.backward(grad_out, None, q, k, v, part)[:3]

    def judge(self, grads: Sequence[torch.Tensor], budget: bool) -> Verdict:
        """Compare; `budget`: also within the float64 error budget."""
        for name, t, own in zip("qkv", grads, self.inputs[1:], strict=True):
            if t.shape != own.shape or t.dtype != own.dtype:
                why = f"d{name}: shape {tuple(t.shape)} {t.dtype}, expected {tuple(own.shape)} {own.dtype}"
                return Verdict(None, why)
        errors = []
        for which in range(3):
            pairs = [(self._cut(grads, at)[which], exact[which]) for at, exact in self.exact.items()]
            gap = torch.stack([(got.to(exact.dtype) - exact).square().sum() for got, exact in pairs]).sum()
            size = torch.stack([exact.square().sum() for _, exact in pairs]).sum()
            errors.append((gap / size.clamp_min(1e-30)).sqrt().item())
        for name, error in zip("qkv", errors, strict=True):
            if not error < FROBENIUS:
                return Verdict(error, f"relative error of d{name} {error:.3g}, expected below {FROBENIUS:g}")
        why = self._budget(grads) if budget else ""
        return Verdict(max(errors), why, WRONG if why else OK)

    def _budget(self, grads: Sequence[torch.Tensor]) -> str:
        for at in heads(self.problem, SCORES_FP64):
            (grad_out, q, k, v), part = self._part(at)
            for result in check_gradients([*self._cut(grads, at), *NO_EXTRAS], grad_out, None, q, k, v, part):
                if not result.ok:
                    return f"outside the float64 error budget in batch element {at[0]}, key head {at[1]}: {result}"
        return ""
