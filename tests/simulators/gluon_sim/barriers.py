"""The two kinds of barriers: mbarriers in shared memory and the hardware's named barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import BarrierError, MissingFence
from .memory import Event

if TYPE_CHECKING:
    from .machine import Cta, Thread
    from .memory import Access

TX_LIMIT = (1 << 20) - 1  # bytes that one mbarrier can count
WARP = 32
NAMED_BARRIERS = 16  # of a CTA


class MBarrier:
    """A shared-memory mbarrier object: arrival count, transaction bytes and phase."""

    def __init__(self, cta: Cta, label: str, count: int, made: Access) -> None:
        if count <= 0:
            raise BarrierError(f"mbarrier.init of {label} with count {count}")
        self.cta, self.label, self.count = cta, label, count
        self.made = made  # the generic write that initialised it
        self.address = -1
        self.pending, self.tx, self.phase = count, 0, 0
        self.pend_bit, self.done_bit = cta.new_bit(), cta.new_bit()
        self.waiters: list[tuple[Thread, int, str]] = []  # thread, phase number it is waiting for, location

    def state(self) -> str:
        return (
            f"{self.label}: {self.phase} phases completed (current parity {self.phase & 1}), "
            f"{self.pending} of {self.count} arrivals and {self.tx} bytes outstanding"
        )

    def used_by(self, what: str, where: str) -> None:
        """Something asynchronous is going to arrive here."""
        if not self.made.fenced:
            raise MissingFence(
                f"missing fence_async_shared: {what} arrives at {self.label} through the async proxy, but it was made "
                f"through the generic proxy: {self.made}",
                where,
            )

    def passed(self, parity: int) -> bool:
        return (self.phase & 1) != parity

    def arrive(self, n: int) -> None:
        if n > self.pending:
            raise BarrierError(f"over-arrival: {n} arrivals on {self.state()}")
        self.pending -= n
        self._flip()

    def add_tx(self, nbytes: int) -> None:
        self.tx += nbytes
        if abs(self.tx) > TX_LIMIT:
            raise BarrierError(f"transaction count out of range on {self.state()}")
        self._flip()

    def _flip(self) -> None:
        if self.pending or self.tx:
            return
        for thread, number, where in self.waiters:
            if self.phase > number:
                raise BarrierError(
                    f"missed phase: {self.label} completes phase {self.phase} while {thread.name} has not yet observed "
                    f"phase {number} (waiting at {where}); by parity that wait may never return"
                )
        self.phase += 1
        self.pending = self.count
        self.cta.share(self.pend_bit, self.done_bit)


class NamedBarrier:
    """A hardware named barrier (`bar.sync` / `bar.arrive` in inline assembly), or the one of a pair of CTAs.

    It counts whoever arrives: who does not come after the end of the last use may count as one of that.
    """

    def __init__(self, cta: Cta, label: str) -> None:
        self.label = label
        self.arrived, self.generation = 0, 0
        self.there: list[Thread] = []
        self.expected: int | None = None
        self.pend_bit, self.done_bit = cta.new_bit(), cta.new_bit()
        self.cta = cta

    def arrive(self, thread: Thread, expected: int) -> None:
        if self.arrived and expected != self.expected:
            raise BarrierError(f"{self.label}: thread counts {self.expected} and {expected} in one use")
        end = self.cta.ends.get(self)
        if thread in self.there or (end is not None and not end.vis & thread.bit):
            raise BarrierError(f"{self.label}: {thread.name} arrives again, and nothing orders that after the last use")
        self.expected = expected
        self.there.append(thread)
        self.arrived += thread.num_warps * WARP
        if self.arrived > expected:
            raise BarrierError(f"{self.label}: {self.arrived} threads arrived, {expected} expected")
        self.cta.share(thread.bit, self.pend_bit)
        if self.arrived == expected:
            self.arrived, self.there = 0, []
            self.generation += 1
            self.cta.ends[self] = Event(self.pend_bit)
            self.cta.share(self.pend_bit, self.done_bit)
