"""mbarriers, and the fence between the generic and the async proxy."""

from __future__ import annotations

from ..barriers import WARP, MBarrier
from ..errors import BarrierError, Unsupported
from ..interpreter import Env, Executable, pure, steps, sync
from ..machine import Steps, Thread
from ..memory import Access
from ..mlir import Op
from ..pairs import home
from ..views import View
from .common import Fn, scalar_int, slots

FLIP = "gluon_sim.flip"  # attribute that mutation testing sets: wait for the other parity


@sync("ttng.init_barrier")
def _init_barrier(op: Op, exe: Executable) -> Fn:
    a, count, ty = op.operands[0].slot, op.int_attr("count"), op.operands[0].type

    def run(env: Env, th: Thread) -> None:
        cta = home(th, ty)
        if cta is not th.cta:
            return
        # Of those that a pair has once, each CTA makes the arrivals.
        arrivals = count * (len(cta.ctas) if ty.halved is None else 1)
        view: View = env[a]
        old = th.cta.barriers.get(view.address)
        if old is not None:
            raise BarrierError(f"mbarrier.init of {view.label}, which already is the mbarrier {old.label}")
        made = Access("w", view, th, "mbarrier.init", op.loc)
        made.fenced = exe.module.compiled
        view.space.access(made)
        bar = MBarrier(th.cta, view.label, arrivals, made)
        bar.address = view.address
        th.cta.barriers[view.address] = bar

    return run


@sync("ttng.inval_barrier")
def _inval_barrier(op: Op, exe: Executable) -> Fn:
    a, ty = op.operands[0].slot, op.operands[0].type

    def run(env: Env, th: Thread) -> None:
        if home(th, ty) is not th.cta:
            return
        bar = th.cta.barrier(env[a])
        if bar.tx:
            raise BarrierError(f"mbarrier.invalidate while copies are outstanding on {bar.state()}")
        del th.cta.barriers[env[a].address]

    return run


def _refuse_routes(op: Op) -> None:
    if "fromCTA" in op.attrs or op.int_attr("multicastCTA", 0):
        raise Unsupported(f"{op.name} with arrivals of chosen CTAs")


def _arrive(th: Thread, bar: MBarrier, count: int) -> None:
    th.actor.meet()  # the compiler has one warp arrive, behind a barrier of the partition
    th.cta.share(th.bit, bar.pend_bit)
    bar.arrive(count)


@sync("ttng.arrive_barrier")
def _arrive_barrier(op: Op, exe: Executable) -> Fn:
    s, count, ty = slots(op.operands), op.int_attr("count"), op.operands[0].type
    _refuse_routes(op)

    def run(env: Env, th: Thread) -> None:
        if len(s) < 2 or env[s[1]]:
            _arrive(th, home(th, ty).barrier(env[s[0]]), count)

    return run


@sync("ttng.barrier_expect")
def _barrier_expect(op: Op, exe: Executable) -> Fn:
    (a, p), size, ty = slots(op.operands), op.int_attr("size"), op.operands[0].type
    _refuse_routes(op)

    def run(env: Env, th: Thread) -> None:
        if env[p]:
            bar = home(th, ty).barrier(env[a])
            bar.tx += size
            _arrive(th, bar, 1)

    return run


@steps("ttng.wait_barrier")
def _wait_barrier(op: Op, exe: Executable) -> Fn:
    s = slots(op.operands)
    seg = op.segments()
    pred = seg[2][0].slot if len(seg) > 2 and seg[2] else None
    flip = op.int_attr(FLIP, 0)  # set by mutation testing
    ty = op.operands[0].type

    def run(env: Env, th: Thread) -> Steps:
        yield None
        if home(th, ty) is not th.cta:  # the compiler has only the CTA wait whose barrier it is
            return
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


@steps("ttng.cluster_barrier")
def _cluster_barrier(op: Op, exe: Executable) -> Fn:
    """Of the pair; relaxed or not, what comes before is seen after."""

    def run(env: Env, th: Thread) -> Steps:
        yield None
        if th is not th.cta.threads[0]:
            raise Unsupported("cluster barrier in a partition")
        bar = th.cta.cluster
        generation = bar.generation
        bar.arrive(th, len(th.cta.ctas) * th.num_warps * WARP)
        while bar.generation == generation:
            th.waiting_for = bar.label
            yield lambda: bar.generation != generation
        th.cta.share(bar.done_bit, th.bit)

    return run


@pure("ttng.fence_mbarrier_init_release_cluster")
def _fence_init(op: Op, exe: Executable) -> Fn:
    return lambda env: None


@pure("ttng.cluster_arrive", "ttng.cluster_wait")
def _cluster(op: Op, exe: Executable) -> Fn:
    raise Unsupported("clusters")
