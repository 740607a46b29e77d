"""Who goes next, drawn from the seed: some seeds starve a partition, some delay or rush everything asynchronous."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import Deadlock, Livelock, SimError
from .machine import Cta, Engine, Thread


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


def run_ctas(ctas: Iterable[Cta], rng: random.Random, max_steps: int) -> None:
    """Interleave the threads and asynchronous operations of some resident programs until all have finished."""
    live = list(ctas)
    policy = Policy.draw(rng)
    last: Thread | None = None
    steps = 0
    while live:
        steps += 1
        if steps > max_steps:
            raise Livelock(f"no end after {max_steps} scheduler steps", _where(live))
        if last is not None and not last.done and rng.random() < policy.burst and last.ready():
            _step_thread(last)
            continue
        choices, weights = _choices(live, policy)
        finished = [c for c in live if all(t.done for t in c.threads) and not any(e.queue for e in c.engines)]
        for c in finished:
            c.check_exit()
            c.stats.steps += steps
            live.remove(c)
        if finished:
            continue
        if not choices:
            raise _deadlock(live)
        pick = rng.choices(choices, weights)[0]
        if isinstance(pick, Thread):
            last = pick
            _step_thread(pick)
        else:
            engine, position = pick
            engine.step(position)


def _choices(live: list[Cta], policy: Policy) -> tuple[list[Thread | tuple[Engine, int]], list[float]]:
    """Who could go next, and how likely: threads, and the operations (by their place in the queue) of engines."""
    choices: list[Thread | tuple[Engine, int]] = []
    weights: list[float] = []
    for cta in live:
        for k, t in enumerate(cta.threads):
            if t.ready():
                choices.append(t)
                weights.append(policy.thread_weights[(k + 8 * cta.rank) % 16])
        for e in cta.engines:
            places = len(e.queue) if not e.in_order else min(1, len(e.queue))
            choices += [(e, k) for k in range(places)]
            weights += [policy.async_weight] * places
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


def _deadlock(ctas: list[Cta]) -> Deadlock:
    err = Deadlock("deadlock: every thread waits and nothing is outstanding")
    for c in ctas:
        for t in c.threads:
            if not t.done:
                err.context.append(f"{c.title} {t.name} at {t.where}: {t.waiting_for or 'blocked'}")
        for bar in c.barriers.values():
            if bar.pending != bar.count or bar.tx:
                err.context.append(f"{c.title} barrier {bar.state()}")
    return err
