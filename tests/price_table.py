"""The tables of prices in benchmarks/results: lines of several Tritons in one file."""

import csv
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
