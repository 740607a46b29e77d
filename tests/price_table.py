"""The tables of prices in benchmarks/results: lines of several Tritons in one file."""

import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import triton


def recorded(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


def write(file: Path, lines: list[dict[str, Any]]) -> None:
    """These lines in place of those of the same Triton."""
    others = [line for line in recorded(file) if line["triton"] != triton.__version__] if file.exists() else []
    with file.open("w", newline="") as table:
        writer = csv.DictWriter(table, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*others, *lines], key=lambda line: line["triton"]))


def command(
    file: Path,
    entries: Iterable[Any],
    price: Callable[[Any], dict[str, Any]],
    shown: Sequence[str],
    after: Callable[[Any, list[dict[str, Any]]], None] = lambda entry, lines: None,
) -> None:
    """Price one entry after the other and print what is shown of it; with --write on the command line, write the
    table. after: is told of each entry, with all lines so far."""
    lines: list[dict[str, Any]] = []
    for entry in entries:
        lines.append(price(entry))
        print(*(lines[-1][name] for name in shown), flush=True)
        after(entry, lines)
    if "--write" in sys.argv:
        write(file, lines)
