"""Rows as a table, JSON, CSV and a roofline plot."""

import csv
import importlib.util
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from .check import LEFT_OUT, OK
from .host import About
from .measure import Overhead, Row
from .peers import LAZYMAX, ours

CPU_NOTE = "note: times of a CPU only show that the tool works"


def header(about: About) -> str:
    """What a reader must know before the figures."""
    ceilings = ", ".join(f"{kind} matmul {tflops:.4g} TFLOP/s" for kind, tflops in about.matmul_tflops.items())
    return (
        f"{about.device} ({about.arch}), torch {about.torch}, Triton {about.triton or 'none'}, "
        + f"cuDNN {about.cudnn or 'none'}"
        + (f"\nunder load: {about.smi}" if about.smi else "")
        + f"\nceilings measured here: {ceilings}, copy {about.copy_gbs:.4g} GB/s"
        + f"\n{about.rounds} rounds of {about.window_ms:g} ms a candidate, order alternating; median (min..max)"
        + (f"\n{CPU_NOTE}" if about.arch == "cpu" else "")
    )


def case_table(rows: Sequence[Row]) -> str:
    """One case: a line per candidate, speed of lazymax beside it in the last column."""
    head = rows[0]
    what = head.case if head.shape in head.case else f"{head.case}  [{head.shape}] {head.band}"
    lines = [f"{head.suite}: {what}, {head.dtype}, {head.intensity:.0f} flop/byte"]
    width = max(15, *(len(row.candidate) for row in rows))
    for row in rows:
        if row.status != OK or row.ms is None or row.tflops is None:
            lines.append(
                f"  {row.candidate:<{width}} {row.status.upper() if row.status != LEFT_OUT else LEFT_OUT}: {row.reason}"
            )
            continue
        share = "" if row.matmul_share is None else f" {row.matmul_share:>4.0%} of matmul"
        memory = "" if row.extra_mib is None else f"  +{row.extra_mib:.1f} MiB"
        speed = "" if row.lazymax_speed is None or row.candidate == LAZYMAX else f"  lazymax {row.lazymax_speed:.3f}x"
        spread = f"({row.ms_min:.4g}..{row.ms_max:.4g})"
        lines.append(
            f"  {row.candidate:<{width}} {row.ms:>8.4g} ms {spread:<18} {row.tflops:>6.1f} TFLOP/s{share}"
            f"  err {row.error:.1e}{memory}{speed}" + (f"  {row.plan}" if row.plan else "")
        )
    return "\n".join(lines)


def fastest_row(rows: Sequence[Row]) -> str:
    """Of one case with `--rows all`: which row of lazymax's tables won, and by how much."""
    mine = [row for row in rows if ours(row.candidate)]
    default = _row_name(mine[0])
    timed = sorted((row for row in mine if row.ms is not None), key=lambda row: (row.lazymax_speed or 0.0, row.ms))
    if not timed:
        return "fastest row: none, no result was right"
    best = timed[0]
    if best.lazymax_speed is None:
        return f"fastest row: {_row_name(best)}; the default {default} has no time"
    if best.candidate != LAZYMAX:
        return f"fastest row: {_row_name(best)}, {1 / best.lazymax_speed:.2f}x of the default {default}"
    if len(timed) == 1:
        return f"fastest row: {default}, the default; no other was timed"
    return f"fastest row: {default}, the default; {timed[1].lazymax_speed:.2f}x of the next, {_row_name(timed[1])}"


def _row_name(row: Row) -> str:
    """Of a row of a table; the route of a call that took none."""
    return row.plan.split(":")[-1] if row.candidate == LAZYMAX else row.candidate.removeprefix(f"{LAZYMAX}:")


