"""What a kernel costs on gfx1151, from its binary and from what ran: no time is measured."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .emulator import Result

# Issue cycles of a wave's instruction, measured per SIMD (ROCm/rocm-libraries, rocKE): they add, since WMMA and
# transcendentals run on the vector pipe.
WMMA_CYCLES, TRANS_CYCLES, VALU_CYCLES = 36.15, 4.0, 1.31
WMMA_TFLOPS = 43.51  # of 40 CUs that issue nothing else
VGPR_ROWS, VGPR_GRANULE = 1536, 24  # of a SIMD, per lane; 24 is LLVM's allocation granule for this GPU in wave32
MAX_WAVES = 16  # of a SIMD


@dataclass(frozen=True)
class Price:
    """Of one wave in one iteration of the main loop; names with `per_64_wmma` are divided by the WMMAs of that."""

    instructions: float
    wmma: float
    trans: float
    valu: float  # a VOPD pair counts once
    global_loads_per_64_wmma: float
    lds_loads_per_64_wmma: float
    lds_stores_per_64_wmma: float
    lds_cycles_per_64_wmma: float
    lds_conflict_free_cycles_per_64_wmma: float
    cache_lines: float
    barriers: float
    scratch: float

    @property
    def cycles(self) -> float:
        """That the vector pipe is busy."""
        return WMMA_CYCLES * self.wmma + TRANS_CYCLES * self.trans + VALU_CYCLES * self.valu

    @property
    def floor_tflops(self) -> float:
        """What the kernel reaches at most, if it only has to issue its instructions."""
        return WMMA_TFLOPS * WMMA_CYCLES * self.wmma / self.cycles


def main_loop(run: Callable[[int], Result], first: int, second: int, waves: int) -> Price:
    """The price of an iteration, from the difference between two runs: run(n) executes one workgroup of `waves` waves
    with n iterations."""
    if not 0 < first < second:
        raise ValueError(f"main_loop: got {first} and {second} iterations, expected two, the second larger")
    runs, share = (run(first), run(second)), 1.0 / ((second - first) * waves)
    classes: Counter[str] = runs[1].by_class.copy()
    classes.subtract(runs[0].by_class)
    per = {name: count * share for name, count in classes.items()}

    def grown(counter: str) -> float:
        return float(getattr(runs[1], counter) - getattr(runs[0], counter)) * share

    wmma = per.get("wmma", 0.0)
    if wmma <= 0:
        raise ValueError(f"main_loop: the runs with {first} and {second} iterations executed equally many WMMAs")
    return Price(
        instructions=grown("executed"),
        wmma=wmma,
        trans=per.get("trans", 0.0),
        valu=per.get("valu", 0.0) + per.get("vopd", 0.0),
        global_loads_per_64_wmma=per.get("global_load", 0.0) * 64 / wmma,
        lds_loads_per_64_wmma=per.get("lds_load", 0.0) * 64 / wmma,
        lds_stores_per_64_wmma=per.get("lds_store", 0.0) * 64 / wmma,
        lds_cycles_per_64_wmma=grown("lds_cycles") * 64 / wmma,
        lds_conflict_free_cycles_per_64_wmma=grown("lds_conflict_free_cycles") * 64 / wmma,
        cache_lines=grown("cache_lines"),
        barriers=per.get("barrier", 0.0),
        scratch=per.get("scratch", 0.0),
    )


@dataclass(frozen=True)
class Resources:
    """Of one wave, except LDS: of the workgroup."""

    vgprs: int
    sgprs: int
    spilled_vgprs: int
    lds_bytes: int
    scratch_bytes: int  # per lane

    @property
    def waves_per_simd(self) -> int:
        """That the registers allow."""
        return min(MAX_WAVES, VGPR_ROWS // (math.ceil(self.vgprs / VGPR_GRANULE) * VGPR_GRANULE))


def static_resources(compiled: Any) -> Resources:
    """From the metadata of Triton's CompiledKernel."""
    text, name = compiled.asm["amdgcn"], compiled.metadata.name
    entries = re.split(r"\n  - ", text[text.index("amdhsa.kernels:") :])
    entry = next(part for part in entries if re.search(rf"\.name: +{re.escape(name)}\n", part))

    def value(key: str) -> int:
        return int(re.search(rf"\.{key}: +(\d+)", entry)[1])  # type: ignore[index]

    return Resources(
        vgprs=value("vgpr_count"),
        sgprs=value("sgpr_count"),
        spilled_vgprs=value("vgpr_spill_count"),
        lds_bytes=max(value("group_segment_fixed_size"), compiled.metadata.shared),
        scratch_bytes=value("private_segment_fixed_size"),
    )
