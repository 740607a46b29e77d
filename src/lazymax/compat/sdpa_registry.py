"""lazymax as one of torch's flash attention implementations (torch.nn.attention.register_flash_attention_impl): SDPA's
own selection stays in charge. Importing this module changes nothing in torch."""

from dataclasses import dataclass
from typing import Any

import torch

from .. import differentiation, ops
from ..extras import NO_EXTRAS, Extras, Rules

NAME = "lazymax"


def register_with_torch() -> None:
    """Add "lazymax" to torch's flash attention implementations, for those who want SDPA's selection to stay in charge.

        lazymax.compat.sdpa.register_with_torch()
        torch.nn.attention.activate_flash_attention_impl("lazymax")
        ...                                                             # F.scaled_dot_product_attention as ever
        torch.nn.attention.restore_flash_attention_impl()               # torch 2.11 or newer

    Registering activates nothing. While activated, what torch sends to its flash kernels on CUDA and ROCm devices runs
    on lazymax, forward and backward, eager and compiled: of SDPA the calls that it selects flash for (fp16 or bf16, no
    mask, no backend that torch prefers; torch.nn.attention.sdpa_kernel can insist), of nested tensors and
    torch.nn.attention.varlen the packed sequences. torch's kernels keep the calls that `left_to_torch` names, and
    varlen_attn_out.

    A GPU without a flash backend in torch never gets there: `replace_sdpa` is for those.

    Raises NotImplementedError where torch has no registry (before 2.10).
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise NotImplementedError(
            f"register_with_torch: torch {torch.__version__} has no registry of flash attention implementations, 2.10 "
            "or newer has; lazymax.replace_sdpa() works without"
        )
    register(NAME, register_fn=override_flash)


@dataclass
class FlashOverride:
    """What torch's registry keeps while lazymax is activated; `remove` gives the operators back."""

    library: torch.library.Library | None

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()  # type: ignore[no-untyped-call]
        self.library = None


def override_flash(dispatch_key: str = "CUDA") -> FlashOverride:
    """Put the functions of `IMPLEMENTATIONS` in the place of torch's kernels for a dispatch key."""
    library = torch.library.Library("aten", "IMPL", dispatch_key)  # type: ignore[no-untyped-call]
    for name, function in IMPLEMENTATIONS.items():
        implementation = _with_torch_behind(name, function, dispatch_key)
        library.impl(name, implementation, dispatch_key, with_keyset=True)  # type: ignore[no-untyped-call]
    return FlashOverride(library)


def _with_torch_behind(name: str, function: Any, dispatch_key: str) -> Any:
    """The function; torch's kernel, if there is one, for the calls that it leaves to torch."""
    qualified = f"aten::{name}"
    theirs = None
    if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, dispatch_key):
        theirs = torch.library.get_kernel(qualified, dispatch_key)

    def implementation(keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not isinstance(result, str):
            return result
        if theirs is None:
            raise NotImplementedError(
                f"{qualified}: got {result}, which lazymax leaves to torch's kernel, and this torch has none"
            )
        if name == COUNTED:
            ops.observe(None)
        return theirs.call_boxed(keys, *args, **kwargs)

    return implementation


def left_to_torch(dropout_p: float = 0.0, return_debug_mask: bool = False, **rest: Any) -> str | None:
    """Which argument of a flash operator makes a call torch's, if any: dropout (its random numbers are torch's), the
    debug mask, lengths beside packed sequences, ALiBi, paged caches, a number of splits, and whatever later torch
    adds."""
    if dropout_p:
        return f"dropout_p={dropout_p}"
    if return_debug_mask:
        return "return_debug_mask=True"
    return next((name for name, value in rest.items() if value is not None), None)


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...] | str:
    """`aten::_scaled_dot_product_flash_attention`, any device: query (B, Hq, Sq, D), key and value (B, Hkv, Sk, D) ->
    (out, LSE (B, Hq, Sq) float32 in natural log, None, None, Sq, Sk, RNG seed and offset, debug mask); or why not.

    Causal is bottom right, as this operator means it: SDPA comes here with Sq == Sk only, torch.nn.attention.bias with
    others too.
    """
    why = left_to_torch(dropout_p, return_debug_mask)
    if why:
        return why
    out, lse = _forward(query, key, value, NO_EXTRAS, _rules(is_causal, scale))
    return _stored_like(out, query), lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor | None,
    philox_offset: torch.Tensor | None,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...] | str:
    """`aten::_scaled_dot_product_flash_attention_backward`: the gradients of query, key and value; or why not."""
    why = left_to_torch(dropout_p)
    if why:
        return why
    grads = _backward(grad_out, query, key, value, out, logsumexp, NO_EXTRAS, _rules(is_causal, scale))
    return _all_stored_like(grads, query, key, value)


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **rest: Any,
) -> tuple[Any, ...] | str:
    """`aten::_flash_attention_forward`: query (B, Sq, Hq, D), key and value (B, Sk, Hkv, D), or with cum_seq_q and
    cum_seq_k packed, (total, heads, D) -> (out, LSE (B, Hq, Sq) or (Hq, total), RNG seed and offset, debug mask); or
    why not. The window is aligned bottom right."""
    why = left_to_torch(dropout_p, return_debug_mask, **rest)
    if why:
        return why
    if (cum_seq_q is None) != (cum_seq_k is None):
        return "packed queries over keys that are not"
    extras, lengths = _packing(cum_seq_q, cum_seq_k, max_q, max_k)
    rules = _rules(is_causal, scale, window_size_left, window_size_right, *lengths)
    out, lse = _forward(_heads_first(query), _heads_first(key), _heads_first(value), extras, rules)
    out = out.transpose(1, 2)
    if query.dim() == 3:
        out, lse = out[0], lse[0]
    return _stored_like(out, query), lse, *_unused(query)


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor | None,
    unused: torch.Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, ...] | str:
    """`aten::_flash_attention_backward`: the gradients of query, key and value; or why not."""
    why = left_to_torch(dropout_p, **rest)
    if why:
        return why
    extras, lengths = _packing(cum_seq_q, cum_seq_k, max_q, max_k)
    rules = _rules(is_causal, scale, window_size_left, window_size_right, *lengths)
    lse = logsumexp if query.dim() == 4 else logsumexp[None]
    do, q, k, v, o = (_heads_first(t) for t in (grad_out, query, key, value, out))
    grads = _backward(do, q, k, v, o, lse, extras, rules)
    grads = [g.transpose(1, 2) if query.dim() == 4 else g[0].transpose(0, 1) for g in grads]
    return _all_stored_like(grads, query, key, value)


