"""The backward of sm_90 in the Gluon simulator; runs in a `gluon_sim.Worker`, where Triton compiles."""

from dataclasses import replace
from typing import Any

import schedules
import torch
from hopper import DTYPES
from hopper_backward import ARCH, SIMULATED, finished, forward, one_by_one, prepare, prepared, rows, upstream
from ptxas import assembled as by_ptxas
from simulators.gluon_sim import Options, activate

from lazymax.backends.sm_90.kernels.backward import attention_backward
from lazymax.compiling import compiling_for, meta_tensors
from lazymax.compiling_backward import builds, plan_of
from lazymax.kernels.launch import run
from lazymax.problem import Problem
from lazymax.testing import check_gradients, poisoned

NO_EXTRAS = [torch.empty(0)] * 3  # mask, slopes and sinks


def simulate(index: int, which: int, dims: tuple[int, int], dtype: str, options: Options) -> tuple[bool, str]:
    """One call under the schedule of a seed, beside float64."""
    call = SIMULATED[which]
    (q, k, v), extras, problem = call.inputs(dims, DTYPES[dtype], options.seed)
    d_out, d_lse = upstream(call, q, v)
    out, lse = forward(q, k, v, problem, extras)
    launch = one_by_one(rows()[index], problem)
    grads = [poisoned(*t.shape, dtype=t.dtype, device="cpu") for t in (q, k, v)]
    work = launch.work(q.device)
    prepare(launch, work, out, d_out, lse, d_lse)
    grid, arguments = launch.arguments((q, k, v, d_out), grads, work)
    with activate(replace(options, resident=(1, 2, 4)[options.seed % 3])):
        run(attention_backward, grid, None, arguments, **launch.options)
    assert not work.found.any() and (work.odd is None or not work.odd.any()), "NaN or inf"
    grads[0] = finished(launch, work, grads[0])
    budgets = check_gradients([*grads, *NO_EXTRAS], d_out, d_lse, q, k, v, problem, extras, out=out)
    return all(b.ok for b in budgets), "; ".join(map(str, budgets))


def seeds(index: int, dims: tuple[int, int], dtype: str, of: list[int]) -> list[str]:
    """What went wrong, one call after the other."""
    return schedules.failures(
        lambda options: simulate(index, options.seed % len(SIMULATED), dims, dtype, options), "sm_90", of, SIMULATED
    )


def mutants(index: int, dims: tuple[int, int], of: list[int]) -> tuple[int, list[str]]:
    """(how many, what survived): every synchronisation of the kernel dropped or weakened once."""
    return schedules.survivors(
        lambda options, which: simulate(index, which, dims, "bf16", options), "sm_90", of, (0, 1, 9)
    )


def assembled(index: int, dims: tuple[int, int], dtype: str, rules: dict[str, Any]) -> dict[str, Any]:
    """Compile, and what ptxas says: bytes of spills, advisories that serialise every product ("C75")."""
    problem = Problem.from_shape((4, 32, 8, 4096, 4096, *dims), dtype, return_lse=True, **rules)
    _, build = builds(problem, plan_of("sm_90", rows()[index], ARCH), ARCH)["all"]
    kernel, spills, lines = by_ptxas(build)
    advisories = [line for line in lines if "C75" in line]
    return {"spills": spills, "advisories": advisories, "wgmma": kernel.asm["ptx"].count("wgmma.mma_async")}


def built_around(index: int, dims: tuple[int, int]) -> list[int]:
    """Bytes of shared memory of each kernel around the main one."""
    problem = Problem.from_shape((4, 32, 8, 4096, 4096, *dims), "bf16", return_lse=True, causal="top_left")
    launch = prepared(rows()[index], problem)
    q, k, v = meta_tensors(problem)
    lse, work = torch.empty(q.shape[:3], device="meta"), launch.work(q.device)
    found = []
    for kernel, grid, arguments, options in launch.launches((q, k, v, q), q, lse, None, (q, k, v), work):
        if kernel is not attention_backward:
            with compiling_for(ARCH, kernel):
                found.append(kernel.warmup(*arguments, grid=grid, **options).metadata.shared)
    return found
