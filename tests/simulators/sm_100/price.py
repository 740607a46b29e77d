"""What a block of keys costs on sm_100, from the machine code of a kernel: nothing is run, no time is measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from . import issue
from .issue import VARIED, Estimate
from .loops import Loop, loops
from .pipes import PEAK_TFLOPS, Products, clocks
from .sass import read, registers_used
from .streams import Latencies, Schedule

LEAST_EXPONENTIALS = 24  # of a softmax; the correction and the cold path have fewer
SIMILAR = 1.08  # times the instructions of the shortest: without a mask too
UNIT = 256 * 128  # queries x keys that the cycles of a price are for


def role(loop: Loop) -> str:
    """Of the warps that run it, by what it has; "whole" if one role does everything."""
    softmax = loop.count("MUFU") >= LEAST_EXPONENTIALS
    loads, stores = loop.count("LDTM"), loop.count("STTM")
    if loop.count("UTCHMMA"):
        return "whole" if softmax else "products"
    if loop.count("UTMALDG"):
        return "loads"
    if loop.count("UTMASTG"):
        return "stores"
    if softmax and stores:
        return "softmax"
    return "correction" if loads and stores else "other"


@dataclass(frozen=True, slots=True)
class Kernel:
    """The loops over blocks of keys."""

    softmax: tuple[Loop, ...]  # without a mask: of each warp that a quarter has for it
    masked: tuple[Loop, ...]
    products: Loop
    correction: Loop | None = None
    loads: Loop | None = None
    correcting: int = 1  # warps of the correction that a quarter has

    @property
    def whole(self) -> bool:
        """One role does everything."""
        return self.products is self.softmax[0]

    @property
    def jumps(self) -> bool:
        """The softmax jumps over its rescale. With a correction it has all its work in every iteration, and what is
        conditional in it are a few retries of waits."""
        return self.correction is None

    @property
    def all(self) -> list[Loop]:
        found = [*self.softmax, *self.masked, self.correction, self.products, self.loads]
        return list({id(loop): loop for loop in found if loop}.values())


def hot_loops(text: str) -> dict[str, list[Loop]]:
    """The innermost loops of each role, shortest first."""
    found: dict[str, list[Loop]] = {}
    for loop in loops(read(text)):
        found.setdefault(role(loop), []).append(loop)
    found.pop("other", None)
    inner = {
        name: [loop for loop in of if not any(other.blocks < loop.blocks for other in of)] for name, of in found.items()
    }
    return {name: sorted(of, key=lambda loop: (len(loop.instructions), loop.address)) for name, of in inner.items()}


def kernel(text: str, warps: int = 2, split: bool = True, correcting: int = 1, stretches: int = 1) -> Kernel:
    """From the output of nvdisasm. warps: of the softmax, on each quarter of a multiprocessor. split: a correction
    rescales O, with `correcting` warps of a quarter. stretches: how often the roles part, each time with loops of their
    own; that of the shortest step of the softmax counts."""
    found = hot_loops(text)
    steps = found.get("softmax") or found.get("whole")
    if not steps:
        raise ValueError(f"sm_100: no loop has {LEAST_EXPONENTIALS} exponentials or more, expected that of a softmax")
    short = [loop for loop in steps if len(loop.instructions) <= SIMILAR * len(steps[0].instructions)]
    softmax = tuple(short[:warps] if len(short) >= warps else short[:1] * warps)
    masked = tuple(steps[len(short) :])
    if "softmax" not in found:
        return Kernel(softmax, masked, steps[0])
    one = {name: found.get(name, []) for name in ("products", "correction", "loads") if split or name != "correction"}
    if any(len(of) != stretches for of in one.values()):
        counted = ", ".join(f"{len(of)} of {name}" for name, of in one.items())
        number = "one loop" if stretches == 1 else f"{stretches} loops"
        raise ValueError(f"sm_100: expected {number} of each role beside the softmax, got {counted}")
    return Kernel(softmax, masked, **{name: of[0] for name, of in one.items()}, correcting=correcting)


@dataclass(frozen=True, slots=True)
class Price:
    """Counts are exact; cycles are counts by the rates of pipes.py, for 256 queries and 128 keys, of a quarter of a
    multiprocessor (tensor and shared memory: of all of it)."""

    # Of one warp in one step of the softmax: counts.
    instructions: int
    masked_instructions: int  # where a mask is applied; the longest such step, 0: none
    mufu: int
    packed: int
    maxima: int
    converts: int
    tmem_loads: int
    tmem_stores: int
    barriers: int
    # Of the hot loops.
    products: int
    spills: int  # loads and stores of the stack
    softmax_registers: int
    correction_registers: int
    products_registers: int
    # Cycles.
    tensor_cycles: float
    operand_cycles: float  # shared memory, read by tensor cores
    shared_cycles: float  # and K and V written
    mufu_cycles: float
    fma_cycles: float
    alu_cycles: float
    tmem_cycles: float
    issue_cycles: float  # what every iteration passes through
    most_issue_cycles: float  # every instruction of the loops once
    rescale_fma_cycles: float  # more, where both tiles rescale O
    rescale_tmem_cycles: float

    @property
    def pipes(self) -> dict[str, float]:
        """Cycles of what may bind."""
        return {
            "tensor": self.tensor_cycles, "shared": self.shared_cycles, "mufu": self.mufu_cycles,
            "fma": self.fma_cycles, "alu": self.alu_cycles, "tmem": self.tmem_cycles, "issue": self.issue_cycles,
        }  # fmt: skip

    @property
    def binds(self) -> str:
        """The busiest; the first of equals."""
        return max(self.pipes, key=lambda pipe: self.pipes[pipe])

    @property
    def floor(self) -> float:
        """Cycles that it takes at least."""
        return self.pipes[self.binds]


def _added(parts: list[dict[str, float]]) -> dict[str, float]:
    return {pipe: sum(part[pipe] for part in parts) for pipe in clocks(())}


def price(of: Kernel, work: Products) -> Price:
    """work: of a CTA, for one block of keys."""
    step, correction = of.softmax[0], of.correction
    found = of.products.count("UTCHMMA")
    if found != work.count:
        raise ValueError(f"sm_100: {found} products in a loop, expected {work.count} for a block of {work.keys} keys")
    per = UNIT / (work.rows * work.keys)
    always = [clocks(loop.always if of.jumps else loop.instructions) for loop in of.softmax]
    most = [clocks(loop.instructions) for loop in of.softmax]
    if correction:
        always += [clocks(correction.always)] * of.correcting
        most += [clocks(correction.instructions)] * of.correcting
    each, every = _added(always), _added(most)
    others = [loop for loop in (of.products, of.loads) if loop and not of.whole]
    tmem = each["tmem_load"] + each["tmem_store"]
    return Price(
        instructions=len(step.instructions),
        masked_instructions=max((len(loop.instructions) for loop in of.masked), default=0),
        mufu=step.count("MUFU"),
        packed=step.count("FFMA2", "FADD2", "FMUL2"),
        maxima=step.count("FMNMX"),
        converts=step.count("F2FP"),
        tmem_loads=step.count("LDTM"),
        tmem_stores=step.count("STTM"),
        barriers=step.count("BAR"),
        products=found,
        spills=sum(loop.count("LDL", "STL") for loop in of.all),
        softmax_registers=max(registers_used(loop.instructions) for loop in (*of.softmax, *of.masked)),
        correction_registers=registers_used(correction.instructions) if correction else 0,
        products_registers=registers_used(of.products.instructions),
        tensor_cycles=work.tensor * per,
        operand_cycles=work.operands * per,
        shared_cycles=(work.operands + work.arriving) * per,
        mufu_cycles=each["mufu"] * per,
        fma_cycles=each["fma"] * per,
        alu_cycles=each["alu"] * per,
        tmem_cycles=tmem * per,
        issue_cycles=(each["issue"] + sum(len(loop.always) for loop in others)) * per,
        most_issue_cycles=(every["issue"] + sum(len(loop.instructions) for loop in others)) * per,
        rescale_fma_cycles=(every["fma"] - each["fma"]) * per,
        rescale_tmem_cycles=(every["tmem_load"] + every["tmem_store"] - tmem) * per,
    )


def estimate(of: Kernel, schedule: Schedule, latencies: Sequence[Latencies] = VARIED) -> Estimate | None:
    """See issue.py; None for a kernel without roles, whose warps it does not know."""
    return None if of.whole else issue.estimate(of.softmax, of.correction, schedule, latencies)


def share(cycles: float, work: Products) -> float:
    """Of the card's peak, if 256 queries and 128 keys take so many clocks."""
    return work.tflops(cycles * work.rows * work.keys / UNIT) / PEAK_TFLOPS
