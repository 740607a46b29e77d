"""Execute a kernel that Triton compiled for gfx1151, instruction by instruction, on the CPU, and count what ran."""

import ctypes
import functools
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import elf
from .arguments import Range, buffer_of, pack
from .build import COUNTERS, TRACE, Job, Stats, interpreter
from .encoding import Program, encode
from .errors import EmulationError
from .parser import parse

# What registers start with, so that a read of one that was never written tends to show: a NaN in f32, and in the upper
# half of packed f16 and bf16. LDS and scratch are filled with its highest byte. A launch with another pattern whose
# results differ read something that it had not written.
POISON = 0xFFFFDEAD
MAX_STEPS = 10**10  # instructions of a launch: some minutes
FAILURES = {
    1: "memory access outside the arguments",
    2: "LDS access out of range",
    3: "scratch access out of range",
    4: "unknown instruction",
    5: "step limit reached",
    6: "jump out of the program",
}
CLASSES = (  # the first that matches
    ("wmma", r"v_wmma"),
    ("trans", r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_"),
    ("vopd", r"v_dual_"),  # a pair counts once
    ("valu", r"v_"),
    ("lds_load", r"ds_load"),
    ("lds_store", r"ds_store_"),
    ("lds_other", r"ds_"),
    ("wait", r"buffer_gl|s_waitcnt"),
    ("barrier", r"s_barrier"),
    ("scratch", r"scratch_"),
    ("global_load", r"(global|buffer|flat)_load"),
    ("global_store", r"(global|buffer|flat)_"),
    ("scalar_load", r"s_(buffer_)?load"),
    ("branch", r"s_(c?branch|endpgm|setpc|swappc)"),
    ("hint", r"s_(delay_alu|nop|clause|sendmsg|set_inst|sleep|setprio)"),
    ("scalar", r""),
)
# Of user SGPRs, in their order: bit of the descriptor's properties, count. Bit 3 is the kernarg pointer.
USER_SGPRS = ((0, 4), (1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (6, 1))
KERNARG_POINTER = 3

Trace = Callable[[int, str, Any, Any], None]


@dataclass(frozen=True)
class Executed:
    """One instruction of the program."""

    count: int  # times that waves executed it
    text: str
    location: str  # file:line of the source


@dataclass(frozen=True)
class Result:
    """What ran, summed over all waves. An instruction of a wave counts once, and so does a VOPD pair."""

    executed: int
    by_mnemonic: Counter[str]
    by_class: Counter[str]  # see CLASSES
    instructions: tuple[Executed, ...]  # in the order of the program
    lds_cycles: int  # by the model of 32 banks
    lds_conflict_free_cycles: int  # what they would be without bank conflicts
    lds_bytes: int
    cache_lines: int  # of 128 bytes, touched by global, flat and buffer accesses, summed over instructions
    memory_bytes: int
    branches_taken: int
    wmma_mismatches: int  # WMMAs whose lanes 16 to 31 of A or B do not repeat lanes 0 to 15
    seconds: float


@functools.cache
def issue_class(mnemonic: str) -> str:
    """Which of CLASSES it belongs to."""
    return next(name for name, pattern in CLASSES if re.match(pattern, mnemonic))


def _raise(stats: Stats, program: Program) -> None:
    where = f"instruction {stats.err_pc}"
    if 0 <= stats.err_pc < len(program.source):
        source = program.source[stats.err_pc]
        where = f"{source.text!r}" + (f" ({source.location})" if source.location else "")
    lane = f", lane {stats.err_lane}" if stats.err_lane >= 0 else ""
    size = f", {stats.err_size} bytes at {stats.err_address:#x}" if stats.err_size else ""
    raise EmulationError(f"{FAILURES[stats.err]}: {where}{lane}{size}")


def _result(program: Program, counts: Sequence[int], stats: Stats, seconds: float) -> Result:
    by_mnemonic, by_class, instructions = Counter[str](), Counter[str](), []
    for count, source in zip(counts, program.source, strict=True):
        if not source.name:  # the second half of a pair
            continue
        instructions.append(Executed(count, source.text, source.location))
        if count:
            by_mnemonic[source.name] += count
            by_class[issue_class(source.name)] += count
    counters = {name: getattr(stats, name) for name in COUNTERS}
    return Result(
        by_mnemonic=by_mnemonic, by_class=by_class, instructions=tuple(instructions), seconds=seconds, **counters
    )


def _traced(program: Program, trace: Trace | None) -> Any:
    if trace is None:
        return TRACE()

    def call(wave: int, index: int, vgprs: Any, sgprs: Any) -> None:
        views = np.ctypeslib.as_array(vgprs, (256, 32)), np.ctypeslib.as_array(sgprs, (128,))
        trace(wave, program.source[index].text, *views)

    return TRACE(call)


def run(
    program: Program, start: Callable[[Any, Any], int], ranges: Sequence[Range], trace: Trace | None, **sizes: int
) -> Result:
    """start(library, job) makes the interpreter execute the program. sizes: the other fields of `Job`."""
    length = len(program.source)
    counts, stats = (ctypes.c_uint64 * length)(), Stats()
    flat = [address for of in ranges for address in of]
    job = Job(
        program=program.instructions, dpp=program.dpp, counts=counts, stats=ctypes.pointer(stats),
        ranges=(ctypes.c_uint64 * (len(flat) + 2))(*flat, 0, 0), trace=_traced(program, trace), length=length,
        range_count=len(ranges), **sizes,
    )  # fmt: skip
    before = time.perf_counter()
    failed = start(interpreter(), ctypes.byref(job))
    seconds = time.perf_counter() - before
    if failed:
        _raise(stats, program)
    return _result(program, list(counts), stats, seconds)


# ---- Triton kernels


@dataclass(frozen=True)
class _Kernel:
    """A compiled kernel, read and encoded."""

    code: elf.CodeObject
    program: Program
    image: Any  # keeps the loaded segments alive
    image_range: Range


_kernels: dict[bytes, _Kernel] = {}


def _read(hsaco: bytes, text: str, name: str) -> _Kernel:
    key = hashlib.sha256(hsaco).digest()
    if key not in _kernels:
        code = elf.load(hsaco, name)
        image, image_range = buffer_of(code.image)
        symbols = {symbol: image_range[0] + at for symbol, at in code.symbols.items()}
        _kernels[key] = _Kernel(code, encode(parse(text), symbols), image, image_range)
    return _kernels[key]


def _user_sgprs(code: elf.CodeObject, kernarg: int) -> list[int]:
    found: list[int] = []
    for bit, count in USER_SGPRS:
        if code.properties >> bit & 1:
            found += [kernarg & 0xFFFFFFFF, kernarg >> 32] if bit == KERNARG_POINTER else [0] * count
    return (found + [0] * code.user_sgprs)[: code.user_sgprs]


def _words(values: Sequence[int]) -> Any:
    return (ctypes.c_uint32 * max(1, len(values)))(*values)


def launch(
    compiled: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    *,
    workgroups: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None,
    poison: bool | int = True,
    max_steps: int = MAX_STEPS,
    trace: Trace | None = None,
) -> Result:
    """Run a kernel over a grid; tensors are written in place.

    compiled: Triton's CompiledKernel. arguments: all of them, as in `kernel[grid](*arguments)`, on the CPU. workgroups:
    first and past-the-last index of a part of the grid, to run only that. poison: see POISON; False: registers, LDS and
    scratch start as zeros; an integer: another pattern. max_steps: instructions after which it gives up. trace: called
    before each instruction with (wave, text, vgprs[256, 32], sgprs[128]), views of the live state.
    """
    metadata = compiled.metadata
    if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
        raise NotImplementedError(f"{metadata.name}: kernels with scratch memory from the host are not modelled")
    kernel = _read(compiled.asm["hsaco"], compiled.asm["amdgcn"], metadata.name)
    code = kernel.code
    whole = (*grid, 1, 1)[:3]
    segment, ranges = pack(code, compiled.src, arguments, whole, metadata.num_warps * 32)
    kernarg, kernarg_range = buffer_of(segment + bytes(64))
    user = _user_sgprs(code, kernarg_range[0])
    first, last = workgroups or ((0, 0, 0), whole)

    def start(library: Any, job: Any) -> int:
        entry = kernel.program.labels[metadata.name]
        user_words = (_words(user), len(user), code.workgroup_ids)
        return int(library.run_grid(job, entry, _words(first), _words(last), *user_words))

    result = run(
        kernel.program, start, [*ranges, kernarg_range, kernel.image_range], trace, max_steps=max_steps,
        threads=metadata.num_warps * 32, lds_size=max(code.lds, metadata.shared), scratch_per_lane=code.scratch,
        poison=POISON if poison is True else int(poison),
    )  # fmt: skip
    del kernarg  # which had to live until here
    return result
