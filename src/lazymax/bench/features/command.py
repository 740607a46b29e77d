"""The part of the `bench` command that the suites of calls have."""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...compat import tritons
from ...console import progress, say
from ..check import OK
from ..clock import clock_for
from ..host import About, about
from ..peers import LAZYMAX
from ..report import header
from . import flex, packed
from .cases import ON_CPU, ON_GPU, SUITES, Feature
from .measure import FeatureRow, Peers, Suite, alone
from .rehearse import Rehearsal, rehearse
from .report import LEGENDS, case_line, closing

Write = Callable[[About, Sequence[FeatureRow], bool], None]
JOBS = 8


PEERS: dict[str, tuple[str, ...]] = {"features": (flex.FLEX,), "varlen": tuple(packed.PEERS)}


def calls_of(options: argparse.Namespace, device: torch.device) -> tuple[Feature, ...]:
    """The cases asked for; none if no suite of calls is. Raises ValueError for what does not go with it."""
    suite = next((name for name in options.suite if name in SUITES), None)
    if suite is None:
        return ()
    others = [name for name in ("shape", "causal", "window", "plot", "overhead") if getattr(options, name)]
    others += ["suite"] if len(options.suite) > 1 else []
    if others:
        raise ValueError(f"--suite {suite}: goes alone, got --{', --'.join(others)} beside it")
    for name in _against(options):
        if name not in PEERS[suite]:
            raise ValueError(f"--against: got {name!r}, --suite {suite} takes {', '.join(PEERS[suite])} or none")
    if options.jobs is not None and options.jobs < 0:
        raise ValueError(f"--jobs: got {options.jobs}, expected 0 or more")
    fault = tritons.unsupported_triton(tritons.triton_version())
    if fault:  # the modifications are Triton functions, on every device
        raise ValueError(f"--suite {suite}: {fault}")
    found = tuple(feature for feature in _everything(suite, device) if options.only in feature.name)
    if not found:
        raise ValueError(f"bench: no case to time; none of --suite {suite} has --only {options.only!r} in its name")
    return found


def _against(options: argparse.Namespace) -> list[str]:
    return [name.strip() for name in (options.against or "").split(",") if name.strip()]


def _everything(suite: str, device: torch.device) -> tuple[Feature, ...]:
    return SUITES[suite](ON_GPU if device.type == "cuda" else ON_CPU)


def _peers(suite: str, names: Sequence[str]) -> Peers:
    if not names:
        return alone
    return flex.peers if suite == "features" else partial(packed.peers, names)


def run(
    options: argparse.Namespace,
    wanted: Sequence[Feature],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    write: Write,
) -> int:
    """Exit code: 1 if a result of lazymax was wrong or missing."""
    from . import mods

    mods.register()
    start = time.perf_counter()
    kind = wanted[0].suite
    quiet = options.json == "-"
    faults = {dtype: _rehearsed(options, wanted, dtype, device, quiet) for dtype in dtypes}
    clock = clock_for(device)
    facts = about(clock, dtypes, options.arguments, options.rounds, options.window_ms, options.commit)
    if not quiet:
        say(f"{header(facts)}\n{LEGENDS[kind]}")
    rows: list[FeatureRow] = []
    for dtype in dtypes:
        suite = Suite(
            _everything(kind, device), dtype, clock, impl=options.impl, peers=_peers(kind, _against(options)),
            rounds=options.rounds, window_ms=options.window_ms, faults=faults[dtype],
            matmul_tflops=facts.matmul_tflops[str(dtype).removeprefix("torch.")],
        )  # fmt: skip
        for feature in progress(wanted, "bench", len(wanted)):
            found = suite.measure(feature)
            rows += found
            if not quiet:
                say(case_line(found))
            write(facts, rows, False)  # after every case: a run that is cut short leaves what it has
    if quiet:
        write(facts, rows, True)
    else:
        say(f"\n{closing(rows)}\n{len(rows)} rows in {time.perf_counter() - start:.0f} s")
    return 0 if all(row.status == OK for row in rows if row.candidate == LAZYMAX) else 1


def _rehearsed(
    options: argparse.Namespace, wanted: Sequence[Feature], dtype: torch.dtype, device: torch.device, quiet: bool
) -> dict[str, str]:
    jobs = options.jobs
    if jobs is None:
        jobs = min(JOBS, max(1, (os.cpu_count() or 1) // 2)) if device.type == "cuda" else 0
    if not jobs:
        return {}
    start = time.perf_counter()
    # a case's base runs too, whether it was asked for or not
    names = list(dict.fromkeys(name for f in wanted for name in (f.base, f.name) if name))
    faults = rehearse(names, Rehearsal(str(device), str(dtype).removeprefix("torch."), options.impl), jobs)
    if not quiet:
        say(f"{len(names)} cases rehearsed by {jobs} processes in {time.perf_counter() - start:.0f} s")
    return faults
