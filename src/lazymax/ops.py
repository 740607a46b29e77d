"""The torch operators: `torch.ops.lazymax.attention_forward` and `.attention_backward` (ops_backward.py).

Defined with `torch.library.Library` (define / impl), which costs less per call than the decorator. Planning happens
inside the operator, on real sizes, so a compiled caller sees one opaque node and no branch on a length. Importing this
module needs torch only; Triton is imported when the first problem takes a kernel.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

from . import arch as arches
from . import mods, reference, verify
from .arch import Arch
from .compat import tritons
from .dispatch import Plan, plan
from .extras import NO_EXTRAS, Extras, Rules, check_extras
from .problem import Problem, check_tensors, fp32_precision, output_strides

library = torch.library.Library("lazymax", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_EXTRAS = (
    "Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, Tensor? seqlens_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? dropout_seed, Tensor[] score_args, Tensor[] mask_args"
)
_RULES = (
    "bool causal, int? window_left, int? window_right, str align, float? scale, float softcap, float dropout_p, "
    "str? score_mod, str? mask_mod, SymInt? max_seqlen_q, SymInt? max_seqlen_k"
)
library.define(  # type: ignore[no-untyped-call]
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_EXTRAS}, {_RULES}, str impl, float? rescale_threshold, "
    "bool return_lse, bool keep_lse=False, bool deterministic=False) -> (Tensor, Tensor)",
    tags=_TAGS,
)
# Returns the gradients of q, k, v, mask, alibi_slopes, sinks and every score_arg; empty where `needs` says no. out and
# lse: what the forward returned; without them it is run again.
library.define(  # type: ignore[no-untyped-call]
    f"attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, {_EXTRAS}, {_RULES}, "
    'bool[] needs, Tensor? out=None, Tensor? lse=None, str impl="auto", bool deterministic=False) -> Tensor[]',
    tags=_TAGS,
)


class Options(NamedTuple):
    """How the forward runs."""

    impl: str = "auto"
    rescale_threshold: float | None = None
    return_lse: bool = False
    keep_lse: bool = False  # for the backward: an LSE comes back where a kernel runs, and room for one elsewhere
    deterministic: bool = False  # of the gradients

    @property
    def with_lse(self) -> bool:
        """The second output has a number for each row."""
        return self.return_lse or self.keep_lse


N_EXTRAS, N_RULES = len(Extras._fields), len(Rules._fields)
N_SINGLE: Final = 7  # of the extras, those that are no lists; a literal, so that slices by it have types
N_NEEDS = 4  # gradients the backward makes on demand: of mask, alibi_slopes, sinks, score_args

FORWARD = "lazymax::attention_forward"
BACKWARD = "lazymax::attention_backward"


@dataclass(slots=True)
class _Decision:
    """What was decided for one problem, and what a call needs of it."""

    problem: Problem
    arch: Arch
    plan: Plan
    launch: Any  # of the tile, see `Tile.prepare`; None on the reference route
    out_size: tuple[int, ...]
    out_strides: list[int]
    lse_size: tuple[int, ...]
    no_lse: torch.Tensor  # what the direct path passes where nobody asked for an LSE; has no elements


# Bounded: cleared when full, which costs one planning per live problem.
_decided: dict[tuple[Any, ...], _Decision] = {}
_DECIDED_LIMIT = 4096


mods._forget.append(_decided.clear)

# Called with the plan of every forward (None: torch's own function was called instead); see `compat.sdpa`.
observers: list[Callable[[Plan | None], None]] = []


def observe(plan: Plan | None) -> None:
    """Tell the observers what ran; not what is only traced."""
    if torch.compiler.is_compiling():
        return
    for observer in tuple(observers):  # while another thread takes one off, the list itself would skip the next
        observer(plan)


def _decide(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, rules: Rules, options: Options
) -> _Decision:
    problem = Problem.from_tensors(
        q, k, v, extras, rules, rescale_threshold=options.rescale_threshold, return_lse=options.with_lse,
        deterministic=options.deterministic,
    )  # fmt: skip
    arch = arches.of(q.device)
    chosen = plan(problem, arch, options.impl)
    if chosen.route == "reference" and not options.return_lse:
        problem = replace(problem, return_lse=False)  # its backward takes none, and without it torch's SDPA may run
    lse_size = tuple(q.shape[:3]) if options.with_lse else (0,)
    out_size = (*q.shape[:3], v.shape[3])
    strides = output_strides(q, v.shape[3])
    no_lse = torch.empty(0, dtype=torch.float32, device=q.device)
    return _Decision(problem, arch, chosen, _prepare(problem, chosen), out_size, strides, lse_size, no_lse)


def _prepare(problem: Problem, chosen: Plan) -> Any:
    return chosen.tile.prepare(problem, chosen) if chosen.tile else None


def _run(decision: _Decision, impl: str, extras: Extras, *tensors: torch.Tensor) -> bool:
    """Launch, on the tensors' device; False if no kernel could be built and the reference must do it. With impl "auto"
    a row that cannot be built for this GPU gives way to the portable rows, then to the reference, with one warning."""
    device = tensors[0].device
    try:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                decision.launch(*tensors, extras)
        else:
            decision.launch(*tensors, extras)
        return True
    except Exception as error:
        from .kernels.launch import is_build_failure

        if impl != "auto" or not is_build_failure(error):
            raise
        instead = "reference" if decision.plan.backend == "portable" else "portable"
        warnings.warn(
            f"lazymax: {decision.plan.describe()} cannot be built for {decision.arch.id} "
            f"({type(error).__name__}: {error}); {instead} takes over",
            stacklevel=2,
        )
        decision.plan = plan(decision.problem, decision.arch, instead)
        decision.launch = _prepare(decision.problem, decision.plan)
    return decision.launch is not None and _run(decision, impl, extras, *tensors)


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    rules: Rules,
    options: Options,
    direct: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator. direct: called past the dispatcher, so that an LSE nobody asked for need not be a fresh tensor."""
    device = q.device
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, device, k.device,
        v.device, q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15, rules, options,
        None if extras is NO_EXTRAS else _key(extras),
        device.type == "cpu" and tritons.interpreting(),
        fp32_precision() if q.dtype == torch.float32 else None,
    )  # fmt: skip
    decision = _decided.get(key)
    if decision is None:
        if len(_decided) >= _DECIDED_LIMIT:
            _decided.clear()
        decision = _decided[key] = _decide(q, k, v, extras, rules, options)
    problem = decision.problem
    out = torch.empty_strided(decision.out_size, decision.out_strides, dtype=q.dtype, device=device)
    if direct and not options.with_lse:
        lse = decision.no_lse
    else:
        lse = torch.empty(decision.lse_size, dtype=torch.float32, device=device)
    if problem.copied:
        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    if out.numel() == 0 and lse.numel() == 0:
        return out, lse
    if decision.launch is None or not _run(decision, options.impl, extras, q, k, v, out, lse):
        result, result_lse = reference.fallback(q, k, v, problem, extras)
        out.copy_(result)
        lse.copy_(result_lse) if problem.return_lse else lse.fill_(math.nan)
    if observers:
        observe(decision.plan)
    return verify.after_forward(out, lse, q, k, v, problem, decision.plan, extras)


