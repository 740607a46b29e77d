"""Attention in plain Python numbers, one at a time, straight from the rules of DESIGN.md section 3, and the calls that
the reference is compared with it on. Shares no code with the package: neither masks nor random numbers nor offsets."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from lazymax import mods
from lazymax.extras import Extras
from lazymax.options import parse_options
from lazymax.problem import Problem
from lazymax.testing import make_qkv

INF = float("inf")
LOWEST = torch.finfo(torch.float32).min


class Maker:
    """Random tensors of one case; float64 unless the case needs what it says."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def bools(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator) < 0.6


@dataclass(frozen=True)
class Case:
    id: str
    sizes: tuple[int, ...]  # B, Hq, Hkv, Sq, Sk, D[, D_v]
    rules: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[Maker], dict[str, Any]] = lambda make: {}

    def options(self) -> dict[str, Any]:
        return {**self.rules, **self.tensors(Maker())}

    def build(self, dtype: torch.dtype = torch.float64, **more: Any) -> tuple[Any, ...]:
        """q, k, v, problem, extras"""
        return build(*make_qkv(*self.sizes, dtype=dtype), {**self.options(), **more})


def build(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> tuple[Any, ...]:
    options = dict(options)
    return_lse = options.pop("return_lse", False)
    extras, rules = parse_options(q, **options)
    return q, k, v, Problem.from_tensors(q, k, v, extras, rules, return_lse=return_lse), extras


def tensors_of(extras: Extras) -> dict[str, torch.Tensor]:
    """The floating tensors of a call that can have a gradient, in the order of `reference.backward`."""
    named = {"mask": extras.mask, "slopes": extras.alibi_slopes, "sinks": extras.sinks}
    named |= {f"arg{i}": t for i, t in enumerate(extras.score_args)}
    return {name: t for name, t in named.items() if t is not None and t.is_floating_point()}


# Modifications. The registered stand-ins have what a jitted function has and the reference looks at: a signature.


def _tilt(s, b, h, q_idx, k_idx, weight, table):
    return s * (1 + 0.1 * weight[h]) + table[b, (q_idx - k_idx).abs() % table.shape[1]] + 0.01 * s * s


def _tilt_by_hand(s, b, h, i, j, weight, table):
    return s * (1 + 0.1 * weight[h]) + table[b][abs(i - j) % len(table[b])] + 0.01 * s**2


def _flat(s, b, h, q_idx, k_idx):
    return 0.1 * (h + q_idx * k_idx - b)


def _sieve(b, h, q_idx, k_idx, limit):
    return ((q_idx + 2 * k_idx + h + b) % 3 != 0) & (k_idx < limit[b])


def _sieve_by_hand(b, h, i, j, limit):
    return (i + 2 * j + h + b) % 3 != 0 and j < limit[b]


def _stand_in(function: Callable[..., Any]) -> Any:
    return SimpleNamespace(fn=function)


mods.register_score_mod("by_hand.tilt", _stand_in(_tilt), reference=_tilt)


def _root(s, b, h, q_idx, k_idx, weight):
    return weight[h] * torch.sqrt(s.abs())  # of infinite slope at 0


mods.register_score_mod("by_hand.root", _stand_in(_root), reference=_root)
mods.register_score_mod("by_hand.flat", _stand_in(_flat), reference=_flat)
mods.register_mask_mod("by_hand.sieve", _stand_in(_sieve), reference=_sieve)
BY_HAND = {"by_hand.tilt": _tilt_by_hand, "by_hand.flat": _flat, "by_hand.sieve": _sieve_by_hand}


def _tilted(make: Maker, batch: int = 2, heads: int = 4) -> dict[str, Any]:
    return dict(score_mod="by_hand.tilt", score_mod_args=(make.normal(heads), make.normal(batch, 3)))


def _sieved(batch: int = 2) -> dict[str, Any]:
    return dict(mask_mod="by_hand.sieve", mask_mod_args=(torch.tensor([5, 0, 3][:batch]),))


def _with_holes(make: Maker, *shape: int) -> torch.Tensor:
    return make.normal(*shape).masked_fill(~make.bools(*shape), -INF)


def _rows_of_lowest(make: Maker) -> torch.Tensor:
    mask = make.normal(5, 7).float()
    mask[1], mask[3, 2:] = LOWEST, LOWEST
    return mask


def _seed(value: int) -> torch.Tensor:
    return torch.tensor([value])


SIZES = (2, 4, 2, 5, 7, 3, 2)
LONG = (2, 4, 2, 7, 5, 3, 2)

PLAIN = (
    Case("plain", (2, 2, 2, 4, 5, 3)),
    Case("one of each", (1, 1, 1, 1, 1, 1)),
    Case("grouped", (1, 6, 2, 3, 4, 3)),
    Case("D_v", (1, 2, 2, 3, 4, 3, 5)),
    Case("causal, top left", (1, 2, 2, 4, 6, 3), dict(causal="top_left")),
    Case("causal, bottom right", (1, 2, 2, 4, 6, 3), dict(causal="bottom_right")),
    Case("causal, fewer keys, top left", (1, 2, 2, 6, 4, 3), dict(causal="top_left")),
    Case("rows without keys", (1, 2, 2, 6, 4, 3), dict(causal="bottom_right")),
    Case("window", (1, 2, 2, 6, 6, 3), dict(window=(2, 1))),
    Case("window, bottom right", (1, 2, 2, 4, 7, 3), dict(window=(1, 0), window_align="bottom_right")),
    Case("window open on the left", (1, 2, 2, 6, 6, 3), dict(window=(None, 1))),
    Case("window open on the right", (1, 2, 2, 6, 6, 3), dict(window=(0, -1))),
    Case("window beyond the keys", (1, 2, 2, 9, 4, 3), dict(window=(1, 1))),
    Case("causal window", (1, 2, 1, 7, 7, 3), dict(causal="top_left", window=(2, 5))),
    Case("scale", (1, 2, 2, 4, 5, 3), dict(scale=1.7)),
    Case("negative scale", (1, 2, 2, 4, 5, 3), dict(scale=-0.3, causal="top_left")),
    Case("zero scale", (1, 2, 2, 4, 5, 3), dict(scale=0.0, causal="top_left")),
    Case("huge scores", (1, 2, 2, 4, 5, 3), dict(scale=1e4)),
    Case("no keys", (1, 2, 2, 3, 0, 3)),
    Case("no queries", (1, 2, 2, 0, 4, 3)),
    Case("no head dim", (1, 2, 2, 3, 4, 0, 3)),
)

FEATURES = (
    Case("softcap", SIZES, dict(softcap=0.7)),
    Case("softcap of huge scores", SIZES, dict(softcap=30.0, scale=1e5)),
    Case("slopes per head", SIZES, {}, lambda make: dict(alibi_slopes=make.normal(4))),
    Case("slopes per batch, bottom right", SIZES, dict(causal="bottom_right"),
         lambda make: dict(alibi_slopes=make.normal(2, 4))),
    Case("slopes, window align alone", LONG, dict(window_align="bottom_right"),
         lambda make: dict(alibi_slopes=make.normal(4))),
    Case("float mask of keys", SIZES, {}, lambda make: dict(attn_mask=make.normal(7))),
    Case("float mask of queries", SIZES, {}, lambda make: dict(attn_mask=make.normal(5, 1))),
    Case("float mask of heads and keys", SIZES, {}, lambda make: dict(attn_mask=make.normal(1, 4, 1, 7))),
    Case("float mask of batch and keys", SIZES, {}, lambda make: dict(attn_mask=_with_holes(make, 2, 1, 1, 7))),
    Case("float mask, full", SIZES, dict(causal="top_left"),
         lambda make: dict(attn_mask=_with_holes(make, 2, 4, 5, 7))),
    Case("float mask, expanded", SIZES, {}, lambda make: dict(attn_mask=make.normal(2, 1, 5, 7).expand(2, 4, 5, 7))),
    Case("rows of the lowest float", SIZES, {}, lambda make: dict(attn_mask=_rows_of_lowest(make))),
    Case("bool mask", SIZES, {}, lambda make: dict(attn_mask=make.bools(2, 1, 5, 7))),
    Case("bool mask, rows without keys", SIZES, {},
         lambda make: dict(attn_mask=(torch.arange(5) < 3)[:, None])),
    Case("sinks", SIZES, {}, lambda make: dict(sinks=make.normal(4))),
    Case("sinks per batch, rows without keys", LONG, dict(causal="bottom_right"),
         lambda make: dict(sinks=make.normal(2, 4))),
    Case("sinks, one absent", SIZES, {}, lambda make: dict(sinks=torch.tensor([0.3, -INF, 900.0, -900.0]).double())),
    Case("sinks without keys", (2, 4, 2, 5, 0, 3), {}, lambda make: dict(sinks=make.normal(4))),
    Case("lengths", (3, 4, 2, 5, 7, 3), {}, lambda make: dict(seqlens_k=torch.tensor([3, 7, 1]))),
    Case("lengths of 0 and beyond", (3, 4, 2, 5, 7, 3), {},
         lambda make: dict(seqlens_k=torch.tensor([0, 99, -3], dtype=torch.int32))),
    Case("lengths of 0 and beyond, bottom right", (3, 4, 2, 5, 7, 3), dict(causal="bottom_right"),
         lambda make: dict(seqlens_k=torch.tensor([0, 99, -3]))),
    Case("lengths, causal, top left", (3, 4, 2, 5, 7, 3), dict(causal="top_left"),
         lambda make: dict(seqlens_k=torch.tensor([3, 7, 1]))),
    Case("lengths, causal, bottom right", (3, 4, 2, 5, 7, 3), dict(causal="bottom_right"),
         lambda make: dict(seqlens_k=torch.tensor([3, 7, 1]), alibi_slopes=make.normal(4))),
    Case("lengths, window, bottom right", (3, 4, 2, 5, 7, 3), dict(window=(2, 1), window_align="bottom_right"),
         lambda make: dict(seqlens_k=torch.tensor([4, 7, 0]))),
    Case("score_mod", SIZES, {}, _tilted),
    Case("score_mod of half-precision arguments", SIZES, dict(score_mod="by_hand.tilt"),
         lambda make: dict(score_mod_args=(make.normal(4).half(), make.normal(2, 3).half()))),
    Case("score_mod of positions alone", SIZES, dict(score_mod="by_hand.flat")),
    Case("mask_mod", SIZES, {}, lambda make: _sieved()),
    Case("dropout", SIZES, dict(dropout_p=0.4), lambda make: dict(dropout_seed=_seed(2**40 + 17))),
    Case("dropout, negative seed", SIZES, dict(dropout_p=0.5), lambda make: dict(dropout_seed=_seed(-5))),
    Case("dropout of all", SIZES, dict(dropout_p=1.0), lambda make: dict(dropout_seed=_seed(1))),
    Case("all at once", SIZES, dict(causal="bottom_right", window=(4, None), softcap=2.0, scale=0.9, dropout_p=0.3),
         lambda make: dict(alibi_slopes=make.normal(2, 4), attn_mask=make.normal(4, 1, 7), sinks=make.normal(4),
                           seqlens_k=torch.tensor([7, 4]), dropout_seed=_seed(3), **_tilted(make), **_sieved())),
    Case("all at once, bool mask", SIZES, dict(softcap=2.0, dropout_p=0.3),
         lambda make: dict(alibi_slopes=make.normal(4), attn_mask=make.bools(4, 5, 7), sinks=make.normal(2, 4),
                           dropout_seed=_seed(3), **_tilted(make))),
)  # fmt: skip


def _offsets(*ends: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


PACKED_SIZES = (1, 4, 2, 11, 13, 3, 2)
# Three sequences of 3, 0 and 5 queries over 2, 4 and 6 keys; 3 rows and 1 key belong to none.
ENDS = dict(cu_seqlens_q=_offsets(0, 3, 3, 8), cu_seqlens_k=_offsets(0, 2, 6, 12))

PACKED = (
    Case("packed", PACKED_SIZES, ENDS),
    Case("packed, causal, top left", PACKED_SIZES, dict(**ENDS, causal="top_left")),
    Case("packed, causal, bottom right", PACKED_SIZES, dict(**ENDS, causal="bottom_right", max_seqlen_q=5)),
    Case("packed, window, bottom right", PACKED_SIZES, dict(**ENDS, window=(1, 1), window_align="bottom_right")),
    Case("packed, one row each", (1, 2, 2, 4, 9, 3), dict(
        cu_seqlens_q=_offsets(0, 1, 2, 3, 4, dtype=torch.int64), cu_seqlens_k=_offsets(0, 2, 2, 9, 9))),
    Case("packed, offsets beyond the rows", PACKED_SIZES, dict(
        causal="bottom_right", cu_seqlens_q=_offsets(0, 6, 99), cu_seqlens_k=_offsets(0, 20, 40))),
    Case("packed, no sequence", PACKED_SIZES, dict(cu_seqlens_q=_offsets(0), cu_seqlens_k=_offsets(0))),
    Case("packed, slopes and sinks", PACKED_SIZES, dict(**ENDS, causal="bottom_right"),
         lambda make: dict(alibi_slopes=make.normal(4), sinks=make.normal(4))),
    Case("packed, all at once", PACKED_SIZES, dict(**ENDS, softcap=2.0, dropout_p=0.3),
         lambda make: dict(alibi_slopes=make.normal(3, 4), sinks=make.normal(3, 4), dropout_seed=_seed(5),
                           **_tilted(make, 3), **_sieved(3))),
)  # fmt: skip

ALL = (*PLAIN, *FEATURES, *PACKED)


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's integers, as in Salmon et al., section 3.3."""
    c, k = list(counter), list(key)
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [product1 // 2**32 ^ c[1] ^ k[0], product1 % 2**32, product0 // 2**32 ^ c[3] ^ k[1], product0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def _kept(seed: int, b: int, h: int, i: int, j: int, p: float) -> bool:
    seed %= 2**64
    word = philox_by_hand([j // 4, i, h, b], [seed % 2**32, seed // 2**32])[j % 4]
    return (word >> 8) / 2**24 >= torch.tensor(p, dtype=torch.float32).item()


def _listed(t: torch.Tensor | None) -> Any:
    return None if t is None else t.double().tolist()


def _entry(mask: Any, b: int, h: int, i: int, j: int) -> Any:
    for index in (b, h, i, j):
        mask = mask[index if len(mask) > 1 else 0]
    return mask


def _sequences(options: dict[str, Any], q_len: int, kv_len: int) -> list[tuple[int, int, int, int]]:
    q_ends, k_ends = (
        [min(end, most) for end in options[f"cu_seqlens_{name}"].tolist()]
        for name, most in (("q", q_len), ("k", kv_len))
    )
    return list(zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False))


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> tuple[Any, Any]:
    """out and LSE in float64; options as of `attention()`."""
    batch, q_heads, q_len, _ = q.shape
    out = torch.zeros(batch, q_heads, q_len, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, q_heads, q_len), -INF, dtype=torch.float64)
    rows, keys, values = (t.double().tolist() for t in (q, k, v))
    if "cu_seqlens_q" in options:
        places = [(0, index, *ends) for index, ends in enumerate(_sequences(options, q_len, k.shape[2]))]
    else:
        lengths = options.get("seqlens_k", torch.full((batch,), k.shape[2])).tolist()
        places = [(b, b, 0, q_len, 0, min(max(lengths[b], 0), k.shape[2])) for b in range(batch)]
    group = q_heads // k.shape[1]
    for place, b, q_start, q_stop, k_start, k_stop in places:
        for h in range(q_heads):
            head_keys = keys[place][h // group][k_start:k_stop]
            head_values = values[place][h // group][k_start:k_stop]
            for i in range(q_stop - q_start):
                row = rows[place][h][q_start + i]
                shift = (k_stop - k_start) - (q_stop - q_start)
                result, row_lse = _row_by_hand(row, head_keys, head_values, options, b, h, i, shift)
                lse[place, h, q_start + i] = row_lse
                if result:
                    out[place, h, q_start + i] = torch.tensor(result, dtype=torch.float64)
    return out, lse


def _row_by_hand(
    row: list[float], keys: Any, values: Any, options: dict[str, Any], b: int, h: int, i: int, shift: int
) -> tuple[list[float], float]:
    causal, window = options.get("causal"), options.get("window") or (None, None)
    align = causal or options.get("window_align") or "top_left"
    left, right = (None if side == -1 else side for side in window)
    scale = options.get("scale", 1 / math.sqrt(len(row)) if row else 1.0)
    middle = i + (shift if align == "bottom_right" else 0)
    mask = options.get("attn_mask")
    mask = None if mask is None else mask[(None,) * (4 - mask.dim())].tolist()
    slopes, sinks = _listed(options.get("alibi_slopes")), _listed(options.get("sinks"))
    scores = {}
    for j, key in enumerate(keys):
        if (causal and j > middle) or (left is not None and j < middle - left):
            continue
        if right is not None and j > middle + right:
            continue
        s = scale * math.fsum(x * y for x, y in zip(row, key, strict=True))
        if options.get("softcap"):
            s = options["softcap"] * math.tanh(s / options["softcap"])
        if slopes:
            s -= (slopes[b] if isinstance(slopes[0], list) else slopes)[h] * abs(middle - j)
        entry = 0.0 if mask is None else _entry(mask, b, h, i, j)
        if entry is False:
            continue
        s += 0.0 if entry is True else entry
        if options.get("score_mod"):
            args = [_listed(t) for t in options.get("score_mod_args", ())]
            s = BY_HAND[options["score_mod"]](s, b, h, i, j, *args)
        if options.get("mask_mod"):
            args = [_listed(t) for t in options.get("mask_mod_args", ())]
            if not BY_HAND[options["mask_mod"]](b, h, i, j, *args):
                continue
        if s != -INF:
            scores[j] = s
    sink = -INF if sinks is None else (sinks[b] if isinstance(sinks[0], list) else sinks)[h]
    top = max([*scores.values(), sink])
    if top == -INF:
        return [0.0] * len(values[0] if values else []), -INF
    total = math.fsum(math.exp(s - top) for s in (*scores.values(), sink))
    weights = {j: math.exp(s - top) / total for j, s in scores.items()}
    if p := options.get("dropout_p"):
        seed = int(options["dropout_seed"])
        weights = {j: w / (1 - p) if _kept(seed, b, h, i, j, p) else 0.0 for j, w in weights.items()}
    return [
        math.fsum(weight * values[j][d] for j, weight in weights.items())
        for d in range(len(values[0]) if values else 0)
    ], top + math.log(total)
