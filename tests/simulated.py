"""The kernel of sm_90 in the Gluon simulator and through ptxas; runs in a `gluon_sim.Worker`, where Triton compiles."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import schedules
import torch
from hopper import CAUSAL, DIVIDED, DTYPES, Call, arranged, merged, rows
from ptxas import assembled as by_ptxas
from simulators.gluon_sim import Options, activate

from lazymax import arch as arches
from lazymax.backends.sm_90 import work
from lazymax.backends.sm_90.launch import HopperLaunch
from lazymax.backends.sm_90.work import WHOLE, Division
from lazymax.compiling import compile_plan, launcher_fault, loop_counts
from lazymax.dispatch import plan
from lazymax.problem import Problem, output_strides
from lazymax.testing import check_attention

ARCH = arches.by_name("sm_90")
# Some tiles of many blocks and some of few, several for every CTA: each ring goes round more than twice.
CALLS = (
    Call((1, 4, 2, 390, 700), CAUSAL, sinks=True),
    Call((2, 2, 1, 300, 150), CAUSAL),  # rows without keys, whole tiles too
    Call((1, 3, 1, 390, 500), {}, "rising", "bshd"),
    Call((1, 2, 1, 250, 600), {"window": (200, 30), "window_align": "bottom_right", "scale": -0.2}, "rising", "padded"),
    Call((1, 2, 1, 400, 700), CAUSAL | {"window": (130, None)}, "large"),
    Call((1, 2, 2, 129, 129), {"causal": "top_left", "scale": 0.0, "softcap": 3.0}),
    Call((1, 2, 1, 260, 520), {"causal": "top_left", "rescale_threshold": 0.0}, "rising"),
    Call((1, 2, 1, 140, 300), CAUSAL, "huge"),
    Call((1, 2, 1, 140, 200), {"causal": "top_left"}, "hidden", "bshd"),
    Call((1, 2, 1, 140, 200), {}, "visible", sinks=True),
    Call((1, 2, 1, 140, 600), CAUSAL, "step"),
    Call((1, 1, 1, 140, 500), {}, "cliff"),
    # Long tiles, then some of one block behind each other: waits that a long tile's ring implies are needed there.
    Call((1, 2, 1, 450, 700), CAUSAL, offsets=((0, 70, 70, 300, 360, 420, 440), (0, 300, 310, 420, 480, 520, 700))),
    Call((3, 2, 1, 200, 420), CAUSAL | {"softcap": 20.0, "scale": -0.5}, sinks=True, lengths=(0, 130, 420)),
    Call((1, 6, 2, 300, 90), sinks=True),  # one block for every tile, fewer than the ring has slots
    Call((1, 2, 1, 200, 1300)),  # consumers without rows leave out more blocks than the ring has slots
    *DIVIDED,
)


def simulate(index: int, which: int, dims: tuple[int, int], dtype: str, options: Options) -> tuple[bool, str]:
    """One call on few CTAs under the schedule of a seed, beside float64."""
    (q, k, v), extras, problem = CALLS[which].inputs(dims, DTYPES[dtype], options.seed)
    launch = HopperLaunch.of_forward(problem, rows()[index], CALLS[which].division)
    launch.ctas = (2, 3, 1)[options.seed % 3]
    out = torch.empty_strided((*q.shape[:3], dims[1]), output_strides(q, dims[1]), dtype=q.dtype).fill_(torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    twins = patch.multiple(HopperLaunch, _arrange=arranged, _merge=merged)
    with activate(options), twins, patch.object(work, "LEAST_KEYS", 1):
        launch(q, k, v, out, lse, extras)
    budgets = check_attention(out, lse, q, k, v, problem, extras)
    return all(b.ok for b in budgets), "; ".join(map(str, budgets))


def seeds(index: int, dims: tuple[int, int], dtype: str, of: list[int]) -> list[str]:
    """What went wrong, one call after the other."""
    return schedules.failures(
        lambda options: simulate(index, options.seed % len(CALLS), dims, dtype, options), "sm_90", of, CALLS
    )


def mutants(index: int, dims: tuple[int, int], of: list[int]) -> tuple[int, list[str]]:
    """(how many, what survived): every synchronisation of the kernel dropped or weakened once."""

    return schedules.survivors(
        lambda options, which: simulate(index, which, dims, "bf16", options), "sm_90", of, (0, 1, 14, 15)
    )


def assembled(
    index: int, dims: tuple[int, int], dtype: str, rules: dict[str, Any], division: tuple[int, int] = WHOLE
) -> dict[str, Any]:
    """Compile, and what ptxas says: bytes of spills, advisories that serialise every product ("C75"). wgmma: those in
    the hot loop. fault: of Triton's launcher."""
    row = rows()[index]
    problem = Problem.from_shape((4, 32, 8, 4096, 4096, *dims), dtype, return_lse=True, **rules)
    with patch.object(type(row), "division", lambda *_: Division(*division)):
        chosen = replace(plan(problem, ARCH), tile=row)
        kernel, spills, lines = by_ptxas(lambda: compile_plan(problem, chosen, ARCH))
    advisories = [line for line in lines if "C75" in line]
    return {
        "spills": spills,
        "advisories": advisories,
        "wgmma": loop_counts(kernel.asm["ptx"], r"wgmma\.mma_async")[0],
        "shared": kernel.metadata.shared,
        "fault": launcher_fault(kernel),
    }