def summary(rows: Sequence[Row]) -> str:
    """Geometric mean of lazymax's speed beside each peer, and its worst case, by suite and dtype."""
    lines = []
    groups = dict.fromkeys((row.suite, row.dtype, row.candidate) for row in rows if row.candidate != LAZYMAX)
    for suite, dtype, peer in groups:
        found = [r for r in rows if (r.suite, r.dtype, r.candidate) == (suite, dtype, peer)]
        timed = [(r.lazymax_speed, r.case) for r in found if r.lazymax_speed is not None]
        if not timed:
            continue
        mean = statistics.geometric_mean(speed for speed, _ in timed)
        low, case = min(timed)
        lines.append(
            f"{suite} {dtype}: lazymax {mean:.3f}x the speed of {peer} (geometric mean of {len(timed)} cases), "
            f"least {low:.3f}x at {case}, most {max(timed)[0]:.3f}x"
        )
    return "\n".join(lines)


def overhead_table(rows: Sequence[Overhead]) -> str:
    head = "host time of an eager call at (B, H, S, D) = (1, 2, 64, 64), microseconds, median (min..max):"
    return "\n".join(
        [head, *(f"  {r.call:<38} {r.us:>7.2f} ({r.us_min:.2f}..{r.us_max:.2f})  {r.ratio:.2f}x torch" for r in rows)]
    )


def to_json(about: About, rows: Sequence[Row], overheads: Sequence[Overhead] = ()) -> str:
    content = {"about": asdict(about), "rows": [asdict(r) for r in rows], "overhead": [asdict(r) for r in overheads]}
    return json.dumps(_finite(content), indent=1)


def _finite(value: object) -> object:
    """JSON has no NaN: the error of a result that is not finite becomes null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


ABOUT_COLUMNS = (
    "arch", "device", "date", "commit", "torch", "triton", "cudnn", "smi", "rounds", "window_ms",
    "matmul_tflops", "command",
)  # fmt: skip
_COUNTS = ("flops", "bytes")


def write_csv(path: Path, about: About, rows: Sequence[Row]) -> None:
    """A line per row, each with where and when it was measured, so that files of several runs can be joined."""
    names = [field.name for field in fields(rows[0] if rows else Row)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *ABOUT_COLUMNS], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            values = asdict(row) | {key: getattr(about, key) for key in ABOUT_COLUMNS}
            values["matmul_tflops"] = about.matmul_tflops.get(row.dtype)
            writer.writerow({key: _cell(key, value) for key, value in values.items()})


def _cell(name: str, value: object) -> object:
    if name in _COUNTS:
        return int(value)  # type: ignore[call-overload]
    return f"{value:.5g}" if isinstance(value, float) else value


def plot_fault() -> str | None:
    """Why no plot can be drawn, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install 'lazymax[bench]'"
    return None


def write_plot(path: Path, about: About, rows: Sequence[Row]) -> None:
    """Roofline: TFLOP/s over arithmetic intensity, under the ceilings measured in the same run."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.tflops is not None]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    intensities = [row.intensity for row in timed] or [1.0]
    ridges = [ceiling * 1e3 / about.copy_gbs for ceiling in about.matmul_tflops.values()]
    low, high = min(intensities + ridges) / 4, max(intensities + ridges) * 4
    grid = [low * (high / low) ** (step / 200) for step in range(201)]
    for kind, ceiling in about.matmul_tflops.items():
        roof = [min(ceiling, about.copy_gbs * x / 1e3) for x in grid]
        axes.plot(grid, roof, color="black", linewidth=1, label=f"{kind} matmul {ceiling:.3g} TFLOP/s, copy bandwidth")
    for index, name in enumerate(dict.fromkeys(row.candidate for row in timed)):
        mine = [(row.intensity, row.tflops) for row in timed if row.candidate == name and row.tflops is not None]
        marker = "o" if name == LAZYMAX else "xsv^D+"[index % 6]
        axes.scatter([x for x, _ in mine], [y for _, y in mine], marker=marker, label=name, zorder=3, alpha=0.8)
    axes.set(xscale="log", yscale="log", xlabel="flop per byte (q, k, v and output once)")
    axes.set_ylabel("TFLOP/s (visible pairs)")
    axes.set_title(f"{about.device}, {about.date[:10]}, torch {about.torch}, Triton {about.triton}", fontsize=10)
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
