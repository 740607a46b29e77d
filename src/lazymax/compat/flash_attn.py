"""flash-attn's functions (2.8) under their names, on lazymax: change the import and nothing else.

    from lazymax.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

Parameters, their order and their defaults are flash-attn's. The ones that all functions share:

dropout_p (float): of the probabilities, 0 to 1; drawn from torch's generator.
softmax_scale (float | None): on the scores; None is 1 / sqrt(headdim).
causal (bool): aligned to the bottom right: query i of Sq sees keys 0 .. i + Sk - Sq of Sk. Closes the right side of
    `window_size`, whatever it says.
window_size ((left, right)): query i sees keys i + Sk - Sq - left .. i + Sk - Sq + right, both inclusive, with or
    without `causal`; -1 (or None) leaves a side open.
softcap (float): scores become softcap * tanh(score / softcap); 0 or less is off.
alibi_slopes (fp32 (nheads,) or (batch, nheads) | None): score -= slope * |i + Sk - Sq - j|.
deterministic (bool): taken and without effect: the backward gives the same bits run to run either way.
return_attn_probs (bool): return (out, softmax_lse, S_dmask) instead of out. softmax_lse is fp32 and natural log.
    S_dmask has no elements, as flash-attn's has without dropout.

A query that sees no key gives 0. Query head h uses key head h // (nheads / nheads_k). In a packed batch Sq and Sk are
those of the sequence.

What a call raises, each naming the argument: NotImplementedError for return_attn_probs=True beside dropout (nothing
stores the probabilities) and for block_table; TypeError and ValueError for what has no meaning.

Where the results or the domain differ from flash-attn 2.8:

- the LSE of a query without keys is -inf (theirs +inf), which is what merging of partial results needs;
- the LSE under causal ALiBi is that of the documented score (theirs is off by slope * (i + Sk - Sq) in each row);
- a window obeys the formula above also when there are far more queries than keys, where their kernel takes a side of Sk
  or more as open, and an open side beside a closed one as Sk wide;
- dropout is not quantised to multiples of 1 / 255 and goes with softcap; the dropped places are not theirs;
- taken as well: fp32, any head dim to 576 (v: 512), a headdim of v of its own, int64 offsets, None as a maximum
  length, the CPU. float64 takes the reference route. The LSE is differentiable.
"""

import math
import operator
from typing import Any, TypeAlias

import torch

