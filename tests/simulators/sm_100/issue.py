"""How long a block of keys takes: warps of one quarter issue in order, beside the tensor pipe. An estimate.

Two softmax warps, one for each tile of 128 queries, and the correction warp, if there is one, issue what every
iteration of their loops passes through; each instruction waits for its registers, its pipe and the barriers. The tensor
pipe runs the products in the order of the kernel and waits for what the warps publish. K and V are taken to be in
shared memory in time, and shared memory to have no other traffic.

No hardware stands behind it. `Latencies` are assumed; TENSOR_SHARE was chosen among 1, 0.87 and 0.80 because a kernel
like Triton's public Gluon example then had the published ratio to FlashAttention-4, and CLOCK_SHARE puts FA4's own
machine code (D=128, not causal) on its published 1605 TFLOP/s. Builds that hardly differ came out up to 10% apart. It
ranks builds; it promises no TFLOP/s.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from .loops import Loop
from .pipes import TENSOR_FLOP
from .streams import Latencies, Schedule, Slot, correction_slots, softmax_slots

CLOCK_SHARE = 0.851  # of GHZ, for the period of FA4's code to give what FA4 publishes; fitted
BLOCKS = 32  # of keys; the second half counts
_USUAL = Latencies()
# The softmax warps may lock in phase, both at the exponentials, or out of phase: one run alone is not to be trusted.
VARIED = (
    _USUAL,
    replace(_USUAL, barrier=20, product=100),
    replace(_USUAL, barrier=30, product=125),
    replace(_USUAL, try_wait=18, mufu=18),
    replace(_USUAL, try_wait=32, mufu=28),
    replace(_USUAL, arrive=20, wake=30),
    replace(_USUAL, arrive=45, wake=60),
    replace(_USUAL, tmem_load=25, tmem_store=25),
    replace(_USUAL, tmem_load=60, tmem_store=60),
)


@dataclass(slots=True)
class _Warp:
    number: int
    slots: list[Slot]
    at: int = 0
    block: int = 0
    ready: float = 0.0  # when it may issue again
    operands: float = 0.0  # when the registers of the next instruction are there
    registers: dict[int, float] = field(default_factory=dict)
    drained: float = 0.0  # when its tensor memory accesses have ended
    started: float = 0.0  # when it saw S

    def advance(self) -> None:
        self.at += 1
        if self.at == len(self.slots):
            self.at, self.block = 0, self.block + 1
        slot, get, latest = self.slots[self.at], self.registers.get, 0.0
        for register in slot.reads:
            latest = max(latest, get(register, 0.0))
        for register in slot.writes:
            latest = max(latest, get(register, 0.0) - 2)
        self.operands = latest


class _Quarter:
    """Two softmax warps, a correction warp if there is one, and the tensor pipe."""

    def __init__(
        self, softmax: Sequence[Loop], correction: Loop | None, schedule: Schedule, latencies: Latencies
    ) -> None:
        streams = [softmax_slots(loop, schedule, latencies, correction is not None) for loop in softmax]
        streams += [correction_slots(correction, schedule, latencies)] if correction else []
        self.publishes = (*schedule.parts, "o") if correction else schedule.parts  # what a P V needs
        self.warps = [_Warp(number, slots) for number, slots in enumerate(streams)]
        self.schedule, self.latencies = schedule, latencies
        self.free: dict[str, float] = {}  # when a pipe is
        self.issue_free = 0.0
        self.events: dict[tuple[str, int, int], float] = {}  # (name, tile of queries, block)
        self.tensor_free = 0.0
        self.done: list[float] = []  # when each block's last product was
        self.answers: list[float] = []  # from S seen to P published
        ahead = [("qk", tile % 2, tile // 2) for tile in range(schedule.buffers)]
        pairs = (
            (("pv", tile % 2, tile // 2), ("qk", (tile + schedule.buffers) % 2, (tile + schedule.buffers) // 2))
            for tile in range(2 * BLOCKS + 2)
        )
        self.products = [*ahead, *itertools.chain.from_iterable(pairs)]
        self.product = 0

    def run(self) -> tuple[float, float]:
        """(clocks of a block, clocks from S to P), once it is steady."""
        self._multiply()
        while len(self.done) < BLOCKS:
            first, chosen = math.inf, None
            for warp in self.warps:
                time = self._earliest(warp)
                if time < first:
                    first, chosen = time, warp
            if chosen is None:
                waits = [f"warp {warp.number} for {warp.slots[warp.at].event}" for warp in self.warps]
                raise ValueError(f"sm_100: no warp goes on: {', '.join(waits)}")
            self._issue(chosen, max(first, self.issue_free))
        half = BLOCKS // 2
        return (self.done[-1] - self.done[half]) / (len(self.done) - 1 - half), sum(self.answers[-8:]) / 8

    def _earliest(self, warp: _Warp) -> float:
        slot = warp.slots[warp.at]
        time = max(warp.ready, warp.operands)
        if slot.pipe:
            return max(time, self.free.get(slot.pipe, 0.0))
        if slot.role == "await":
            key = ("alpha", int(slot.event[-1]), warp.block) if slot.event != "s" else ("s", warp.number, warp.block)
            return max(time, self.events.get(key, math.inf))
        return time

    def _issue(self, warp: _Warp, time: float) -> None:
        slot, latencies = warp.slots[warp.at], self.latencies
        self.issue_free = warp.ready = time + 1
        if slot.pipe:
            self.free[slot.pipe] = max(time, self.free.get(slot.pipe, 0.0)) + slot.cycles
        if slot.pipe == "tmem_load":
            warp.drained = max(warp.drained, time + slot.latency)
        elif slot.pipe == "tmem_store":
            warp.drained = max(warp.drained, time + slot.cycles + latencies.tmem_store)
        elif slot.role == "drain":
            warp.ready = max(time + 1, warp.drained)
        elif slot.role == "barrier":
            warp.ready = time + latencies.barrier
        elif slot.role in ("wait", "await"):
            warp.ready = time + latencies.try_wait
            warp.started = time if slot.event == "s" else warp.started
        elif slot.role == "publish":
            name, tile = (slot.event, warp.number) if slot.event[0] != "o" else ("o", int(slot.event[1]))
            self.events[name, tile, warp.block] = time + latencies.arrive
            if name in ("p", "p2"):
                self.answers.append(time - warp.started)
            self._multiply()
        for register in slot.writes:
            warp.registers[register] = time + slot.latency
        warp.advance()

    def _multiply(self) -> None:
        """Runs products until one lacks what it needs."""
        latencies, early = self.latencies, self.schedule.early
        clocks = 2.0 * 128 * 128 * self.schedule.head_dim / TENSOR_FLOP / latencies.tensor_share
        while self.product < len(self.products):
            kind, tile, block = self.products[self.product]
            if kind == "qk":
                self.tensor_free += clocks
                self.events["s", tile, block] = self.tensor_free + latencies.product
            else:
                first = self.schedule.parts[0]
                needed = [(name, tile, block) for name in self.publishes]
                if not all(event in self.events for event in needed):
                    return
                at = {event[0]: self.events[event] + latencies.wake for event in needed}
                start = max(self.tensor_free, at[first], at.get("o", 0.0), self._corrected(tile, block))
                second = at.get("p2", 0.0)  # the rest of P
                self.tensor_free = max(start + clocks * early / 128, second) + clocks * (1 - early / 128)
                self.events["pv", tile, block] = self.tensor_free
                if tile == 1:
                    self.done.append(self.tensor_free)
            self.product += 1

    def _corrected(self, tile: int, block: int) -> float:
        """With three buffers S is there before the P V of the block before: the correction waits for that itself."""
        before = ("pv", tile, block - 1)
        if self.schedule.buffers < 3 or before not in self.events:
            return 0.0
        of = self.latencies
        return self.events[before] + of.product + of.try_wait + of.barrier + of.arrive


@dataclass(frozen=True, slots=True)
class Estimate:
    """Clocks of a block of keys, both tiles of queries: the median over some latencies, the least and the most; and the
    median from S to P."""

    period: float
    low: float
    high: float
    answer: float


def estimate(
    softmax: Sequence[Loop], correction: Loop | None, schedule: Schedule, latencies: Sequence[Latencies]
) -> Estimate:
    runs = [_Quarter(softmax, correction, schedule, of).run() for of in latencies]
    periods = [period for period, _ in runs]
    return Estimate(median(periods), min(periods), max(periods), median(answer for _, answer in runs))
