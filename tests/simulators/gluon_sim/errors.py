"""Every failure the simulator reports is a :class:`SimError`; the subclass says what kind of bug it is."""

from __future__ import annotations

from typing import Any


class SimError(Exception):
    """Base class. `where`: kernel source location of the operation at fault; `context`: partition, program, seed."""

    def __init__(self, message: str, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.context: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.where), {"context": self.context}

    def __str__(self) -> str:
        text = self.message
        if self.where:
            text += f"\n  at {self.where}"
        for line in self.context:
            text += f"\n  {line}"
        return text


class Unsupported(SimError):
    """The kernel uses something the simulator does not model."""


class RaceError(SimError):
    """Two conflicting accesses to shared or tensor memory are not ordered by any synchronisation."""


class MissingFence(RaceError):
    """Between a generic-proxy access to shared memory and an async-proxy one, of which one writes, there is no
    `fence_async_shared`. A read counts: barriers alone let TMA overwrite what loads under way still read."""


class UninitialisedRead(SimError):
    """Shared or tensor memory was read that nothing has written (or whose writer has not landed yet)."""


class BarrierError(SimError):
    """mbarrier misuse: not initialised, over-arrival, negative transaction count, missed phase."""


class Deadlock(SimError):
    """No thread can run and no asynchronous operation is outstanding."""


class InFlightAtExit(SimError):
    """The program ended while nothing had waited for an asynchronous operation."""


class OutOfBounds(SimError):
    """Global, shared or tensor memory address outside its allocation, or misaligned."""


class GlobalRace(RaceError):
    """Two programs of one launch, or two threads of one, write (or write and read) the same global address, or only one
    uses atomics there, and nothing orders the two."""


class ResourceError(SimError):
    """Shared or tensor memory does not fit the target."""


class KernelAssert(SimError):
    """`gl.device_assert` (or Triton's integer-overflow sanitizer) failed."""


class Livelock(SimError):
    """The step limit was reached; usually a spin loop that nothing can satisfy."""
