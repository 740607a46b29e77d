"""Global memory: host allocations at made-up addresses, with bounds and who touched what.

Bounds are those of the allocation (a tensor's storage), not of a view into it. What one thread touches, another may,
of its program or another, only where that is ordered (ordering.py) or both read or both use atomics. The asynchronous
operations of a program are checked against other programs only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .dtypes import Array, DType
from .errors import GlobalRace, OutOfBounds, Unsupported
from .ordering import Actor, Clock, Clocks, Numbers, Order, join

READ, WRITTEN, UPDATED = "read", "written", "updated by atomics"
CONFLICTS = {READ: (WRITTEN, UPDATED), WRITTEN: (READ, UPDATED, WRITTEN), UPDATED: (READ, WRITTEN)}
RELAXED = Order()


class Buffer:
    """One host allocation. For each byte where an element began: `users`, the clock of those who did each, and
    `released`, the clock that an atomic finds there which acquires."""

    def __init__(self, base: int, data: npt.NDArray[np.uint8], name: str, memory: GlobalMemory) -> None:
        self.base, self.data, self.name, self.memory = base, data, name, memory
        self.end = base + data.size
        self.users: dict[str, Numbers] = {}
        self.released: Numbers | None = None

    def elements(self, dt: DType) -> Array:
        return self.data[: self.data.size // dt.store.itemsize * dt.store.itemsize].view(dt.store)

    def note(self, how: str, at: npt.NDArray[np.int64], by: Actor, what: str) -> None:
        """Remember an access to the bytes `at`. It comes after all that it conflicts with, or this is a race."""
        for done in CONFLICTS[how]:
            if done in self.users:
                self._refuse(done, "of" if how == READ else "to", at, by, what)
        if how not in self.users:
            self.users[how] = np.zeros(self.data.size, np.int32)
        users = self.users[how]
        by.used = True
        users[at] = self.memory.clocks.merged(users[at], {by.number: by.now})
        if how == WRITTEN and self.released is not None:
            self.released[at] = 0

    def _refuse(self, done: str, to: str, at: npt.NDArray[np.int64], by: Actor, what: str) -> None:
        def unordered(users: Clock) -> list[Actor]:
            late = [self.memory.actors[n] for n, time in users.items() if by.clock.get(n, 0) < time]
            return [a for a in late if a.program != by.program or (a.thread and by.thread and a is not by)]

        clocks, users = self.memory.clocks, self.users[done][at]
        bad = clocks.where(users, lambda clock: bool(unordered(clock)))
        if bad.any():
            others = {a.program for a in unordered(clocks.all[users[bad][0]])}
            who = "several programs of the same launch"
            if len(others) == 1:
                who = f"program {next(iter(others))} of the same launch"
            if others == {by.program}:
                who = "another partition of it"
            raise GlobalRace(
                f"{what} {to} '{self.name}' by program {by.program}: {int(bad.sum())} elements were {done} "
                f"by {who}, and nothing orders that before"
            )

    def synchronise(self, at: npt.NDArray[np.int64], by: Actor, order: Order) -> None:
        """Of an atomic that has been performed. One that orders nothing keeps what is released there."""
        if order.acquire and self.released is not None:
            join(by.clock, self.memory.clocks.joined(self.released[at]))
        if order.release:
            if self.released is None:
                self.released = np.zeros(self.data.size, np.int32)
            self.released[at] = self.memory.clocks.merged(self.released[at], by.clock)


class GlobalMemory:
    """Fake 64-bit addresses for host arrays, with gaps between them so that stray pointers are caught."""

    GAP = 1 << 20

    def __init__(self, races: bool) -> None:
        self.buffers: list[Buffer] = []
        self.by_storage: dict[int, Buffer] = {}
        self.next = 1 << 40
        self.races = races
        self.clocks = Clocks()
        self.actors: list[Actor] = []
        self.changes = 0  # how often something may have changed
        # device-made TMA descriptors: address -> (base, dims, byte strides, fill with nan)
        self.descriptors: dict[int, tuple[int, list[int], list[int], bool]] = {}

    def actor(self, program: int, thread: bool) -> Actor:
        self.actors.append(Actor(len(self.actors), program, thread))
        return self.actors[-1]

    def add_bytes(self, data: npt.NDArray[np.uint8], name: str) -> Buffer:
        buf = Buffer(self.next, data, name, self)
        self.next = -(-(buf.end + self.GAP) // 256) * 256
        self.buffers.append(buf)
        return buf

    def address_of(self, tensor: torch.Tensor, name: str) -> int:
        """Register a CPU torch tensor (by storage) and return the address of its first element."""
        if tensor.device.type != "cpu":
            raise Unsupported(f"argument {name} is on {tensor.device}; the simulator takes CPU tensors")
        storage = tensor.untyped_storage()
        key: int = storage.data_ptr()
        if key not in self.by_storage:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.by_storage[key] = self.add_bytes(raw.numpy(), name)
        return self.by_storage[key].base + int(tensor.data_ptr()) - key

    def _locate(self, lo: int, hi: int) -> Buffer | None:
        for b in self.buffers:
            if b.base <= lo and hi <= b.end:
                return b
        return None

    def find(self, addr: npt.NDArray[np.int64], nbytes: int, what: str) -> Buffer:
        """The buffer that holds `nbytes` at each address, a multiple of that."""
        lo, hi = int(addr.min()), int(addr.max()) + nbytes
        buf = self._locate(lo, hi)
        if buf is None:
            starts = np.array([b.base for b in self.buffers], np.int64)
            ends = np.array([b.end for b in self.buffers], np.int64)
            k = np.searchsorted(starts, addr, side="right") - 1
            bad = (k < 0) | (addr + nbytes > ends[np.maximum(k, 0)])
            if bad.any():
                a = int(addr[bad][0])
                near = min(self.buffers, key=lambda b: min(abs(a - b.base), abs(a - b.end)))
                raise OutOfBounds(
                    f"{what} at byte {a - near.base} of '{near.name}', which has {near.data.size} bytes "
                    f"({int(bad.sum())} of {addr.size} lanes are out of bounds)"
                )
            raise Unsupported(f"{what} through pointers into several tensors at once")
        if ((addr - buf.base) % nbytes).any():
            raise OutOfBounds(f"{what}: misaligned address in '{buf.name}'")
        return buf

    def load(self, addr: npt.NDArray[np.int64], dt: DType, by: Actor, what: str = "load") -> Array:
        flat = addr.ravel()
        buf = self.find(flat, dt.nbytes, what)
        if self.races:
            buf.note(READ, flat - buf.base, by, what)
        return dt.decode(buf.elements(dt)[(flat - buf.base) // dt.nbytes]).reshape(addr.shape)

    def store(self, addr: npt.NDArray[np.int64], value: Any, dt: DType, by: Actor, what: str = "store") -> None:
        flat = addr.ravel()
        buf = self.find(flat, dt.nbytes, what)
        if self.races:
            buf.note(WRITTEN, flat - buf.base, by, what)
        buf.elements(dt)[(flat - buf.base) // dt.nbytes] = dt.encode(value).ravel()
        self.changes += 1

    def update(
        self,
        addr: npt.NDArray[np.int64],
        dt: DType,
        by: Actor,
        change: Callable[[Array], Any],
        order: Order = RELAXED,
        what: str = "atomic",
    ) -> Array:
        """An atomic on different addresses: what was there before. `change` makes of it what to write, or None."""
        buf = self.find(addr, dt.nbytes, what)
        at, elements, index = addr - buf.base, buf.elements(dt), (addr - buf.base) // dt.nbytes
        if self.races:
            buf.note(UPDATED if order.device else WRITTEN, at, by, what)
        raw = elements[index]
        old = dt.decode(raw)
        new = change(old)
        if new is not None:
            elements[index] = dt.encode(new)
            self.changes += elements[index].tobytes() != raw.tobytes()
        if self.races and order.device:
            buf.synchronise(at, by, order if new is not None else Order(order.acquire))
        return old

    def watch(self, addr: npt.NDArray[np.int64], dt: DType) -> Callable[[], bool]:
        """Whether what is there has changed since."""
        buf = self.find(addr, dt.nbytes, "atomic")
        elements, index = buf.elements(dt), (addr - buf.base) // dt.nbytes
        before = elements[index].tobytes()
        return lambda: elements[index].tobytes() != before
