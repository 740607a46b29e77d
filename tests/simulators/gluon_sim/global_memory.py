"""Global memory: host allocations at made-up addresses, with bounds and ownership of what programs write.

Bounds are those of the allocation (a tensor's storage), not of a view into it. Atomics of several programs may meet,
with nothing else of another program. Between the partitions of one program nothing is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .dtypes import Array, DType
from .errors import GlobalRace, OutOfBounds, Unsupported

SEVERAL = -1


class Buffer:
    """One host allocation. `writer`, `reader`, `updater`: for each byte, 1 + the program that wrote it, read it or used
    an atomic there, or SEVERAL."""

    def __init__(self, base: int, data: npt.NDArray[np.uint8], name: str) -> None:
        self.base, self.data, self.name = base, data, name
        self.end = base + data.size
        self.writer: npt.NDArray[np.int32] | None = None
        self.reader: npt.NDArray[np.int32] | None = None
        self.updater: npt.NDArray[np.int32] | None = None

    def read(self, at: npt.NDArray[np.int64], program: int, what: str) -> None:
        """Note a read of the bytes `at`, which no other program may have written."""
        self._refuse(self.writer, at, program, what, "of", "written")
        self._refuse(self.updater, at, program, what, "of", "updated by atomics")
        self.reader = self._shared(self.reader, at, program)

    def write(self, at: npt.NDArray[np.int64], program: int, what: str) -> None:
        """Note a write of the bytes `at`, which no other program may have touched."""
        self._refuse(self.reader, at, program, what, "to", "read")
        self._refuse(self.updater, at, program, what, "to", "updated by atomics")
        self._refuse(self.writer, at, program, what, "to", "written")
        if self.writer is None:
            self.writer = np.zeros(self.data.size, np.int32)
        self.writer[at] = program + 1

    def update(self, at: npt.NDArray[np.int64], program: int, what: str) -> None:
        """Note an atomic on the bytes `at`, which other programs may have touched by atomics only."""
        self._refuse(self.reader, at, program, what, "to", "read")
        self._refuse(self.writer, at, program, what, "to", "written")
        self.updater = self._shared(self.updater, at, program)

    def _shared(
        self, users: npt.NDArray[np.int32] | None, at: npt.NDArray[np.int64], program: int
    ) -> npt.NDArray[np.int32]:
        """`users`, with this one too."""
        if users is None:
            users = np.zeros(self.data.size, np.int32)
        before = users[at]
        users[at] = np.where((before == 0) | (before == program + 1), program + 1, SEVERAL)
        return users

    def _refuse(
        self,
        users: npt.NDArray[np.int32] | None,
        at: npt.NDArray[np.int64],
        program: int,
        what: str,
        to: str,
        done: str,
    ) -> None:
        if users is None:
            return
        owners = users[at]
        bad = (owners != 0) & (owners != program + 1)
        if bad.any():
            first = int(owners[bad][0])
            who = "several programs" if first == SEVERAL else f"program {first - 1}"
            raise GlobalRace(
                f"{what} {to} '{self.name}' by program {program}: {int(bad.sum())} elements were {done} "
                f"by {who} of the same launch"
            )


class GlobalMemory:
    """Fake 64-bit addresses for host arrays, with gaps between them so that stray pointers are caught."""

    GAP = 1 << 20

    def __init__(self, races: bool) -> None:
        self.buffers: list[Buffer] = []
        self.by_storage: dict[int, Buffer] = {}
        self.next = 1 << 40
        self.races = races
        # device-made TMA descriptors: address -> (base, dims, byte strides, fill with nan)
        self.descriptors: dict[int, tuple[int, list[int], list[int], bool]] = {}

    def add_bytes(self, data: npt.NDArray[np.uint8], name: str) -> Buffer:
        buf = Buffer(self.next, data, name)
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

    def load(
        self, addr: npt.NDArray[np.int64], dt: DType, program: int, what: str = "load", atomic: bool = False
    ) -> Array:
        flat = addr.ravel()
        buf = self.find(flat, dt.nbytes, what)
        if self.races:
            (buf.update if atomic else buf.read)(flat - buf.base, program, what)
        raw = buf.data[: buf.data.size // dt.store.itemsize * dt.store.itemsize].view(dt.store)
        return dt.decode(raw[(flat - buf.base) // dt.nbytes]).reshape(addr.shape)

    def store(
        self,
        addr: npt.NDArray[np.int64],
        value: Any,
        dt: DType,
        program: int,
        what: str = "store",
        atomic: bool = False,
    ) -> None:
        flat = addr.ravel()
        buf = self.find(flat, dt.nbytes, what)
        if self.races:
            (buf.update if atomic else buf.write)(flat - buf.base, program, what)
        raw = buf.data[: buf.data.size // dt.store.itemsize * dt.store.itemsize].view(dt.store)
        raw[(flat - buf.base) // dt.nbytes] = dt.encode(value).ravel()
