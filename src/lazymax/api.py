"""The public functions. Docstrings, argument parsing, one operator call each."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from . import arch as arches
from . import ops, reference
from .dispatch import Explanation, plan
from .problem import Problem, align_of, parse_causal, parse_window

# torch's documentation and most of its kernels say so; its CPU flash kernel takes both (2.13).
MASK_BESIDE_CAUSAL = (
    "scaled_dot_product_attention: got attn_mask beside is_causal=True, expected one of them; "
    "add the triangle to the mask"
)
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    impl: str = "auto",
    return_lse: bool = False,
    rescale_threshold: float | None = None,
    window_align: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention: softmax(scale * q @ k^T, over the allowed keys) @ v.

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd". float16, bfloat16, float32 (float64: reference only).
        k: (B, Hkv, Sk, D), of q's dtype and device. Hq must be a multiple of Hkv; query head h uses key head
            h // (Hq / Hkv) (grouped queries).
        v: (B, Hkv, Sk, D_v).
        causal: None, "top_left" (PyTorch: query i sees keys 0..i) or "bottom_right" (flash-attn: query i sees keys
            0..i + Sk - Sq). The two are the same when Sq == Sk.
        window: (left, right): query i sees left keys before and right keys after its diagonal position, both edges
            inclusive; None or -1 is open. Aligned like `causal`.
        scale: on the scores; default 1 / sqrt(D). Any float, also 0 or negative.
        layout: order of the dimensions of q, k, v and the output, "bhsd" or "bshd". Strides are free either way; only
            the head dimension should be contiguous (it is copied otherwise).
        impl: "auto" chooses the best kernel for the GPU and falls back with a reason (`explain` shows it). The name of
            a backend, or "reference", takes that one or raises.
        return_lse: also return the logsumexp of the scaled scores, natural log, float32, (B, Hq, Sq).
        rescale_threshold: of the lazy rescale, log2 units, 0 to 8; default 8. 0 keeps the exact running maximum.
            Changes rounding only.
        window_align: alignment of the window when `causal` is None; default "top_left".

    Returns:
        The output, q's shape with D_v for D, q's dtype, stored densely in q's order of dimensions; with return_lse, the
        pair (output, LSE). A query with no allowed key gives 0, and -inf in the LSE. Keys outside the length, the
        window and the causal range never reach a result, even if they hold NaN or inf.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not go together.
        TypeError: arguments of the wrong type.
        NotImplementedError: a named `impl` that cannot take the problem.

    The algorithm is the online softmax over key blocks of FlashAttention (Dao et al., 2022) in the exp2 domain, with
    the lazy rescale of FlashAttention-4. Differentiable; composes with torch.compile, vmap and CUDA graphs.
    """
    _check_types(q, k, v, scale, layout, impl, rescale_threshold, return_lse)
    causal = parse_causal(causal)
    left, right = parse_window(window)
    align = align_of(causal, window_align)
    if layout == "bshd":
        q, k, v = _swap(q, "q"), _swap(k, "k"), _swap(v, "v")
    out, lse = ops.forward(q, k, v, causal is not None, left, right, align, scale, impl, rescale_threshold, return_lse)
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


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

    Shapes (N, ..., Hq, L, E), (N, ..., H, S, E), (N, ..., H, S, Ev) -> (N, ..., Hq, L, Ev); `is_causal` is the
    upper-left triangle. Under torch.autocast the inputs are cast as torch casts them. Dense masks,
    which no kernel of ours takes yet, are computed by formula (`reference.masked`). The rest that the kernels do not
    take (dropout, float64, other than 4 dimensions, broadcast batches) is computed by torch's own function, which also
    raises torch's own errors; `lazymax.explain` says which route a call takes.

    Raises:
        RuntimeError: attn_mask beside is_causal, as torch documents, or key and value of different lengths.
        whatever torch's function raises for a call that neither takes.
    """
    if attn_mask is not None and is_causal:
        raise RuntimeError(MASK_BESIDE_CAUSAL)
    if attn_mask is not None and _simply_masked(query, key, value, attn_mask, dropout_p, scale, enable_gqa):
        return reference.masked(*_autocast(query, key, value), attn_mask, scale, enable_gqa)
    if not _simple(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    query, key, value = _autocast(query, key, value)
    out, _ = ops.forward(query, key, value, bool(is_causal), None, None, "top_left", scale, "auto", None, False)
    return out


def explain(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    causal: str | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    window_align: str | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    impl: str = "auto",
    return_lse: bool = False,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    arch: str | None = None,
    show: bool = True,
) -> Explanation:
    """Print which kernel a call would take, with which tile, why, and why every other candidate was refused.

    Give the tensors of the call, or, without them, `shape` = (B, Hq, Hkv, Sq, Sk, D) or (B, Hq, Hkv, Sq, Sk, D, D_v)
    with `dtype`. `arch` asks for another GPU than the tensors' device, by id ("gfx1151", "sm_90"); no GPU is needed.
    The other arguments are those of `attention` and `scaled_dot_product_attention`.

    Returns the `Explanation` (`.plan`, `.to_json()`); show=False prints nothing. Raises what the call would raise.
    """
    if is_causal:
        if causal not in (None, "top_left"):
            raise ValueError(f"is_causal: got True beside causal={causal!r}; is_causal means 'top_left'")
        if attn_mask is not None:
            raise RuntimeError(MASK_BESIDE_CAUSAL)
        causal = "top_left"
    rules: dict[str, Any] = dict(
        causal=causal, window=window, window_align=window_align, scale=scale, return_lse=return_lse,
        mask=None if attn_mask is None else str(attn_mask.dtype).removeprefix("torch."), dropout_p=dropout_p,
    )  # fmt: skip
    _check_layout(layout)
    if q is not None and k is not None and v is not None:
        if layout == "bshd":
            q, k, v = _swap(q, "q"), _swap(k, "k"), _swap(v, "v")
        problem = Problem.from_call(q, k, v, **rules)
        where = arches.by_name(arch) if arch else arches.of(q.device)
    elif shape is not None:
        problem = Problem.from_shape(shape, dtype, **rules)
        here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        where = arches.by_name(arch) if arch else arches.of(here)
    else:
        raise ValueError("explain: got neither q, k, v nor shape; expected one of the two")
    explanation = Explanation(problem, where, plan(problem, where, impl))
    if show:
        print(explanation)
    return explanation


def _check_layout(layout: str) -> None:
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout: got {layout!r}, expected 'bhsd' or 'bshd'")


def _check_types(
    q: Any, k: Any, v: Any, scale: Any, layout: Any, impl: Any, rescale_threshold: Any, return_lse: Any
) -> None:
    """What the operator's schema would refuse with a message about schemas."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, expected a torch.Tensor")
    for name, number in (("scale", scale), ("rescale_threshold", rescale_threshold)):
        if number is not None and not isinstance(number, int | float):
            raise TypeError(f"{name}: got {number!r}, expected a number or None")
    if not isinstance(impl, str):
        raise TypeError(f"impl: got {impl!r}, expected the name of a backend")
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: got {return_lse!r}, expected a bool")
    _check_layout(layout)


