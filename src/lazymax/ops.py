"""The torch operators: `torch.ops.lazymax.attention_forward` and `.attention_backward`.

Defined with `torch.library.Library` (define / impl), which costs less per call than the decorator. Planning happens
inside the operator, on real sizes, so a compiled caller sees one opaque node and no branch on a length. Importing this
module needs torch only; Triton is imported when the first problem takes a kernel.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import arch as arches
from . import reference, verify
from .arch import Arch
from .compat import tritons
from .dispatch import Plan, plan
from .problem import Problem, check_tensors, fp32_precision, output_strides

_lib = torch.library.Library("lazymax", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_RULES = "bool causal, int? window_left, int? window_right, str align, float? scale"
_lib.define(  # type: ignore[no-untyped-call]
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_RULES}, str impl, float? rescale_threshold, bool return_lse)"
    " -> (Tensor, Tensor)",
    tags=_TAGS,
)
_lib.define(  # type: ignore[no-untyped-call]
    f"attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, {_RULES})"
    " -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)

FORWARD = "lazymax::attention_forward"
BACKWARD = "lazymax::attention_backward"


@dataclass(slots=True)
class _Decision:
    """What was decided for one problem, and what a call needs of it."""

    problem: Problem
    arch: Arch
    plan: Plan
    launch: Any  # kernels.launch.ForwardLaunch, or None on the reference route
    out_size: tuple[int, ...]
    out_strides: list[int]
    lse_size: tuple[int, ...]
    no_lse: torch.Tensor  # what the direct path passes where nobody asked for an LSE; has no elements


# Bounded: cleared when full, which costs one planning per live problem.
_decided: dict[tuple[Any, ...], _Decision] = {}
_DECIDED_LIMIT = 4096


def _decide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: tuple[Any, ...], impl: str) -> _Decision:
    causal, left, right, align, scale, threshold, return_lse = rules
    problem = Problem.from_tensors(
        q, k, v, causal=causal, window=(left, right), align=align, scale=scale, rescale_threshold=threshold,
        return_lse=return_lse,
    )  # fmt: skip
    arch = arches.of(q.device)
    chosen = plan(problem, arch, impl)
    lse_size = tuple(q.shape[:3]) if return_lse else (0,)
    out_size = (*q.shape[:3], v.shape[3])
    strides = output_strides(q, v.shape[3])
    no_lse = torch.empty(0, dtype=torch.float32, device=q.device)
    return _Decision(problem, arch, chosen, _prepare(problem, chosen), out_size, strides, lse_size, no_lse)


def _prepare(problem: Problem, chosen: Plan) -> Any:
    if chosen.route != "triton" or problem.kv_len == 0:
        return None
    from .kernels.launch import ForwardLaunch

    return ForwardLaunch.prepare(problem, chosen)


def _run(decision: _Decision, impl: str, *tensors: torch.Tensor) -> bool:
    """Launch, on the tensors' device; False if no kernel could be built and the reference must do it. With impl "auto"
    a row that cannot be built for this GPU gives way to the portable rows, then to the reference, with one warning."""
    device = tensors[0].device
    try:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                decision.launch(*tensors)
        else:
            decision.launch(*tensors)
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
    return decision.launch is not None and _run(decision, impl, *tensors)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    align: str,
    scale: float | None,
    impl: str,
    rescale_threshold: float | None,
    return_lse: bool,
    direct: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator. direct: called past the dispatcher, so that an LSE nobody asked for need not be a fresh tensor."""
    rules = (causal, window_left, window_right, align, scale, rescale_threshold, return_lse)
    device = q.device
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, device, k.device,
        v.device, q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15, impl, rules,
        device.type == "cpu" and tritons.interpreting(),
        fp32_precision() if q.dtype == torch.float32 else None,
    )  # fmt: skip
    decision = _decided.get(key)
    if decision is None:
        if len(_decided) >= _DECIDED_LIMIT:
            _decided.clear()
        decision = _decided[key] = _decide(q, k, v, rules, impl)
    problem = decision.problem
    out = torch.empty_strided(decision.out_size, decision.out_strides, dtype=q.dtype, device=device)
    if direct and not return_lse:
        lse = decision.no_lse
    else:
        lse = torch.empty(decision.lse_size, dtype=torch.float32, device=device)
    if problem.copied:
        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    if out.numel() == 0 and lse.numel() == 0:
        return out, lse
    if problem.kv_len == 0:
        out.zero_()
        lse.fill_(float("-inf"))
    elif decision.launch is None or not _run(decision, impl, q, k, v, out, lse):
        result, result_lse = reference.fallback(q, k, v, problem)
        out.copy_(result)
        lse.copy_(result_lse)
    return verify.after_forward(out, lse, q, k, v, problem, decision.plan)


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rules: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(q, k, v)
    return_lse = named["return_lse"] if "return_lse" in named else rules[-1]
    out = q.new_empty_strided((*q.shape[:3], v.shape[3]), output_strides(q, v.shape[3]))
    return out, q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)


