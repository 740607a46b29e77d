"""Arithmetic of inline PTX on arrays of register contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import Unsupported

Bits = npt.NDArray[Any]
Mods = tuple[str, ...]


def as_f32(x: Bits) -> npt.NDArray[np.float32]:
    return x.astype(np.uint32).view(np.float32)


def bits_of(x: Any) -> Bits:
    bits: Bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return bits


def _ftz(x: Any, mods: Mods) -> Any:
    if "ftz" not in mods:
        return x
    small = np.abs(x) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def _round(exact: npt.NDArray[np.float64], mods: Mods) -> npt.NDArray[np.float32]:
    near = exact.astype(np.float32)
    if "rm" in mods:
        near = np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)
    elif "rp" in mods:
        near = np.where(near < exact, np.nextafter(near, np.float32(np.inf)), near)
    elif "rz" in mods:
        near = np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)
    return near.astype(np.float32)


def _fmin(a: Any, b: Any, mods: Mods) -> Any:
    return np.minimum(a, b) if "NaN" in mods else np.fmin(a, b)


def _fmax(a: Any, b: Any, mods: Mods) -> Any:
    return np.maximum(a, b) if "NaN" in mods else np.fmax(a, b)


_UNARY: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: np.float32(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "tanh": np.tanh,
    "abs": np.abs,
    "neg": np.negative,
}
FLOAT_OPS = frozenset(("add", "sub", "mul", "fma", "mad", "max", "min", "div", *_UNARY))


def float_op(op: str, mods: Mods, xs: list[Any]) -> Any:
    """An operation of `FLOAT_OPS` on float32; the approximate ones are as numpy rounds them."""
    xs = [_ftz(x, mods) for x in xs]
    if op in _UNARY:
        r = _UNARY[op](xs[0])
    elif op in ("max", "min"):
        r = xs[0]
        for x in xs[1:]:
            r = _fmax(r, x, mods) if op == "max" else _fmin(r, x, mods)
    elif op == "div":
        r = xs[0] / xs[1]
    else:
        wide = [x.astype(np.float64) for x in xs]
        if op == "add":
            exact = wide[0] + wide[1]
        elif op == "sub":
            exact = wide[0] - wide[1]
        else:
            exact = wide[0] * wide[1] + (wide[2] if op in ("fma", "mad") else 0.0)
        r = _round(exact, mods)
    return _ftz(r.astype(np.float32), mods)


def integer_op(op: str, mods: Mods, signed: bool, xs: list[Any], last: int | None) -> Any:
    """An operation on raw bits, all of the type of `xs[0]`; `last`: the table of lop3."""
    ut = xs[0].dtype.type
    width = xs[0].dtype.itemsize * 8
    st: Any = {64: np.int64, 32: np.int32, 16: np.int16}[width]
    if op in _PLAIN:
        return _PLAIN[op](*xs)
    if op in ("mul", "mad") and "lo" in mods:
        return xs[0] * xs[1] + (xs[2] if op == "mad" else ut(0))
    if op in ("max", "min"):
        f = np.maximum if op == "max" else np.minimum
        return f(xs[0].view(st), xs[1].view(st)).view(ut) if signed else f(xs[0], xs[1])
    if op == "shl":
        return np.where(xs[1] >= width, ut(0), xs[0] << np.minimum(xs[1], ut(width - 1)))
    if op == "shr":
        by = np.minimum(xs[1], ut(width - 1))
        if signed:
            return (np.ascontiguousarray(xs[0]).view(st) >> by.astype(st)).view(ut)
        return np.where(xs[1] >= width, ut(0), xs[0] >> by)
    if op == "lop3" and last is not None:
        r = np.zeros_like(xs[0])
        for k in range(8):
            if last >> k & 1:
                a, b, c = (x if k >> (2 - j) & 1 else ~x for j, x in enumerate(xs[:3]))
                r = r | (a & b & c)
        return r
    if op == "prmt":
        pair = xs[1].astype(np.uint64) << np.uint64(32) | xs[0].astype(np.uint64)
        r = np.zeros_like(xs[0])
        for k in range(4):
            byte = (xs[2] >> ut(4 * k)) & ut(7)
            r = r | (((pair >> (byte.astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)).astype(ut) << ut(8 * k))
        return r
    raise Unsupported(f"inline assembly {op}.{'.'.join(mods)}")


_PLAIN: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