def _swap(t: torch.Tensor, name: str) -> torch.Tensor:
    if t.dim() != 4:
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected 4 dimensions (batch, length, heads, head dim)")
    return t.transpose(1, 2)


def _simple(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Whether lazymax's operator takes the call as torch means it; everything else is torch's to compute or refuse."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return False
    if type(is_causal) is not bool or type(enable_gqa) is not bool or type(dropout_p) not in (float, int):
        return False
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        return False
    if (
        mask is not None
        or dropout_p
        or q.is_nested
        or k.is_nested
        or v.is_nested
        or not q.device == k.device == v.device
    ):
        return False
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape  # each look-up makes an object
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        return False
    batch, heads, _, head_dim = q_shape
    if k_shape[2] != v_shape[2]:
        raise RuntimeError(  # torch's CPU kernel reads past the end of v here (2.13), its formula refuses
            f"scaled_dot_product_attention: got key {tuple(k_shape)} and value {tuple(v_shape)}, expected one length"
        )
    if batch != k_shape[0] or batch != v_shape[0] or k_shape[1] != v_shape[1] or head_dim != k_shape[3]:
        return False
    if heads != k_shape[1] and (not enable_gqa or k_shape[1] == 0 or heads % k_shape[1]):
        return False
    if _autocasts(q):
        return all(t.dtype in _KERNEL_DTYPES for t in (q, k, v))
    return q.dtype == k.dtype == v.dtype and q.dtype in _KERNEL_DTYPES


def _simply_masked(q: Any, k: Any, v: Any, mask: Any, dropout_p: Any, scale: Any, enable_gqa: Any) -> bool:
    """Whether `reference.masked` takes the call as torch means it."""
    if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in (q, k, v, mask)):
        return False
    if dropout_p != 0 or type(enable_gqa) is not bool or not (scale is None or isinstance(scale, int | float)):
        return False
    if not q.device == k.device == v.device == mask.device or min(q.dim(), k.dim(), v.dim()) < 3:
        return False
    if mask.dim() < 2 or (mask.dtype != torch.bool and not mask.is_floating_point()):
        return False
    if enable_gqa and (k.shape[-3] != v.shape[-3] or k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]):
        return False
    return bool(_autocasts(q) or q.dtype == k.dtype == v.dtype) and q.is_floating_point()


def _autocasts(t: torch.Tensor) -> bool:
    return t.device.type != "meta" and torch.is_autocast_enabled(t.device.type)


def _autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast as torch's function is cast under torch.autocast."""
    if not _autocasts(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)