from .. import api

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_OPEN = (-1, -1)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q (batch, Sq, nheads, headdim), k and v (batch, Sk, nheads_k, headdim) -> out, shaped like q.

    softmax_lse: (batch, nheads, Sq). The other arguments and what is raised: see the module.
    """
    rules = _rules(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _answer(api.attention(q, k, v, layout="bshd", **rules), q, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """qkv (batch, S, 3, nheads, headdim), read in place -> out (batch, S, nheads, headdim).

    softmax_lse: (batch, nheads, S). The other arguments and what is raised: see the module.
    """
    rules = _rules(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    q, k, v = _unpack(qkv, "qkv", 3, "batch, length")
    return _answer(api.attention(q, k, v, layout="bshd", **rules), q, return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q (batch, Sq, nheads, headdim), kv (batch, Sk, 2, nheads_k, headdim), read in place -> out, shaped like q.

    softmax_lse: (batch, nheads, Sq). The other arguments and what is raised: see the module.
    """
    rules = _rules(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    k, v = _unpack(kv, "kv", 2, "batch, length")
    return _answer(api.attention(q, k, v, layout="bshd", **rules), q, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim) -> out, shaped like q.

    cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or int64, where each sequence starts and the last one ends.
    max_seqlen_q, max_seqlen_k: ints; only the choice of tiles looks at them, and None will do. Another integer, NumPy's
    or a 0-d tensor, is converted, for which a tensor on a GPU waits for the GPU; torch.compile drops a tensor, whose
    value it does not know. softmax_lse: (nheads, total_q).

    block_table (paged keys) raises NotImplementedError. The other arguments and what is raised: see the module.
    """
    if block_table is not None:
        raise NotImplementedError(
            "block_table: got a table of pages, expected None: paged keys and values are not implemented; gather the "
            "pages into packed k and v and give their lengths in cu_seqlens_k"
        )
    rules = _rules(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    longest = _length(max_seqlen_q, "max_seqlen_q"), _length(max_seqlen_k, "max_seqlen_k")
    return _answer(api.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, **rules), q, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """qkv (total, 3, nheads, headdim), read in place -> out (total, nheads, headdim).

    softmax_lse: (nheads, total). cu_seqlens and max_seqlen as in `flash_attn_varlen_func`, the rest as in the module.
    """
    rules = _rules(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    q, k, v = _unpack(qkv, "qkv", 3, "total")
    longest = _length(max_seqlen, "max_seqlen")
    return _answer(
        api.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **rules), q, return_attn_probs
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q (total_q, nheads, headdim), kv (total_k, 2, nheads_k, headdim), read in place -> out, shaped like q.

    softmax_lse: (nheads, total_q). Offsets and maxima as in `flash_attn_varlen_func`, the rest as in the module.
    """
    k, v = _unpack(kv, "kv", 2, "total")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _rules(
    dropout_p: Any, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, slopes: Any, return_attn_probs: Any
) -> dict[str, Any]:
    """The shared arguments as keywords of `lazymax.attention`. What is not checked here has the same name there."""
    dropout_p = _real(dropout_p, "dropout_p")
    if return_attn_probs and dropout_p > 0.0:
        raise NotImplementedError(
            f"return_attn_probs: got True beside dropout_p={dropout_p}, expected one of them: no kernel stores the "
            "probabilities (S_dmask); lazymax.attention(..., dropout_p=..., return_lse=True) gives out and LSE"
        )
    if isinstance(causal, str):
        raise TypeError(f"causal: got {causal!r}, expected a bool; True is always 'bottom_right' here")
    softcap = _real(softcap, "softcap")
    if softmax_scale is not None:
        softmax_scale = _real(softmax_scale, "softmax_scale")
        if not math.isfinite(softmax_scale):
            raise ValueError(f"softmax_scale: got {softmax_scale}, expected a finite number")
    return {
        "dropout_p": dropout_p,
        "scale": softmax_scale,
        "causal": "bottom_right" if causal else None,
        "window": None if window_size == _OPEN else _window(window_size),
        "softcap": 0.0 if softcap <= 0.0 else softcap,
        "alibi_slopes": slopes,
        "return_lse": bool(return_attn_probs),
        "window_align": "bottom_right",  # also of ALiBi, without a window
    }


def _answer(result: Any, q: torch.Tensor, return_attn_probs: Any) -> Result:
    return (*result, q.new_empty(0)) if return_attn_probs else result


def _unpack(packed: torch.Tensor, name: str, count: int, lengths: str) -> tuple[torch.Tensor, ...]:
    """Views of the stacked tensors. The dimension of the stack is checked: otherwise a wrong layout would compute."""
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name}: got {type(packed).__name__}, expected a torch.Tensor")
    shape, dim = packed.shape, 1 + lengths.count(",")
    if len(shape) != dim + 3 or shape[dim] != count:
        raise ValueError(f"{name}: got shape {tuple(shape)}, expected ({lengths}, {count}, heads, head dim)")
    return packed.unbind(dim)  # its gradient is one stack, where three slices would add three padded gradients


def _window(window_size: Any) -> tuple[int | None, ...]:
    """-1 stays -1, which is open for lazymax too; NumPy's integers become ints."""
    try:
        left, right = (None if side is None else operator.index(side) for side in window_size)
    except (TypeError, ValueError):
        raise TypeError(
            f"window_size: got {window_size!r}, expected a pair (left, right) of key counts, -1 for open"
        ) from None
    if (left or 0) < -1 or (right or 0) < -1:
        raise ValueError(f"window_size: got {window_size!r}; only -1 means open, other negative sizes mean nothing")
    return left, right


def _real(value: Any, name: str) -> float:
    if type(value) is float:
        return value
    try:
        return float(operator.pos(value))  # which text has not
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: got {value!r}, expected a number") from None


def _length(value: Any, name: str) -> int | None:
    if value is None or isinstance(value, int | torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, torch.Tensor) and torch.compiler.is_compiling():
        return None
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, expected an int, the longest sequence of the batch") from None
