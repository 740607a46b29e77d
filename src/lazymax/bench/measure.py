"""One case after the other: inputs, check, memory, time."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from .. import arch as arches
from ..api import attention
from ..arch import Arch
from ..dispatch import Plan, plan
from ..drop_in import scaled_dot_product_attention
from ..problem import Problem
from ..reference import TORCH_SDPA
from .cases import Case
from .check import FAILED, LEFT_OUT, OK, Oracle, Verdict
from .clock import Clock, GraphClock, host_blocks, ratio, rounds_of
from .peers import LAZYMAX, LeftOut, Make, Ready, ours, refusals
from .rows import ALL, BEST, PORTABLE, others, portable, ran, row_of

# what `--rows` adds beside lazymax
MORE: dict[str, Callable[[Problem, Arch, Plan, Plan], dict[str, Plan]]] = {
    BEST: lambda problem, arch, planned, default: {},
    PORTABLE: portable,
    ALL: others,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate on one case. Fields after `error` are None unless the result was right."""

    suite: str
    case: str
    shape: str
    dtype: str
    band: str  # "full", "causal top_left", "window (511, 0)"
    candidate: str
    plan: str  # the route, backend and tile that ran, of lazymax and its rows
    status: str
    reason: str  # why wrong or left out
    flops: float  # of visible pairs; of a backward 2.5 times as many
    bytes: float  # q, k, v and the output, once each; of a backward their gradients too
    intensity: float  # flops per byte
    error: float | None = None  # relative Frobenius error
    ms: float | None = None  # median over the rounds
    ms_min: float | None = None
    ms_max: float | None = None
    tflops: float | None = None
    matmul_share: float | None = None  # of the matmul measured in the same run
    lazymax_speed: float | None = None  # how many times faster lazymax was, median of the ratios within each round
    extra_mib: float | None = None  # peak memory beyond inputs, results and LSE; of a backward, with its forward


def measure(
    case: Case,
    dtype: torch.dtype,
    candidates: Mapping[str, Make],
    clock: Clock,
    *,
    impl: str = "auto",
    rows: str = BEST,
    rounds: int = 5,
    window_ms: float = 100.0,
    matmul_tflops: float | None = None,
    check: "Check | None" = None,
    work: tuple[float, float] = (1.0, 1.0),
) -> list[Row]:
    """Check and time every candidate on one case; a row each: lazymax, its other rows as far as they are wanted, then
    the candidates in their order. check: instead of `checked`; work: what it times, beside the problem's flops and
    bytes."""
    problem, examined, plans = (check or checked)(case, dtype, candidates, clock, impl=impl, rows=rows)
    times = rounds_of(examined.ready, clock, rounds, window_ms)
    return [
        _row(case, problem, name, plans.get(name, ""), examined, times, matmul_tflops, work)
        for name in examined.verdicts
    ]


def checked(
    case: Case, dtype: torch.dtype, candidates: Mapping[str, Make], clock: Clock, *, impl: str, rows: str
) -> tuple[Problem, "Examined", dict[str, str]]:
    """Run every candidate on one case and judge it; by name, what ran for lazymax and for its rows."""
    q, k, v = case.tensors(dtype, clock.device)
    problem = Problem.from_call(q, k, v, causal=case.causal, window=case.window)
    oracle = Oracle(problem, q, k, v)
    arch = arches.of(clock.device)
    planned = plan(problem, arch, impl)
    default = ran(lambda: _once(candidates[LAZYMAX](case, problem, q, k, v), clock), planned)
    more = MORE[rows](problem, arch, planned, default)
    everyone = {LAZYMAX: candidates[LAZYMAX]} | {name: row_of(p) for name, p in more.items()} | dict(candidates)
    makes = {name: partial(make, case, problem, q, k, v) for name, make in everyone.items()}
    plans = {LAZYMAX: default} | more
    examined = examine(makes, oracle, clock, strict=plans)
    return problem, examined, {name: p.describe() for name, p in plans.items()}


@dataclass(frozen=True, slots=True)
class Examined:
    """What the check left: who may be timed, and a verdict on everybody in their order."""

    ready: dict[str, Ready] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    memory: dict[str, float | None] = field(default_factory=dict)


Check = Callable[..., tuple[Problem, Examined, dict[str, str]]]


class Judge(Protocol):
    """`check.Oracle`, or that of the gradients."""

    problem: Problem

    def judge(self, result: Any, budget: bool) -> Verdict: ...


def examine(
    makes: Mapping[str, Callable[[], Ready]], oracle: Judge, clock: Clock, strict: Collection[str] = (LAZYMAX,)
) -> Examined:
    """Run everybody once and judge the results, and those of their graphs if these are what is timed; `strict`: who
    has to stay in the float64 error budget."""
    found = Examined()
    for name, make in makes.items():
        try:
            with refusals():
                candidate = make()
                out = _once(candidate, clock)
        except LeftOut as why:
            found.verdicts[name] = Verdict(None, str(why), FAILED if ours(name) else LEFT_OUT)
            continue
        found.verdicts[name] = oracle.judge(out, budget=name in strict)
        if found.verdicts[name].status != OK:
            continue
        found.memory[name] = extra_memory(candidate, oracle.problem, clock)
        if isinstance(clock, GraphClock):
            try:
                candidate = clock.captured(candidate)
            except RuntimeError as fault:
                reason = f"no CUDA graph of it: {str(fault).splitlines()[0]}"
                found.verdicts[name] = Verdict(None, reason, FAILED if ours(name) else LEFT_OUT)
                continue
            found.verdicts[name] = oracle.judge(_once(candidate, clock), budget=name in strict)
            if found.verdicts[name].status != OK:
                continue
        found.ready[name] = candidate
    return found