def _backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
    align: str,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    problem = Problem.from_tensors(q, k, v, causal=causal, window=(window_left, window_right), align=align, scale=scale)
    dq, dk, dv = reference.backward(grad_out, grad_lse, q, k, v, problem)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _backward_fake(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rules: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, causal, left, right, align, scale, _impl, _threshold, return_lse = inputs
    ctx.save_for_backward(q, k, v)
    ctx.rules = (causal, left, right, align, scale)
    ctx.return_lse = return_lse


def _differentiate(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v = ctx.saved_tensors
    grad_lse = grad_lse if ctx.return_lse else None
    transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    operator: Any = _Backward.apply if transformed else torch.ops.lazymax.attention_backward
    grads = operator(grad_out, grad_lse, q, k, v, *ctx.rules)
    return (*grads, None, None, None, None, None, None, None, None)


INSTEAD = (
    "call torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for that"
)


def _refuse_double_backward(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError(f"lazymax: gradients of gradients are not implemented; {INSTEAD}")


def _refuse_jvp(ctx: Any, *tangents: Any) -> None:
    raise NotImplementedError(f"lazymax: forward-mode differentiation is not implemented; {INSTEAD}")


class _Forward(torch.autograd.Function):
    """The operator's derivative once more, for torch.func transforms, which `register_autograd` does not serve."""

    generate_vmap_rule = True
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(_refuse_jvp)

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.lazymax.attention_forward(*inputs)  # type: ignore[no-any-return]


class _Backward(torch.autograd.Function):
    """Likewise for the backward, which has no derivative."""

    generate_vmap_rule = True
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_refuse_double_backward)
    jvp = staticmethod(_refuse_jvp)

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.ops.lazymax.attention_backward(*inputs)  # type: ignore[no-any-return]


def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.ops.lazymax.attention_forward`, which also works under torch.func transforms (grad, vmap, their mixtures).

    A plain eager call without gradients goes to the implementation directly: the dispatcher's way there through Python
    costs more than the kernel at small sizes.
    """
    if torch.compiler.is_compiling():
        return torch.ops.lazymax.attention_forward(*inputs)  # type: ignore[no-any-return]
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return _Forward.apply(*inputs)  # type: ignore[no-any-return,no-untyped-call]
    q, k, v = inputs[:3]
    plain = type(q) is type(k) is type(v) is torch.Tensor and torch._C._len_torch_dispatch_stack() == 0
    if plain and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return _forward(*inputs, True)  # type: ignore[call-arg]
    return torch.ops.lazymax.attention_forward(*inputs)  # type: ignore[no-any-return]


def _fold(info: Any, in_dims: Sequence[int | None], tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Move the vmapped dimension to the front of every tensor and fold it into the batch."""
    folded: list[torch.Tensor | None] = []
    for t, dim in zip(tensors, in_dims, strict=True):
        if t is None:
            folded.append(None)
            continue
        t = t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        folded.append(t.flatten(0, 1))
    return folded


def _forward_vmap(info: Any, in_dims: Any, q: Any, k: Any, v: Any, *rules: Any) -> Any:
    q, k, v = _fold(info, in_dims[:3], (q, k, v))
    out, lse = torch.ops.lazymax.attention_forward(q, k, v, *rules)
    return_lse = rules[-1]
    lse = lse.unflatten(0, (info.batch_size, -1)) if return_lse else lse
    return (out.unflatten(0, (info.batch_size, -1)), lse), (0, 0 if return_lse else None)


def _backward_vmap(info: Any, in_dims: Any, grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, *rules: Any) -> Any:
    folded = _fold(info, in_dims[:5], (grad_out, grad_lse, q, k, v))
    grads = torch.ops.lazymax.attention_backward(*folded, *rules)
    return tuple(g.unflatten(0, (info.batch_size, -1)) for g in grads), (0, 0, 0)


_lib.impl("attention_forward", _forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_lib.impl("attention_backward", _backward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(FORWARD, _forward_fake, lib=_lib)
torch.library.register_fake(BACKWARD, _backward_fake, lib=_lib)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_setup_context, lib=_lib)
torch.library.register_autograd(BACKWARD, _refuse_double_backward, lib=_lib)
torch.library.register_vmap(FORWARD, _forward_vmap, lib=_lib)
torch.library.register_vmap(BACKWARD, _backward_vmap, lib=_lib)
