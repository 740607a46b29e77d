"""Asynchronous operations in general: queued where they stand, performed later by the scheduler."""

from __future__ import annotations

from ..machine import AsyncOp, Engine, Steps, Thread
from ..memory import Access
from ..views import View


def issue(engine: Engine, op: AsyncOp, *accesses: tuple[str, View]) -> None:
    """Check and remember the accesses ("r" or "w", and of what) of an asynchronous operation, then queue it."""
    op.snapshot = op.thread.cta.seen_by(op.thread.bit)
    for kind, view in accesses:
        rec = Access(kind, view, op.thread, op.name, op.where)
        rec.engine, rec.seq = engine, engine.issued + 1
        rec.vis = engine.bit if engine.in_order else 0
        rec.proxy = "generic" if engine is op.thread.cp_async else "async"
        view.space.access(rec)
        op.records.append(rec)
    engine.issue(op)


def complete(op: AsyncOp, bit: int) -> None:
    """Agent `bit` comes after the operation and after what its issuer had seen."""
    for rec in op.records:
        rec.vis |= bit
    for event in op.snapshot:
        event.vis |= bit


def wait_groups(engine: Engine, th: Thread, pending: int) -> Steps:
    """Block until all but the last `pending` committed groups are complete."""
    groups = engine.groups
    if pending < len(groups):
        upto = groups[len(groups) - 1 - pending]
        while engine.completed < upto:
            th.waiting_for = f"{engine.name} to complete"
            yield lambda: engine.completed >= upto
        engine.publish(upto, th.bit)
        engine.groups = [g for g in groups if g > upto]
