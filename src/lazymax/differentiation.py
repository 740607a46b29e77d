"""How the operators are differentiated and vmapped, and `forward`, through which the public functions call them.

`register_autograd` serves autograd and torch.compile; two autograd Functions serve torch.func transforms, which it does
not, and one the usual eager call, which it makes slow. There is no second derivative and no forward mode; both say so.
"""

from collections.abc import Sequence
from typing import Any

import torch

from . import mods, ops, ops_backward
from .extras import NO_EXTRAS, NO_RULES, Extras, Rules

_KNOWN = (torch.Tensor, torch.nn.Parameter, type(None))
NO_NEEDS = [False] * 4  # gradients of mask, slopes, sinks and score_args
INSTEAD = (
    "call torch's own scaled_dot_product_attention (lazymax.reference.TORCH_SDPA) under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for that"
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> Extras:
    extras, rules, options = ops.parsed(inputs[3:])
    ctx.rules, ctx.options = rules, ops.Options(*options)
    kept = output if ctx.options.with_lse else (None, None)  # else the backward runs the forward again
    ctx.save_for_backward(*inputs[:3], *kept, *extras[: ops.N_SINGLE], *extras.score_args, *extras.mask_args)
    ctx.n_score_args, ctx.n_mask_args = len(extras.score_args), len(extras.mask_args)
    return extras


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    extras = _save(ctx, inputs, output)
    ctx.needs = [t is not None and t.requires_grad for t in extras[:3]]
    ctx.needs += [any(t.requires_grad for t in extras.score_args)]


def _gradients(
    ctx: Any, needs: list[bool], grad_out: torch.Tensor, grad_lse: torch.Tensor | None, operator: Any
) -> Any:
    """Gradients of q, k, v; of mask, slopes and sinks; of the score_args. None where `needs` says no."""
    q, k, v, out, lse, *rest = ctx.saved_tensors
    n = ops.N_SINGLE + ctx.n_score_args
    extras = (*rest[: ops.N_SINGLE], list(rest[ops.N_SINGLE : n]), list(rest[n:]))
    grad_lse = grad_lse if ctx.options.return_lse else None
    saved = ops_backward.Saved(out, lse, ctx.options.impl, ctx.options.deterministic)
    grads = operator(grad_out, grad_lse, q, k, v, *extras, *ctx.rules, needs, *saved)
    of_extras = [g if need else None for g, need in zip(grads[3:6], needs, strict=False)]
    of_args = [
        g if needs[3] and t.is_floating_point() else None
        for g, t in zip(grads[6:], rest[ops.N_SINGLE : n], strict=True)
    ]
    return grads[:3], of_extras, of_args


def _differentiate(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    grads, of_extras, of_args = _gradients(ctx, ctx.needs, grad_out, grad_lse, torch.ops.lazymax.attention_backward)
    found = (*grads, *of_extras, *(None,) * (ops.N_SINGLE - 3), of_args, [None] * ctx.n_mask_args)
    # As many as there were arguments: the dispatcher drops those that are equal to their defaults.
    return (*found, *(None,) * (len(ctx.needs_input_grad) - len(found)))


def _refuse_double_backward(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError(f"lazymax: gradients of gradients are not implemented; {INSTEAD}")


def _refuse_jvp(ctx: Any, *tangents: Any) -> None:
    raise NotImplementedError(f"lazymax: forward-mode differentiation is not implemented; {INSTEAD}")


def _nested(n_score: int, n_mask: int, before: int, flat: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of an operator from flat ones, which transforms track: `before` tensors, then the extras."""
    first = before + ops.N_SINGLE
    middle, last = first + n_score, first + n_score + n_mask
    return (*flat[:first], list(flat[first:middle]), list(flat[middle:last]), *flat[last:])


class _Forward(torch.autograd.Function):
    """The forward for torch.func transforms; the two numbers say how many score_args and mask_args there are."""

    generate_vmap_rule = True
    jvp = staticmethod(_refuse_jvp)

    @staticmethod
    def forward(n_score: int, n_mask: int, *flat: Any) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = _nested(n_score, n_mask, 3, flat)
        return torch.ops.lazymax.attention_forward(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        n_score, n_mask, *flat = inputs
        _save(ctx, _nested(n_score, n_mask, 3, flat), output)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        n_mask = ctx.n_mask_args
        first = 5 + ops.N_SINGLE
        wanted = ctx.needs_input_grad
        needs = [*wanted[5:8], any(wanted[first : first + ctx.n_score_args])]

        def operator(grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, *arguments: Any) -> Any:
            *single, score_args, mask_args = arguments[: ops.N_EXTRAS]
            flat = (grad_out, grad_lse, q, k, v, *single, *score_args, *mask_args, *arguments[ops.N_EXTRAS :])
            return _Backward.apply(ctx.n_score_args, n_mask, *flat)  # type: ignore[no-untyped-call]

        grads, of_extras, of_args = _gradients(ctx, needs, grad_out, grad_lse, operator)
        none = (None,) * (n_mask + ops.N_RULES + len(ops.Options._fields))
        return (None, None, *grads, *of_extras, *(None,) * (ops.N_SINGLE - 3), *of_args, *none)


class _Backward(torch.autograd.Function):
    """Likewise the backward, which has no derivative."""

    generate_vmap_rule = True
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_refuse_double_backward)
    jvp = staticmethod(_refuse_jvp)

    @staticmethod
    def forward(n_score: int, n_mask: int, *flat: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ops.lazymax.attention_backward(*_nested(n_score, n_mask, 5, flat)))


class _Eager(torch.autograd.Function):
    """The usual eager call, of q, k and v without extras, straight to the implementations: the way through the
    dispatcher flattens some 30 arguments in Python, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules, options: ops.Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = ops.run_forward(q, k, v, NO_EXTRAS, rules, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.rules, ctx.options = rules, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        options = ctx.options
        saved = ops_backward.Saved(out, lse, options.impl, options.deterministic)
        tensors = torch.zeros_like(out) if grad_out is None else grad_out, grad_lse, q, k, v
        if torch.is_grad_enabled() or not _plain(*tensors):
            # Of a second derivative the operator says that there is none.
            grads = torch.ops.lazymax.attention_backward(*tensors, *NO_EXTRAS, *ctx.rules, NO_NEEDS, *saved)
        else:
            grads = ops_backward.run_backward(*tensors, NO_EXTRAS, ctx.rules, NO_NEEDS, saved, True)
        return (*grads[:3], None, None)


def _plain(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing but the implementation has to see a call: no subclass, no mode, no trace."""
    for t in tensors:
        if type(t) not in _KNOWN:
            return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._get_tracing_state() is None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras = NO_EXTRAS,
    rules: Rules = NO_RULES,
    options: ops.Options = ops.Options(),  # noqa: B008, immutable
) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.ops.lazymax.attention_forward`, which also works under torch.func transforms (grad, vmap, their mixtures).

    A plain eager call goes to the implementation directly: the dispatcher's way there through Python costs more than
    the kernel at small sizes.
    """
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled() and _require_grad(q, k, v, extras):
            options = options._replace(keep_lse=True)
        return torch.ops.lazymax.attention_forward(q, k, v, *extras, *rules, *options)  # type: ignore[no-any-return]
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        n_score, n_mask = len(extras.score_args), len(extras.mask_args)
        options = options._replace(keep_lse=True)
        flat = (*extras[: ops.N_SINGLE], *extras.score_args, *extras.mask_args, *rules, *options)
        return _Forward.apply(n_score, n_mask, q, k, v, *flat)  # type: ignore[no-any-return,no-untyped-call]
    plain = _plain(q, k, v)
    if torch.is_grad_enabled() and _require_grad(q, k, v, extras):
        options = options._replace(keep_lse=True)
        if plain and extras is NO_EXTRAS:
            return _Eager.apply(q, k, v, rules, options)  # type: ignore[no-any-return,no-untyped-call]
    elif plain:
        return ops.run_forward(q, k, v, extras, rules, options, True)
    return torch.ops.lazymax.attention_forward(q, k, v, *extras, *rules, *options)  # type: ignore[no-any-return]


def _require_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return extras is not NO_EXTRAS and any(t.requires_grad for _, t in extras.tensors())


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


def _fold_extras(info: Any, in_dims: Sequence[Any], batch: int, extras: Extras, rules: Rules) -> Extras:
    """The extras of the folded batch. Raises NotImplementedError for what has no place in it."""
    for kind, mod in (("score_mod", rules.score_mod), ("mask_mod", rules.mask_mod)):
        if mod is not None and mods.get(kind, mod).uses("b"):
            raise NotImplementedError(f"{kind}: got {mod!r}, which looks at b, under vmap, which folds the batch")
    if rules.dropout_p:
        raise NotImplementedError(
            "dropout_p: got dropout under vmap, where it is not implemented; fold the batch by hand"
        )
    dims = dict(zip(Extras._fields, in_dims, strict=True))
    for name in ("cu_seqlens_q", "cu_seqlens_k", "score_args", "mask_args"):
        dim = dims[name]
        if any(d is not None for d in (dim if isinstance(dim, tuple | list) else (dim,))):
            raise NotImplementedError(f"{name}: got a vmapped tensor, expected one that is the same for all")
    if extras.cu_seqlens_q is not None:
        raise NotImplementedError("cu_seqlens_q: packed sequences under vmap are not implemented; pack them by hand")
    size = info.batch_size

    def fold(t: torch.Tensor | None, dim: int | None, rank: int) -> torch.Tensor | None:
        if t is None:
            return None
        inner = t if dim is None else t.movedim(dim, 0)
        if dim is None:
            if t.dim() < rank or (rank == 4 and t.shape[0] == 1):
                return t  # the same for every batch element already
            inner = t.expand(size, *t.shape)
        if inner.dim() == rank:  # one row for each of the vmapped: repeat it over the batch
            inner = inner[:, None]
        return inner.expand(size, batch, *inner.shape[2:]).flatten(0, 1)

    return extras._replace(
        mask=fold(extras.mask, dims["mask"], 4),
        alibi_slopes=fold(extras.alibi_slopes, dims["alibi_slopes"], 2),
        sinks=fold(extras.sinks, dims["sinks"], 2),
        seqlens_k=fold(extras.seqlens_k, dims["seqlens_k"], 1),
    )


def _forward_vmap(info: Any, in_dims: Any, q: Any, k: Any, v: Any, *arguments: Any) -> Any:
    q, k, v = _fold(info, in_dims[:3], (q, k, v))
    extras, rules, options = ops.parsed(arguments)
    extras = _fold_extras(info, in_dims[3 : 3 + ops.N_EXTRAS], q.shape[0] // info.batch_size, extras, rules)
    out, lse = torch.ops.lazymax.attention_forward(q, k, v, *extras, *rules, *options)
    with_lse = ops.Options(*options).with_lse
    lse = lse.unflatten(0, (info.batch_size, -1)) if with_lse else lse
    return (out.unflatten(0, (info.batch_size, -1)), lse), (0, 0 if with_lse else None)


def _backward_vmap(
    info: Any, in_dims: Any, grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, *arguments: Any
) -> Any:
    folded = _fold(info, in_dims[:5], (grad_out, grad_lse, q, k, v))
    extras, rules, (needs, *rest) = ops.parsed(arguments)
    if any(needs):
        raise NotImplementedError(
            "lazymax: vmapped gradients of attn_mask, alibi_slopes, sinks and score_mod_args are not implemented; "
            f"{INSTEAD}"
        )
    extras = _fold_extras(info, in_dims[5 : 5 + ops.N_EXTRAS], folded[2].shape[0] // info.batch_size, extras, rules)
    saved = ops_backward.Saved(*rest)
    first = 5 + ops.N_EXTRAS + ops.N_RULES + 1
    kept = _fold(info, in_dims[first : first + 2], saved[:2]) if saved.out is not None else (None, None)
    saved = saved._replace(out=kept[0], lse=kept[1])
    grads = torch.ops.lazymax.attention_backward(*folded, *extras, *rules, needs, *saved)
    shaped = [g.unflatten(0, (info.batch_size, -1)) for g in grads[:3]]
    return [*shaped, *grads[3:]], [0, 0, 0, *(None for _ in grads[3:])]


torch.library.register_autograd(ops.FORWARD, _differentiate, setup_context=_setup_context, lib=ops.library)
torch.library.register_autograd(ops.BACKWARD, _refuse_double_backward, lib=ops.library)
torch.library.register_vmap(ops.FORWARD, _forward_vmap, lib=ops.library)
torch.library.register_vmap(ops.BACKWARD, _backward_vmap, lib=ops.library)
