"""The operator `torch.ops.lazymax.attention_backward`: decided once for each problem, like the forward (ops.py)."""

import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from . import arch as arches
from . import mods, ops, reference
from .arch import Arch
from .compat import tritons
from .dispatch import Plan, plan
from .dispatch_backward import BackwardPlan, plan_backward
from .extras import NO_EXTRAS, Extras, Rules
from .ops import BACKWARD, library, parsed
from .problem import WIDE_STRIDE, Problem, descriptor_refusal, fp32_precision, output_strides


class Saved(NamedTuple):
    """What the operator takes behind `needs`."""

    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    impl: str = "auto"
    deterministic: bool = False


@dataclass(slots=True)
class _Decision:
    """What was decided for one problem, and what a call needs of it."""

    problem: Problem
    arch: Arch
    forward: Plan
    plan: BackwardPlan
    launch: Any  # None on the reference route
    strides: tuple[list[int], ...] | None  # of dq, dk, dv; None: those that torch gives to tensors like q, k, v
    copies_grad: bool  # the kernels cannot read the gradient of the output as it lies


_decided: dict[tuple[Any, ...], _Decision] = {}
_DECIDED_LIMIT = 4096


mods._forget.append(_decided.clear)


def _decide(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    rules: Rules,
    saved: Saved,
) -> _Decision:
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True, deterministic=saved.deterministic)
    arch = arches.of(q.device)
    strides = tuple(output_strides(t, t.shape[3]) for t in (q, k, v))
    problem = beside(problem, grad_out, max(own[2] for own in strides))
    forward = plan(problem, arch, saved.impl)
    chosen = plan_backward(problem, arch, forward)
    copies = grad_out.stride(3) != 1 or grad_out.dtype != q.dtype
    if chosen.tile is not None and chosen.tile.descriptors:
        copies = copies or descriptor_refusal("grad_out", grad_out) is not None
    alike = all(
        torch.empty_like(t, device="meta").stride() == tuple(s) for t, s in zip((q, k, v), strides, strict=True)
    )
    return _Decision(problem, arch, forward, chosen, _prepare(problem, chosen), None if alike else strides, copies)


def beside(problem: Problem, grad_out: torch.Tensor, step: int = 0) -> Problem:
    """The problem with what the gradient of the output, and gradients of row stride `step`, change of it."""
    refusal = descriptor_refusal("grad_out", grad_out)
    if refusal and grad_out.shape[3] * grad_out.element_size() % 16 == 0:
        refusal = None  # a copy can be read
    return replace(
        problem,
        wide=problem.wide or max(step, grad_out.stride(2)) >= WIDE_STRIDE,
        descriptor_refusal=problem.descriptor_refusal or refusal,
    )


def _prepare(problem: Problem, chosen: BackwardPlan) -> Any:
    return chosen.tile.prepare(problem, chosen) if chosen.tile else None


def _launch(decision: _Decision, impl: str, *arguments: Any) -> Any:
    """Launch on the tensors' device; None if no kernel could be built and the reference must do it. With impl "auto" a
    row that cannot be built for this GPU gives way to the portable rows, then to the reference, with one warning."""
    device = arguments[1].device  # of out
    try:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return decision.launch(*arguments)
        return decision.launch(*arguments)
    except Exception as error:
        from .kernels.launch import is_build_failure

        if impl != "auto" or not is_build_failure(error):
            raise
        instead = "reference" if decision.plan.backend == "portable" else "portable"
        warnings.warn(
            f"lazymax: the backward {decision.plan.describe()} cannot be built for {decision.arch.id} "
            f"({type(error).__name__}: {error}); {instead} takes over",
            stacklevel=2,
        )
        decision.plan = plan_backward(decision.problem, decision.arch, decision.forward, instead)
        decision.launch = _prepare(decision.problem, decision.plan)
    return None if decision.launch is None else _launch(decision, impl, *arguments)


