"""wgmma and tcgen05: products that read shared and tensor memory after they were issued.

Not modelled: two CTAs, block scales, and registers that a wgmma in flight still reads.
"""

from __future__ import annotations

from typing import Any

from ..barriers import MBarrier
from ..errors import RaceError, SimError, Unsupported
from ..interpreter import Env, Executable, steps, sync
from ..machine import AsyncOp, Steps, Thread
from ..mlir import Op
from ..views import View
from .asynchronous import complete, issue, wait_groups
from .common import Fn, slots
from .products import matmul

NO_COMMIT = "gluon_sim.no_commit"  # attribute that mutation testing sets: the barriers of a product are not told


class Pending:
    """The register result of an asynchronous wgmma before it has been waited for."""

    def __init__(self) -> None:
        self.value: Any = None
        self.seq = 0

    def _used(self, *args: Any, **kwargs: Any) -> Any:
        raise RaceError("the result of an asynchronous wgmma is used before warpgroup_mma_wait")

    __array_ufunc__ = __array__ = __array_function__ = __getattr__ = _used


@steps("ttng.warp_group_dot")
def _wgmma(op: Op, exe: Executable) -> Fn:
    s, dst = slots(op.operands), op.results[0].slot
    a, b, c = s[:3]
    use_acc = s[3] if len(s) > 3 else None
    adt, bdt, cdt = (op.operands[k].type.dtype for k in range(3))
    is_async, prec = bool(op.int_attr("isAsync", 0)), op.int_attr("inputPrecision", 0)

    def run(env: Env, th: Thread) -> Steps:
        yield None
        va, vb, acc = env[a], env[b], env[c]
        if isinstance(va, Pending):
            raise SimError("wgmma operand A is the result of a wgmma that has not been waited for")
        use = use_acc is None or bool(env[use_acc])
        out = Pending()

        def execute() -> bool:
            x = va.space.read(va, "wgmma") if isinstance(va, View) else va
            y = vb.space.read(vb, "wgmma")
            r = matmul(x, adt, y, bdt, prec)
            if use:
                r = r + (acc.value if isinstance(acc, Pending) else acc)
            out.value = cdt.cast(r)
            return True

        reads = [("r", v) for v in (va, vb) if isinstance(v, View)]
        aop = AsyncOp("wgmma", execute, th, op.loc)
        issue(th.wgmma, aop, *reads)
        out.seq = aop.seq
        th.wgmma.groups.append(aop.seq)
        env[dst] = out
        if not is_async:
            yield from wait_groups(th.wgmma, th, 0)
            env[dst] = out.value

    return run


@steps("ttng.warp_group_dot_wait")
def _wgmma_wait(op: Op, exe: Executable) -> Fn:
    n, src, dst = op.int_attr("pendings"), slots(op.operands), [r.slot for r in op.results]

    def run(env: Env, th: Thread) -> Steps:
        yield None
        yield from wait_groups(th.wgmma, th, n)
        for s, d in zip(src, dst, strict=True):
            v = env[s]
            # a dependency of a still-running wgmma stays pending
            env[d] = v.value if isinstance(v, Pending) and v.seq <= th.wgmma.completed and _waited(th, v) else v

    return run


def _waited(th: Thread, v: Pending) -> bool:
    return not any(g <= v.seq for g in th.wgmma.groups)


def _commit_to(th: Thread, bar: MBarrier, where: str) -> None:
    def fire() -> bool:
        th.tcgen05.publish(aop.seq, bar.pend_bit)
        complete(aop, bar.pend_bit)
        bar.arrive(1)
        return True

    aop = AsyncOp(f"tcgen05.commit to {bar.label}", fire, th, where)
    issue(th.tcgen05, aop)


@sync("ttng.tc_gen5_mma")
def _tcgen05_mma(op: Op, exe: Executable) -> Fn:
    seg = op.segments()
    a, b, d = (seg[k][0].slot for k in range(3))
    use_d, pred = seg[4][0].slot, seg[5][0].slot
    bars, preds = slots(seg[6]), slots(seg[7])
    if NO_COMMIT in op.attrs:
        bars, preds = [], []
    adt, bdt, cdt = (seg[k][0].type.dtype for k in range(3))
    if op.attrs.get("two_ctas", "false") not in ("false",) or "twoCTAs = true" in seg[2][0].type.enc:
        raise Unsupported("two-CTA tcgen05.mma")
    tok = op.results[0].slot if op.results else None

    def run(env: Env, th: Thread) -> None:
        if tok is not None:
            env[tok] = None
        if not env[pred]:
            return
        va, vb, vd = env[a], env[b], env[d]
        use = bool(env[use_d])

        def execute() -> bool:
            x, y = va.space.read(va, "tcgen05.mma"), vb.space.read(vb, "tcgen05.mma")
            r = matmul(x, adt, y, bdt, 0)
            if use:
                r = r + vd.space.read(vd, "tcgen05.mma (accumulator)")
            vd.space.write(vd, cdt.cast(r))
            return True

        issue(th.tcgen05, AsyncOp("tcgen05.mma", execute, th, op.loc), ("r", va), ("r", vb), ("w", vd))
        for s, p in zip(bars, preds, strict=True):
            if env[p]:
                _commit_to(th, th.cta.barrier(env[s]), op.loc)

    return run


@sync("ttng.tmem_copy")
def _tmem_copy(op: Op, exe: Executable) -> Fn:
    src, dst = slots(op.operands)[:2]
    bar_s = op.operands[2].slot if len(op.operands) > 2 else None
    if "scales" in op.operands[1].type.enc:
        raise Unsupported("tcgen05.cp to tensor-memory scales")

    def run(env: Env, th: Thread) -> None:
        vs, vd = env[src], env[dst]

        def execute() -> bool:
            vd.space.write(vd, vs.space.read(vs, "tcgen05.cp").reshape(vd.offsets.shape))
            return True

        issue(th.tcgen05, AsyncOp("tcgen05.cp", execute, th, op.loc), ("r", vs), ("w", vd))
        if bar_s is not None:
            _commit_to(th, th.cta.barrier(env[bar_s]), op.loc)

    return run


@sync("ttng.tc_gen5_commit")
def _tcgen05_commit(op: Op, exe: Executable) -> Fn:
    a = op.operands[0].slot
    pred = op.operands[1].slot if len(op.operands) > 1 else None

    def run(env: Env, th: Thread) -> None:
        if pred is None or env[pred]:
            _commit_to(th, th.cta.barrier(env[a]), op.loc)

    return run
