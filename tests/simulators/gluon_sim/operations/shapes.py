"""Operations that make, move, reduce and check register tensors.

A reduction of floats goes pairwise; the order on the device depends on the layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import KernelAssert, Unsupported
from ..interpreter import Env, Executable, pure, sync
from ..machine import Thread
from ..mlir import Op
from ..pairs import same_part
from .common import Fn, pointee, slots


@pure("tt.get_program_id", "tt.get_num_programs")
def _program_id(op: Op, exe: Executable) -> Fn:
    dst, axis = op.results[0].slot, op.int_attr("axis")
    count = op.name.endswith("programs")

    def run(env: Env) -> None:
        cta = env[-1].cta
        env[dst] = np.int32((cta.grid if count else cta.pid)[axis])

    return run


@pure("tt.make_range")
def _make_range(op: Op, exe: Executable) -> Fn:
    dst, ty = op.results[0].slot, op.results[0].type
    value = np.arange(op.int_attr("start"), op.int_attr("end"), dtype=np.int32)
    if ty.halved is None:
        return lambda env: env.__setitem__(dst, value)
    half = ty.shape[0]

    def run(env: Env) -> None:
        first = env[-1].cta.rank * half
        env[dst] = value[first : first + half]

    return run


@pure("tt.splat")
def _splat(op: Op, exe: Executable) -> Fn:
    a, dst, ty = op.operands[0].slot, op.results[0].slot, op.results[0].type
    shape, comp = ty.shape, ty.dtype.compute
    return lambda env: env.__setitem__(dst, np.full(shape, env[a], comp))


@pure("tt.unsplat")
def _unsplat(op: Op, exe: Executable) -> Fn:
    a, dst = op.operands[0].slot, op.results[0].slot
    return lambda env: env.__setitem__(dst, env[a].reshape(-1)[0])


@pure("tt.broadcast")
def _broadcast(op: Op, exe: Executable) -> Fn:
    a, dst, shape = op.operands[0].slot, op.results[0].slot, op.results[0].type.shape
    return lambda env: env.__setitem__(dst, np.broadcast_to(env[a], shape))


@pure("tt.expand_dims", "tt.reshape")
def _reshape(op: Op, exe: Executable) -> Fn:
    a, dst, shape = op.operands[0].slot, op.results[0].slot, op.results[0].type.shape
    return lambda env: env.__setitem__(dst, env[a].reshape(shape))


@pure("ttg.convert_layout", "gluon.set_auto_layout")
def _convert_layout(op: Op, exe: Executable) -> Fn:
    same_part(op.name, op.operands[0].type, op.results[0].type)
    a, dst = op.operands[0].slot, op.results[0].slot
    return lambda env: env.__setitem__(dst, env[a])


@pure("tt.trans")
def _trans(op: Op, exe: Executable) -> Fn:
    a, dst, order = op.operands[0].slot, op.results[0].slot, tuple(op.list_attr("order"))
    return lambda env: env.__setitem__(dst, env[a].transpose(order))


@pure("tt.join")
def _join(op: Op, exe: Executable) -> Fn:
    (a, b), dst = slots(op.operands), op.results[0].slot
    return lambda env: env.__setitem__(dst, np.stack([env[a], env[b]], -1))


@pure("tt.split")
def _split(op: Op, exe: Executable) -> Fn:
    a, (x, y) = op.operands[0].slot, [r.slot for r in op.results]

    def run(env: Env) -> None:
        env[x], env[y] = env[a][..., 0], env[a][..., 1]

    return run


@pure("tt.addptr")
def _addptr(op: Op, exe: Executable) -> Fn:
    (p, o), dst = slots(op.operands), op.results[0].slot
    size = np.int64(pointee(op.results[0].type).nbytes)

    def run(env: Env) -> None:
        off = env[o]
        env[dst] = env[p] + (off.astype(np.int64) * size)

    return run


_FAST_REDUCE: dict[str, Any] = {
    "arith.maxnumf": np.fmax,
    "arith.maximumf": np.maximum,
    "arith.minnumf": np.fmin,
    "arith.minimumf": np.minimum,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.addi": np.add,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.andi": np.bitwise_and,
}


@pure("tt.reduce")
def _reduce(op: Op, exe: Executable) -> Fn:
    src, dst, axis = slots(op.operands), [r.slot for r in op.results], op.int_attr("axis")
    block = op.regions[0].blocks[0]
    dts = [v.type.dtype for v in op.operands]
    if op.operands[0].type.halved == axis:
        raise Unsupported("a reduction over the parts of two CTAs")
    fast: Any = None
    if len(src) == 1 and len(block.ops) == 2:
        fast = _FAST_REDUCE.get(block.ops[0].name)

    def run(env: Env) -> None:
        xs = [env[s] for s in src]
        if fast is not None:
            env[dst[0]] = dts[0].cast(fast.reduce(xs[0], axis=axis))
            return
        # pairwise tree; the hardware order depends on the layout
        xs = [np.moveaxis(x, axis, 0) for x in xs]
        n = xs[0].shape[0]
        while n > 1:
            h = n // 2
            xs = exe.run_pure_block(block, env, [x[:h] for x in xs] + [x[h : 2 * h] for x in xs])
            n = h
        for d, x in zip(dst, xs, strict=True):
            env[d] = x[0]

    return run


@pure("tt.scan")
def _scan(op: Op, exe: Executable) -> Fn:
    src, dst, axis = slots(op.operands), [r.slot for r in op.results], op.int_attr("axis")
    block, rev = op.regions[0].blocks[0], bool(op.int_attr("reverse", 0))

    def run(env: Env) -> None:
        xs = [np.moveaxis(env[s], axis, 0) for s in src]
        if rev:
            xs = [x[::-1] for x in xs]
        outs = [np.array(x) for x in xs]
        acc = [x[0] for x in xs]
        for k in range(1, xs[0].shape[0]):
            acc = exe.run_pure_block(block, env, acc + [x[k] for x in xs])
            for o, a in zip(outs, acc, strict=True):
                o[k] = a
        for d, o in zip(dst, outs, strict=True):
            env[d] = np.moveaxis(o[::-1] if rev else o, 0, axis)

    return run


@pure("tt.assert")
def _assert(op: Op, exe: Executable) -> Fn:
    c, msg = op.operands[0].slot, op.attrs.get("message", "").strip('"')

    def run(env: Env) -> None:
        if not np.all(env[c]):
            raise KernelAssert(f"assertion failed: {msg}")

    return run


@pure("llvm.intr.assume")
def _assume(op: Op, exe: Executable) -> Fn:
    c = op.operands[0].slot

    def run(env: Env) -> None:
        if not np.all(env[c]):
            raise KernelAssert("a condition given to gl.assume is false")

    return run


@sync("tt.print")
def _print(op: Op, exe: Executable) -> Fn:
    src, prefix = slots(op.operands), op.attrs.get("prefix", "").strip('"')

    def run(env: Env, th: Thread) -> None:
        print(f"[{th.cta.pid} {th.name}]{prefix}", *[env[s] for s in src])

    return run
