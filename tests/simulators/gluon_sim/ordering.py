"""What orders the programs of a launch: clocks, handed on by atomics of global memory that release and acquire.

An actor is a thread, or all that a CTA does asynchronously. Its accesses carry its number and a time; who comes after
them has that time in its clock. Inside a program clocks go the ways of the bits in machine.py, by
threads only: what an asynchronous operation does or completes tells nobody of global memory.

The warps of a partition are one actor, but one of them executes an atomic of a scalar: with it goes what the partition
did before its warps last met (a barrier of the partition, an arrival at an mbarrier, before which both Tritons have
one, or `bar.sync`). Triton 3.9 puts a barrier before such an atomic by itself, 3.6 does not. What it acquires goes to
all warps with the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Clock = dict[int, int]  # the last time, of each actor that is known
Numbers = npt.NDArray[np.int32]


def join(into: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if into.get(actor, 0) < time:
            into[actor] = time


class Actor:
    """Whose accesses to global memory are told apart by their time, which is `now`.

    clock: what every warp comes after.
    """

    def __init__(self, number: int, program: int, thread: bool) -> None:
        self.number, self.program, self.thread = number, program, thread
        self.clock: Clock = {}
        self.now = 1
        self.used = False  # accesses at this time

    def _next(self) -> int:
        """The time of the accesses so far; later ones have another."""
        self.now += self.used
        self.used = False
        return self.now - 1

    def meet(self) -> None:
        """A barrier of all warps."""
        self.clock[self.number] = self._next()

    def all_warps(self) -> Clock:
        """What is behind an arrival of all warps, which do not wait for each other."""
        return self.clock | {self.number: self._next()}


@dataclass(frozen=True)
class Order:
    """What an atomic orders. device: it is one for other programs too (scope gpu or sys); else a plain access."""

    acquire: bool = False
    release: bool = False
    device: bool = True


class Clocks:
    """Clocks by number, each once, so that a byte remembers a number. 0: the empty one."""

    def __init__(self) -> None:
        self.all: list[Clock] = [{}]
        self._numbers: dict[frozenset[tuple[int, int]], int] = {frozenset(): 0}

    def number(self, clock: Clock) -> int:
        key = frozenset(clock.items())
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(dict(clock))
        return self._numbers[key]

    def merged(self, numbers: Numbers, clock: Clock) -> Numbers:
        """Those of `numbers`, each joined with `clock`."""

        def merge(number: int) -> int:
            both = dict(self.all[number])
            join(both, clock)
            return self.number(both)

        different, place = _distinct(numbers)
        return np.array([merge(int(n)) for n in different], np.int32)[place]

    def where(self, numbers: Numbers, test: Callable[[Clock], bool]) -> npt.NDArray[np.bool_]:
        different, place = _distinct(numbers)
        return np.array([test(self.all[n]) for n in different], np.bool_)[place]

    def joined(self, numbers: Numbers) -> Clock:
        out: Clock = {}
        for n in _distinct(numbers)[0]:
            join(out, self.all[n])
        return out


def _distinct(numbers: Numbers) -> tuple[Numbers, npt.NDArray[np.intp]]:
    """Nearly always they are all the same."""
    if numbers.size and numbers.min() == numbers.max():
        return numbers[:1], np.zeros(numbers.size, np.intp)
    different, place = np.unique(numbers, return_inverse=True)
    return different, place.ravel()
