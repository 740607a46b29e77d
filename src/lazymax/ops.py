"""The torch operators: `torch.ops.lazymax.attention_forward` and `.attention_backward`.

Defined with `torch.library.Library` (define / impl), which costs less per call than the decorator. Planning happens
inside the operator, on real sizes, so a compiled caller sees one opaque node and no branch on a length. Importing this
module needs torch only; Triton is imported when the first problem takes a kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch

from . import arch as arches
from . import compat, reference, verify
from .dispatch import Plan, plan
from .problem import Problem, check_tensors

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

# Problem key -> what was decided for it. Bounded: cleared when full, which costs one planning per live problem.
_decided: dict[tuple[Any, ...], tuple[Problem, Plan, Any]] = {}
_DECIDED_LIMIT = 4096


def empty_outputs(
    q: torch.Tensor, v: torch.Tensor, return_lse: bool, make: Any = torch.empty
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Hq, Sq, D_v) that is dense in the order in which q stores its dimensions, and LSE (B, Hq, Sq), fp32;
    an LSE that nobody asked for has no elements. The fake operator calls this too, so its strides are the real ones."""
    strides = q.stride()
    order = sorted(range(3), key=lambda dim: -strides[dim])
    shape = (*q.shape[:3], v.shape[3])
    stored = make([shape[dim] for dim in order] + [shape[3]], dtype=q.dtype, device=q.device)
    out = stored.permute([order.index(dim) for dim in range(3)] + [3])
    lse = make(q.shape[:3] if return_lse else (0,), dtype=torch.float32, device=q.device)
    return out, lse


def _decide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: tuple[Any, ...], impl: str) -> Any:
    causal, left, right, align, scale, threshold, return_lse = rules
    problem = Problem.from_tensors(
        q, k, v, causal=causal, window=(left, right), align=align, scale=scale, rescale_threshold=threshold,
        return_lse=return_lse,
    )  # fmt: skip
    arch = arches.of(q.device)
    chosen = plan(problem, arch, impl)
    launch = None
    if chosen.route == "triton" and problem.kv_len:
        from .kernels.launch import ForwardLaunch

        launch = ForwardLaunch.prepare(problem, chosen)
    return problem, chosen, launch


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
) -> tuple[torch.Tensor, torch.Tensor]:
    rules = (causal, window_left, window_right, align, scale, rescale_threshold, return_lse)
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device,
        v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15, impl, compat.interpreting(), rules,
        q.dtype == torch.float32 and torch.get_float32_matmul_precision(),
    )  # fmt: skip
    decided = _decided.get(key)
    if decided is None:
        if len(_decided) >= _DECIDED_LIMIT:
            _decided.clear()
        decided = _decided[key] = _decide(q, k, v, rules, impl)
    problem, chosen, launch = decided
    out, lse = empty_outputs(q, v, return_lse)
    if out.numel() == 0:
        return out, lse
    if launch is not None:
        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
        if q.device.type == "cuda" and q.device.index != torch.cuda.current_device():
            with torch.cuda.device(q.device):
                launch(q, k, v, out, lse)
        else:
            launch(q, k, v, out, lse)
    elif problem.kv_len == 0:
        out.zero_()
        lse.fill_(float("-inf"))
    else:
        result, result_lse = reference.fallback(q, k, v, problem)
        out.copy_(result)
        lse.copy_(result_lse)
    return verify.after_forward(out, lse, q, k, v, problem, chosen)


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rules: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(q, k, v)
    return empty_outputs(q, v, named["return_lse"] if "return_lse" in named else rules[-1])


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
    grads = _call(_Backward, torch.ops.lazymax.attention_backward, grad_out, grad_lse, q, k, v, *ctx.rules)
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


def _call(function: type[torch.autograd.Function], operator: Any, *inputs: Any) -> Any:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return function.apply(*inputs)  # type: ignore[no-untyped-call]
    return operator(*inputs)


def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.ops.lazymax.attention_forward` that also works under torch.func transforms (grad, vmap, mixtures)."""
    return _call(_Forward, torch.ops.lazymax.attention_forward, *inputs)  # type: ignore[no-any-return]


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
