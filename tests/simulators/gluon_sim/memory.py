"""Shared and tensor memory of one program: bytes, what of them has been written, and who may touch them next.

Races and unwritten memory are tracked in granules of 4 bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import Array, DType
from .errors import MissingFence, RaceError, ResourceError, UninitialisedRead
from .layouts import TMEM_COLUMN_BYTES
from .mlir import Type
from .views import GRANULE, Footprint, View, tile_offsets

if TYPE_CHECKING:
    from .machine import Engine, Thread


class Event:
    """Something that happened. `vis` is the bit set of agents that are ordered after it."""

    __slots__ = ("vis",)

    def __init__(self, vis: int) -> None:
        self.vis = vis


class Access(Event):
    """One remembered read ("r") or write ("w").

    `engine`: of an asynchronous access; `seq` is the number of its operation there.
    """

    __slots__ = ("engine", "fenced", "fp", "kind", "proxy", "seq", "thread", "view", "what", "where")

    def __init__(self, kind: str, view: View, thread: Thread, what: str, where: str) -> None:
        super().__init__(thread.bit)
        self.kind, self.view, self.fp = kind, view, view.fp
        self.thread, self.what, self.where = thread, what, where
        self.engine: Engine | None = None
        self.seq, self.proxy, self.fenced = 0, "generic", False

    def __str__(self) -> str:
        verb = "write" if self.kind == "w" else "read"
        return f"{self.what} ({verb} of {self.view.label}) by {self.thread.name} at {self.where}"


class Space:
    """Shared memory or tensor memory of one program instance."""

    def __init__(self, name: str, size: int, races: bool) -> None:
        self.name, self.size, self.races = name, size, races
        self.buf = np.full(size, 0xFF, np.uint8)  # NaN in every floating-point type
        self.typed: dict[Any, Array] = {}
        self.init = 0
        self.records: list[Access] = []
        self.views: dict[Hashable, View] = {}
        self.top = 0
        self.peak = 0

    # ---- allocation

    def alloc(self, ty: Type, label: str, base: int | None, unique: int) -> View:
        offsets, size = tile_offsets(ty)
        if self.name == "tensor":
            size *= TMEM_COLUMN_BYTES
        if base is None:
            align = 1024 if self.name == "shared" and size >= 1024 else 16
            base = -(-self.top // align) * align
            self.top = base + size
        self.peak = max(self.peak, base + size)
        if base + size > self.size:
            unit = "bytes" if self.name == "shared" else "bytes (512 columns)"
            raise ResourceError(f"{label} needs {self.name} memory up to {base + size} of {self.size} {unit}")
        fp_bits = ((1 << -(-size // GRANULE)) - 1) << (base // GRANULE)
        self.init &= ~fp_bits
        return View(self, offsets + base, ty.dtype, ("alloc", unique), label)

    # ---- data

    def _typed(self, dt: DType) -> Array:
        arr = self.typed.get(dt.store)
        if arr is None:
            arr = self.buf[: self.size // dt.store.itemsize * dt.store.itemsize].view(dt.store)
            self.typed[dt.store] = arr
        return arr

    def read(self, view: View, what: str) -> Array:
        missing = view.fp.bits() & ~self.init
        if missing:
            first = (missing & -missing).bit_length() - 1
            n = bin(missing).count("1")
            raise UninitialisedRead(
                f"{what} reads {view.label}: {n} of {bin(view.fp.bits()).count('1')} words hold no data "
                f"(first at byte {first * GRANULE}); nothing has written them, or their writer has not landed"
            )
        return view.dt.decode(self._typed(view.dt)[view.index])

    def write(self, view: View, value: Any, part: slice | None = None) -> None:
        """Store a whole tile, or only elements `part` of it in row-major order."""
        data = view.dt.encode(value)
        if part is None:
            self._typed(view.dt)[view.index] = data
            self.init |= view.fp.bits()
        else:
            self._typed(view.dt)[view.index.ravel()[part]] = data.ravel()[part]
            self.init |= Footprint.of(view.offsets.ravel()[part], view.dt.nbytes).bits()

    def poison(self, view: View) -> None:
        """An asynchronous write is outstanding: the old contents may no longer be read."""
        self._typed(view.dt)[view.index] = np.frombuffer(b"\xff" * view.dt.store.itemsize, view.dt.store)[0]
        self.init &= ~view.fp.bits()

    # ---- ordering

    def access(self, rec: Access) -> None:
        """Check a new access against every remembered one and remember it."""
        thread, engine, kind = rec.thread, rec.engine, rec.kind
        know = thread.bit | (engine.bit if engine is not None else 0)
        keep: list[Access] = []
        for old in self.records:
            if not old.fp.overlaps(rec.fp):
                keep.append(old)
                continue
            if kind == "r" and old.kind == "r":
                same = old.thread is thread and old.engine is engine and old.proxy == rec.proxy
                if not (same and (engine is None or engine.in_order) and rec.fp.covers(old.fp)):
                    keep.append(old)
                continue
            if self.races:
                if not old.vis & know:
                    raise self._race(rec, old)
                if self.name == "shared" and rec.proxy == "async" and old.proxy == "generic" and not old.fenced:
                    raise MissingFence(
                        f"missing fence_async_shared: {rec.what} on {rec.view.label} by {thread.name} uses the async "
                        f"proxy, but the memory was last used through the generic proxy: {old}",
                        rec.where,
                    )
            if not (kind == "w" and rec.fp.covers(old.fp)):
                keep.append(old)
        keep.append(rec)
        self.records = keep

    def _race(self, new: Access, old: Access) -> RaceError:
        hint = "no barrier orders the two"
        if old.engine is not None:
            hint = "nothing has waited for that asynchronous operation yet"
        verb = "writes" if new.kind == "w" else "reads"
        return RaceError(
            f"race on {self.name} memory: {new.what} by {new.thread.name} {verb} {new.view.label}, "
            f"not ordered after {old}; {hint}",
            new.where,
        )
