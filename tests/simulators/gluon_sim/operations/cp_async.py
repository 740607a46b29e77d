"""cp.async: copies to shared memory through the generic proxy, in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..interpreter import Env, Executable, steps, sync
from ..machine import AsyncOp, Steps, Thread
from ..mlir import Op
from ..views import View
from .asynchronous import complete, issue, wait_groups
from .common import Fn, pointee
from .global_memory import gather_global


def _async_copy(th: Thread, view: View, fetch: Callable[[], Any], what: str, where: str) -> None:
    def land() -> bool:
        view.space.write(view, fetch())
        return True

    issue(th.cp_async, AsyncOp(what, land, th, where), ("w", view))
    view.space.poison(view)


@sync("ttg.async_copy_global_to_local")
def _cp_async(op: Op, exe: Executable) -> Fn:
    src, res, mask, other = (s[0].slot if s else None for s in op.segments())
    dt = pointee(op.operands[0].type)
    tok = op.results[0].slot
    assert src is not None and res is not None

    def run(env: Env, th: Thread) -> None:
        view: View = env[res]
        addr, m = env[src], env[mask] if mask is not None else None
        o = env[other] if other is not None else np.zeros((), dt.compute)

        def fetch() -> Any:
            return gather_global(th, th.actor, addr, m, o, dt, view.offsets.shape)

        fetch()  # from now on, and until it lands: what comes before is what the thread knows now
        _async_copy(th, view, fetch, "async copy", op.loc)
        env[tok] = None

    return run


@sync("ttg.async_commit_group")
def _commit_group(op: Op, exe: Executable) -> Fn:
    tok = op.results[0].slot if op.results else None

    def run(env: Env, th: Thread) -> None:
        th.cp_async.groups.append(th.cp_async.issued)
        if tok is not None:
            env[tok] = None

    return run


@steps("ttg.async_wait")
def _async_wait(op: Op, exe: Executable) -> Fn:
    n = op.int_attr("num")
    tok = op.results[0].slot if op.results else None

    def run(env: Env, th: Thread) -> Steps:
        yield None
        yield from wait_groups(th.cp_async, th, n)
        if tok is not None:
            env[tok] = None

    return run


@sync("ttng.async_copy_mbarrier_arrive")
def _cp_async_arrive(op: Op, exe: Executable) -> Fn:
    a = op.operands[0].slot
    no_increment = "noIncrement" in op.attrs and op.attrs["noIncrement"] != "false"

    def run(env: Env, th: Thread) -> None:
        bar = th.cta.barrier(env[a])
        if not no_increment:
            bar.pending += 1

        def fire() -> bool:
            th.cp_async.publish(aop.seq, bar.pend_bit)
            complete(aop, bar.pend_bit)
            bar.arrive(1)
            return True

        aop = AsyncOp("cp.async.mbarrier.arrive", fire, th, op.loc)
        issue(th.cp_async, aop)

    return run
