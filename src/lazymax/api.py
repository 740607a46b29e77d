"""The public functions. Docstrings, argument parsing, one operator call each."""

from collections.abc import Sequence
from typing import Any

import torch

from . import arch as arches
from . import differentiation, drop_in, merging, ops
from .dispatch import plan
from .explanation import Explanation
from .extras import NO_EXTRAS, Extras, Rules
from .options import parse_options, plain_rules
from .problem import Problem

NOTHING: tuple[torch.Tensor, ...] = ()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    score_mod: str | None = None,
    score_mod_args: Sequence[torch.Tensor] = NOTHING,
    mask_mod: str | None = None,
    mask_mod_args: Sequence[torch.Tensor] = NOTHING,
    layout: str = "bhsd",
    impl: str = "auto",
    return_lse: bool = False,
    rescale_threshold: float | None = None,
    window_align: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention: softmax(scale * q @ k^T, over the allowed keys) @ v. All options can be combined.

    A score passes, in natural units and fp32: scale, softcap, ALiBi, float mask, score_mod. A key counts for a query if
    length, causal rule, window, bool mask and mask_mod all allow it.

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd". float16, bfloat16, float32 (float64: reference only).
        k: (B, Hkv, Sk, D), of q's dtype and device. Hq must be a multiple of Hkv; query head h uses key head
            h // (Hq / Hkv) (grouped queries).
        v: (B, Hkv, Sk, D_v).
        attn_mask: bool (True keeps) or floating (added), any shape that broadcasts to (B, Hq, Sq, Sk) from the right;
            in this order of dimensions for both layouts. Any strides; broadcast dimensions are not materialised.
        causal: None, "top_left" (PyTorch: query i sees keys 0..i) or "bottom_right" (flash-attn: query i sees keys
            0..i + Sk - Sq). The two are the same when Sq == Sk.
        window: (left, right): query i sees left keys before and right keys after its diagonal position, both edges
            inclusive; None or -1 is open. Aligned like `causal`.
        scale: on the scores; default 1 / sqrt(D). Any float, also 0 or negative.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: floating (Hq,) or (B, Hq): slope * |distance to the diagonal| is subtracted from a score, the
            diagonal aligned like `causal` (Press et al., 2021).
        sinks: floating (Hq,) or (B, Hq): one more logit per head in the softmax, without a value (as in gpt-oss; Xiao
            et al., 2023). Learnable.
        seqlens_k: int32 or int64 (B,), the number of keys of each batch element, at most Sk; keys behind are never
            used. "bottom_right" counts from them.
        dropout_p: probability with which a probability is dropped, the others grow by 1 / (1 - dropout_p).
        dropout_seed: int64, one element, on q's device; default: drawn from torch's generator. What is dropped depends
            on the seed and on (batch, head, query, key) alone: Philox, `testing.dropout_keep` shows it.
        score_mod, mask_mod: names given to `register_score_mod`, `register_mask_mod`.
        score_mod_args, mask_mod_args: the tensors they take.
        layout: order of the dimensions of q, k, v and the output, "bhsd" or "bshd". Strides are free either way; only
            the head dimension should be contiguous (it is copied otherwise).
        impl: "auto" chooses the best kernel for the GPU and falls back with a reason (`explain` shows it). The name of
            a backend, or "reference", takes that one or raises.
        return_lse: also return the logsumexp of the final scores (and the sink), natural log, float32, (B, Hq, Sq).
        rescale_threshold: of the lazy rescale, log2 units, 0 to 8; default 8, with which a backend's
            kernel may look at the rows' sums instead of their maxima. 0 keeps the exact running maximum.
            Changes rounding only.
        window_align: alignment of window and ALiBi when `causal` is None; default "top_left".
        deterministic: the gradients have to be the same bits from run to run, as they are under
            `torch.use_deterministic_algorithms(True)` too; else the fastest kernels compute them, whatever their order
            of additions (`explain` says which). The output is the same bits either way.

    Returns:
        The output, q's shape with D_v for D, q's dtype, stored densely in q's order of dimensions; with return_lse, the
        pair (output, LSE). A query with no allowed key gives 0, and -inf (or its sink) in the LSE. Keys that are not
        allowed never reach a result, even if they hold NaN or inf.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not go together.
        TypeError: arguments of the wrong type.
        NotImplementedError: a named `impl` that cannot take the problem.

    The algorithm is the online softmax over key blocks of FlashAttention (Dao et al., 2022) in the exp2 domain, with
    the lazy rescale of FlashAttention-4. Differentiable, also in a float mask, slopes, sinks and score_mod_args;
    composes with torch.compile, vmap and CUDA graphs.
    """
    _check_types(q, k, v, layout, impl, rescale_threshold, return_lse, deterministic)
    how = ops.Options(impl, rescale_threshold, return_lse, deterministic=deterministic)
    plain = attn_mask is alibi_slopes is sinks is seqlens_k is None and score_mod is mask_mod is None
    plain = plain and type(softcap) is type(dropout_p) is float and softcap == dropout_p == 0
    if plain and score_mod_args is mask_mod_args is NOTHING:
        extras, rules = NO_EXTRAS, plain_rules(causal, window, scale, window_align)
        return _call(q, k, v, extras, rules, layout, how)
    options = dict(
        attn_mask=attn_mask, causal=causal, window=window, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, seqlens_k=seqlens_k, dropout_p=dropout_p, dropout_seed=dropout_seed, score_mod=score_mod,
        score_mod_args=score_mod_args, mask_mod=mask_mod, mask_mod_args=mask_mod_args, window_align=window_align,
    )  # fmt: skip
    extras, rules = parse_options(q, **options)  # type: ignore[arg-type]
    return _call(q, k, v, extras, rules, layout, how)


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras, rules: Rules, layout: str, how: ops.Options
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if layout == "bshd":
        q, k, v = _swap(q, "q"), _swap(k, "k"), _swap(v, "v")
    out, lse = differentiation.forward(q, k, v, extras, rules, how)
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if how.return_lse else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    score_mod: str | None = None,
    score_mod_args: Sequence[torch.Tensor] = NOTHING,
    mask_mod: str | None = None,
    mask_mod_args: Sequence[torch.Tensor] = NOTHING,
    impl: str = "auto",
    return_lse: bool = False,
    rescale_threshold: float | None = None,
    window_align: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed sequences: sequence i holds the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q and the rows
    cu_seqlens_k[i] to cu_seqlens_k[i + 1] of k and v, and sees nothing else.

    Args:
        q: (total_q, Hq, D). k: (total_k, Hkv, D). v: (total_k, Hkv, D_v). Any strides.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (sequences + 1,), on q's device: 0 first, then rising. Sequences may
            be empty, and need not be as long in q as in k. Their values are not read on the host (no synchronisation);
            `verification()` checks them.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. Only the choice of tiles looks at them; none is needed.
        the others: as in `attention`, with the sequence for the batch element: causal alignment, window, ALiBi and the
            positions that mods see are those inside a sequence; alibi_slopes and sinks (Hq,) or (sequences, Hq).

    Returns:
        (total_q, Hq, D_v) in q's order of dimensions; with return_lse, the pair (output, LSE (Hq, total_q)). Rows
        behind the last offset give 0 and -inf.

    Raises: as `attention`.
    """
    for name, t in (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, expected a torch.Tensor")
        if name in "qkv" and t.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected 3 dimensions (total, heads, head dim)")
    _check_types(q, k, v, "bhsd", impl, rescale_threshold, return_lse, deterministic)
    how = ops.Options(impl, rescale_threshold, return_lse, deterministic=deterministic)
    options = dict(
        causal=causal, window=window, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, dropout_seed=dropout_seed, score_mod=score_mod, score_mod_args=score_mod_args,
        mask_mod=mask_mod, mask_mod_args=mask_mod_args, window_align=window_align, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    extras, rules = parse_options(q, **options)  # type: ignore[arg-type]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out, lse = differentiation.forward(q, k, v, extras, rules, how)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def merge_states(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the attention of the same queries over two disjoint sets of keys into that over both.

    Args:
        out1, out2: (..., D_v) of one dtype, e.g. (B, Hq, Sq, D_v), as returned with `return_lse`.
        lse1, lse2: the LSEs, natural log, out's shape without D_v. -inf: no keys (its output is not looked at).

    Returns the pair (output, LSE); the output in the dtype of out1, computed in float32 (float64 for float64). Give
    `sinks` to one of the two parts only. Differentiable. Raises ValueError for shapes that do not go together.
    Source: Rabe and Staats, "Self-attention does not need O(n^2) memory" (2021).
    """
    return merging.merge(out1, lse1, out2, lse2)


def explain(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    enable_gqa: bool = False,
    causal: str | None = None,
    attn_mask: torch.Tensor | None = None,
    layout: str = "bhsd",
    impl: str = "auto",
    return_lse: bool = False,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    arch: str | None = None,
    show: bool = True,
    **options: Any,
) -> Explanation:
    """Print which kernel a call would take, with which tile, why, and why every other candidate was refused; then the
    same of its gradients.

    Give the tensors of the call (4 dimensions as in `attention`, others as in `scaled_dot_product_attention`, 3 with
    `cu_seqlens_q` as in `attention_varlen`), or, without them, `shape` = (B, Hq, Hkv, Sq, Sk, D) or
    (B, Hq, Hkv, Sq, Sk, D, D_v) with `dtype`. `arch` asks for another GPU than the tensors' device, by id ("gfx1151",
    "sm_90"); no GPU is needed. `options` are the other arguments of those functions.

    Returns the `Explanation` (`.plan`, `.backward`, `.to_json()`); show=False prints nothing. Raises what the call
    would raise.
    """
    if is_causal:
        if causal not in (None, "top_left"):
            raise ValueError(f"is_causal: got True beside causal={causal!r}; is_causal means 'top_left'")
        if attn_mask is not None:
            raise RuntimeError(drop_in.MASK_BESIDE_CAUSAL)
        causal = "top_left"
    _check_layout(layout)
    if options.get("dropout_p") and options.get("dropout_seed") is None:  # to explain must not draw from the generator
        options["dropout_seed"] = torch.zeros(1, dtype=torch.int64, device="meta" if q is None else q.device)
    if q is not None and k is not None and v is not None:
        if layout == "bshd":
            q, k, v = _swap(q, "q"), _swap(k, "k"), _swap(v, "v")
        elif options.get("cu_seqlens_q") is not None:
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        elif q.dim() != 4:
            attn_mask = drop_in.four_mask(attn_mask, q, k, v)
            q, k, v = drop_in.four(q, k, v)
        problem = Problem.from_call(q, k, v, causal=causal, attn_mask=attn_mask, return_lse=return_lse, **options)
        where = arches.by_name(arch) if arch else arches.of(q.device)
    elif shape is not None:
        problem = Problem.from_shape(shape, dtype, causal=causal, attn_mask=attn_mask, return_lse=return_lse, **options)
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
    q: Any, k: Any, v: Any, layout: Any, impl: Any, rescale_threshold: Any, return_lse: Any, deterministic: Any
) -> None:
    """What the operator's schema would refuse with a message about schemas."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, expected a torch.Tensor")
    if rescale_threshold is not None and not isinstance(rescale_threshold, int | float):
        raise TypeError(f"rescale_threshold: got {rescale_threshold!r}, expected a number or None")
    if not isinstance(impl, str):
        raise TypeError(f"impl: got {impl!r}, expected the name of a backend")
    for name, value in (("return_lse", return_lse), ("deterministic", deterministic)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: got {value!r}, expected a bool")
    _check_layout(layout)


def _swap(t: torch.Tensor, name: str) -> torch.Tensor:
    if t.dim() != 4:
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected 4 dimensions (batch, length, heads, head dim)")
    return t.transpose(1, 2)
