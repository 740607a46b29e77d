"""wgmma and tcgen05: products that read shared and tensor memory after they were issued.

Products of a pair of CTAs are issued by the first: each CTA has half of the rows of A and of the result and half of the
columns of B. Not modelled: block scales, and registers that a wgmma in flight still reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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


def _commit(th: Thread, view: View, where: str) -> None:
    """To the barrier; of a pair, whose first CTA commits for both, to that of each, in any order. (Gluon refuses
    barriers that a pair has once.)"""
    if th.cta.rank:
        return
    ctas = th.cta.ctas
    if len(ctas) > 1 and th.cta.rng.random() < 0.5:
        ctas = ctas[::-1]
    for cta in ctas:
        _commit_to(th, cta.barrier(view), where)


def _commit_to(th: Thread, bar: MBarrier, where: str) -> None:
    def fire() -> bool:
        th.tcgen05.publish(aop.seq, bar.pend_bit)
        complete(aop, bar.pend_bit)
        bar.arrive(1)
        return True

    aop = AsyncOp(f"tcgen05.commit to {bar.label}", fire, th, where)
    bar.used_by("tcgen05.commit", where)
    issue(th.tcgen05, aop)


def _everywhere(th: Thread, view: View) -> list[View]:
    """The part of each CTA of an operand."""
    spaces = [cta.smem if view.space is th.cta.smem else cta.tmem for cta in th.cta.ctas[1:]]
    return [view, *(view.twin(space) for space in spaces)]


@sync("ttng.tc_gen5_mma")
def _tcgen05_mma(op: Op, exe: Executable) -> Fn:
    seg = op.segments()
    a, b, d = (seg[k][0].slot for k in range(3))
    use_d, pred = seg[4][0].slot, seg[5][0].slot
    bars, preds = slots(seg[6]), slots(seg[7])
    if NO_COMMIT in op.attrs:
        bars, preds = [], []
    adt, bdt, cdt = (seg[k][0].type.dtype for k in range(3))
    halves = tuple(seg[k][0].type.halved for k in range(3))
    pair = op.attrs.get("two_ctas", "false") != "false"
    if halves != ((0, 1, 0) if pair else (None, None, None)) or pair != (exe.module.ctas == 2):
        raise Unsupported(f"tcgen05.mma of operands of which CTAs have halves {halves}")
    tok = op.results[0].slot if op.results else None

    def run(env: Env, th: Thread) -> None:
        if tok is not None:
            env[tok] = None
        if not env[pred] or th.cta.rank:
            return
        va, vb, vd = (_everywhere(th, env[s]) for s in (a, b, d))
        use = bool(env[use_d])

        def execute() -> bool:
            y = np.concatenate([v.space.read(v, "tcgen05.mma") for v in vb], 1)
            for rows, out in zip(va, vd, strict=True):
                r = matmul(rows.space.read(rows, "tcgen05.mma"), adt, y, bdt, 0)
                if use:
                    r = r + out.space.read(out, "tcgen05.mma (accumulator)")
                out.space.write(out, cdt.cast(r))
            return True

        accesses = [("r", v) for v in (*va, *vb)] + [("w", v) for v in vd]
        issue(th.tcgen05, AsyncOp("tcgen05.mma", execute, th, op.loc), *accesses)
        for s, p in zip(bars, preds, strict=True):
            if env[p]:
                _commit(th, env[s], op.loc)

    return run


@sync("ttng.tmem_copy")
def _tmem_copy(op: Op, exe: Executable) -> Fn:
    src, dst = slots(op.operands)[:2]
    bar_s = op.operands[2].slot if len(op.operands) > 2 else None
    if "scales" in op.operands[1].type.enc:
        raise Unsupported("tcgen05.cp to tensor-memory scales")
    if exe.module.ctas == 2:
        raise Unsupported("tcgen05.cp of a pair of CTAs")

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
    if len(op.operands) > 2:
        raise Unsupported("tcgen05.commit to CTAs that descriptors choose")

    def run(env: Env, th: Thread) -> None:
        if pred is None or env[pred]:
            _commit(th, env[a], op.loc)

    return run