def _once(candidate: Ready, clock: Clock, whole: bool = False) -> Any:
    """One call; its faults come out here."""
    with candidate.context():
        result = (candidate.whole if whole and candidate.whole else candidate.run)()
        clock.synchronize()
    return result


def _row(
    case: Case,
    problem: Problem,
    name: str,
    what: str,
    examined: Examined,
    times: Mapping[str, list[float]],
    ceiling: float | None,
    work: tuple[float, float],
) -> Row:
    flops, moved = work[0] * problem.flops, work[1] * least_bytes(problem)
    verdict = examined.verdicts[name]
    return Row(
        suite=case.suite,
        case=case.name,
        shape=",".join(map(str, case.shape)),
        dtype=problem.dtype,
        band=band_of(problem),
        candidate=name,
        plan=what,
        status=verdict.status,
        reason=verdict.why,
        flops=flops,
        bytes=moved,
        intensity=flops / moved if moved else 0.0,
        error=verdict.error,
        extra_mib=examined.memory.get(name),
        **figures(name, times, flops, ceiling),
    )


def band_of(problem: Problem) -> str:
    """Which keys a query sees, by position."""
    causal = f"causal {problem.align}" if problem.causal else ""
    window = "" if problem.window == (None, None) else f"window {problem.window}"
    return f"{causal} {window}".strip() or "full"


def figures(
    name: str, times: Mapping[str, list[float]], flops: float, ceiling: float | None
) -> dict[str, float | None]:
    """The fields of a `Row` that come from times; none for a candidate that was not timed."""
    if name not in times:
        return {}
    mine, ours = times[name], times.get(LAZYMAX)
    ms = statistics.median(mine)
    tflops = flops / ms / 1e9
    return dict(
        ms=ms, ms_min=min(mine), ms_max=max(mine), tflops=tflops,
        matmul_share=None if not ceiling else tflops / ceiling,
        lazymax_speed=None if ours is None else ratio(mine, ours),
    )  # fmt: skip


def least_bytes(problem: Problem) -> float:
    """q, k and v read once, the output written once."""
    p, size = problem, getattr(torch, problem.dtype).itemsize
    both = p.head_dim + p.v_head_dim
    q_rows, k_rows = p.packed or (p.batch * p.q_len, p.batch * p.kv_len)
    return float(size * both * (p.q_heads * q_rows + p.kv_heads * k_rows))


def extra_memory(candidate: Ready, problem: Problem, clock: Clock) -> float | None:
    """MiB allocated at the peak of a call beyond its results and one LSE; None on a CPU."""
    if clock.device.type != "cuda":
        return None
    torch.cuda.synchronize(clock.device)
    torch.cuda.reset_peak_memory_stats(clock.device)
    before = torch.cuda.memory_allocated(clock.device)
    results = _once(candidate, clock, whole=True)
    kept = results if isinstance(results, Sequence) else (results,)
    lse = 4 * problem.q_heads * (problem.packed[0] if problem.packed else problem.batch * problem.q_len)
    beyond: float = torch.cuda.max_memory_allocated(clock.device) - before - lse
    beyond -= sum(t.untyped_storage().nbytes() for t in kept)
    return max(0.0, beyond / 2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Host time of one eager call, microseconds: median over blocks with the smallest and largest; `ratio` to torch's
    function in the same round, median."""

    call: str
    dtype: str
    us: float
    us_min: float
    us_max: float
    ratio: float


def overhead(dtype: torch.dtype, clock: Clock, rounds: int, block: int = 200) -> list[Overhead]:
    """Host time per eager call at (1, 2, 64, 64), where the host is all that counts. 200 calls a block: the launch
    queue of a GPU holds about 1000."""
    q, k, v = Case("overhead", (1, 2, 2, 64, 64, 64)).tensors(dtype, clock.device)
    torch_name = "F.scaled_dot_product_attention"
    calls: dict[str, Callable[[], object]] = {
        "lazymax.scaled_dot_product_attention": lambda: scaled_dot_product_attention(q, k, v),
        "lazymax.attention": lambda: attention(q, k, v),
        torch_name: lambda: TORCH_SDPA(q, k, v),
    }
    for call in calls.values():
        call()
    times = host_blocks(calls, clock, rounds, block)
    kind = str(dtype).removeprefix("torch.")
    base = times[torch_name]
    return [
        Overhead(call=name, dtype=kind, us=statistics.median(us), us_min=min(us), us_max=max(us), ratio=ratio(us, base))
        for name, us in times.items()
    ]
