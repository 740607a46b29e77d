"""Entry points: :func:`simulate` one launch, or :func:`activate` the simulator for unmodified host code."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from .arguments import marshal
from .errors import ResourceError, SimError, Unsupported
from .frontend import TARGETS, Program, lower_call
from .global_memory import GlobalMemory
from .interpreter import Executable
from .layouts import TMEM_COLUMNS
from .machine import Cta, Stats
from .operations import HANDLERS
from .scheduler import run_programs

Dims = tuple[int, int, int]


@dataclass(frozen=True)
class Options:
    """How to simulate. Everything random is a function of `seed`."""

    target: str = "sm_100"
    seed: int = 0
    races: bool = True  # happens-before checking of shared and tensor memory
    global_races: bool = True  # programs of one launch must not touch each other's output, but in order
    physical_alloc: bool = True  # use the compiler's own shared- and tensor-memory addresses
    insert_fences: bool = True  # run the compiler's proxy-fence insertion first (with physical_alloc only)
    debug: bool = True  # compile device_assert and the integer-overflow checks in
    resident: int = 1  # how many programs run interleaved; the next starts when one has ended
    programs: Callable[[Dims], bool] | None = None  # run only these program ids
    transform: Callable[[Program], Program] | None = None  # change the program first (see mutate.py)
    max_steps: int = 5_000_000

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"target: {self.target!r} is not one of {', '.join(TARGETS)}")


@dataclass
class Report:
    """One launch that ended well."""

    program: Program
    stats: Stats


def simulate(kernel: Any, grid: Any, *args: Any, options: Options | None = None, **kwargs: Any) -> Report:
    """Run `kernel[grid](*args, **kwargs)` on the simulated device. Tensors are CPU tensors, updated in place."""
    opt = options or Options()
    kwargs = {"debug": opt.debug} | kwargs
    bound = lower_call(
        kernel, args, kwargs, opt.target, physical_alloc=opt.physical_alloc, insert_fences=opt.insert_fences
    )
    program = bound.program if opt.transform is None else opt.transform(bound.program)
    _check_resources(program, opt.target)
    if program.executable is None:
        program.executable = Executable(program.module, program.num_warps, HANDLERS)
    if callable(grid):
        grid = grid(bound.bound_args)
    x, y, z = (*(int(g) for g in grid), 1, 1)[:3]
    gmem = GlobalMemory(races=opt.global_races and x * y * z * program.module.ctas > 1)
    types = [a.type for a in program.module.entry.regions[0].blocks[0].args]
    stats = Stats()
    try:
        _run(program.executable, (x, y, z), marshal(bound.runtime_args, types, gmem), gmem, opt, stats)
    except SimError as e:
        e.context.append(f"kernel {program.name}, target {opt.target}, seed {opt.seed}")
        raise
    return Report(program, stats)


def _check_resources(program: Program, target: str) -> None:
    """What the compiler's allocation takes: buffers and the scratch of its own operations."""
    limit = TARGETS[target].shared_bytes
    if (program.shared_bytes or 0) > limit:
        raise ResourceError(f"{program.name} needs {program.shared_bytes} bytes of shared memory, {target} has {limit}")
    if (program.tmem_columns or 0) > TMEM_COLUMNS:
        raise ResourceError(f"{program.name} needs {program.tmem_columns} columns of tensor memory of {TMEM_COLUMNS}")


def _run(exe: Executable, dims: Dims, values: list[Any], gmem: GlobalMemory, opt: Options, stats: Stats) -> None:
    """Run the programs, `opt.resident` at a time, started in the order of their ids."""
    rng = random.Random(opt.seed)
    limit = TARGETS[opt.target].shared_bytes if opt.physical_alloc else 4 << 20
    ids = [(x, y, z) for z, y, x in itertools.product(range(dims[2]), range(dims[1]), range(dims[0]))]
    if opt.programs is not None:
        ids = [i for i in ids if opt.programs(i)]
    pending = deque(ids)

    def start() -> list[Cta]:
        ctas: list[Cta] = []
        if pending:
            i, first = pending.popleft(), None
            for _ in range(exe.module.ctas):
                cta = Cta(i, dims, gmem, rng, stats, pending=pending, smem_bytes=limit, races=opt.races, first=first)
                ctas.append(cta)
                first = cta.ctas[0]
            for cta in ctas:
                exe.start(cta, values)
            stats.programs += 1
        return ctas

    with np.errstate(all="ignore"):
        run_programs(start, opt.resident, rng, opt.max_steps)


class Session:
    """What :func:`activate` yields: the launches that were simulated."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.reports: list[Report] = []


@contextlib.contextmanager
def activate(options: Options | None = None) -> Iterator[Session]:
    """Inside the block `kernel[grid](...)` of any kernel runs on the simulator."""
    session = Session(options or Options())

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        if warmup:
            raise Unsupported("warmup under the simulator")
        session.reports.append(simulate(self, grid, *args, options=session.options, **kwargs))

    with mock.patch.object(GluonJITFunction, "run", run), mock.patch.object(JITFunction, "run", run):
        yield session
