"""The C interpreter: built on demand into a cache folder, and its structures for ctypes."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from .errors import EmulatorUnavailable

SOURCES = Path(__file__).parent / "interpreter"
MAIN = SOURCES / "interpreter.c"
# No contraction: an FMA only where the instruction is one. -fwrapv: integers wrap as registers do.
FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-w", "-shared",
    "-fPIC",
)  # fmt: skip
CODE_BASE = 1 << 52  # address of instruction 0, as machine.h has it


class Operand(ctypes.Structure):
    _fields_: ClassVar = [("code", ctypes.c_int32), ("mods", ctypes.c_uint32), ("imm", ctypes.c_uint64)]
    code: int
    mods: int
    imm: int


class Ins(ctypes.Structure):
    """One encoded instruction."""

    _fields_: ClassVar = [
        *((name, ctypes.c_uint32) for name in ("op", "aux")),
        *((name, Operand) for name in ("d", "d2", "a", "b", "c")),
        *((name, ctypes.c_int32) for name in ("target", "dpp")),
        *((name, ctypes.c_uint32) for name in ("omod", "dual")),
        ("offset", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("opsel", "opsel_hi", "neg_lo", "neg_hi", "flags")),
    ]
    op: int
    aux: int
    d: Operand
    d2: Operand
    a: Operand
    b: Operand
    c: Operand
    target: int
    dpp: int
    omod: int
    dual: int
    offset: int
    opsel: int
    opsel_hi: int
    neg_lo: int
    neg_hi: int
    flags: int


class Dpp(ctypes.Structure):
    """One permutation of lanes."""

    _fields_: ClassVar = [
        ("source", ctypes.c_int8 * 32),
        *((name, ctypes.c_uint32) for name in ("enable", "bound_ctrl", "fetch_inactive")),
    ]
    source: Any
    enable: int
    bound_ctrl: int
    fetch_inactive: int


COUNTERS = (
    "executed", "lds_cycles", "lds_conflict_free_cycles", "cache_lines", "memory_bytes", "lds_bytes", "wmma_mismatches",
    "branches_taken",
)  # fmt: skip


class Stats(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_uint64) for name in (*COUNTERS, "err_address")),
        *((name, ctypes.c_int32) for name in ("err", "err_pc", "err_lane")),
        ("err_size", ctypes.c_uint32),
    ]
    err_address: int
    err: int
    err_pc: int
    err_lane: int
    err_size: int


_U32P = ctypes.POINTER(ctypes.c_uint32)
TRACE = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, _U32P, _U32P)


class Job(ctypes.Structure):
    """Everything that one run is given."""

    _fields_: ClassVar = [
        ("program", ctypes.POINTER(Ins)),
        ("dpp", ctypes.POINTER(Dpp)),
        ("counts", ctypes.POINTER(ctypes.c_uint64)),
        ("stats", ctypes.POINTER(Stats)),
        ("ranges", ctypes.POINTER(ctypes.c_uint64)),
        ("trace", TRACE),
        ("max_steps", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("length", "range_count")),
        *((name, ctypes.c_uint32) for name in ("threads", "lds_size", "scratch_per_lane", "poison")),
    ]


def _cpu() -> str:
    """What -march=native depends on."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def compile_interpreter(folder: Path, compiler: str) -> Path:
    """Path of the shared library in `folder`, built if it is not there; its name depends on all that goes in."""
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir())] + [" ".join((compiler, *FLAGS, _cpu())).encode()]
    library = folder / f"{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"
    if library.exists():
        return library
    if shutil.which(compiler) is None:
        raise EmulatorUnavailable(f"the gfx1151 emulator needs a C compiler: {compiler!r} not found (set CC)")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = library.with_suffix(f".{os.getpid()}")  # other processes may build at the same time
    done = subprocess.run(
        [compiler, *FLAGS, "-o", str(fresh), str(MAIN), "-lm"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EmulatorUnavailable(f"{compiler!r} cannot build the gfx1151 emulator: {done.stderr.strip()[:400]}")
    fresh.replace(library)
    return library


@functools.cache
def interpreter() -> Any:
    """The loaded library."""
    default = Path(tempfile.gettempdir()) / f"lazymax-gfx1151-emulator-{os.getuid()}"
    folder = Path(os.environ.get("LAZYMAX_EMULATOR_CACHE", default))
    library = ctypes.CDLL(str(compile_interpreter(folder, os.environ.get("CC", "cc"))))
    library.operation_name.restype = ctypes.c_char_p
    for what, structure in enumerate((Ins, Dpp, Stats, Job)):
        assert library.size_of(what) == ctypes.sizeof(structure), f"{structure.__name__} differs from machine.h"
    return library


@functools.cache
def operations() -> dict[str, tuple[int, str]]:
    """Number and group of every operation that the interpreter knows."""
    library, number = interpreter(), 0
    found: dict[str, tuple[int, str]] = {}
    group: list[tuple[str, int]] = []
    while (raw := library.operation_name(number)) is not None:
        name = raw.decode()
        if name.startswith("|"):
            found.update({member: (at, name[1:]) for member, at in group})
            group = []
        else:
            group.append((name, number))
        number += 1
    return found
