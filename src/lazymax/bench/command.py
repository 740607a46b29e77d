"""The `bench` command: options, the run, the files."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from .. import arch as arches
from ..console import UsageError, add_rules, parse_band, parse_device, parse_dtypes, parse_shape, progress, say, usage
from ..dispatch import plan
from .cases import SUITES, Case, label
from .check import OK
from .clock import clock_for
from .features import command as calls_command
from .features.cases import SUITES as CALL_SUITES
from .gradients import measure_backward
from .host import About, about
from .measure import MORE, Overhead, Row, measure, overhead
from .peers import LAZYMAX, PEERS, Make, candidates, ours
from .report import case_table, fastest_row, header, overhead_table, plot_fault, summary, to_json, write_csv, write_plot
from .rows import ALL, BEST, PORTABLE

DEFAULT_PEERS = "sdpa-cudnn,sdpa-flash,sdpa-efficient"
CALLS = " and ".join(CALL_SUITES)  # suites of calls, not of shapes; each goes alone
WINDOW_MS, CALLS_WINDOW_MS = 100.0, 40.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", default=[], metavar="B,Hq,Hkv,Sq,Sk,D[,Dv]", help="repeatable")
    parser.add_argument(
        "--suite", action="append", default=[], choices=(*SUITES, *CALL_SUITES),
        help="named shapes; repeatable; or alone: features, what each costs beside the plain kernel; "
        "varlen, packed sequences beside other libraries",
    )  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT", help="of the suites, the cases with this in their name")
    parser.add_argument("--dtype", default="bf16", help="comma list; default: bf16")
    add_rules(parser)
    parser.add_argument(
        "--against", metavar="PEERS",
        help=f"comma list of {', '.join(PEERS)}; default: {DEFAULT_PEERS}; "
        + "; ".join(f"{name}: {', '.join(peers)}" for name, peers in calls_command.PEERS.items())
        + "; default there: none",
    )  # fmt: skip
    parser.add_argument(
        "--rows", choices=tuple(MORE),
        help=f"{PORTABLE}: the portable kernel beside that of the GPU's own backend; "
        f"{ALL}: every other row of the tile tables that takes the problem; default: {BEST}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not; default: 5")
    parser.add_argument(
        "--window-ms", type=float,
        help=f"time of one candidate in a round; default: {WINDOW_MS:g}, {CALLS}: {CALLS_WINDOW_MS:g}",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, metavar="N",
        help=f"{CALLS}: processes that build and try the kernels beforehand, 0 for none; default: 8 on a GPU",
    )  # fmt: skip
    parser.add_argument(
        "--graphs", action="store_true",
        help="replays of CUDA graphs instead of eager calls: the kernels without the host",
    )  # fmt: skip
    parser.add_argument(
        "--backward", action="store_true",
        help="the gradients of q, k and v instead of the output, from a graph that is kept; memory: of forward and "
        "backward together",
    )  # fmt: skip
    parser.add_argument("--overhead", action="store_true", help="host time of an eager call instead; no shapes")
    parser.add_argument("--device", help="cuda or cuda:N; cpu must be asked for, and only tests this tool")
    parser.add_argument("--commit", help="to write into the files; default: git's")
    parser.add_argument("--json", metavar="FILE", help="- for standard output, without the table")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="roofline, .png, .svg or .pdf")


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The shapes asked for. Raises ValueError."""
    window = parse_band(options.window)
    shapes = [parse_shape(text) for text in options.shape]
    cases = [Case(label(shape, options.causal, window), shape, options.causal, window) for shape in shapes]
    if not shapes and (options.causal or window):
        raise ValueError("--causal, --window: go with --shape; the cases of a suite have their own")
    for suite in options.suite:
        cases += [case for case in SUITES[suite] if options.only in case.name]
    if not cases and not options.overhead:
        raise ValueError(
            f"bench: no case to time; expected --shape or --suite ({', '.join(SUITES)})"
            + (f" with a case named like --only {options.only!r}" if options.only else "")
        )
    return cases


def run(options: argparse.Namespace) -> int:
    """Exit code: 1 if a result of lazymax was wrong or missing."""
    with usage():
        _check_rows(options)
        dtypes, device = parse_dtypes(options.dtype), parse_device(options.device)
        _check_graphs(options, device)
        _check_backward(options)
        wanted = calls_command.calls_of(options, device)
        cases = [] if wanted else cases_of(options)
        against = DEFAULT_PEERS if options.against is None else options.against
        peers = {} if wanted else candidates(against, options.impl)
        if options.window_ms is None:
            options.window_ms = CALLS_WINDOW_MS if wanted else WINDOW_MS
        if device.type == "cpu" and options.device is None:
            raise ValueError(
                f"bench: torch {torch.__version__} sees no GPU, and times of a CPU would say nothing about one; "
                "--device cpu times the reference (or the interpreter) all the same"
            )
        if options.rounds < 1 or not options.window_ms > 0:
            raise ValueError("--rounds, --window-ms: expected at least 1, and more than 0")
        _check_plans(cases, dtypes, device, options.impl)
        _check_outputs(options)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    if wanted:
        return calls_command.run(options, wanted, dtypes, device, partial(_write_calls, options))
    return _overhead(options, dtypes, device) if options.overhead else _run(options, cases, dtypes, peers, device)


