"""Elementwise operations on registers.

Rounded to the type of the result; the hardware's own rounding of approximate functions is not modelled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..dtypes import as_unsigned
from ..errors import SimError, Unsupported
from ..interpreter import Env, Executable, pure
from ..mlir import Op, parse_constant
from .common import Fn, slots


def _elementwise(names: str, fn: Fn, *, cast: bool = True) -> None:
    """Register elementwise operations whose result takes the type of the first result."""

    def make(op: Op, exe: Executable) -> Fn:
        src, dst = slots(op.operands), op.results[0].slot
        dt = op.results[0].type.dtype
        if len(src) == 1:
            a = src[0]

            def run1(env: Env) -> None:
                r = fn(env[a])
                env[dst] = dt.cast(r) if cast else r

            return run1
        if len(src) == 2:
            a, b = src

            def run2(env: Env) -> None:
                r = fn(env[a], env[b])
                env[dst] = dt.cast(r) if cast else r

            return run2

        def run(env: Env) -> None:
            r = fn(*[env[s] for s in src])
            env[dst] = dt.cast(r) if cast else r

        return run

    pure(*names.split())(make)


def _trunc_div(a: Any, b: Any) -> Any:
    if np.any(b == 0):
        raise SimError("integer division by zero")
    return (a - np.fmod(a, b)) // b


def _trunc_rem(a: Any, b: Any) -> Any:
    if np.any(b == 0):
        raise SimError("integer remainder by zero")
    return np.fmod(a, b)


def _unsigned(fn: Fn) -> Fn:
    def run(a: Any, b: Any) -> Any:
        r = fn(as_unsigned(a), as_unsigned(b))
        return r.view(a.dtype)

    return run


def _shift(fn: Fn) -> Fn:
    def run(a: Any, b: Any) -> Any:
        bits = a.dtype.itemsize * 8
        big = np.asarray(as_unsigned(b) >= bits)
        r = fn(a, np.where(big, 0, b).astype(a.dtype))
        return np.where(big, 0, r).astype(a.dtype) if big.any() else r

    return run


_elementwise("arith.addi", np.add)
_elementwise("arith.subi", np.subtract)
_elementwise("arith.muli", np.multiply)
_elementwise("arith.divsi", _trunc_div)
_elementwise("arith.remsi", _trunc_rem)
_elementwise("arith.divui", _unsigned(np.floor_divide))
_elementwise("arith.remui", _unsigned(np.remainder))
_elementwise("arith.andi", np.bitwise_and)
_elementwise("arith.ori", np.bitwise_or)
_elementwise("arith.xori", np.bitwise_xor)
_elementwise("arith.shli", _shift(np.left_shift))
_elementwise("arith.shrsi", _shift(np.right_shift))
_elementwise("arith.shrui", _shift(lambda a, b: np.right_shift(as_unsigned(a), as_unsigned(b)).view(a.dtype)))
_elementwise("arith.maxsi", np.maximum)
_elementwise("arith.minsi", np.minimum)
_elementwise("arith.maxui", _unsigned(np.maximum))
_elementwise("arith.minui", _unsigned(np.minimum))
_elementwise("arith.addf", np.add)
_elementwise("arith.subf", np.subtract)
_elementwise("arith.mulf", np.multiply)
_elementwise("arith.divf tt.precise_divf", np.divide)
_elementwise("arith.remf", np.fmod)
_elementwise("arith.negf", np.negative)
_elementwise("arith.maximumf", np.maximum)
_elementwise("arith.minimumf", np.minimum)
_elementwise("arith.maxnumf", np.fmax)
_elementwise("arith.minnumf", np.fmin)
_elementwise("math.exp", np.exp)
_elementwise("math.exp2", np.exp2)
_elementwise("math.log", np.log)
_elementwise("math.log2", np.log2)
_elementwise("math.sin", np.sin)
_elementwise("math.cos", np.cos)
_elementwise("math.tanh", np.tanh)
_elementwise("math.sqrt tt.precise_sqrt", np.sqrt)
_elementwise("math.rsqrt", lambda x: 1 / np.sqrt(x))
_elementwise("math.absf math.absi", np.abs)
_elementwise("math.floor", np.floor)
_elementwise("math.ceil", np.ceil)
_elementwise("math.fma", lambda a, b, c: np.asarray(a, np.float64) * b + c)
_elementwise("arith.extsi arith.trunci arith.index_cast arith.sitofp arith.extf arith.truncf", lambda x: x)
_elementwise("arith.extui", lambda x: as_unsigned(x) if x.dtype != np.bool_ else x)
_elementwise("arith.uitofp", lambda x: as_unsigned(x) if x.dtype != np.bool_ else x)
_elementwise("tt.ptr_to_int tt.int_to_ptr", lambda x: x)


def _erf(x: Any) -> Any:
    return torch.erf(torch.as_tensor(np.asarray(x, np.float32))).numpy()


_elementwise("math.erf", _erf)


@pure("arith.fptosi", "arith.fptoui")
def _fptoint(op: Op, exe: Executable) -> Fn:
    a, dst, dt = op.operands[0].slot, op.results[0].slot, op.results[0].type.dtype

    def run(env: Env) -> None:
        env[dst] = dt.cast(np.trunc(np.nan_to_num(np.asarray(env[a], np.float64))).astype(np.int64)[()])

    return run


@pure("arith.trunci")
def _trunci(op: Op, exe: Executable) -> Fn:
    a, dst, dt = op.operands[0].slot, op.results[0].slot, op.results[0].type.dtype

    def run(env: Env) -> None:
        x = env[a]
        env[dst] = (x & 1).astype(np.bool_) if dt.bits == 1 else x.astype(dt.compute)

    return run


@pure("tt.mulhiui")
def _mulhiui(op: Op, exe: Executable) -> Fn:
    (a, b), dst = slots(op.operands), op.results[0].slot
    bits = op.results[0].type.dtype.bits

    def run(env: Env) -> None:
        x, y = as_unsigned(env[a]), as_unsigned(env[b])
        if bits == 32:
            r = (x.astype(np.uint64) * y.astype(np.uint64) >> np.uint64(32)).astype(np.uint32).view(np.int32)
        else:
            r = np.frompyfunc(lambda p, q: (int(p) * int(q)) >> 64, 2, 1)(x, y)
            r = np.asarray(r, np.uint64).view(np.int64)
        env[dst] = r

    return run


@pure("tt.clampf")
def _clampf(op: Op, exe: Executable) -> Fn:
    (x, lo, hi), dst, dt = slots(op.operands), op.results[0].slot, op.results[0].type.dtype
    nan = op.int_attr("propagateNan", 0) == 65535

    def run(env: Env) -> None:
        r = np.minimum(np.maximum(env[x], env[lo]), env[hi]) if nan else np.fmin(np.fmax(env[x], env[lo]), env[hi])
        env[dst] = dt.cast(r)

    return run


@pure("arith.constant")
def _constant(op: Op, exe: Executable) -> Fn:
    dst, value = op.results[0].slot, parse_constant(op.attrs["value"], op.results[0].type)
    if isinstance(value, np.ndarray):
        value.setflags(write=False)

    def run(env: Env) -> None:
        env[dst] = value

    return run


@pure("ub.poison")
def _poison(op: Op, exe: Executable) -> Fn:
    ty, dst = op.results[0].type, op.results[0].slot
    if ty.kind not in ("scalar", "tensor"):
        return lambda env: env.__setitem__(dst, None)
    fill = np.nan if ty.dtype.kind == "f" else -0x5A5A5A5A if ty.dtype.bits >= 32 else 1
    value: Any = np.full(ty.shape, fill, ty.dtype.compute) if ty.shape else ty.dtype.compute.type(fill)
    return lambda env: env.__setitem__(dst, value)


_CMPI = [np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal]


@pure("arith.cmpi")
def _cmpi(op: Op, exe: Executable) -> Fn:
    (a, b), dst, pred = slots(op.operands), op.results[0].slot, op.int_attr("predicate")
    fn: Any = _CMPI[pred if pred < 6 else pred - 4]
    if pred < 6:
        return lambda env: env.__setitem__(dst, fn(env[a], env[b]))
    return lambda env: env.__setitem__(dst, fn(as_unsigned(env[a]), as_unsigned(env[b])))


@pure("arith.cmpf")
def _cmpf(op: Op, exe: Executable) -> Fn:
    (a, b), dst, pred = slots(op.operands), op.results[0].slot, op.int_attr("predicate")
    base: list[Any] = [np.equal, np.greater, np.greater_equal, np.less, np.less_equal, np.not_equal]
    if not (1 <= pred <= 6 or 8 <= pred <= 13):
        raise Unsupported(f"cmpf predicate {pred}")
    ordered = pred <= 6
    fn = base[pred - 1 if ordered else pred - 8]

    def run(env: Env) -> None:
        x, y = env[a], env[b]
        nan = np.isnan(x) | np.isnan(y)
        r = fn(x, y)
        env[dst] = (r & ~nan) if ordered else (r | nan)

    return run


@pure("arith.select")
def _select(op: Op, exe: Executable) -> Fn:
    (c, a, b), dst = slots(op.operands), op.results[0].slot

    def run(env: Env) -> None:
        cond = env[c]
        if np.ndim(cond) == 0:
            env[dst] = env[a] if cond else env[b]
        else:
            env[dst] = np.where(cond, env[a], env[b])

    return run


@pure("arith.bitcast", "tt.bitcast")
def _bitcast(op: Op, exe: Executable) -> Fn:
    a, dst = op.operands[0].slot, op.results[0].slot
    sdt, ddt = op.operands[0].type.dtype, op.results[0].type.dtype
    if sdt.kind == "p" or ddt.kind == "p" or sdt.name == ddt.name:
        return lambda env: env.__setitem__(dst, env[a])

    def run(env: Env) -> None:
        raw = sdt.encode(env[a])
        out = ddt.decode(np.ascontiguousarray(raw).view(ddt.store))
        env[dst] = out.reshape(np.shape(env[a]))[()]

    return run


@pure("tt.fp_to_fp")
def _fp_to_fp(op: Op, exe: Executable) -> Fn:
    a, dst, dt = op.operands[0].slot, op.results[0].slot, op.results[0].type.dtype
    rtz = op.attrs.get("rounding", "").split(":")[0].strip() == "0"

    def run(env: Env) -> None:
        if rtz:
            raise Unsupported("fp_to_fp with rtz rounding")
        env[dst] = dt.cast(np.asarray(env[a], np.float32) if dt.kind == "f" else env[a])

    return run


@pure("tt.extern_elementwise")
def _extern(op: Op, exe: Executable) -> Fn:
    name = op.attrs.get("symbol", "").strip('"')
    table: dict[str, Any] = {
        "__nv_exp2f": np.exp2,
        "__nv_expf": np.exp,
        "__nv_fast_expf": np.exp,
        "__nv_log2f": np.log2,
        "__nv_fast_log2f": np.log2,
        "__nv_logf": np.log,
        "__nv_tanhf": np.tanh,
        "__nv_rsqrtf": lambda x: 1 / np.sqrt(x),
        "__nv_fast_fdividef": np.divide,
        "__nv_floorf": np.floor,
        "__nv_rintf": np.rint,
        "__nv_fmaf": lambda a, b, c: np.asarray(a, np.float64) * b + c,
    }
    if name not in table:
        raise Unsupported(f"libdevice function {name}")
    fn, src, dst, dt = table[name], slots(op.operands), op.results[0].slot, op.results[0].type.dtype
    return lambda env: env.__setitem__(dst, dt.cast(fn(*[env[s] for s in src])))