def _key(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    rules: Rules,
    saved: Saved,
) -> tuple[Any, ...]:
    """What a decision depends on, and the binaries' specialisation with it."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), grad_out.stride(), q.dtype, q.device,
        q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15, grad_out.data_ptr() & 15, rules, saved.impl,
        saved.deterministic or torch.are_deterministic_algorithms_enabled(),
        grad_out.dtype, *(t is not None and (t.stride(), t.data_ptr() & 15) for t in (saved.out, saved.lse, grad_lse)),
        None if extras is NO_EXTRAS else ops._key(extras),
        q.device.type == "cpu" and tritons.interpreting(),
        fp32_precision() if q.dtype == torch.float32 else None,
    )  # fmt: skip


def _operator(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *arguments: Any,
) -> list[torch.Tensor]:
    extras, rules, (needs, *rest) = parsed(arguments)
    return run_backward(grad_out, grad_lse, q, k, v, extras, rules, needs, Saved(*rest))


def run_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    rules: Rules,
    needs: list[bool],
    saved: Saved,
    direct: bool = False,
) -> list[torch.Tensor]:
    """The operator, on parsed arguments. Gradients of score_args, and with them all others, are the reference's.
    direct: called past the dispatcher, for those of q, k and v alone."""
    key = (*_key(grad_out, grad_lse, q, k, v, extras, rules, saved), *needs)
    decision = _decided.get(key)
    if decision is None:
        if len(_decided) >= _DECIDED_LIMIT:
            _decided.clear()
        decision = _decided[key] = _decide(grad_out, q, k, v, extras, rules, saved)
    grads: tuple[torch.Tensor, ...]
    if decision.strides is None:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    else:
        grads = tuple(
            torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device)
            for t, strides in zip((q, k, v), decision.strides, strict=True)
        )
    problem = decision.problem
    by_torch = needs[3] and any(t.is_floating_point() for t in extras.score_args)
    if decision.launch is not None and not by_torch:
        others = _by_kernels(decision, saved, grad_out, grad_lse, (q, k, v), extras, rules, needs, grads)
        if others is not None:
            return list(grads) if direct else [*grads, *(q.new_empty(0) if grad is None else grad for grad in others)]
    found = reference.backward(grad_out, grad_lse, q, k, v, problem, extras, needs)
    for grad, own in zip(grads, found, strict=False):
        grad.copy_(own)
    return [*grads, *(g.contiguous() for g in found[3:])]


def _by_kernels(
    decision: _Decision,
    saved: Saved,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    extras: Extras,
    rules: Rules,
    needs: list[bool],
    grads: tuple[torch.Tensor, ...],
) -> list[torch.Tensor | None] | None:
    """Fill grads; those of mask, slopes, sinks and score_args, None where `needs` says no. None: cannot be built."""
    out, lse = saved.out, saved.lse
    if out is None or lse is None:
        out, lse = ops.run_forward(*inputs, extras, rules, ops.Options(saved.impl, return_lse=True))
    if decision.problem.copied:
        inputs = tuple(t if t.stride(3) == 1 else t.contiguous() for t in inputs)  # type: ignore[assignment]
    if decision.copies_grad:
        grad_out = grad_out.to(out.dtype, memory_format=torch.contiguous_format, copy=True)
    out = out if out.stride(3) == 1 else out.contiguous()
    d_lse = None if grad_lse is None else grad_lse.float().contiguous()
    d_slopes = None
    if needs[1] and extras.alibi_slopes is not None:
        d_slopes = torch.zeros(out.shape[:3], dtype=torch.float32, device=out.device)
    of_mask = needs[0] and extras.mask is not None and extras.mask.is_floating_point()
    arguments = ((*inputs, grad_out), out, lse.contiguous(), d_lse, grads, extras, d_slopes, of_mask)
    found = _launch(decision, saved.impl, *arguments)
    if found is None:
        return None
    delta, d_mask = found
    others: list[torch.Tensor | None] = [None] * (3 + len(extras.score_args))
    if d_mask is not None and extras.mask is not None:
        others[0] = d_mask.to(extras.mask.dtype)
    if d_slopes is not None and extras.alibi_slopes is not None:
        others[1] = _per_head(d_slopes, extras.alibi_slopes, extras)
    if needs[2] and extras.sinks is not None:
        sinks = _of_rows(extras.sinks.float(), extras, out.shape[2])
        weight = torch.exp(sinks - lse).where(lse > float("-inf"), 0.0)  # of the sink; rows of no sequence have none
        others[2] = _per_head(-(weight * delta).where(weight > 0, 0.0), extras.sinks, extras)
    return others


def _sequences(extras: Extras, rows: int) -> torch.Tensor:
    """The packed offsets, inside the tensor and rising whatever they hold."""
    assert extras.cu_seqlens_q is not None
    return extras.cu_seqlens_q.long().clamp(0, rows).cummax(0).values


def _of_rows(t: torch.Tensor, extras: Extras, rows: int) -> torch.Tensor:
    """(Hq,), (B, Hq) or (sequences, Hq) -> what broadcasts to (B, Hq, Sq). Rows of no sequence get the last one's."""
    if t.dim() == 1 or extras.cu_seqlens_q is None:
        return t[..., None]
    if t.shape[0] == 0:
        return t.new_zeros(t.shape[1], 1)
    at = torch.arange(rows, device=t.device)
    number = torch.searchsorted(_sequences(extras, rows)[1:].contiguous(), at, right=True)
    return t[number.clamp(max=t.shape[0] - 1)].T


def _per_head(own: torch.Tensor, t: torch.Tensor, extras: Extras) -> torch.Tensor:
    """(B, Hq, Sq), each row's share -> the gradient of t, (Hq,), (B, Hq) or (sequences, Hq). In a fixed order."""
    if t.dim() == 1:
        total = own.sum((0, 2))
    elif extras.cu_seqlens_q is None:
        total = own.sum(2)
    else:
        lengths = _sequences(extras, own.shape[2]).diff()
        first = own[0, :, : own.shape[2]].T.contiguous()
        total = torch.segment_reduce(first, "sum", lengths=lengths, axis=0, unsafe=True)
    return total.to(t.dtype)


def _fake(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *arguments: Any,
) -> list[torch.Tensor]:
    extras, _, (needs, *_) = parsed(arguments)

    def empty(t: torch.Tensor | None, need: bool) -> torch.Tensor:
        if t is None or not need or not t.is_floating_point():
            return q.new_empty(0)
        return t.new_empty(t.shape)

    grads = [t.new_empty_strided(t.shape, output_strides(t, t.shape[3])) for t in (q, k, v)]
    of_extras = [empty(t, need) for t, need in zip(extras[:3], needs, strict=False)]
    return [*grads, *of_extras, *(empty(t, needs[3]) for t in extras.score_args)]


library.impl("attention_backward", _operator, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(BACKWARD, _fake, lib=library)
