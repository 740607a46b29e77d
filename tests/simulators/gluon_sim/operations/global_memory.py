"""Loads, stores and atomics on global memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..dtypes import DType
from ..errors import Unsupported
from ..global_memory import RELAXED, GlobalMemory
from ..interpreter import Env, Executable, steps, sync
from ..machine import Poll, Steps, Thread
from ..mlir import Op
from ..ordering import Actor, Order
from .common import Fn, slots


def gather_global(th: Thread, by: Actor, addr: Any, mask: Any, other: Any, dt: DType, shape: tuple[int, ...]) -> Any:
    addr = np.broadcast_to(np.asarray(addr, np.int64), shape)
    if mask is None:
        r = th.cta.gmem.load(addr, dt, by)
        return r if shape else r.reshape(())[()]
    mask = np.broadcast_to(mask, shape)
    # lanes that are masked off without `other` hold garbage on the device
    fill = other if other is not None else (np.nan if dt.kind == "f" else 0x5A)
    out = np.array(np.broadcast_to(np.asarray(fill, dt.compute), shape))
    if mask.any():
        out[mask] = th.cta.gmem.load(addr[mask], dt, by)
    return out if shape else out[()]


@sync("tt.load")
def _load(op: Op, exe: Executable) -> Fn:
    ptr, mask, other = (s[0].slot if s else None for s in op.segments())
    dst, ty = op.results[0].slot, op.results[0].type
    assert ptr is not None

    def run(env: Env, th: Thread) -> None:
        m = env[mask] if mask is not None else None
        o = env[other] if other is not None else None
        env[dst] = gather_global(th, th.actor, env[ptr], m, o, ty.dtype, ty.shape)

    return run


def _scatter_global(th: Thread, addr: Any, value: Any, mask: Any, dt: DType) -> None:
    addr, value = np.asarray(addr, np.int64), np.asarray(value)
    shape = np.broadcast_shapes(addr.shape, value.shape)
    addr, value = np.broadcast_to(addr, shape), np.broadcast_to(value, shape)
    if mask is not None:
        mask = np.broadcast_to(mask, shape)
        addr, value = addr[mask], value[mask]
    if addr.size:
        th.cta.gmem.store(addr, value, dt, th.actor)


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


def atomic(
    gmem: GlobalMemory, by: Actor, kind: int, addr: Any, val: Any, mask: Any, dt: DType, order: Order = RELAXED
) -> Any:
    """Element by element, in order, so that duplicate addresses behave."""
    addr = np.asarray(addr, np.int64)
    val = np.broadcast_to(np.asarray(val), addr.shape)
    out = np.zeros(addr.shape, dt.compute)
    sel = np.ones(addr.shape, np.bool_) if mask is None else np.broadcast_to(mask, addr.shape)
    flat_a, flat_v, flat_o, flat_s = addr.ravel(), val.ravel(), out.ravel(), sel.ravel()
    if len(np.unique(flat_a[flat_s])) == int(flat_s.sum()) and kind in (4, 5, 10):
        if flat_s.any():
            a, v = flat_a[flat_s], flat_v[flat_s]
            flat_o[flat_s] = gmem.update(a, dt, by, lambda old: v if kind == 10 else dt.cast(old + v), order)
    else:
        for i in np.flatnonzero(flat_s):

            def change(old: Any, value: Any = flat_v[i]) -> Any:
                return dt.cast(np.asarray([_rmw(kind, old[0], value)]))

            flat_o[i] = gmem.update(flat_a[i : i + 1], dt, by, change, order)[0]
    return flat_o.reshape(addr.shape) if addr.shape else flat_o[0]


def _order(op: Op) -> Order:
    """sem: relaxed, acquire, release or both from 1 on; scope: gpu, cta, sys."""
    sem = op.int_attr("sem")
    return Order(sem in (2, 4), sem in (3, 4), op.int_attr("scope") != 2)


def polling(op: Op, th: Thread, addr: Any, dt: DType, run: Callable[[], None]) -> Steps:
    """Run an atomic. One that finds again what it found just before, and does not change it, waits for another value:
    that takes fewer steps than going round. Where nothing else can go on the scheduler has it look all the same."""
    yield None
    if addr is None:  # of several elements, or none
        run()
        return
    addresses, gmem, last = np.asarray(addr, np.int64).ravel(), th.cta.gmem, th.poll
    key = addresses.tobytes()
    if last is not None and (last.op, last.number + 1, last.addresses) == (op, th.executed, key):
        th.waiting_for, th.polling = "polls memory", True
        yield last.changed
        th.polling = False
    changes = gmem.changes
    run()
    th.poll = Poll(op, th.executed, key, gmem.watch(addresses, dt)) if gmem.changes == changes else None


@steps("tt.atomic_rmw")
def _atomic_rmw(op: Op, exe: Executable) -> Fn:
    kind, dt = op.int_attr("atomic_rmw_op"), op.operands[1].type.dtype
    if exe.module.ctas == 2:
        raise Unsupported("atomics of a pair of CTAs")
    s, order = slots(op.operands), _order(op)
    dst = op.results[0].slot

    def run(env: Env, th: Thread) -> Steps:
        mask = env[s[2]] if len(s) > 2 else None
        lone = np.size(env[s[0]]) == 1 and (mask is None or bool(np.all(mask)))

        def once() -> None:
            env[dst] = atomic(th.cta.gmem, th.actor, kind, env[s[0]], env[s[1]], mask, dt, order)

        yield from polling(op, th, env[s[0]] if lone else None, dt, once)

    return run


@steps("tt.atomic_cas")
def _atomic_cas(op: Op, exe: Executable) -> Fn:
    p, c, v = slots(op.operands)
    dst, dt, order = op.results[0].slot, op.operands[1].type.dtype, _order(op)

    def run(env: Env, th: Thread) -> Steps:
        addr = np.atleast_1d(np.asarray(env[p], np.int64))
        cmp, val = (np.broadcast_to(env[s], addr.shape).ravel() for s in (c, v))

        def once() -> None:
            out = np.zeros(addr.shape, dt.compute)
            for i, at in enumerate(addr.ravel()):

                def change(old: Any, i: int = i) -> Any:
                    return val[i : i + 1] if old[0] == cmp[i] else None

                out.ravel()[i] = th.cta.gmem.update(np.array([at]), dt, th.actor, change, order)[0]
            env[dst] = out.reshape(np.shape(env[p]))[()]

        yield from polling(op, th, addr if addr.size == 1 else None, dt, once)

    return run
