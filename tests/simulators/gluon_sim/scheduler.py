"""Who goes next, drawn from the seed: some seeds starve a partition, some delay or rush everything asynchronous."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .errors import Deadlock, Livelock, SimError
from .machine import Cta, Engine, Thread

LOOKS = 64  # that a poll may take which gives up in the end


@dataclass(frozen=True)
class Policy:
    """How the scheduler weighs its choices; drawn from the seed."""

    async_weight: float
    thread_weights: tuple[float, ...]
    burst: float  # probability of running the same agent again

    @staticmethod
    def draw(rng: random.Random) -> Policy:
        style = rng.choice(["even", "even", "late", "early", "skewed", "skewed"])
        weight = {"even": 1.0, "late": 0.02, "early": 50.0, "skewed": 10 ** rng.uniform(-1.5, 1.5)}[style]
        spread = 2.0 if style == "skewed" else 0.3
        return Policy(weight, tuple(10 ** rng.uniform(-spread, spread) for _ in range(16)), rng.choice([0.0, 0.5, 0.9]))


def run_programs(start: Callable[[], list[Cta]], resident: int, rng: random.Random, max_steps: int) -> None:
    """Interleave the threads and asynchronous operations of some resident programs until all have finished. start: the
    CTAs of the next program, none if there is none. max_steps: from one start or end of a program to the next."""
    live: list[Cta] = []
    while _fill(live, start, resident, rng):
        _run_until_one_ends(live, Policy.draw(rng), rng, max_steps)


def _fill(live: list[Cta], start: Callable[[], list[Cta]], resident: int, rng: random.Random) -> list[Cta]:
    """All that are resident now. Of several programs some are much slower than others."""
    while len({id(cta.ctas) for cta in live}) < resident and (new := start()):
        live += new
        if resident > 1:
            new[0].ctas[0].pace = 10 ** rng.uniform(-1.0, 1.0)
    return live


def _run_until_one_ends(live: list[Cta], policy: Policy, rng: random.Random, max_steps: int) -> None:
    last: Thread | None = None
    looks, changes = Counter[Thread](), -1  # of those that poll, since memory last changed
    for steps in range(1, max_steps + 1):
        if last is not None and not last.done and rng.random() < policy.burst and last.ready():
            _step_thread(last)
            continue
        choices, weights = _choices(live, policy)
        finished = [c for c in live if all(t.done for t in c.threads) and not any(e.queue for e in c.engines)]
        for c in finished:
            c.finish()
            c.stats.steps += steps
            live.remove(c)
        if finished:
            return
        if not choices:
            if changes != live[0].gmem.changes:
                looks, changes = Counter(), live[0].gmem.changes
            pollers = [t for c in live for t in c.threads if t.polling and looks[t] < LOOKS]
            if not pollers:
                raise _deadlock(live)
            last = rng.choice(pollers)
            looks[last] += 1
            _step_thread(last)
            continue
        pick = rng.choices(choices, weights)[0]
        if isinstance(pick, Thread):
            last = pick
            _step_thread(pick)
        else:
            engine, position = pick
            engine.step(position)
    raise Livelock(f"no end after {max_steps} scheduler steps", _where(live))


def _choices(live: list[Cta], policy: Policy) -> tuple[list[Thread | tuple[Engine, int]], list[float]]:
    """Who could go next, and how likely: threads, and the operations (by their place in the queue) of engines."""
    choices: list[Thread | tuple[Engine, int]] = []
    weights: list[float] = []
    for cta in live:
        pace = cta.ctas[0].pace
        for k, t in enumerate(cta.threads):
            if t.ready():
                choices.append(t)
                weights.append(policy.thread_weights[(k + 8 * cta.rank) % 16] * pace)
        for e in cta.engines:
            places = len(e.queue) if not e.in_order else min(1, len(e.queue))
            choices += [(e, k) for k in range(places)]
            weights += [policy.async_weight * pace] * places
    return choices, weights


def _step_thread(t: Thread) -> None:
    assert t.gen is not None
    t.blocked = None
    t.waiting_for = ""
    try:
        t.blocked = next(t.gen)
    except StopIteration:
        t.done = True
    except SimError as e:
        if e.where is None:
            e.where = t.where
        if not e.context:
            e.context.append(f"in {t.name}, {t.cta.title}")
        raise


def _where(ctas: list[Cta]) -> str:
    return "; ".join(f"{t.name} at {t.where}" for c in ctas for t in c.threads if not t.done)


def _deadlock(ctas: list[Cta]) -> Deadlock | Livelock:
    err: Deadlock | Livelock = Deadlock("deadlock: every thread waits and nothing is outstanding")
    if any(t.polling for c in ctas for t in c.threads):
        left = len(ctas[0].pending)
        err = Livelock(f"every thread waits or polls what nothing will change; {left} programs have not started")
    for c in ctas:
        for t in c.threads:
            if not t.done:
                err.context.append(f"{c.title} {t.name} at {t.where}: {t.waiting_for or 'blocked'}")
        for bar in c.barriers.values():
            if bar.pending != bar.count or bar.tx:
                err.context.append(f"{c.title} barrier {bar.state()}")
    return err
