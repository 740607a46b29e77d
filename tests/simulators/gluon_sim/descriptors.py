"""TMA descriptors: what the hardware would refuse, and the boxes that are copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .dtypes import DType
from .errors import SimError
from .machine import Thread


@dataclass
class TensorDesc:
    """A strided global tensor and the shape of a box."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    box: tuple[int, ...]
    dt: DType
    fill: float
    name: str
    halved: int | None = None  # the dimension of which `box` is half: of a pair of CTAs each copies its own

    def of(self, th: Thread, coords: tuple[int, ...]) -> tuple[int, ...]:
        """Where the box of a CTA begins, from where that of the pair does."""
        return tuple(at + (th.cta.rank * self.box[dim] if dim == self.halved else 0) for dim, at in enumerate(coords))

    def addresses(self, coords: tuple[int, ...]) -> tuple[Any, Any]:
        """Addresses of one box and the mask of elements inside the tensor."""
        addr = np.int64(self.address)
        mask: Any = np.True_
        rank = len(self.box)
        for d in range(rank):
            idx = coords[d] + np.arange(self.box[d], dtype=np.int64)
            ok = (idx >= 0) & (idx < self.shape[d])
            shape = [1] * rank
            shape[d] = -1
            addr = addr + (idx * (self.strides[d] * self.dt.nbytes)).reshape(shape)
            mask = mask & ok.reshape(shape)
        return np.broadcast_to(addr, self.box), np.broadcast_to(mask, self.box)

    def check(self) -> None:
        if self.address % 16:
            raise SimError(f"TMA descriptor of {self.name}: base address is not 16-byte aligned")
        for s in self.strides[:-1]:
            if s * self.dt.nbytes % 16:
                raise SimError(f"TMA descriptor of {self.name}: stride {s} is not a multiple of 16 bytes")
        if self.strides[-1] != 1:
            raise SimError(f"TMA descriptor of {self.name}: last stride is {self.strides[-1]}")
        if any(b > 256 for b in self.box[:-1]):
            raise SimError(f"TMA descriptor of {self.name}: box {self.box} has a dimension over 256")

    def load(self, th: Thread, coords: tuple[int, ...], what: str) -> Any:
        addr, mask = self.addresses(coords)
        out = np.full(self.box, self.fill, self.dt.compute)
        if mask.any():
            out[mask] = th.cta.gmem.load(addr[mask], self.dt, th.cta.loading, what)
        return out

    def store(self, th: Thread, coords: tuple[int, ...], value: Any, what: str) -> None:
        addr, mask = self.addresses(coords)
        if mask.any():
            th.cta.gmem.store(addr[mask], value[mask], self.dt, th.cta.asynchronous, what)
