"""The optional part of an attention call: its tensors (`Extras`) and its options (`Rules`), with their checks.

Both travel through the operator in the order of their fields.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import mods


class Extras(NamedTuple):
    """Optional tensors of a call, None where absent."""

    mask: torch.Tensor | None = None  # (B or 1, Hq or 1, Sq or 1, Sk or 1), bool (True keeps) or floating (added)
    alibi_slopes: torch.Tensor | None = None  # (Hq,) or (B, Hq)
    sinks: torch.Tensor | None = None  # (Hq,) or (B, Hq), one logit per head
    seqlens_k: torch.Tensor | None = None  # (B,) keys of each batch element
    cu_seqlens_q: torch.Tensor | None = None  # (sequences + 1,) first rows of packed sequences
    cu_seqlens_k: torch.Tensor | None = None
    dropout_seed: torch.Tensor | None = None  # (1,) int64
    score_args: tuple[torch.Tensor, ...] = ()  # of the score_mod
    mask_args: tuple[torch.Tensor, ...] = ()  # of the mask_mod

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are there, by the names users know."""
        for name, value in zip(ARGUMENTS, self, strict=True):
            if isinstance(value, tuple | list):
                yield from ((f"{name}[{i}]", t) for i, t in enumerate(value))
            elif value is not None:
                yield name, value


ARGUMENTS = (
    "attn_mask", "alibi_slopes", "sinks", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k", "dropout_seed", "score_mod_args",
    "mask_mod_args",
)  # fmt: skip
NO_EXTRAS = Extras()


class Rules(NamedTuple):
    """What a call says beside its tensors; hashable. Window sizes inclusive, None open."""

    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    align: str = "top_left"
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    score_mod: str | None = None
    mask_mod: str | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


NO_RULES = Rules()


def check_numbers(rules: Rules) -> None:
    """Raise ValueError unless scale, softcap and dropout_p are in range."""
    if rules.scale is not None and not math.isfinite(rules.scale):
        raise ValueError(f"scale: got {rules.scale}, expected a finite number")
    if not (rules.softcap == 0 or 1e-30 <= rules.softcap < math.inf):  # its inverse has to be a float32
        raise ValueError(f"softcap: got {rules.softcap}, expected 0 (none) or a finite number from 1e-30 on")
    if not 0.0 <= rules.dropout_p <= 1.0:
        raise ValueError(f"dropout_p: got {rules.dropout_p}, expected a probability, 0 to 1")


def check_extras(q: torch.Tensor, k: torch.Tensor, extras: Extras, rules: Rules) -> None:
    """Raise TypeError or ValueError unless the extras fit q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and the rules."""
    for name, t in extras.tensors():
        if t.device != q.device:
            raise ValueError(f"{name}: got device {t.device}, q is on {q.device}; move it there")
    packed = extras.cu_seqlens_q is not None
    if extras.mask is not None:
        _check_mask(q, k, extras.mask, packed)
    _check_per_head("alibi_slopes", extras.alibi_slopes, q, packed)
    _check_per_head("sinks", extras.sinks, q, packed)
    if packed != (extras.cu_seqlens_k is not None):
        raise ValueError("cu_seqlens_q, cu_seqlens_k: got one of them, expected both")
    _check_lengths(q, k, extras, rules)
    if rules.dropout_p > 0:
        seed = extras.dropout_seed
        if seed is None or seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(f"dropout_seed: got {_told(seed)}, expected an int64 tensor of one element")
    for kind, mod, args in (
        ("score_mod", rules.score_mod, extras.score_args), ("mask_mod", rules.mask_mod, extras.mask_args),
    ):  # fmt: skip
        if mod is not None:
            mods.get(kind, mod).check_arguments(len(args))
        elif args:
            raise ValueError(f"{kind}_args: got {len(args)} tensors without a {kind}")


def _told(t: torch.Tensor | None) -> str:
    return "None" if t is None else f"{t.dtype} of shape {tuple(t.shape)}"


