"""mbarriers, and the fence between the generic and the async proxy."""

from __future__ import annotations

from ..barriers import MBarrier
from ..errors import BarrierError, Unsupported
from ..interpreter import Env, Executable, pure, steps, sync
from ..machine import Steps, Thread
from ..memory import Access
from ..mlir import Op
from ..views import View
from .common import Fn, scalar_int, slots

FLIP = "gluon_sim.flip"  # attribute that mutation testing sets: wait for the other parity


@sync("ttng.init_barrier")
def _init_barrier(op: Op, exe: Executable) -> Fn:
    a, count = op.operands[0].slot, op.int_attr("count")

    def run(env: Env, th: Thread) -> None:
        view: View = env[a]
        old = th.cta.barriers.get(view.address)
        if old is not None:
            raise BarrierError(f"mbarrier.init of {view.label}, which already is the mbarrier {old.label}")
        view.space.access(Access("w", view, th, "mbarrier.init", op.loc))
        bar = MBarrier(th.cta, view.label, count)
        bar.address = view.address
        th.cta.barriers[view.address] = bar

    return run


@sync("ttng.inval_barrier")
def _inval_barrier(op: Op, exe: Executable) -> Fn:
    a = op.operands[0].slot

    def run(env: Env, th: Thread) -> None:
        bar = th.cta.barrier(env[a])
        if bar.tx:
            raise BarrierError(f"mbarrier.invalidate while copies are outstanding on {bar.state()}")
        del th.cta.barriers[env[a].address]

    return run


def _arrive(th: Thread, bar: MBarrier, count: int) -> None:
    th.cta.share(th.bit, bar.pend_bit)
    bar.arrive(count)


@sync("ttng.arrive_barrier")
def _arrive_barrier(op: Op, exe: Executable) -> Fn:
    s, count = slots(op.operands), op.int_attr("count")

    def run(env: Env, th: Thread) -> None:
        if len(s) < 2 or env[s[1]]:
            _arrive(th, th.cta.barrier(env[s[0]]), count)

    return run


@sync("ttng.barrier_expect")
def _barrier_expect(op: Op, exe: Executable) -> Fn:
    (a, p), size = slots(op.operands), op.int_attr("size")

    def run(env: Env, th: Thread) -> None:
        if env[p]:
            bar = th.cta.barrier(env[a])
            bar.tx += size
            _arrive(th, bar, 1)

    return run


@steps("ttng.wait_barrier")
def _wait_barrier(op: Op, exe: Executable) -> Fn:
    s = slots(op.operands)
    seg = op.segments()
    pred = seg[2][0].slot if len(seg) > 2 and seg[2] else None
    flip = op.int_attr(FLIP, 0)  # set by mutation testing

    def run(env: Env, th: Thread) -> Steps:
        yield None
        if pred is not None and not env[pred]:
            return
        bar = th.cta.barrier(env[s[0]])
        parity = (scalar_int(env[s[1]]) & 1) ^ flip
        if scalar_int(env[s[1]]) not in (0, 1):
            raise BarrierError(f"mbarrier.wait on {bar.label} with phase {scalar_int(env[s[1]])}")
        if not bar.passed(parity):
            ticket = (th, bar.phase, op.loc)
            bar.waiters.append(ticket)
            while not bar.passed(parity):
                th.waiting_for = f"waits for parity {parity} of {bar.state()}"
                yield lambda: bar.passed(parity)
            bar.waiters.remove(ticket)
        th.cta.share(bar.done_bit, th.bit)

    return run


@sync("ttng.fence_async_shared")
def _fence(op: Op, exe: Executable) -> Fn:
    return lambda env, th: th.cta.fence_async(th)


@pure("ttng.cluster_arrive", "ttng.cluster_wait")
def _cluster(op: Op, exe: Executable) -> Fn:
    raise Unsupported("clusters")
