"""`scaled_dot_product_attention`: torch's function, argument by argument, on lazymax's operator."""

import math
from typing import Any

import torch

from . import differentiation, ops
from .extras import NO_EXTRAS, NO_RULES, Rules
from .options import parse_options
from .reference import TORCH_SDPA

# torch's documentation and most of its kernels say so; its CPU flash kernel takes both (2.13).
MASK_BESIDE_CAUSAL = (
    "scaled_dot_product_attention: got attn_mask beside is_causal=True, expected one of them; "
    "add the triangle to the mask"
)
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TOP_LEFT = Rules(causal=True)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention`: the same arguments, meaning and errors.

    Shapes (N, ..., Hq, L, E), (N, ..., H, S, E), (N, ..., H, S, Ev) -> (N, ..., Hq, L, Ev), leading dimensions
    broadcast; `is_causal` is the upper-left triangle. Under torch.autocast the inputs are cast as torch casts them.
    What the operator does not take (float64, nested or sparse tensors, subclasses) is computed by torch's own function,
    which also raises torch's own errors; `lazymax.explain` says which route a call takes.

    Raises:
        RuntimeError: attn_mask beside is_causal, as torch documents, key and value of different lengths, or a dropout_p
            that is no probability.
        whatever torch's function raises for a call that neither takes.
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError(MASK_BESIDE_CAUSAL)
    if not _takes(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        ops.observe(None)
        return TORCH_SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if _autocasts(query):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    plain = attn_mask is None and not dropout_p
    if plain and query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        rules = _TOP_LEFT if is_causal else NO_RULES
        return differentiation.forward(
            query, key, value, NO_EXTRAS, rules if scale is None else rules._replace(scale=float(scale))
        )[0]
    q, k, v = four(query, key, value)
    extras, rules = parse_options(
        q,
        attn_mask=four_mask(attn_mask, query, key, value),
        causal="top_left" if is_causal else None,
        scale=scale,
        dropout_p=float(dropout_p),
    )
    out, _ = differentiation.forward(q, k, v, extras, rules)
    if query.dim() <= 3:
        return out.reshape(*query.shape[:-1], value.shape[-1])
    return out if query.dim() == 4 else out.reshape(*_leading(query, key, value), *out.shape[1:])


def _leading(*tensors: torch.Tensor) -> torch.Size:
    """The dimensions before the heads, broadcast."""
    return torch.Size(torch.broadcast_shapes(*(t.shape[:-3] for t in tensors)))  # type: ignore[no-untyped-call]


def four(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(..., H, L, E) -> (B, H, L, E) with the leading dimensions broadcast and folded; fewer dimensions get new ones in
    front, so three are heads, lengths and head dim."""
    padded = [t[(None,) * max(0, 4 - t.dim())] for t in tensors]
    leading = _leading(*padded)
    return [t.expand(*leading, *t.shape[-3:]).flatten(0, -4) for t in padded]


def four_mask(mask: torch.Tensor | None, *tensors: torch.Tensor) -> torch.Tensor | None:
    """The mask of the same call with four dimensions; one that is the same for all leading dimensions stays so."""
    if mask is None or mask.dim() <= 3:
        return mask
    leading = _leading(*tensors)
    if mask.dim() == 4 and len(leading) <= 1:
        return mask
    if all(n == 1 for n in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*leading, *mask.shape[-3:]).flatten(0, -4)


def _takes(q: Any, k: Any, v: Any, mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> bool:
    """Whether lazymax's operator takes the call as torch means it; everything else is torch's to compute or refuse."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return False
    if type(is_causal) is not bool or type(enable_gqa) is not bool or type(dropout_p) not in (float, int):
        return False
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        return False
    if q.is_nested or k.is_nested or v.is_nested or not q.device == k.device == v.device:
        return False
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(  # torch's CUDA kernels compute something (2.11), its CPU kernel refuses
            f"scaled_dot_product_attention: got dropout_p={dropout_p}, expected a probability from 0 to 1"
        )
    if mask is not None and not _takes_mask(mask, q, k):
        return False
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape  # each look-up makes an object
    if not len(q_shape) == len(k_shape) == len(v_shape) >= 2:
        return False
    if k_shape[-2] != v_shape[-2]:
        raise RuntimeError(  # torch's CPU kernel reads past the end of v here (2.13), its formula refuses
            f"scaled_dot_product_attention: got key {tuple(k_shape)} and value {tuple(v_shape)}, expected one length"
        )
    if q_shape[-1] != k_shape[-1]:
        return False
    if len(q_shape) >= 3:
        heads, kv_heads = q_shape[-3], k_shape[-3]
        if kv_heads != v_shape[-3] or kv_heads == 0:
            return False
        if heads != kv_heads and kv_heads != 1 and (not enable_gqa or heads % kv_heads):
            return False
        alike = len(q_shape) == 4 and q_shape[0] == k_shape[0] == v_shape[0]
        if not (alike or _broadcast(q_shape[:-3], k_shape[:-3], v_shape[:-3])):
            return False
    if _autocasts(q):
        return all(t.dtype in _KERNEL_DTYPES for t in (q, k, v))
    return q.dtype == k.dtype == v.dtype and q.dtype in _KERNEL_DTYPES and q.layout == torch.strided


def _broadcast(q_lead: Any, k_lead: Any, v_lead: Any) -> bool:
    """Whether leading dimensions of equal number broadcast."""
    return all(len({n for n in sizes if n != 1}) <= 1 for sizes in zip(q_lead, k_lead, v_lead, strict=True))


def _takes_mask(mask: Any, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a mask is one that torch documents; what it says of another is torch's to say."""
    if not isinstance(mask, torch.Tensor) or mask.layout != torch.strided or mask.device != q.device:
        return False
    if not (mask.dtype == torch.bool or mask.is_floating_point()) or not 2 <= mask.dim() <= max(q.dim(), 2):
        return False
    scores = (*q.shape[:-2], q.shape[-2], k.shape[-2])
    return all(n in (1, of) for n, of in zip(reversed(mask.shape), reversed(scores), strict=False))


def _autocasts(t: torch.Tensor) -> bool:
    return t.device.type != "meta" and torch.is_autocast_enabled(t.device.type)
