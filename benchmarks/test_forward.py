"""The forward on every named shape, lazymax and torch's own choice, under pytest-benchmark.

    pytest benchmarks/test_forward.py -k "paper and S=4096" --benchmark-group-by=param:case

The host's timer around a call and a synchronisation: for following a change on one machine (`--benchmark-compare`). For
figures beside other libraries use `lazymax bench`, which alternates the order and takes the device's time.
"""

from typing import Any

import pytest
import torch
from cases import PARAMETERS, TINY

from lazymax.bench.cases import Case
from lazymax.bench.check import OK, Oracle
from lazymax.bench.clock import clock_for
from lazymax.bench.peers import LAZYMAX, LeftOut, candidates, refusals
from lazymax.problem import Problem


@pytest.mark.parametrize("candidate", [LAZYMAX, "sdpa"])
@pytest.mark.parametrize("case", PARAMETERS)
def test_forward(benchmark: Any, case: Case, candidate: str, device: torch.device) -> None:
    if device.type == "cpu" and case is not TINY:
        pytest.skip("no GPU: a CPU's time of this shape says nothing")
    q, k, v = case.tensors(torch.bfloat16, device)
    problem = Problem.from_call(q, k, v, causal=case.causal, window=case.window)
    clock = clock_for(device)
    try:
        with refusals():
            ready = candidates("sdpa")[candidate](case, problem, q, k, v)
            out = ready.run()
    except LeftOut as why:
        if candidate == LAZYMAX:
            raise
        pytest.skip(str(why))
    verdict = Oracle(problem, q, k, v).judge(out, budget=candidate == LAZYMAX)
    assert verdict.status == OK, verdict.why

    def call() -> None:
        ready.run()
        clock.synchronize()

    benchmark.pedantic(call, rounds=20, iterations=5, warmup_rounds=2)
    benchmark.extra_info["flops"] = problem.flops
    benchmark.extra_info["tflops"] = problem.flops / benchmark.stats.stats.median / 1e12
