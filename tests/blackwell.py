"""The kernel of sm_100 in the Gluon simulator and through ptxas; runs in a `gluon_sim.Worker`, where Triton builds."""

import re
import subprocess
from dataclasses import replace
from typing import Any

import schedules
import torch
import triton
from hopper import CAUSAL, DTYPES, Call
from ptxas import assembled as by_ptxas
from simulators.gluon_sim import Options, activate
from simulators.sm_100 import disassemble, hot_loops
from simulators.sm_100.sass import registers_used

from lazymax import arch as arches
from lazymax.backends import Tile, registry
from lazymax.backends.sm_100.launch import BlackwellLaunch
from lazymax.backends.sm_100.rows import BlackwellTile
from lazymax.compat.tritons import release
from lazymax.compiling import compile_plan, launcher_fault
from lazymax.dispatch import plan
from lazymax.kernels.launch import ForwardLaunch
from lazymax.problem import Problem, output_strides
from lazymax.testing import check_attention

# Those of pairs of CTAs last.
ROWS = [row for row in registry()["sm_100"].forward if isinstance(row, BlackwellTile)]
ROWS.sort(key=lambda row: row.pair)
# Each rung the other way, beside the row of its head dim. By default one has the call of its place here.
RUNGS: dict[str, dict[str, Any]] = {
    "exact, P at once": {"order": 0, "max3": False, "branch": False, "early": 128, "software": 0, "s_buffers": 2},
    "P in halves": {"early": 64, "chunk": 64, "degree": 2, "reads": 4, "order": 1, "s_buffers": 2},
    "no split": {"split": False},
    "narrow chunks": {"chunk": 16, "software": 16, "order": 4},
    "snake": {"scheduler": "snake", "num_stages": 3},
    "counter": {"scheduler": "counter"},
    "no split, two buffers": {"split": False, "branch": False, "order": 0, "early": 64, "s_buffers": 2},
}
# Some tiles of many blocks and some of few, several for every CTA: each ring goes round more than twice.
CALLS = (
    Call((1, 2, 1, 300, 500), CAUSAL),
    Call((2, 1, 1, 390, 200), CAUSAL),  # rows without keys, whole tiles too
    Call((1, 3, 1, 260, 250), {}, "rising", "bshd"),
    Call((1, 1, 1, 300, 500), {"window": (200, 30), "window_align": "bottom_right", "scale": -0.2}, "rising", "padded"),
    Call((1, 2, 1, 260, 420), CAUSAL | {"window": (130, None)}, "large"),
    Call((1, 2, 2, 257, 129), {"causal": "top_left", "scale": 0.0}),
    Call((1, 2, 1, 260, 300), {"causal": "top_left", "rescale_threshold": 0.0}, "rising"),
    Call((1, 1, 1, 140, 200), CAUSAL, "huge"),
    Call((1, 1, 1, 300, 300), {"causal": "top_left"}, "hidden", "bshd"),
    Call((1, 1, 1, 130, 140), {}, "visible"),
    Call((1, 2, 1, 160, 600), CAUSAL, "step"),
    Call((1, 1, 1, 270, 500), {"window": (100, None), "window_align": "bottom_right"}, "cliff"),
    Call((1, 4, 2, 300, 90)),  # one block for every tile, fewer than the ring has slots
)
# For pairs of CTAs, full bands: tiles of 512 rows, several for every pair, and one block for every tile.
PAIRED = (
    Call((1, 2, 1, 560, 420), {}, "rising", "bshd"),
    Call((1, 1, 1, 520, 300), {}, "lone"),
    Call((1, 2, 1, 300, 200), {}, "huge"),
    Call((1, 1, 1, 530, 900), {}, "large", "padded"),
    Call((1, 1, 1, 130, 140), {}, "visible"),
    Call((1, 4, 2, 600, 90)),
    Call((1, 2, 1, 520, 300), {"rescale_threshold": 0.0}, "rising"),
    Call((2, 1, 1, 390, 260), {"scale": -0.2}, "step"),
)
# The portable kernel in roles that Triton makes, and calls for full bands of one length, then for others.
BY_ROLES = [row for row in registry()["sm_100"].forward if row.warp_specialize]
FULL = (
    Call((1, 2, 1, 140, 700), {}, "rising", "bshd"),
    Call((1, 1, 1, 130, 640), {"scale": -0.2}, "large"),  # no block is cut
    Call((1, 3, 1, 260, 90)),  # no block is whole
    Call((1, 1, 1, 100, 300), {}, "huge"),
    Call((1, 1, 1, 130, 500), {}, "visible", "padded"),
    Call((2, 2, 1, 70, 390), {"rescale_threshold": 0.0}, "step"),
)
BANDED = (
    Call((1, 2, 1, 260, 500), CAUSAL, "rising", "bshd"),
    Call((2, 1, 1, 390, 200), CAUSAL),
    Call((1, 1, 1, 140, 500), {"window": (200, 30), "window_align": "bottom_right", "scale": -0.2}, "rising", "padded"),
    Call((1, 2, 1, 260, 420), CAUSAL | {"window": (130, None)}, "large"),
    Call((1, 1, 1, 140, 200), CAUSAL, "huge"),
    Call((1, 1, 1, 300, 300), {"causal": "top_left"}, "hidden", "bshd"),
    Call((2, 1, 1, 5, 520), {}, "step", lengths=(500, 3)),
    Call((2, 2, 1, 70, 390), {"rescale_threshold": 0.0}, "rising", lengths=(0, 390)),
    Call((2, 2, 1, 140, 300), CAUSAL, "step", lengths=(300, 70)),
)
LONG = (
    Call((1, 3, 1, 520, 1300), CAUSAL, "rising"),
    Call((2, 2, 2, 390, 900), {"window": (300, 10), "window_align": "bottom_right"}, "large", "bshd"),
    Call((1, 5, 1, 300, 1100), {}, "rising", "padded"),
)  # with --slow
# Long and short tiles of two bands, and full ones of more blocks than the ring has slots: with fewer, waits for a slot
# seemed to do nothing, and with three score buffers the correction's for P V.
MUTATED = (CALLS[0], CALLS[1], Call((1, 2, 1, 260, 700), {}, "rising"))
# More schedules of calls that take a second, all of one build: causal, with the LSE.
QUICK = [seed for seed in range(13, 61) if seed % 13 in (1, 5, 7, 8) and seed // 2 % 2 == 0]


# Six heads, four at a time: their tiles come in two sections, the second a smaller one.
SECTIONS = Call((1, 6, 3, 300, 150), CAUSAL, "rising")


def simulate(
    row: BlackwellTile, call: Call, dtype: str, options: Options, heads_together: int | None = None
) -> tuple[bool, str]:
    """One call on few CTAs under the schedule of a seed, beside float64; with the kernel's own fences between proxies
    and none of the compiler's, whose search for places takes a fifth of a build's time."""
    options = replace(options, insert_fences=False)
    (q, k, v), extras, problem = call.inputs((row.head_dim,) * 2, DTYPES[dtype], options.seed)
    problem = replace(problem, return_lse=options.seed // 2 % 2 == 0)
    launch = BlackwellLaunch.of_forward(problem, row)
    launch.ctas = (2, 3, 1)[options.seed % 3]
    launch.heads_together = heads_together or launch.heads_together
    if launch.config.CLC.value:  # they take tiles from each other only if they are there together
        options = replace(options, resident=launch.ctas)
    out = torch.empty_strided(q.shape, output_strides(q, row.head_dim), dtype=q.dtype).fill_(torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    with activate(options):
        launch(q, k, v, out, lse, extras)
    budgets = check_attention(out, lse if problem.return_lse else None, q, k, v, problem, extras)
    return all(b.ok for b in budgets), "; ".join(map(str, budgets))


def seeds(row: BlackwellTile, dtype: str, of: list[int], calls: tuple[Call, ...] = CALLS) -> list[str]:
    """What went wrong; a seed has one of the calls, which for a pair of CTAs are others."""
    calls = PAIRED if row.pair else calls

    def run(options: Options) -> tuple[bool, str]:
        return simulate(row, calls[options.seed % len(calls)], dtype, options)

    return schedules.failures(run, row.when.archs[0], of, calls)


def sections(row: BlackwellTile, dtype: str, of: list[int]) -> list[str]:
    """What went wrong where heads are dealt in sections."""
    return schedules.failures(
        lambda options: simulate(row, SECTIONS, dtype, options, 4), row.when.archs[0], of, (SECTIONS,)
    )


def by_roles(row: Tile, dtype: str, of: list[int], device: str = "cpu") -> list[str]:
    """What went wrong with a row of the portable kernel that Triton parts among roles: on the CPU in its own TTGIR for
    sm_100, simulated."""
    calls = FULL if row.when.causal is False else BANDED

    def run(options: Options) -> tuple[bool, str]:
        dims = ((row.when.head_dims or (64,))[0],) * 2
        (q, k, v), extras, problem = calls[options.seed % len(calls)].inputs(dims, DTYPES[dtype], options.seed, device)
        made = plan(problem, arches.by_name("sm_100"))
        launch = ForwardLaunch.prepare(problem, replace(made, tile=row, rescale=row.rescale))
        out = torch.empty_strided(q.shape, output_strides(q, dims[1]), dtype=q.dtype, device=device).fill_(torch.nan)
        lse = torch.full(q.shape[:3], torch.nan, device=device)
        if device == "cpu":
            with activate(options) as session:
                launch(q, k, v, out, lse, extras)
            assert "ttg.warp_specialize" in session.reports[0].program.ttgir, "no roles"
        else:
            launch(q, k, v, out, lse, extras)
        budgets = check_attention(out, lse, q, k, v, problem, extras)
        return all(b.ok for b in budgets), "; ".join(map(str, budgets))

    return schedules.failures(run, "sm_100", of, calls)


def mutants(row: BlackwellTile, of: list[int]) -> tuple[int, list[str]]:
    """(how many, what survived): every synchronisation of the kernel dropped or weakened once."""
    calls = PAIRED if row.pair else MUTATED
    return schedules.survivors(
        lambda options, which: simulate(row, calls[which], "bf16", options), "sm_100", of, (0, 1, 2)
    )


def assembled(row: BlackwellTile, dtype: str, rules: dict[str, Any], lse: bool = True) -> dict[str, Any]:
    """Compile, and what ptxas says: bytes of spills, of shared memory, columns of tensor memory. dealt: registers of a
    thread for which a role's warps ask when they part, and those of the correction."""
    arch = arches.by_name(row.when.archs[0])
    problem = Problem.from_shape((4, 32, 8, 4096, 4096, row.head_dim), dtype, return_lse=lse, **rules)
    chosen = replace(plan(problem, arch), tile=row)
    kernel, spills, _ = by_ptxas(lambda: compile_plan(problem, chosen, arch))
    return {
        "spills": spills,
        **hot(kernel.asm["cubin"], arch.id),
        "dealt": sorted({int(count) for count in re.findall(r"setmaxnreg\S+\s+(\d+)", kernel.asm["ptx"])} - BETWEEN),
        "shared": kernel.metadata.shared,
        "fault": launcher_fault(kernel),
        "columns": kernel.metadata.tmem_size,
        "exponentials": kernel.asm["ptx"].count("ex2.approx"),
        "products": kernel.asm["ptx"].count("tcgen05.mma."),
        "of_pairs": kernel.asm["ptx"].count("tcgen05.mma.cta_group::2."),
    }


def assembled_roles(row: Tile, dtype: str, rules: dict[str, Any]) -> dict[str, Any]:
    """Compile a row of the portable kernel that Triton parts among roles. loops: over key blocks, the cold path's not
    counted; parted: those that it parted; partitions: warps of each group beside the kernel's own."""
    arch = arches.by_name("sm_100")
    problem = Problem.from_shape(
        (1, 4, 4, 4096, 4096, (row.when.head_dims or (64,))[0]), dtype, return_lse=True, **rules
    )
    chosen = replace(plan(problem, arch), tile=row, rescale=row.rescale)
    kernel, spills, _ = by_ptxas(lambda: compile_plan(problem, chosen, arch))
    main = kernel.asm["ttir"].split("tt.func private")[0]
    found = re.findall(r"^\s*partition\d+.*num_warps\((\d+)\)", kernel.asm["ttgir"], re.MULTILINE)
    warps = [int(count) for count in found]
    return {
        "loops": main.count("scf.for"),
        "parted": kernel.asm["ttgir"].count("ttg.warp_specialize("),
        "partitions": [warps[i : i + 3] for i in range(0, len(warps), 3)],
        "spills": spills,
        "shared": kernel.metadata.shared,
        "columns": kernel.metadata.tmem_size,
        "products": kernel.asm["ptx"].count("tcgen05.mma."),
    }


BETWEEN = {80, 256}  # registers before the roles part and after: of warps that wait, and of those that prepare


def hot(cubin: bytes, arch: str) -> dict[str, Any]:
    """Of the loops over key blocks of the softmax, the correction and the products: loads and stores of spilled
    registers, at most. Registers that each role uses."""
    try:
        loops = hot_loops(disassemble(cubin))
    except subprocess.CalledProcessError as error:  # the nvdisasm of Triton 3.6 does not know sm_103
        assert arch == "sm_103" and release(triton.__version__) < (3, 9), error.stderr
        return {"in_loops": 0, "registers": {}}
    softmax, others = loops["softmax"], loops["correction"] + loops["products"]
    assert len(softmax) >= 4 and others, f"{len(softmax)} loops of the softmax, {len(others)} of others"
    spills = max(loop.count("STL", "LDL") for loop in softmax + others)
    registers = {role: max(registers_used(loop.instructions) for loop in of) for role, of in loops.items()}
    return {"in_loops": spills, "registers": registers}
