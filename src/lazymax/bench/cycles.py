"""Cycles of single launches by Nsight Compute: `python -m lazymax.bench.cycles --against sdpa-cudnn,fa3 --csv FILE`.

Times follow the clock, and the clock follows power; cycles repeat. The command runs itself once more under ncu. There
every candidate is checked as `lazymax bench` does it, and who is right makes one call with the counters on, behind a
kernel that nobody else launches: it tells whose the kernels after it are.
"""

import argparse
import csv
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..console import Parser, UsageError, parse_dtypes, say, table
from .cases import SUITES, Case
from .check import OK
from .clock import clock_for
from .host import origin
from .measure import MORE, band_of, checked
from .peers import Ready, candidates, ours
from .rows import PORTABLE

MARK = "spin_kernel"  # of torch.cuda._sleep
# columns and ncu's names for them; "elapsed": the share of all cycles of the kernel, its start and end included
PERCENT = "avg.pct_of_peak_sustained_elapsed"
METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "ns": "gpu__time_duration.sum",
    "instructions": "smsp__inst_executed.sum",
    "issue": f"sm__issue_active.{PERCENT}",
    "tensor": f"sm__pipe_tensor_cycles_active.{PERCENT}",
    "mufu": f"sm__inst_executed_pipe_xu.{PERCENT}",
    "alu": f"sm__inst_executed_pipe_alu.{PERCENT}",
    "fma": f"sm__inst_executed_pipe_fma.{PERCENT}",
    "smem": f"l1tex__data_pipe_lsu_wavefronts.{PERCENT}",
    "l2": f"lts__t_sectors.{PERCENT}",
    "dram_bytes": "dram__bytes.sum",
    "registers": "launch__registers_per_thread",
    "smem_bytes": "launch__shared_mem_per_block",
}
Launch = dict[str, str]  # by ncu's column


class Failed(Exception):
    """No counters; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """One candidate on one case, in the order of the calls. Those whose status is not "ok" were not launched."""

    case: str
    shape: str
    dtype: str
    band: str
    candidate: str
    plan: str
    status: str
    reason: str
    error: float | None
    flops: float


def parse_launches(text: str) -> list[Launch]:
    """The launches in the output of `ncu --csv --page raw`, one each, in their order."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        told = [line for line in lines if "==ERROR==" in line] or lines[-5:]
        raise Failed("ncu gave no counters: " + (" ".join(line.strip() for line in told)[:600] or "it said nothing"))
    rows = csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"'))))
    return sorted((row for row in rows if row["ID"]), key=lambda row: int(row["ID"]))  # the second line holds units


def by_call(launches: Sequence[Launch], calls: int) -> list[list[Launch]]:
    """The kernels of each call: those behind its mark."""
    found: list[list[Launch]] = []
    for launch in launches:
        if MARK in launch["Kernel Name"]:
            found.append([])
        elif found:
            found[-1].append(launch)
    if len(found) != calls or not all(found):
        counts = [len(kernels) for kernels in found]
        raise Failed(f"{calls} calls were made, but ncu saw {len(found)} marks with {counts} kernels behind them")
    return found


def number(text: str | None) -> float | None:
    """A value as ncu prints it, or None for a metric that it does not know."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def short_name(kernel: str) -> str:
    """Without return type, arguments and template arguments, which fill pages."""
    return re.split(r"[<(]", re.sub(r"^void |\(anonymous namespace\)::|<unnamed>::", "", kernel))[0].strip()


def rows_of(calls: Sequence[Called], launches: Sequence[Launch], processors: int) -> list[dict[str, object]]:
    """A row per kernel, and one for each candidate that was not launched. `flop_per_cycle`: of the whole call, in the
    cycles of this kernel, on each multiprocessor."""
    kernels = iter(by_call(launches, sum(call.status == OK for call in calls)))
    rows: list[dict[str, object]] = []
    for call in calls:
        for launch in next(kernels) if call.status == OK else [None]:
            values = {name: number(launch.get(metric)) if launch else None for name, metric in METRICS.items()}
            cycles = values["cycles"]
            rows.append(
                asdict(call)
                | {"kernel": short_name(launch["Kernel Name"]) if launch else ""}
                | {"flop_per_cycle": call.flops / cycles / processors if cycles else None}
                | values
            )
    return rows


def known_metrics(listing: str) -> list[str]:
    """Of `METRICS` those that `ncu --query-metrics` lists, for ncu stops at a name that it does not know. All of them
    if the list is not as expected."""
    listed = {line.split()[0] for line in listing.splitlines() if line.strip()}
    if not {"sm__cycles_elapsed", "gpu__time_duration"} <= listed:
        return list(METRICS.values())
    return [name for name in METRICS.values() if name.startswith("launch__") or name.split(".")[0] in listed]


def find_ncu(path: str | None) -> str:
    """Nsight Compute's command line. Raises UsageError without one."""
    installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    found = shutil.which(path or "ncu") or (str(installed[0]) if installed and not path else None)
    if found is None:
        raise UsageError(f"no ncu{f' at {path}' if path else ' on PATH'}; it is Nsight Compute, of the CUDA toolkit")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a result of lazymax was wrong or there are no counters, 2 for a wrong use."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parser().parse_args(given)
        if options.launch:
            return _launch_all(options)
        return _profile(options, given)
    except (UsageError, ValueError) as error:
        print(f"cycles: {error}", file=sys.stderr)
        return 2
    except (Failed, subprocess.TimeoutExpired) as error:
        print(f"cycles: {error}", file=sys.stderr)
        return 1


