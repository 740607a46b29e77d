"""Cluster launch control: a program asks for one that has not started, which then never does.

A request may be refused although programs are left, as hardware may when it has other work. After a refusal was read
no other request may follow, and a refusal has no program id: undefined for the hardware, errors here.
"""

from __future__ import annotations

import numpy as np

from ..errors import SimError
from ..interpreter import Env, Executable, pure, sync
from ..machine import AsyncOp, Thread
from ..memory import Access
from ..mlir import Op
from ..views import View
from .asynchronous import complete, issue
from .common import Fn, slots

NBYTES = 16  # of an answer: here x, y, z and whether the request was granted, 4 bytes each
REFUSED = 1 / 8


@sync("ttng.clc_try_cancel")
def _try_cancel(op: Op, exe: Executable) -> Fn:
    dst, bar_s = slots(op.operands)
    what = "clc.try_cancel"

    def run(env: Env, th: Thread) -> None:
        cta, view = th.cta, env[dst]
        if cta.refused:
            raise SimError("clc.try_cancel after an answer that no program was cancelled")
        if view.offsets.size * view.dt.nbytes != NBYTES or view.offsets.min() % NBYTES:
            raise SimError(f"clc.try_cancel: {view.label} is not {NBYTES} bytes, aligned to as many")
        bar = cta.barrier(env[bar_s])
        bar.used_by(what, op.loc)

        def answer() -> bool:
            granted = bool(cta.pending) and cta.rng.random() >= REFUSED
            program = cta.pending.popleft() if granted else (0, 0, 0)
            cta.stats.cancelled += granted
            view.space.write(view, np.array([*program, granted], np.int32).view(np.int64))
            complete(aop, bar.pend_bit)
            bar.add_tx(-NBYTES)
            return True

        aop = AsyncOp(what, answer, th, op.loc)
        issue(cta.requests, aop, ("w", view))
        view.space.poison(view)

    return run


@sync("ttng.clc_load_result")
def _load_result(op: Op, exe: Executable) -> Fn:
    src, dst = op.operands[0].slot, op.results[0].slot

    def run(env: Env, th: Thread) -> None:
        view: View = env[src]
        view.space.access(Access("r", view, th, "clc.load_result", op.loc))
        env[dst] = view.space.read(view, "clc.load_result").view(np.int32)
        th.cta.refused |= not env[dst][3]

    return run


@pure("ttng.clc_is_canceled")
def _is_canceled(op: Op, exe: Executable) -> Fn:
    src, dst = op.operands[0].slot, op.results[0].slot
    return lambda env: env.__setitem__(dst, np.bool_(env[src][3]))


@pure("ttng.clc_get_program_id")
def _program_id(op: Op, exe: Executable) -> Fn:
    src, dst, dim = op.operands[0].slot, op.results[0].slot, op.int_attr("dim")

    def run(env: Env) -> None:
        if not env[src][3]:
            raise SimError("the program id of a request that cancelled none")
        env[dst] = env[src][dim]

    return run
