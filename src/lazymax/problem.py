"""Problem: everything about one attention call that dispatch may look at. Every user error is raised here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .extras import NO_EXTRAS, NO_RULES, Extras, Rules, check_extras, check_numbers
from .options import parse_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call, without its data. Lengths and dims in elements; `dtype` as torch spells it ("bfloat16")."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    dtype: str
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    align: str = "top_left"  # where the diagonal of `causal`, `window` and ALiBi lies when q_len != kv_len
    scale: float = 1.0
    rescale_threshold: float = 8.0
    return_lse: bool = False
    requires_grad: bool = False
    deterministic: bool = False  # gradients have to be the same bits from run to run
    mask: str | None = None  # dtype of attn_mask
    mask_varies: tuple[bool, bool, bool, bool] = (False, False, False, False)  # over batch, head, query, key
    softcap: float = 0.0  # natural units, 0: none
    alibi: bool = False
    sinks: bool = False
    score_mod: str | None = None
    mask_mod: str | None = None
    dropout_p: float = 0.0
    seqlens_k: bool = False  # every batch element has its own number of keys, kv_len is the most
    packed: tuple[int, int] | None = None  # rows of all sequences in q and in k; q_len and kv_len are upper bounds then
    fp32_precision: str = "ieee"  # of fp32 products; torch's own setting decides, see `fp32_precision()`
    copied: tuple[str, ...] = ()  # inputs whose head dimension is not contiguous
    wide: bool = False  # a row stride needs 64-bit offsets inside one tile
    descriptor_refusal: str | None = None  # why q, k and v cannot be read through tensor descriptors

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q_heads // self.kv_heads if self.kv_heads else 1

    @property
    def ragged(self) -> bool:
        """The lengths differ over the batch and stand in device memory."""
        return self.seqlens_k or self.packed is not None

    @property
    def modified(self) -> bool:
        """Scores change after the scale, by more than a choice of keys."""
        return bool(self.softcap or self.alibi or self.score_mod) or self.mask not in (None, "bool")

    @property
    def plain(self) -> bool:
        """Nothing but a band and a length hides keys or changes scores."""
        return not (self.modified or self.mask or self.mask_mod or self.dropout_p or self.sinks or self.packed)

    @property
    def mask_rows(self) -> bool:
        """The mask differs from query to query."""
        return self.mask_varies[2]

    def q_tiles(self, block_m: int) -> int:
        """Query tiles of one head, over the whole batch."""
        return self.slots(block_m) * (1 if self.packed else self.batch)

    def slots(self, block: int, of_keys: bool = False) -> int:
        """Tiles of queries (or of keys) side by side in a grid: of a batch element, or of all packed sequences."""
        if self.packed:
            return self.packed[of_keys] // block + self.batch + 1  # see kernels/sequences.py
        return -(-(self.kv_len if of_keys else self.q_len) // block)

    @property
    def first_offset(self) -> int | None:
        """Query i sees no key before `i + first_offset`; None: no left bound, or one that hides no key. Of ragged
        problems aligned bottom right, the kernel adds each sequence's own difference of lengths to this and to
        `last_offset`."""
        if self.window[0] is None:
            return None
        offset = self._clamp(self._shift - self.window[0])
        return None if offset <= 1 - self.q_len and not self.ragged else offset

    @property
    def last_offset(self) -> int | None:
        """Query i sees no key after `i + last_offset`; None: no right bound."""
        right = 0 if self.causal else self.window[1]
        if right is None:
            return None
        offset = self._clamp(self._shift + right)
        return None if offset >= self.kv_len - 1 and not self.ragged else offset

    @property
    def reach(self) -> int:
        """Keys that a query can see at most."""
        first, last = self.first_offset, self.last_offset
        return self.kv_len if first is None or last is None else max(0, min(self.kv_len, last - first + 1))

    @property
    def _shift(self) -> int:
        return self.kv_len - self.q_len if self.align == "bottom_right" and not self.ragged else 0

    def _clamp(self, offset: int) -> int:
        """Beyond the lengths every offset means the same; this keeps the kernel's 32-bit sums in range."""
        if self.ragged:
            reach = sum(self.packed) if self.packed else self.q_len + self.kv_len
            return max(-reach, min(reach, offset))
        return max(-self.q_len, min(self.kv_len, offset))

    @property
    def flops(self) -> float:
        """Of the two products, counting visible keys only: 4 * D for every visible (query, key) pair if D_v == D. Only
        the band hides keys here: an upper bound under masks and with ragged lengths."""
        return 2.0 * self.batch * self.q_heads * self.visible_pairs * (self.head_dim + self.v_head_dim)

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head inside the band."""
        first, last = self.first_offset, self.last_offset
        return _below(self.q_len, self.kv_len, last) - (
            0
            if first is None
            else _below(self.q_len, self.kv_len, min(first - 1, self.kv_len if last is None else last))
        )

    @classmethod
    def from_tensors(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extras: Extras = NO_EXTRAS,
        rules: Rules = NO_RULES,
        *,
        rescale_threshold: float | None = None,
        return_lse: bool = False,
        deterministic: bool = False,
    ) -> "Problem":
        """Check the tensors (see `check_tensors`, `check_extras`) and keep what dispatch needs of them."""
        check_tensors(q, k, v)
        check_numbers(rules)
        batch, q_len, kv_len = q.shape[0], q.shape[2], k.shape[2]
        packed = None
        if extras is not NO_EXTRAS:
            check_extras(q, k, extras, rules)
            if extras.cu_seqlens_q is not None:
                packed = q_len, kv_len
                batch = extras.cu_seqlens_q.shape[0] - 1
                q_len = q_len if rules.max_seqlen_q is None else min(q_len, rules.max_seqlen_q)
                kv_len = kv_len if rules.max_seqlen_k is None else min(kv_len, rules.max_seqlen_k)
        named = {"q": q, "k": k, "v": v}
        mask = extras.mask
        gradients = (*named.values(), *(t for _, t in extras.tensors()))
        return cls(
            batch=batch,
            q_heads=q.shape[1],
            kv_heads=k.shape[1],
            q_len=q_len,
            kv_len=kv_len,
            head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            dtype=_name(q.dtype),
            causal=rules.causal,
            window=(rules.window_left, rules.window_right),
            align=rules.align,
            scale=default_scale(q.shape[3]) if rules.scale is None else float(rules.scale),
            rescale_threshold=default_threshold(rescale_threshold),
            return_lse=return_lse,
            requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in gradients),
            deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
            mask=None if mask is None else _name(mask.dtype),
            mask_varies=NOWHERE if mask is None else _varies(mask),
            softcap=float(rules.softcap),
            alibi=extras.alibi_slopes is not None,
            sinks=extras.sinks is not None,
            score_mod=rules.score_mod,
            mask_mod=rules.mask_mod,
            dropout_p=float(rules.dropout_p),
            seqlens_k=extras.seqlens_k is not None,
            packed=packed,
            fp32_precision=fp32_precision() if q.dtype == torch.float32 else "ieee",
            copied=tuple(name for name, t in named.items() if not _last_contiguous(t)),
            wide=output_strides(q, v.shape[3])[2] >= WIDE_STRIDE
            or any(_last_contiguous(t) and t.shape[2] > 1 and t.stride(2) >= WIDE_STRIDE for t in named.values())
            or (mask is not None and max(mask.stride()[2:]) >= WIDE_STRIDE),
            descriptor_refusal=descriptor_refusal("q", q) or descriptor_refusal("k", k) or descriptor_refusal("v", v),
        )

    @classmethod
    def from_call(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rescale_threshold: float | None = None,
        return_lse: bool = False,
        deterministic: bool = False,
        **options: Any,
    ) -> "Problem":
        """From the arguments of `attention()`, bhsd."""
        extras, rules = parse_options(q, **options)
        how: dict[str, Any] = dict(rescale_threshold=rescale_threshold, return_lse=return_lse)
        return cls.from_tensors(q, k, v, extras, rules, **how, deterministic=deterministic)

    @classmethod
    def from_shape(cls, shape: Sequence[int], dtype: torch.dtype | str, **rules: Any) -> "Problem":
        """From (B, Hq, Hkv, Sq, Sk, D[, D_v]) and a dtype, as if contiguous; other arguments as in `from_call`."""
        sizes_only = isinstance(shape, Sequence) and all(type(n) is int and n >= 0 for n in shape)
        if not sizes_only or len(shape) not in (6, 7):
            raise ValueError(f"shape: got {shape!r}, expected 6 or 7 sizes: B, Hq, Hkv, Sq, Sk, D[, D_v]")
        batch, q_heads, kv_heads, q_len, kv_len, head_dim = shape[:6]
        kind = parse_dtype(dtype)
        sizes = ((q_heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, shape[-1]))
        q, k, v = (torch.empty(batch, *size, dtype=kind, device="meta") for size in sizes)
        return cls.from_call(q, k, v, **{name: _to_meta(value) for name, value in rules.items()})


NOWHERE = (False, False, False, False)


def _varies(mask: torch.Tensor) -> tuple[bool, bool, bool, bool]:
    batch, heads, rows, cols = (n > 1 and s != 0 for n, s in zip(mask.shape, mask.stride(), strict=True))
    return batch, heads, rows, cols


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype, its name, or fp16, bf16, fp32, fp64."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = DTYPES.get(dtype, getattr(torch, dtype, None)) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)} or a floating-point torch dtype")
    return found


def _below(q_len: int, kv_len: int, offset: int | None) -> int:
    """Pairs (i, j) with 0 <= j <= i + offset, j < kv_len; all pairs if offset is None."""
    if offset is None:
        return q_len * kv_len
    # Queries lowest..highest - 1 see 1 to kv_len - 1 keys, one more each; those after them see all.
    lowest, highest = min(q_len, max(0, -offset)), min(q_len, kv_len - 1 - offset)
    ramp = max(0, highest - lowest)
    full = q_len - max(lowest, min(q_len, max(0, highest)))
    first = lowest + offset + 1
    return ramp * first + ramp * (ramp - 1) // 2 + full * kv_len


WIDE_STRIDE = 2**23  # of rows; times the at most 128 rows of a tile it stays below 2**31


def output_strides(q: torch.Tensor, v_head_dim: int) -> list[int]:
    """Strides of an output (B, Hq, Sq, D_v) that is dense in the order in which q stores its dimensions."""
    stored = q.stride()
    strides = [0, 0, 0, 1]
    step: Any = v_head_dim
    # Innermost first; an expanded dimension (stride 0) has no place of its own and goes outside, as if it were stored.
    for dim in sorted((2, 1, 0), key=lambda dim: (stored[dim] == 0, stored[dim])):
        strides[dim] = step
        step = step * q.shape[dim]
    return strides


def _to_meta(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_to_meta(item) for item in value)
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def default_threshold(threshold: float | None) -> float:
    """Log2 units. 8: probabilities up to 2**8 fit any 16-bit P with room to spare."""
    if threshold is None:
        return 8.0
    if not 0.0 <= threshold <= 8.0:
        raise ValueError(
            f"rescale_threshold: got {threshold}, expected 0 (exact running maximum) to 8 (log2 units; beyond, a "
            "16-bit probability could overflow)"
        )
    return float(threshold)


def fp32_precision() -> str:
    """ "tf32" if the user allowed it for matrix products (torch.backends.cuda.matmul), else "ieee"."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision in (None, "none"):
        return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"
    return "tf32" if precision == "tf32" else "ieee"


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and
    v (B, Hkv, Sk, D_v) go together. Compares dimensions with each other only, never with a constant length, so that
    tracing it makes no guard per length."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, expected a torch.Tensor")
        if t.dim() != 4:
            raise ValueError(
                f"{name}: got shape {tuple(t.shape)}, expected 4 dimensions (batch, heads, length, head dim)"
            )
        if not t.is_floating_point():
            raise TypeError(f"{name}: got dtype {t.dtype}, expected float16, bfloat16, float32 or float64")
        if t.layout != torch.strided:
            raise NotImplementedError(f"{name}: got layout {t.layout}, expected a dense (strided) tensor")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k, v: got dtypes {q.dtype}, {k.dtype}, {v.dtype}, expected one; cast them, or call "
            "scaled_dot_product_attention under torch.autocast, which casts as torch does"
        )
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise NotImplementedError(f"q, k, v: got dtype {q.dtype}, expected float16, bfloat16, float32 or float64")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v: got devices {q.device}, {k.device}, {v.device}, expected one")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.shape[0] != k.shape[0] or q.shape[0] != v.shape[0]:
        raise ValueError(f"q, k, v: got different batch sizes: {shapes}; expand k and v (stride 0 costs nothing)")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k, v: got different head counts: {shapes}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k, v: got different lengths: {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k: got different head dims: {shapes}")
    if q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0):
        raise ValueError(
            f"q, k: got {q.shape[1]} query heads over {k.shape[1]} key heads, expected a multiple: {shapes}"
        )


def _last_contiguous(t: torch.Tensor) -> bool:
    return t.stride(3) == 1 or t.shape[3] <= 1


def descriptor_refusal(name: str, t: torch.Tensor) -> str | None:
    """The rules of cuTensorMapEncodeTiled, as far as a caller can break them."""
    if t.numel() == 0:
        return f"{name} is empty"
    size = t.element_size()
    if not _last_contiguous(t):  # copied first, to rows without a gap
        row = t.shape[3] * size
        return None if row % 16 == 0 else f"{name}, copied, has rows of {row} bytes, expected a multiple of 16"
    if t.data_ptr() % 16 != 0:
        return f"{name} starts at an address that is no multiple of 16 bytes"
    for dim in range(3):
        if t.shape[dim] > 1 and (t.stride(dim) * size % 16 != 0 or t.stride(dim) <= 0):
            return f"{name} has stride {t.stride(dim)} in dimension {dim}, expected a positive multiple of {16 // size}"
    return None
