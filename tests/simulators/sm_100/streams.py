"""The loops of the roles as streams of what a warp issues, with the barriers named by what they stand for."""

from dataclasses import dataclass, replace

from .loops import Loop
from .pipes import price
from .sass import Instruction

TENSOR_SHARE = 0.87  # of its rate that the tensor pipe reaches; fitted, see issue.py
LONG = {"LDS", "LDSM", "SHFL", "S2R", "R2UR", "LDL", "LDC", "LDCU", "REDUX", "CREDUX", "S2UR"}


@dataclass(frozen=True, slots=True)
class Latencies:
    """Clocks until a result can be used; all assumed."""

    alu: float = 4
    fma: float = 4
    f2fp: float = 5
    mufu: float = 22
    long: float = 30  # of LONG
    tmem_load: float = 40  # and the clocks it takes
    tmem_store: float = 40  # until a wait for it ends
    barrier: float = 24  # of the warps of a partition
    arrive: float = 30  # until whoever waits on the mbarrier sees it
    try_wait: float = 24
    product: float = 110  # from the last product to those who wait for it
    wake: float = 40  # from an arrival to the first product
    tensor_share: float = TENSOR_SHARE


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the machine code alone does not say. Q K^T runs `buffers` tiles ahead of P V."""

    head_dim: int
    early: int = 128  # columns of P that are published first; 128: all at once
    buffers: int = 2  # of S: one for each tile of queries, or three that rotate
    rescale: bool = False  # O is rescaled in every block

    @property
    def parts(self) -> tuple[str, ...]:
        """In which P is published."""
        return ("p",) if self.early == 128 else ("p1", "p2")


@dataclass(frozen=True, slots=True)
class Slot:
    """An instruction of a warp. `event`: what it waits for or publishes, of `role`."""

    role: str  # "", "wait", "await", "publish", "barrier", "drain"
    event: str
    pipe: str | None
    cycles: float
    latency: float
    reads: list[int]
    writes: list[int]


def _role(instruction: Instruction) -> str:
    if instruction.mnemonic == "SYNCS":
        return "wait" if "TRYWAIT" in instruction.name else "arrive" if "ARRIVE" in instruction.name else ""
    if instruction.name.startswith("FENCE.VIEW.ASYNC.T"):
        return "drain"  # of tensor memory
    return "barrier" if instruction.mnemonic == "BAR" and "ARV" not in instruction.name else ""


def _slot(instruction: Instruction, latencies: Latencies) -> Slot:
    pipe, cycles = price(instruction)
    reads, writes = instruction.registers()
    latency = {"mufu": latencies.mufu, "fma": latencies.fma, "tmem_load": latencies.tmem_load + cycles}.get(
        pipe or "", latencies.alu
    )
    if instruction.mnemonic == "F2FP":
        latency = latencies.f2fp
    elif instruction.mnemonic in LONG:
        latency = latencies.long
    return Slot(_role(instruction), "", None if pipe == "spill" else pipe, cycles, latency, reads, writes)


def _from(slots: list[Slot], at: int) -> list[Slot]:
    return slots[at:] + slots[:at]


def softmax_slots(loop: Loop, schedule: Schedule, latencies: Latencies, split: bool) -> list[Slot]:
    """Of an iteration, from its wait for S on; what it publishes are alpha (split: others rescale O), and P in one or
    two parts."""
    code = loop.once if schedule.rescale and not split else loop.always
    slots = [_slot(instruction, latencies) for instruction in code]
    loads = [at for at, slot in enumerate(slots) if slot.pipe == "tmem_load"]
    waits = [at for at, slot in enumerate(slots) if slot.role == "wait"]
    if not loads or not waits:
        raise ValueError(f"softmax loop at {loop.address:#x}: expected a wait and a load of S in every iteration")
    slots = _from(slots, max((at for at in waits if at < loads[0]), default=waits[-1]))
    slots[0] = replace(slots[0], role="await", event="s")
    names = [*(["alpha"] if split else []), *schedule.parts]
    arrivals = [at for at, slot in enumerate(slots) if slot.role == "arrive"]
    if len(arrivals) != len(names):
        raise ValueError(
            f"softmax loop at {loop.address:#x}: {len(arrivals)} arrivals in every iteration, expected {names}"
        )
    for at, name in zip(arrivals, names, strict=True):
        slots[at] = replace(slots[at], role="publish", event=name)
    return slots


def correction_slots(loop: Loop, schedule: Schedule, latencies: Latencies) -> list[Slot]:
    """Of an iteration: for each tile of queries a wait for alpha, and an arrival that says O is right."""
    code = loop.once if schedule.rescale else loop.always
    slots = [_slot(instruction, latencies) for instruction in code]
    first = [id(instruction) for instruction in loop.always if _role(instruction) == "wait"]
    waits = [at for at, instruction in enumerate(code) if id(instruction) in first]
    if len(waits) != 2:
        raise ValueError(f"correction loop at {loop.address:#x}: {len(waits)} waits in every iteration, expected 2")
    slots, second = _from(slots, waits[0]), waits[1] - waits[0]
    slots[0] = replace(slots[0], role="await", event="alpha0")
    slots[second] = replace(slots[second], role="await", event="alpha1")
    arrivals = [at for at, slot in enumerate(slots) if slot.role == "arrive"]
    for tile, those in enumerate(([at for at in arrivals if at < second], [at for at in arrivals if at > second])):
        if not those:
            raise ValueError(f"correction loop at {loop.address:#x}: no arrival for tile {tile} of the queries")
        slots[those[-1]] = replace(slots[those[-1]], role="publish", event=f"o{tile}")
    return slots
