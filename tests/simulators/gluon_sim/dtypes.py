"""Element types: how values of an MLIR element type are computed with and how they are stored in bytes.

Registers hold numpy arrays. fp16/fp32/fp64 and integers use the numpy type itself; bf16 and the fp8 types use
float32 arrays whose values are always representable in the narrow type (they are rounded after every operation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def round_bf16(x: Array) -> Array:
    """Round float32 to the nearest bfloat16 value (ties to even), kept as float32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
    rounded = np.where(np.isnan(x), np.uint32(0x7FC00000), rounded)
    return rounded.astype(np.uint32).view(np.float32)


def round_tf32(x: Array) -> Array:
    """Round float32 to 10 mantissa bits (what a TF32 tensor core reads)."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits).astype(np.uint32).view(np.float32)


def _fp8_table(exp_bits: int, man_bits: int, bias: int, has_inf: bool) -> npt.NDArray[np.float32]:
    table = np.zeros(256, np.float32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exp = (code >> man_bits) & ((1 << exp_bits) - 1)
        man = code & ((1 << man_bits) - 1)
        if exp == 0:
            value = sign * man * 2.0 ** (1 - bias - man_bits)
        else:
            value = sign * (1 + man / (1 << man_bits)) * 2.0 ** (exp - bias)
        if has_inf and exp == (1 << exp_bits) - 1:
            value = sign * np.inf if man == 0 else np.nan
        elif not has_inf and (code & 0x7F) == 0x7F:
            value = np.nan
        table[code] = value
    return table


_FP8 = {"f8E4M3FN": _fp8_table(4, 3, 7, False), "f8E5M2": _fp8_table(5, 2, 15, True)}
_FP8_MAX = {"f8E4M3FN": 448.0, "f8E5M2": 57344.0}


def _encode_fp8(x: Array, name: str) -> npt.NDArray[np.uint8]:
    """Nearest representable value, ties to even code, saturating (what cvt.rn.satfinite does)."""
    table = _FP8[name][:127] if name == "f8E4M3FN" else _FP8[name][:124]
    mag = np.abs(np.asarray(x, np.float64))
    mag = np.minimum(np.nan_to_num(mag, nan=0.0, posinf=_FP8_MAX[name]), _FP8_MAX[name])
    hi = np.searchsorted(table, mag, side="left").clip(0, len(table) - 1)
    lo = np.maximum(hi - 1, 0)
    d_hi = table[hi] - mag
    d_lo = mag - table[lo]
    code = np.where((d_lo < d_hi) | ((d_lo == d_hi) & (lo % 2 == 0)), lo, hi)
    code = np.where(np.isnan(x), 0x7F, code)
    signed: npt.NDArray[np.uint8] = (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)
    return signed


@dataclass(frozen=True)
class DType:
    """How one element type is computed with (`compute`) and stored (`store`)."""

    name: str  # MLIR spelling
    bits: int
    compute: np.dtype[Any]
    store: np.dtype[Any]
    kind: str  # "f", "i" or "p"

    @property
    def nbytes(self) -> int:
        return max(1, self.bits // 8)

    def encode(self, x: Any) -> Array:
        """Register values -> storage values."""
        if self.name == "bf16":
            high: Array = round_bf16(np.asarray(x, np.float32)).view(np.uint32) >> np.uint32(16)
            return high.astype(np.uint16)
        if self.name in _FP8:
            return _encode_fp8(np.asarray(x, np.float32), self.name)
        return np.asarray(x, self.store)

    def decode(self, raw: Array) -> Array:
        """Storage values -> register values."""
        if self.name == "bf16":
            wide: Array = raw.astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32)
        if self.name in _FP8:
            return _FP8[self.name][raw]
        if self.name == "i1":
            return raw.astype(np.bool_)
        return raw

    def cast(self, x: Any) -> Any:
        """Bring a computed value back into this type (rounds bf16/fp8, keeps numpy scalars scalar)."""
        if self.name == "bf16":
            return _keep_scalar(round_bf16(np.asarray(x, np.float32)), x)
        if self.name in _FP8:
            return _keep_scalar(_FP8[self.name][_encode_fp8(np.asarray(x, np.float32), self.name)], x)
        if isinstance(x, np.ndarray):
            with np.errstate(over="ignore"):
                return x if x.dtype == self.compute else x.astype(self.compute)
        return self.compute.type(x)


def _keep_scalar(result: Array, like: Any) -> Any:
    return result if isinstance(like, np.ndarray) and like.ndim else result.reshape(())[()]


def _mk(name: str, bits: int, compute: Any, store: Any, kind: str) -> DType:
    return DType(name, bits, np.dtype(compute), np.dtype(store), kind)


_DTYPES: dict[str, DType] = {
    d.name: d
    for d in [
        _mk("i1", 1, np.bool_, np.uint8, "i"),
        _mk("i8", 8, np.int8, np.int8, "i"),
        _mk("i16", 16, np.int16, np.int16, "i"),
        _mk("i32", 32, np.int32, np.int32, "i"),
        _mk("i64", 64, np.int64, np.int64, "i"),
        _mk("index", 64, np.int64, np.int64, "i"),
        _mk("f16", 16, np.float16, np.float16, "f"),
        _mk("bf16", 16, np.float32, np.uint16, "f"),
        _mk("f32", 32, np.float32, np.float32, "f"),
        _mk("f64", 64, np.float64, np.float64, "f"),
        _mk("f8E4M3FN", 8, np.float32, np.uint8, "f"),
        _mk("f8E5M2", 8, np.float32, np.uint8, "f"),
    ]
}
_PTR = _mk("ptr", 64, np.int64, np.int64, "p")


def dtype(name: str) -> DType:
    """The :class:`DType` of an MLIR element type; pointers are 64-bit addresses."""
    if name.startswith("!tt.ptr"):
        return _PTR
    return _DTYPES[name]


UNSIGNED: dict[Any, Any] = {
    np.dtype(np.int8): np.uint8,
    np.dtype(np.int16): np.uint16,
    np.dtype(np.int32): np.uint32,
    np.dtype(np.int64): np.uint64,
    np.dtype(np.bool_): np.bool_,
}


def as_unsigned(x: Any) -> Any:
    """Reinterpret a signless integer value as unsigned."""
    return x.view(UNSIGNED[x.dtype])
