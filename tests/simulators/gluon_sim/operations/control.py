"""Control flow: loops, branches, calls and the partitions of a warp-specialised kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import Livelock, SimError
from ..interpreter import Env, Executable, pure, steps, term
from ..machine import Steps, Thread
from ..mlir import Op


@term("scf.yield", "tt.reduce.return", "tt.scan.return", "tt.return", "ttg.warp_yield", "ttg.warp_return")
def _yield(op: Op, exe: Executable) -> Callable[..., Any]:
    slots = [v.slot for v in op.operands]
    return lambda env: ("yield", [env[s] for s in slots])


@term("scf.condition")
def _condition(op: Op, exe: Executable) -> Callable[..., Any]:
    slots = [v.slot for v in op.operands]
    return lambda env: ("cond", [env[s] for s in slots])


@term("cf.br")
def _br(op: Op, exe: Executable) -> Callable[..., Any]:
    slots, label = [v.slot for v in op.operands], op.successors[0]
    return lambda env: ("br", [env[s] for s in slots], label)


@term("cf.cond_br")
def _cond_br(op: Op, exe: Executable) -> Callable[..., Any]:
    c, a, b = op.segments()
    cs, sa, sb = c[0].slot, [v.slot for v in a], [v.slot for v in b]
    la, lb = op.successors

    def run(env: Env) -> Any:
        return ("br", [env[s] for s in sa], la) if env[cs] else ("br", [env[s] for s in sb], lb)

    return run


@term("ub.unreachable", "llvm.unreachable")
def _unreachable(op: Op, exe: Executable) -> Callable[..., Any]:
    def run(env: Env) -> Any:
        raise SimError("reached code the compiler considers unreachable", op.loc)

    return run


@steps("scf.for")
def _for(op: Op, exe: Executable) -> Callable[..., Any]:
    lb, ub, st = (v.slot for v in op.operands[:3])
    init = [v.slot for v in op.operands[3:]]
    body = op.regions[0].blocks[0]
    iv, carried = body.args[0].slot, [a.slot for a in body.args[1:]]
    cast = body.args[0].type.dtype.compute.type
    res = [v.slot for v in op.results]

    def run(env: Env, th: Thread) -> Steps:
        i, hi, step = int(env[lb]), int(env[ub]), int(env[st])
        if step <= 0:
            raise SimError(f"scf.for with step {step}", op.loc)
        vals = [env[s] for s in init]
        while i < hi:
            env[iv] = cast(i)
            for s, v in zip(carried, vals, strict=True):
                env[s] = v
            vals = (yield from exe.run_block(body, env, th))[1]
            i += step
        for s, v in zip(res, vals, strict=True):
            env[s] = v

    return run


@steps("scf.if")
def _if(op: Op, exe: Executable) -> Callable[..., Any]:
    cond = op.operands[0].slot
    res = [v.slot for v in op.results]
    arms = [r.blocks[0] if r.blocks and (r.blocks[0].ops or res) else None for r in op.regions]

    def run(env: Env, th: Thread) -> Steps:
        arm = arms[0] if env[cond] else arms[1]
        if arm is not None:
            vals = (yield from exe.run_block(arm, env, th))[1]
            for s, v in zip(res, vals, strict=True):
                env[s] = v

    return run


@steps("scf.while")
def _while(op: Op, exe: Executable) -> Callable[..., Any]:
    before, after = (r.blocks[0] for r in op.regions)
    init = [v.slot for v in op.operands]
    res = [v.slot for v in op.results]

    def run(env: Env, th: Thread) -> Steps:
        vals = [env[s] for s in init]
        for _ in range(10_000_000):
            for a, v in zip(before.args, vals, strict=True):
                env[a.slot] = v
            cond, *vals = (yield from exe.run_block(before, env, th))[1]
            if not cond:
                break
            for a, v in zip(after.args, vals, strict=True):
                env[a.slot] = v
            vals = (yield from exe.run_block(after, env, th))[1]
            yield None
        else:
            raise Livelock("scf.while did not end", op.loc)
        for s, v in zip(res, vals, strict=True):
            env[s] = v

    return run


@steps("tt.call")
def _call(op: Op, exe: Executable) -> Callable[..., Any]:
    callee = op.attrs["callee"].lstrip("@").strip('"')
    args, res = [v.slot for v in op.operands], [v.slot for v in op.results]

    def run(env: Env, th: Thread) -> Steps:
        fn = exe.module.funcs[callee]
        payload = yield from exe.run_region(fn.regions[0], env, th, [env[s] for s in args])
        for s, v in zip(res, payload[1], strict=True):
            env[s] = v

    return run


@steps("ttg.warp_specialize")
def _warp_specialize(op: Op, exe: Executable) -> Callable[..., Any]:
    holder = op.regions[1].blocks[0].ops[0]
    captures = [v.slot for v in (op.operands or holder.operands)]
    default = op.regions[0].blocks[0]
    warps = op.list_attr("partitionNumWarps")
    res = [v.slot for v in op.results]
    names = [
        f"partition {k} ({exe.function_of(r) or 'default'})" for k, r in enumerate([op.regions[0], *holder.regions])
    ]

    def run(env: Env, th: Thread) -> Steps:
        cta = th.cta
        args = [env[s] for s in captures]
        workers = []
        th.actor.meet()
        for k, region in enumerate(holder.regions):
            w = Thread(cta, names[k + 1], warps[k], exe.new_env())
            w.gen = exe.run_region(region, w.env, w, args)
            cta.share(th.bit, w.bit)
            workers.append(w)
        cta.threads += workers
        outer, th.name = th.name, names[0]
        vals = (yield from exe.run_block(default, env, th))[1]
        th.op = op
        while not all(w.done for w in workers):
            th.waiting_for = "the other partitions to finish"
            yield lambda: all(w.done for w in workers)
        for w in workers:
            cta.share(w.bit, th.bit)
        th.actor.meet()
        th.name = outer
        for s, v in zip(res, vals, strict=True):
            env[s] = v

    return run


@pure("ttg.warp_specialize.partitions")
def _partitions(op: Op, exe: Executable) -> Callable[..., Any]:
    return lambda env: None
