"""Memory descriptors: which bytes of shared or tensor memory a tile covers.

Both memories are bytes at their real (swizzled, padded, packed) addresses, so that views, slices and reinterpretations
alias exactly as they would on the device.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .dtypes import DType
from .errors import OutOfBounds
from .layouts import TMEM_COLUMN_BYTES, product, shared_offsets, shared_rank, tmem_offsets
from .mlir import Type

if TYPE_CHECKING:
    from .memory import Space

GRANULE = 4  # bytes; resolution of race and initialisation tracking


@dataclass(frozen=True)
class Footprint:
    """A set of granules: `[lo, hi)` entirely if `mask` is None, else bit k of mask is granule lo + k."""

    lo: int
    hi: int
    mask: int | None

    @staticmethod
    def of(offsets: npt.NDArray[np.int64], nbytes: int) -> Footprint:
        first = offsets.ravel() // GRANULE
        lo, hi = int(first.min()), int((offsets.max() + nbytes - 1) // GRANULE) + 1
        flags = np.zeros(hi - lo, np.bool_)
        for k in range(max(1, nbytes // GRANULE)):
            flags[first - lo + k] = True
        if flags.all():
            return Footprint(lo, hi, None)
        return Footprint(lo, hi, int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little"))

    def bits(self) -> int:
        """The set as an absolute bit mask."""
        m = (1 << (self.hi - self.lo)) - 1 if self.mask is None else self.mask
        return m << self.lo

    def overlaps(self, other: Footprint) -> bool:
        if self.hi <= other.lo or other.hi <= self.lo:
            return False
        if self.mask is None and other.mask is None:
            return True
        return bool(self.bits() & other.bits())

    def covers(self, other: Footprint) -> bool:
        if other.lo < self.lo or other.hi > self.hi:
            return False
        if self.mask is None:
            return True
        return not (other.bits() & ~self.bits())


class View:
    """A memory descriptor: the byte address of each element of a tile, plus how it was derived."""

    __slots__ = ("_index", "dt", "fp", "key", "label", "offsets", "space")

    def __init__(self, space: Space, offsets: npt.NDArray[np.int64], dt: DType, key: Hashable, label: str) -> None:
        self.space, self.offsets, self.dt, self.key, self.label = space, offsets, dt, key, label
        if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) + dt.nbytes > space.size):
            raise OutOfBounds(f"{label} reaches outside {space.name} memory ({space.size} bytes)")
        self.fp = Footprint.of(offsets, dt.nbytes)
        self._index: npt.NDArray[np.int64] | None = None

    @property
    def index(self) -> npt.NDArray[np.int64]:
        if self._index is None:
            self._index = self.offsets // self.dt.nbytes
        return self._index

    @property
    def address(self) -> int:
        return int(self.offsets.flat[0])

    def derive(self, step: Hashable, offsets: npt.NDArray[np.int64], label: str, dt: DType | None = None) -> View:
        key = (self.key, step)
        cached = self.space.views.get(key)
        if cached is None:
            cached = View(self.space, offsets, dt or self.dt, key, label)
            self.space.views[key] = cached
        return cached

    def twin(self, space: Space) -> View:
        """The same place in the memory of the other CTA of a pair."""
        key = ("twin", self.key)
        cached = space.views.get(key)
        if cached is None:
            cached = View(space, self.offsets, self.dt, self.key, f"{self.label} of CTA 1")
            space.views[key] = cached
        return cached

    def index_view(self, i: int) -> View:
        if not 0 <= i < self.offsets.shape[0]:
            raise OutOfBounds(f"index {i} of {self.label}, which has {self.offsets.shape[0]} buffers")
        return self.derive(("index", i), self.offsets[i], f"{self.label}[{i}]")

    def subslice(self, starts: tuple[int, ...], shape: tuple[int, ...]) -> View:
        rank = len(shape)
        sel = tuple(slice(s, s + n) for s, n in zip(starts[-rank:], shape, strict=True))
        part = self.offsets[sel]
        if part.shape != shape:
            raise OutOfBounds(f"slice {starts} of shape {shape} from {self.label} of shape {self.offsets.shape}")
        where = ",".join(f"{s}:{s + n}" for s, n in zip(starts[-rank:], shape, strict=True))
        return self.derive(("slice", starts, shape), part, f"{self.label}[{where}]")

    def transpose(self, order: tuple[int, ...]) -> View:
        return self.derive(("trans", order), self.offsets.transpose(order), self.label)

    def reshape(self, shape: tuple[int, ...]) -> View:
        return self.derive(("reshape", shape), self.offsets.reshape(shape), self.label)

    def reinterpret(self, ty: Type) -> View:
        key = ("as", ty.text)
        cached = self.space.views.get((self.key, key))
        if cached is not None:
            return cached
        offsets, _ = tile_offsets(ty)
        return self.derive(key, offsets + self.address, f"{self.label} as {ty.elem}{list(ty.shape)}", ty.dtype)


def tile_offsets(ty: Type) -> tuple[npt.NDArray[np.int64], int]:
    """Byte offsets of a possibly multi-buffered descriptor type, and its size in bytes (columns for TMEM)."""
    bits = ty.dtype.bits if ty.dtype.bits >= 8 else 8
    if ty.space == "tmem":
        tile_rank = min(2, len(ty.shape))
        tile, size = tmem_offsets(ty.enc, ty.shape[-tile_rank:], bits)
        stride = size * TMEM_COLUMN_BYTES
    else:
        tile_rank = shared_rank(ty.enc, len(ty.shape))
        tile, size = shared_offsets(ty.enc, ty.shape[len(ty.shape) - tile_rank :], bits)
        stride = size
    lead = ty.shape[: len(ty.shape) - tile_rank]
    if not lead:
        return tile, size
    count = product(lead)
    slots = np.arange(count, dtype=np.int64).reshape(lead + (1,) * tile_rank) * stride
    return slots + tile, size * count