def _key(extras: Extras) -> tuple[Any, ...]:
    """What a decision depends on of the extras, that of the binary's specialisation included."""
    return (
        *(
            t is not None and (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)
            for t in (*extras[:N_SINGLE], *extras.score_args, *extras.mask_args)
        ),
        len(extras.score_args),
    )


def parsed(arguments: tuple[Any, ...]) -> tuple[Extras, Rules, tuple[Any, ...]]:
    """The operator's arguments after the tensors -> extras, rules, the rest. Absent extras are the object NO_EXTRAS."""
    of_extras = arguments[:N_EXTRAS]
    extras = NO_EXTRAS
    if any(t is not None for t in of_extras[:-2]) or of_extras[-2] or of_extras[-1]:
        *tensors, score_args, mask_args = of_extras
        extras = Extras(*tensors)._replace(score_args=tuple(score_args), mask_args=tuple(mask_args))
    return extras, Rules(*arguments[N_EXTRAS : N_EXTRAS + N_RULES]), arguments[N_EXTRAS + N_RULES :]


def _operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    extras, rules, options = parsed(arguments)
    return run_forward(q, k, v, extras, rules, Options(*options))


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    extras, rules, options = parsed(arguments)
    check_tensors(q, k, v)
    check_extras(q, k, extras, rules)
    out = q.new_empty_strided((*q.shape[:3], v.shape[3]), output_strides(q, v.shape[3]))
    return out, q.new_empty(q.shape[:3] if Options(*options).with_lse else (0,), dtype=torch.float32)


library.impl("attention_forward", _operator, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(FORWARD, _forward_fake, lib=library)
