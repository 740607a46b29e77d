"""Loads, stores and atomics on global memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import DType
from ..errors import Unsupported
from ..interpreter import Env, Executable, sync
from ..machine import Thread
from ..mlir import Op
from .common import Fn, slots


def gather_global(th: Thread, addr: Any, mask: Any, other: Any, dt: DType, shape: tuple[int, ...]) -> Any:
    addr = np.broadcast_to(np.asarray(addr, np.int64), shape)
    if mask is None:
        r = th.cta.gmem.load(addr, dt, th.cta.linear)
        return r if shape else r.reshape(())[()]
    mask = np.broadcast_to(mask, shape)
    # lanes that are masked off without `other` hold garbage on the device
    fill = other if other is not None else (np.nan if dt.kind == "f" else 0x5A)
    out = np.array(np.broadcast_to(np.asarray(fill, dt.compute), shape))
    if mask.any():
        out[mask] = th.cta.gmem.load(addr[mask], dt, th.cta.linear)
    return out if shape else out[()]


@sync("tt.load")
def _load(op: Op, exe: Executable) -> Fn:
    ptr, mask, other = (s[0].slot if s else None for s in op.segments())
    dst, ty = op.results[0].slot, op.results[0].type
    assert ptr is not None

    def run(env: Env, th: Thread) -> None:
        m = env[mask] if mask is not None else None
        o = env[other] if other is not None else None
        env[dst] = gather_global(th, env[ptr], m, o, ty.dtype, ty.shape)

    return run


def _scatter_global(th: Thread, addr: Any, value: Any, mask: Any, dt: DType) -> None:
    addr, value = np.asarray(addr, np.int64), np.asarray(value)
    shape = np.broadcast_shapes(addr.shape, value.shape)
    addr, value = np.broadcast_to(addr, shape), np.broadcast_to(value, shape)
    if mask is not None:
        mask = np.broadcast_to(mask, shape)
        addr, value = addr[mask], value[mask]
    if addr.size:
        th.cta.gmem.store(addr, value, dt, th.cta.linear)


@sync("tt.store")
def _store(op: Op, exe: Executable) -> Fn:
    ptr, val = op.operands[0], op.operands[1]
    mask = op.operands[2].slot if len(op.operands) > 2 else None
    dt = val.type.dtype

    def run(env: Env, th: Thread) -> None:
        if th.cta.rank and ptr.type.halved is None:
            return  # what both CTAs of a pair have, the first stores
        _scatter_global(th, env[ptr.slot], env[val.slot], None if mask is None else env[mask], dt)

    return run


def _rmw(kind: int, old: Any, val: Any) -> Any:
    # and, or, xor, add, fadd, max, min, umax, umin, xchg
    if kind == 1:
        return old & val
    if kind == 2:
        return old | val
    if kind == 3:
        return old ^ val
    if kind in (4, 5):
        return old + val
    if kind == 6:
        return max(old, val)
    if kind == 7:
        return min(old, val)
    if kind in (8, 9):
        u = old.dtype.type
        a, b = int(old) % (1 << 8 * old.itemsize), int(val) % (1 << 8 * val.itemsize)
        pick = old if (a >= b) == (kind == 8) else val
        return u(pick)
    if kind == 10:
        return val
    raise Unsupported(f"atomic operation {kind}")


def atomic(th: Thread, kind: int, addr: Any, val: Any, mask: Any, dt: DType) -> Any:
    """Element by element, in order, so that duplicate addresses behave."""
    addr = np.asarray(addr, np.int64)
    val = np.broadcast_to(np.asarray(val), addr.shape)
    out = np.zeros(addr.shape, dt.compute)
    gm, pid = th.cta.gmem, th.cta.linear
    sel = np.ones(addr.shape, np.bool_) if mask is None else np.broadcast_to(mask, addr.shape)
    flat_a, flat_v, flat_o, flat_s = addr.ravel(), val.ravel(), out.ravel(), sel.ravel()
    if len(np.unique(flat_a[flat_s])) == int(flat_s.sum()) and kind in (4, 5, 10):
        if flat_s.any():
            a, v = flat_a[flat_s], flat_v[flat_s]
            old = gm.load(a, dt, pid, "atomic", atomic=True)
            flat_o[flat_s] = old
            gm.store(a, v if kind == 10 else dt.cast(old + v), dt, pid, "atomic", atomic=True)
    else:
        for i in np.flatnonzero(flat_s):
            a = flat_a[i : i + 1]
            old = gm.load(a, dt, pid, "atomic", atomic=True)[0]
            flat_o[i] = old
            gm.store(a, np.asarray([dt.cast(_rmw(kind, old, flat_v[i]))]), dt, pid, "atomic", atomic=True)
    return flat_o.reshape(addr.shape) if addr.shape else flat_o[0]


@sync("tt.atomic_rmw")
def _atomic_rmw(op: Op, exe: Executable) -> Fn:
    kind, dt = op.int_attr("atomic_rmw_op"), op.operands[1].type.dtype
    if exe.module.ctas == 2:
        raise Unsupported("atomics of a pair of CTAs")
    s = slots(op.operands)
    dst = op.results[0].slot

    def run(env: Env, th: Thread) -> None:
        env[dst] = atomic(th, kind, env[s[0]], env[s[1]], env[s[2]] if len(s) > 2 else None, dt)

    return run


@sync("tt.atomic_cas")
def _atomic_cas(op: Op, exe: Executable) -> Fn:
    p, c, v = slots(op.operands)
    dst, dt = op.results[0].slot, op.operands[1].type.dtype

    def run(env: Env, th: Thread) -> None:
        addr = np.atleast_1d(np.asarray(env[p], np.int64))
        cmp, val = np.broadcast_to(env[c], addr.shape), np.broadcast_to(env[v], addr.shape)
        out = np.zeros(addr.shape, dt.compute)
        gm, pid = th.cta.gmem, th.cta.linear
        for i in range(addr.size):
            a = addr.ravel()[i : i + 1]
            old = gm.load(a, dt, pid, "atomic", atomic=True)[0]
            out.ravel()[i] = old
            if old == cmp.ravel()[i]:
                gm.store(a, val.ravel()[i : i + 1], dt, pid, "atomic", atomic=True)
        env[dst] = out.reshape(np.shape(env[p]))[()]

    return run