IMPLEMENTATIONS = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
}


# torch's kernel of SDPA's forward calls this operator, so that a call left to torch passes here once, either way.
COUNTED = "_flash_attention_forward"


def _rules(
    is_causal: bool,
    scale: float | None,
    left: int | None = None,
    right: int | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
) -> Rules:
    left, right = (None if side is None or side < 0 else side for side in (left, right))
    return Rules(
        causal=is_causal,
        window_left=left,
        window_right=None if is_causal else right,
        align="bottom_right",
        scale=scale,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
    )


def _packing(
    cum_seq_q: torch.Tensor | None, cum_seq_k: torch.Tensor | None, max_q: int, max_k: int
) -> tuple[Extras, tuple[int, int] | tuple[()]]:
    if cum_seq_q is None:
        return NO_EXTRAS, ()
    return Extras(cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k), (max_q, max_k)


def _heads_first(t: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) or (total, H, D) -> (B, H, S, D), a view."""
    return (t if t.dim() == 4 else t[None]).transpose(1, 2)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, rules: Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    return differentiation.forward(q, k, v, extras, rules, ops.Options(return_lse=True))


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    extras: Extras,
    rules: Rules,
) -> list[torch.Tensor]:
    """Gradients of q, k, v with P = exp(S - lse) and the row sums of grad_out * out, both as given: torch's ring
    attention (context parallelism) gives those over the keys of all devices beside the keys of one.

    lazymax's operator takes neither, but differentiates its own out_1 and lse_1 of these keys. The gradients are those
    for w * grad_out, w = exp(lse_1 - lse), beside grad_lse = w * rowsum(grad_out * (out_1 - out)): in the ordinary case
    w is 1 and the other 0, exactly, since the forward is the same bit for bit.
    """
    own_out, own_lse = _forward(q, k, v, extras, rules)
    weight = torch.exp(own_lse - lse).where(own_lse > float("-inf"), 0.0)
    grad = grad_out.float() * weight[..., None]
    grad_lse = (grad * (own_out.float() - out.float())).sum(-1)
    grads = torch.ops.lazymax.attention_backward(
        grad.to(grad_out.dtype), grad_lse, q, k, v, *extras, *rules, [False] * ops.N_NEEDS
    )
    return list(grads[:3])


def _unused(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RNG seed and offset as a compiled graph expects them (torch/_meta_registrations.py), which only dropout would
    read, and no debug mask."""
    hip = torch.version.hip is not None
    kind = torch.int64 if hip else torch.uint64
    seed = torch.empty(() if hip else (2,), dtype=kind, device=query.device)
    offset = torch.empty((), dtype=kind, device=query.device)
    return seed, offset, torch.empty(0, dtype=query.dtype, device=query.device)


def _stored_like(t: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """With the strides of empty_like(model), which a compiled graph was promised (torch/_meta_registrations.py)."""
    if t.stride() == model.stride():  # t is dense, so model is, and empty_like keeps a dense tensor's strides
        return t
    like = torch.empty_like(model)
    return t if t.stride() == like.stride() else like.copy_(t)


def _all_stored_like(grads: list[torch.Tensor], *models: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(_stored_like(grad, model) for grad, model in zip(grads, models, strict=True))