def _parser() -> Parser:
    parser = Parser(prog="python -m lazymax.bench.cycles", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", choices=tuple(SUITES), default="paper")
    parser.add_argument("--only", default="S=16384", metavar="TEXT", help="cases with this in their name; S=16384")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--against", default="sdpa-cudnn,fa3", metavar="PEERS", help="default: sdpa-cudnn,fa3")
    parser.add_argument("--rows", choices=tuple(MORE), default=PORTABLE, help=f"as of lazymax bench; {PORTABLE}")
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--commit", help="to write into the file; default: git's")
    parser.add_argument("--ncu", metavar="FILE", help="default: the one on PATH")
    parser.add_argument("--timeout", type=float, default=450, metavar="SECONDS", help="of ncu; 450")
    parser.add_argument("--launch", metavar="FILE", help=argparse.SUPPRESS)  # under ncu: the calls go into this file
    return parser


def _cases(options: argparse.Namespace) -> list[Case]:
    found = [case for case in SUITES[options.suite] if options.only in case.name]
    if not found:
        raise ValueError(f"no case of --suite {options.suite} has --only {options.only!r} in its name")
    return found


def _profile(options: argparse.Namespace, given: Sequence[str]) -> int:
    # a wrong use shows before anything starts
    _cases(options), candidates(options.against, options.impl), parse_dtypes(options.dtype)
    ncu = find_ncu(options.ncu)
    if not torch.cuda.is_available():
        raise UsageError("there is no NVIDIA GPU here")
    device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        calls, launches = _under_ncu(ncu, given, Path(folder), options.timeout)
    rows = rows_of(calls, launches, torch.cuda.get_device_properties(device).multi_processor_count)
    version = _output([ncu, "--version"]).strip().splitlines()[-1:]
    whence = origin(device, options.commit) | {
        "ncu": " ".join(version), "command": shlex.join(["python", "-m", "lazymax.bench.cycles", *given]),
    }  # fmt: skip
    say(f"{whence['device']}, {' '.join(version)}; shares of all cycles in %\n{_table(rows)}")
    if options.csv:
        write_csv(Path(options.csv), rows, whence)
    return 0 if all(call.status == OK for call in calls if ours(call.candidate)) else 1


def _under_ncu(ncu: str, given: Sequence[str], folder: Path, timeout: float) -> tuple[list[Called], list[Launch]]:
    """This command again, with counters. Raises Failed with what ncu said."""
    log, file = folder / "ncu.log", folder / "calls.jsonl"
    metrics = known_metrics(_output([ncu, "--query-metrics"]))
    command = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--log-file", str(log), "--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", "lazymax.bench.cycles", *given, "--launch", str(file)]
    try:
        code = subprocess.run(command, env=os.environ | {"LC_ALL": "C"}, timeout=timeout).returncode
    except subprocess.TimeoutExpired as late:
        raise Failed(f"ncu was not back within {timeout:g} s") from late
    launches = parse_launches(log.read_text() if log.exists() else "")
    if code:
        raise Failed(f"under ncu the command ended with {code}")
    return [Called(**json.loads(line)) for line in file.read_text().splitlines()], launches


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def _launch_all(options: argparse.Namespace) -> int:
    """What ncu runs: check everybody, then one call of each with the counters on."""
    clock = clock_for(torch.device("cuda", torch.cuda.current_device()))
    peers = candidates(options.against, options.impl)
    with Path(options.launch).open("w") as file:
        for dtype in parse_dtypes(options.dtype):
            for case in _cases(options):
                problem, examined, plans = checked(case, dtype, peers, clock, impl=options.impl, rows=options.rows)
                for name, verdict in examined.verdicts.items():
                    called = Called(
                        case=case.name, shape=",".join(map(str, case.shape)), dtype=problem.dtype,
                        band=band_of(problem), candidate=name, plan=plans.get(name, ""), status=verdict.status,
                        reason=verdict.why, error=verdict.error, flops=problem.flops,
                    )  # fmt: skip
                    if verdict.status == OK:
                        _count(examined.ready[name])
                    file.write(json.dumps(asdict(called)) + "\n")
    return 0


def _count(candidate: Ready) -> None:
    with candidate.context():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # between its passes ncu saves and restores memory, the check's leftovers too
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # launches MARK
        candidate.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    shown = ("cycles", "flop_per_cycle", "issue", "tensor", "mufu", "alu", "fma", "smem", "l2")
    lines = []
    for row in rows:
        what = row["kernel"] or f"{row['status']}: {row['reason']}"
        cells = ("" if row[name] is None else f"{row[name]:,.{0 if name == 'cycles' else 1}f}" for name in shown)
        lines.append((str(row["case"]), str(row["candidate"]), str(what)[:40], *cells))
    return table(("case", "candidate", "kernel", *shown), lines)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]], whence: Mapping[str, str]) -> None:
    """A line per kernel, each with where and when it was measured."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *whence], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **whence} for row in rows)


if __name__ == "__main__":
    sys.exit(main())