def _check_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, packed: bool) -> None:
    if packed:
        raise ValueError(
            "attn_mask: got one beside packed sequences, which have no rectangle of scores; a mask_mod sees the "
            "sequence and the positions in it"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask: got dtype {mask.dtype}, expected bool (True keeps) or floating (added)")
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask.dim() != 4 or any(n != 1 and n != of for n, of in zip(mask.shape, full, strict=True)):
        raise ValueError(
            f"attn_mask: got shape {tuple(mask.shape)}, expected one that broadcasts to (B, Hq, Sq, Sk) = {full}"
        )


def _check_per_head(name: str, t: torch.Tensor | None, q: torch.Tensor, packed: bool) -> None:
    if t is None:
        return
    if not t.is_floating_point():
        raise TypeError(f"{name}: got dtype {t.dtype}, expected a floating one")
    per_batch = t.dim() == 2 and t.shape[1] == q.shape[1] and (packed or t.shape[0] == q.shape[0])
    if not per_batch and tuple(t.shape) != (q.shape[1],):
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected (Hq,) or (B, Hq) with Hq = {q.shape[1]}")


def _check_lengths(q: torch.Tensor, k: torch.Tensor, extras: Extras, rules: Rules) -> None:
    for name, t in (
        ("seqlens_k", extras.seqlens_k), ("cu_seqlens_q", extras.cu_seqlens_q), ("cu_seqlens_k", extras.cu_seqlens_k),
    ):  # fmt: skip
        if t is None:
            continue
        if t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: got dtype {t.dtype}, expected int32 or int64")
        if t.dim() != 1 or not (t.is_contiguous() or t.shape[0] == 1):
            raise ValueError(f"{name}: got {_told(t)} and stride {t.stride()}, expected one contiguous dimension")
    cu_q, cu_k = extras.cu_seqlens_q, extras.cu_seqlens_k
    if extras.seqlens_k is not None:
        if cu_q is not None:
            raise ValueError("seqlens_k: got it beside packed sequences, whose lengths are in cu_seqlens_k")
        if extras.seqlens_k.shape[0] != q.shape[0]:
            raise ValueError(
                f"seqlens_k: got {extras.seqlens_k.shape[0]} lengths, expected one per batch: {q.shape[0]}"
            )
    if cu_q is None or cu_k is None:
        if rules.max_seqlen_q is not None or rules.max_seqlen_k is not None:
            raise ValueError("max_seqlen_q, max_seqlen_k: for packed sequences, got no cu_seqlens_q")
        return
    if q.shape[0] != 1:
        raise ValueError(f"q: got a batch of {q.shape[0]}, expected (total, heads, head dim) beside cu_seqlens_q")
    if cu_q.shape != cu_k.shape or cu_q.shape[0] < 1:
        raise ValueError(
            f"cu_seqlens_q, cu_seqlens_k: got {cu_q.shape[0]} and {cu_k.shape[0]} offsets, expected one more than "
            "sequences in both"
        )
    for name, t in (("alibi_slopes", extras.alibi_slopes), ("sinks", extras.sinks)):
        if t is not None and t.dim() == 2 and t.shape[0] != cu_q.shape[0] - 1:
            raise ValueError(f"{name}: got {t.shape[0]} rows, expected one per sequence: {cu_q.shape[0] - 1}")
    for name, longest in (("max_seqlen_q", rules.max_seqlen_q), ("max_seqlen_k", rules.max_seqlen_k)):
        if longest is not None and longest < 0:
            raise ValueError(f"{name}: got {longest}, expected a length")


def check_offsets(q_rows: int, k_rows: int, extras: Extras) -> None:
    """Read the packed sequences' offsets (a device synchronisation) and raise ValueError if they are not sorted from 0
    to at most the packed rows."""
    for name, t, rows in (("cu_seqlens_q", extras.cu_seqlens_q, q_rows), ("cu_seqlens_k", extras.cu_seqlens_k, k_rows)):
        if t is None:
            continue
        values = t.tolist()
        if values[0] != 0 or values != sorted(values) or values[-1] > rows:
            raise ValueError(f"{name}: got {values}, expected offsets that begin with 0 and rise to {rows} at most")