def _other_work(options: argparse.Namespace) -> list[str]:
    """Of the options, what times something else than shapes."""
    return [f"--suite {name}" for name in options.suite if name in CALL_SUITES] + ["--overhead"] * options.overhead


def _check_rows(options: argparse.Namespace) -> None:
    others = _other_work(options)
    if options.rows and others:
        raise ValueError(f"--rows: got {options.rows!r} with {others[0]}; it goes with --shape and suites of shapes")


def _check_graphs(options: argparse.Namespace, device: torch.device) -> None:
    others = _other_work(options) + [f"device {device}"] * (device.type != "cuda")
    if options.graphs and others:
        raise ValueError(f"--graphs: got {others[0]}; it goes with --shape and suites of shapes, on a GPU")


def _check_backward(options: argparse.Namespace) -> None:
    others = _other_work(options) + [f"--rows {options.rows}"] * bool(options.rows)
    if options.backward and others:
        raise ValueError(f"--backward: got {others[0]}; it goes with --shape and suites of shapes alone")
    if options.backward and f"{LAZYMAX}:graph" in (options.against or ""):
        raise ValueError(f"--backward: got --against {LAZYMAX}:graph, whose output has no gradient")


def _check_plans(cases: Sequence[Case], dtypes: Sequence[torch.dtype], device: torch.device, impl: str) -> None:
    """Find shapes that make no sense, and a named impl that cannot take one, before anything is timed."""
    for case in cases:
        for dtype in dtypes:
            problem = case.problem(dtype)
            plan(problem, arches.of(device), impl)
            if not problem.flops:
                raise ValueError(f"--shape: got {','.join(map(str, case.shape))}, in which no query sees a key")


def _check_outputs(options: argparse.Namespace) -> None:
    if options.plot and (fault := plot_fault()):
        raise UsageError(fault)
    if options.overhead and (options.csv or options.plot or options.shape or options.suite):
        raise ValueError(
            "--overhead: has its own shape and one output file, --json; got --shape, --suite, --csv or --plot"
        )
    for name in ("json", "csv", "plot"):
        path = getattr(options, name)
        if path and path != "-" and not Path(path).parent.is_dir():
            raise ValueError(f"--{name}: got {path!r}, but there is no folder {Path(path).parent}")


def _run(
    options: argparse.Namespace,
    cases: Sequence[Case],
    dtypes: Sequence[torch.dtype],
    peers: Mapping[str, Make],
    device: torch.device,
) -> int:
    quiet = options.json == "-"
    clock = clock_for(device, options.graphs)
    facts = about(clock, dtypes, options.arguments, options.rounds, options.window_ms, options.commit)
    if not quiet:
        say(header(facts) + ("\ntimes of CUDA graph replays" if options.graphs else ""))
    rows: list[Row] = []
    work = [(case, dtype) for dtype in dtypes for case in cases]
    for case, dtype in progress(work, "bench", len(work)):
        found = (measure_backward if options.backward else measure)(
            case, dtype, peers, clock, impl=options.impl, rows=options.rows or BEST, rounds=options.rounds,
            window_ms=options.window_ms, matmul_tflops=facts.matmul_tflops[str(dtype).removeprefix("torch.")],
        )  # fmt: skip
        rows += found
        if not quiet:
            say("\n" + case_table(found) + (f"\n  {fastest_row(found)}" if options.rows == ALL else ""))
        _write(options, facts, rows)  # after every case: a run that is cut short leaves what it has
    if quiet:
        _write(options, facts, rows, stdout=True)
    else:
        say("\n" + summary(rows))
    if options.plot:
        write_plot(Path(options.plot), facts, rows)
    return 0 if all(row.status == OK for row in rows if ours(row.candidate)) else 1


def _write_calls(options: argparse.Namespace, facts: About, rows: Sequence[Row], stdout: bool) -> None:
    _write(options, facts, rows, stdout=stdout)


def _overhead(options: argparse.Namespace, dtypes: Sequence[torch.dtype], device: torch.device) -> int:
    clock = clock_for(device)
    facts = about(clock, dtypes, options.arguments, options.rounds, options.window_ms, options.commit)
    rows = [row for dtype in dtypes for row in overhead(dtype, clock, options.rounds)]
    if options.json != "-":
        say(overhead_table(rows))
    _write(options, facts, [], rows, stdout=True)
    return 0


def _write(
    options: argparse.Namespace,
    facts: About,
    rows: Sequence[Row],
    overheads: Sequence[Overhead] = (),
    stdout: bool = False,
) -> None:
    if options.csv:
        write_csv(Path(options.csv), facts, rows)
    if options.json == "-":
        if stdout:
            sys.stdout.write(to_json(facts, rows, overheads) + "\n")
    elif options.json:
        Path(options.json).write_text(to_json(facts, rows, overheads) + "\n")
