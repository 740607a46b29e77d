"""From the optional arguments of the public functions to the `Extras` and `Rules` that the operator takes."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from .extras import NO_EXTRAS, Extras, Rules

ALIGNMENTS = ("top_left", "bottom_right")


def parse_causal(causal: str | bool | None) -> str | None:
    """The `causal` argument of `attention()`: None or False for no causal rule, else an alignment by name."""
    if causal is None or causal is False:
        return None
    if causal is True:
        raise ValueError(
            "causal: got True, expected 'top_left' (PyTorch: query i sees keys 0..i) or 'bottom_right' (flash-attn: "
            "the last query sees all keys); they differ when q and k have different lengths"
        )
    if not isinstance(causal, str) or causal not in ALIGNMENTS:
        raise ValueError(f"causal: got {causal!r}, expected None, 'top_left' or 'bottom_right'")
    return causal


def parse_window(window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """The `window` argument: (left, right), both edges inclusive, None or -1 for open."""
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window: got {window!r}, expected a pair (left, right) of key counts, None or -1 for open")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window: got {window!r}, expected integers or None")
        if side is not None and side < -1:
            raise ValueError(f"window: got {window!r}; only None or -1 means open, other negative sizes mean nothing")
    left, right = (None if side == -1 else side for side in window)
    return left, right


def align_of(causal: str | None, window_align: str | None) -> str:
    """Where the diagonal lies: as `causal` says, else as `window_align` says, else top left."""
    if window_align not in (None, *ALIGNMENTS):
        raise ValueError(f"window_align: got {window_align!r}, expected None, 'top_left' or 'bottom_right'")
    if causal and window_align and causal != window_align:
        raise ValueError(f"window_align: got {window_align!r} beside causal={causal!r}; they must agree")
    return causal or window_align or "top_left"


def parse_options(
    q: torch.Tensor,
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
    score_mod_args: Sequence[torch.Tensor] = (),
    mask_mod: str | None = None,
    mask_mod_args: Sequence[torch.Tensor] = (),
    window_align: str | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Extras, Rules]:
    """The optional arguments of `attention()` and `attention_varlen()` as the operator takes them. Without a seed,
    dropout draws one from torch's generator of q's device."""
    rules = plain_rules(causal, window, scale, window_align)
    for name, number in (("softcap", softcap), ("dropout_p", dropout_p)):
        if not isinstance(number, int | float):
            raise TypeError(f"{name}: got {number!r}, expected a number")
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None and not isinstance(mod, str):
            raise TypeError(f"{name}: got {mod!r}, expected a name given to lazymax.register_{name}")
    rules = rules._replace(
        softcap=softcap,
        dropout_p=dropout_p,
        score_mod=score_mod,
        mask_mod=mask_mod,
        max_seqlen_q=parse_length("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=parse_length("max_seqlen_k", max_seqlen_k),
    )
    if dropout_p > 0 and dropout_seed is None:
        dropout_seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    for name, args in (("score_mod_args", score_mod_args), ("mask_mod_args", mask_mod_args)):
        if not isinstance(args, tuple | list):
            raise TypeError(f"{name}: got {type(args).__name__}, expected a tuple of tensors")
    named = (
        ("alibi_slopes", alibi_slopes), ("sinks", sinks), ("seqlens_k", seqlens_k), ("cu_seqlens_q", cu_seqlens_q),
        ("cu_seqlens_k", cu_seqlens_k), ("dropout_seed", dropout_seed),
    )  # fmt: skip
    arguments = (
        (name, t) for name, of in (("score_mod_args", score_mod_args), ("mask_mod_args", mask_mod_args)) for t in of
    )
    for name, t in (*named, *arguments):
        if t is not None and not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: got {t!r}, expected a torch.Tensor")
    extras = Extras(
        parse_mask(attn_mask), alibi_slopes, sinks, seqlens_k, cu_seqlens_q, cu_seqlens_k,
        dropout_seed if dropout_p > 0 else None, tuple(score_mod_args), tuple(mask_mod_args),
    )  # fmt: skip
    return (extras if any(True for _ in extras.tensors()) else NO_EXTRAS), rules


def plain_rules(
    causal: str | None, window: tuple[int | None, int | None] | None, scale: float | None, window_align: str | None
) -> Rules:
    """The rules that every call has, from a cache: calls with nothing else are the short ones."""
    try:
        if torch.compiler.is_compiling():  # dynamo ignores caches, and says so to the user
            return _plain_rules(causal, window, scale, window_align)
        return _cached_rules(causal, window, scale, window_align)
    except TypeError:  # a list does not hash; it is checked like the rest
        return _plain_rules(causal, window, scale, window_align)


def _plain_rules(causal: Any, window: Any, scale: Any, window_align: Any) -> Rules:
    if scale is not None and not isinstance(scale, int | float):
        raise TypeError(f"scale: got {scale!r}, expected a number")
    named = parse_causal(causal)
    left, right = parse_window(window)
    return Rules(named is not None, left, right, align_of(named, window_align), scale)


_cached_rules = functools.lru_cache(maxsize=256, typed=True)(_plain_rules)


def parse_length(name: str, length: Any) -> int | None:
    """An optional length: an int, or anything that is one (a tensor of one integer costs a synchronisation)."""
    if length is None or (isinstance(length, int | torch.SymInt) and not isinstance(length, bool)):
        return length  # type: ignore[return-value]
    try:
        if not isinstance(length, bool):
            return operator.index(length)
    except TypeError:
        pass
    raise TypeError(f"{name}: got {length!r}, expected an int or None (none is needed)")


def parse_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask with four dimensions, new ones in front: right-aligned broadcasting and no other guess."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attn_mask: got {type(mask).__name__}, expected a torch.Tensor")
    if mask.dim() > 4:
        raise ValueError(f"attn_mask: got shape {tuple(mask.shape)}, expected one that broadcasts to (B, Hq, Sq, Sk)")
    return mask[(None,) * (4 - mask.dim())]
