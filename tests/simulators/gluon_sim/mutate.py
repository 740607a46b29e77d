"""Mutation testing of synchronisation: drop or weaken each synchronising operation and see whether it is noticed.

A mutant that survives either removes something redundant or marks a blind spot of the checks; both are worth a look.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .api import Options
from .errors import SimError
from .frontend import Program
from .mlir import Op, Region, walk
from .operations.barriers import FLIP
from .operations.shared import PARTITION_BARRIERS
from .operations.tensor_cores import NO_COMMIT

DROP, TWICE, PARITY, FEWER = "drop", "arrive twice", "wait for the other parity", "wait for one fewer"
NAMED, UNCOMMITTED = "drop its named barrier", "drop its commit"
ATOMICS = ("tt.atomic_rmw", "tt.atomic_cas")
NO_ACQUIRE, NO_RELEASE = "acquire nothing", "release nothing"
SEM = {(NO_ACQUIRE, 2): 1, (NO_ACQUIRE, 4): 3, (NO_RELEASE, 3): 1, (NO_RELEASE, 4): 2}  # of an atomic: what it becomes
CHANGES = {
    "ttng.wait_barrier": (DROP, PARITY),
    "ttng.arrive_barrier": (DROP, TWICE),
    "ttng.barrier_expect": (DROP,),
    "ttng.fence_async_shared": (DROP,),
    "ttng.tc_gen5_commit": (DROP,),
    "ttng.tc_gen5_mma": (UNCOMMITTED,),
    "ttng.async_tma_store_wait": (DROP, FEWER),
    "ttng.warp_group_dot_wait": (FEWER,),
    "ttng.async_copy_mbarrier_arrive": (DROP,),
    "ttg.async_wait": (FEWER,),
    "ttng.clc_try_cancel": (DROP,),
    "tt.elementwise_inline_asm": (NAMED, NO_ACQUIRE, DROP),
} | dict.fromkeys(ATOMICS, (NO_ACQUIRE, NO_RELEASE))
BARRIER_TEXT = r"(?:@!?\w+\s+)?\bbar(?:rier)?\.(?:cta\.)?(?:sync|arrive)[^;]*;"


@dataclass(frozen=True)
class Mutant:
    """One change to one operation of a kernel."""

    kernel: str
    index: int  # position in a walk of the module
    op: str
    loc: str
    how: str

    def __str__(self) -> str:
        return f"{self.how}: {self.op} at {self.loc} in {self.kernel}"

    def apply(self, program: Program) -> Program:
        """A changed copy."""
        module = copy.deepcopy(program.module)
        regions = [f.regions[0] for f in module.funcs.values()]
        _forget_code(regions)
        ops, at = list(walk(regions))[self.index]
        op = ops[at]
        if op.name != self.op or op.loc != self.loc:
            raise ValueError(f"{self} does not belong to this program")
        if self.how == DROP:
            del ops[at]
        elif self.how == TWICE:
            ops.insert(at, copy.copy(op))
        elif self.how == FEWER:
            key = "pendings" if "pendings" in op.attrs else "num"
            op.attrs[key] = str(op.int_attr(key) + 1)
        elif self.how.startswith(NAMED):
            text = op.attrs["asm_string"]
            bar = list(re.finditer(BARRIER_TEXT, text))[int(self.how[len(NAMED) :] or 1) - 1]
            op.attrs["asm_string"] = text[: bar.start()] + text[bar.end() :]
        elif self.how == NO_ACQUIRE and "asm_string" in op.attrs:
            op.attrs["asm_string"] = op.attrs["asm_string"].replace(".acquire.", ".relaxed.")
        elif self.how in (NO_ACQUIRE, NO_RELEASE):
            op.attrs["sem"] = str(SEM[self.how, op.int_attr("sem")])
        else:
            op.attrs[FLIP if self.how == PARITY else NO_COMMIT] = "1"
        return replace(program, module=module, executable=None)


def _forget_code(regions: Iterable[Region]) -> None:
    for region in regions:
        for block in region.blocks:
            block.code = None
            for op in block.ops:
                _forget_code(op.regions)


def _operations(program: Program) -> list[Op]:
    return [ops[at] for ops, at in walk(f.regions[0] for f in program.module.funcs.values())]


def _ways(how: str, op: Op) -> list[str]:
    """To change the operation like this: of several named barriers in a block each is dropped by itself."""
    if how == NAMED:
        count = len(re.findall(BARRIER_TEXT, op.attrs["asm_string"]))
        return [NAMED] * count if count < 2 else [f"{NAMED} {k + 1}" for k in range(count)]
    if "asm_string" in op.attrs:
        return [how] * ((".acquire." if how == NO_ACQUIRE else "fence.proxy") in op.attrs["asm_string"])
    if how in (NO_ACQUIRE, NO_RELEASE):
        return [how] if (how, op.int_attr("sem")) in SEM else []
    return [how] if how != UNCOMMITTED or op.segments()[6] else []


def mutants(program: Program) -> list[Mutant]:
    """Every change this module knows how to make to an operation that has been executed. Of the barriers of a partition
    those that an atomic follows which releases: others have no meaning here."""
    found = []
    for index, (ops, at) in enumerate(walk(f.regions[0] for f in program.module.funcs.values())):
        op = ops[at]
        ways = [way for how in CHANGES.get(op.name, ()) for way in _ways(how, op)] if op.hits else []
        if op.name in PARTITION_BARRIERS:
            following = next((later for later in ops[at:] if later.hits), op)
            ways = [DROP] if following.name in ATOMICS and _ways(NO_RELEASE, following) else []
        found += [Mutant(program.name, index, op.name, op.loc, way) for way in ways]
    return found


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    error: str | None  # None: survived every seed
    seed: int | None  # that killed it

    @property
    def killed(self) -> bool:
        return self.error is not None

    def __str__(self) -> str:
        return f"killed by seed {self.seed}: {self.mutant}: {self.error}" if self.killed else f"SURVIVED: {self.mutant}"


def run_mutants(launch: Callable[[Options], Any], base: Options, seeds: Iterable[int]) -> list[Outcome]:
    """Run `launch` once per mutant and seed until something raises.

    `launch(options)` simulates one or more launches with exactly these options and raises AssertionError if a result is
    wrong. It runs unchanged first: what executes then is what is mutated.
    """
    seen: list[Program] = []

    def record(program: Program) -> Program:
        if not any(program is p for p in seen):
            seen.append(program)
            for op in _operations(program):
                op.hits = 0
        return program

    launch(replace(base, transform=record))
    seeds = list(seeds)
    return [_run(launch, base, seeds, program, mutant) for program in seen for mutant in mutants(program)]


def _run(
    launch: Callable[[Options], Any], base: Options, seeds: Iterable[int], original: Program, mutant: Mutant
) -> Outcome:
    changed = mutant.apply(original)

    def swap(program: Program) -> Program:
        return changed if program is original else program

    for seed in seeds:
        try:
            launch(replace(base, seed=seed, transform=swap))
        except (SimError, AssertionError) as e:
            return Outcome(mutant, f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}", seed)
    return Outcome(mutant, None, None)


def summary(outcomes: Iterable[Outcome]) -> str:
    """A line for each mutant, survivors first, and the score."""
    ordered = sorted(outcomes, key=lambda o: o.killed)
    killed = sum(o.killed for o in ordered)
    return "\n".join([*map(str, ordered), f"{killed} of {len(ordered)} mutants killed"])
