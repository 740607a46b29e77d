"""Execute a few hand-written instructions on given registers, to test what single instructions do."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arguments import Range, memory_of
from .emulator import MAX_STEPS, POISON, Result, Trace, run
from .encoding import encode
from .parser import parse

EXEC = 126
ZERO_AT_START = (106, 107, 124, 127)  # vcc, null, upper half of exec


@dataclass(frozen=True)
class Registers:
    """State at the end of a text."""

    vgprs: npt.NDArray[np.uint32]  # (waves, 256, 32)
    sgprs: npt.NDArray[np.uint32]  # (waves, 128)
    result: Result

    def v(self, index: int, dtype: Any = np.uint32, count: int = 1) -> npt.NDArray[Any]:
        """A VGPR of wave 0, (32,), as `dtype`; of a narrow dtype (32, 2). count: several, (count, 32, ...)."""
        found = np.ascontiguousarray(self.vgprs[0, index : index + count]).view(dtype).reshape(count, 32, -1)
        per_lane: npt.NDArray[Any] = found[..., 0] if found.shape[-1] == 1 else found
        return per_lane[0] if count == 1 else per_lane


def _bits(values: Any) -> npt.NDArray[np.uint32]:
    """Register contents: 4-byte values as they are, pairs of 2-byte values packed; Python numbers as 32 bits."""
    array = np.atleast_1d(values)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype == np.int64:
        array = (array & 0xFFFFFFFF).astype(np.uint32)
    bits = np.ascontiguousarray(array).view(np.uint32)
    return bits if array.dtype.itemsize == 4 else bits[..., 0]


def run_text(
    text: str,
    *,
    vgprs: Mapping[int, Any] | None = None,
    sgprs: Mapping[int, Any] | None = None,
    memory: Mapping[int, npt.NDArray[Any]] | None = None,
    waves: int = 1,
    lds: int = 0,
    scratch: int = 0,
    max_steps: int = MAX_STEPS,
    trace: Trace | None = None,
) -> Registers:
    """Execute `text`, to which an s_endpgm is added, by one workgroup.

    vgprs: per register the lanes' values, (32,) or (waves, 32) of 4 bytes (pairs of 2 bytes: (32, 2)), or one number.
    sgprs: per register a number, or one per wave. memory: arrays that may be accessed; the address of each goes to the
    pair of SGPRs from the given one on. lds, scratch: bytes (of scratch, per lane).
    """
    program = encode(parse(text + "\n s_endpgm\n"))
    v = np.full((waves, 256, 32), POISON, np.uint32)
    s = np.full((waves, 128), POISON, np.uint32)
    s[:, ZERO_AT_START], s[:, EXEC] = 0, 0xFFFFFFFF
    ranges: list[Range] = []
    for index, array in (memory or {}).items():
        ranges.append(memory_of(array))
        s[:, index], s[:, index + 1] = array.ctypes.data & 0xFFFFFFFF, array.ctypes.data >> 32
    for index, values in (sgprs or {}).items():
        s[:, index] = _bits(values)
    for index, values in (vgprs or {}).items():
        v[:, index] = _bits(values)
    pointer = ctypes.POINTER(ctypes.c_uint32)

    def start(library: Any, job: Any) -> int:
        return int(library.run_registers(job, v.ctypes.data_as(pointer), s.ctypes.data_as(pointer)))

    result = run(
        program, start, ranges, trace, max_steps=max_steps, threads=waves * 32, lds_size=lds, scratch_per_lane=scratch,
        poison=POISON,
    )  # fmt: skip
    return Registers(v, s, result)
