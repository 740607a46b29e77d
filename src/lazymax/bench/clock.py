"""Timing: windows of many calls, rounds with an alternating order, medians and spread."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .peers import Ready, captured

MAX_CALLS = 2000  # of one window; more only costs events
FLUSH_BYTES = 256 << 20  # as triton.testing.do_bench: larger than any L2; also long enough to hide the host's work


class GpuClock:
    """CUDA events around every call, L2 overwritten before each. A window's time is the median of its calls: the events
    of a call that the host issued late would stretch a mean."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._events: list[tuple[Any, Any]] = []

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def milliseconds(self, run: Callable[[], Any], calls: int) -> float:
        while len(self._events) < calls:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._events.append((start, end))
        events = self._events[:calls]
        for start, end in events:
            self._flush.zero_()
            start.record()
            run()
            end.record()
        self.synchronize()
        return statistics.median(float(start.elapsed_time(end)) for start, end in events)


class GraphClock(GpuClock):
    """The same for replays of a CUDA graph of one call: no host time, be it ever so short."""

    captured = staticmethod(captured)


class HostClock:
    """The CPU's. For testing this tool: on a CPU lazymax runs its reference or the interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        pass

    def milliseconds(self, run: Callable[[], Any], calls: int) -> float:
        samples = []
        for _ in range(calls):
            start = time.perf_counter()
            run()
            samples.append((time.perf_counter() - start) * 1e3)
        return statistics.median(samples)


Clock = GpuClock | HostClock


def clock_for(device: torch.device, graphs: bool = False) -> Clock:
    """graphs: needs a GPU."""
    if graphs:
        return GraphClock(device)
    return GpuClock(device) if device.type == "cuda" else HostClock(device)


def order(names: Sequence[str], turn: int) -> list[str]:
    """The names for one round: backwards in every second one, and another name first every two rounds, so that nobody
    always runs on a card that a particular other one has heated."""
    shift = (turn // 2) % max(1, len(names))
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if turn % 2 else turned


def calls_for(run: Callable[[], Any], clock: Clock, window_ms: float) -> int:
    """How many calls fill a window, overwriting L2 included."""
    clock.milliseconds(run, 2)  # the first calls load code
    clock.synchronize()
    start = time.perf_counter()
    clock.milliseconds(run, 5)
    return max(1, min(MAX_CALLS, int(window_ms / ((time.perf_counter() - start) * 1e3 / 5))))


def rounds_of(ready: Mapping[str, Ready], clock: Clock, rounds: int, window_ms: float) -> dict[str, list[float]]:
    """Milliseconds per call of each candidate in each round. A first round is run and dropped: the card's clocks settle
    to its power limit in it."""
    calls = {}
    for name, candidate in ready.items():
        with candidate.context():
            calls[name] = calls_for(candidate.run, clock, window_ms)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(rounds + 1):
        for name in order(list(ready), turn):
            with ready[name].context():
                times[name].append(clock.milliseconds(ready[name].run, calls[name]))
    return {name: values[1:] for name, values in times.items()}


def ratio(others: Sequence[float], ours: Sequence[float]) -> float:
    """How many times longer the others took: the median of the ratios within each round."""
    return statistics.median(other / own for other, own in zip(others, ours, strict=True))


def host_blocks(
    calls: Mapping[str, Callable[[], Any]], clock: Clock, rounds: int, block: int
) -> dict[str, list[float]]:
    """Microseconds of host time per call, in blocks of calls that do not wait for the device, order alternating."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in order(list(calls), turn):
            call = calls[name]
            clock.synchronize()  # a full launch queue would make the host wait
            start = time.perf_counter()
            for _ in range(block):
                call()
            times[name].append((time.perf_counter() - start) / block * 1e6)
    clock.synchronize()
    return {name: values[1:] for name, values in times.items()}
