"""A row may only get cheaper: prices of the gfx1151 kernels, from executed instructions, beside the committed table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gfx1151_backward_static as backward
import pytest
from gfx1151_static import FILE, entries
from price_table import recorded
from simulators.gfx1151 import EmulatorUnavailable
from simulators.gfx1151.build import interpreter
from turns import FLOOR

TESTS = Path(__file__).parent
DEARER = 1.01  # than the table

PRICES = """
import importlib, json, sys
module = importlib.import_module(sys.argv[2])
Pricing, entries = module.Pricing, module.entries

pricing = Pricing()
wanted = {tuple(key) for key in json.loads(sys.argv[1])}
print(json.dumps([pricing.price(entry) for entry in entries() if not wanted or entry.key in wanted]))
"""
# (table, row, head dim, dtype): at least so many TFLOP/s if only issue counts, at most so many global loads for 64 WMMA
ASKED: dict[tuple[str, str, str, str], tuple[float, float]] = {
    ("WMMA", "128x32-w8", "128", "fp16"): (36.5, 16),
    ("WMMA", "256x64-w16-always", "128", "bf16"): (35.0, 16),
    ("WMMA", "128x64-w8", "64", "fp16"): (32.0, 16),
    ("WMMA", "64x16-w4-q", "256", "fp16"): (35.0, 16),
    ("WMMA", "128x64-w8", "80", "fp16"): (0.9 * 36.5, 16),
    ("WMMA", "128x64-w8", "96", "fp16"): (0.9 * 36.5, 16),
}
# Beside the rows that are chosen, by default.
SEED = {("singlewave", "16x16-w1", "128", "fp16"), ("pipelined", "16x16-w1-pipelined", "128", "fp16")}


def prices(wanted: set[tuple[str, ...]], builds: Path, module: str = "gfx1151_static") -> list[dict[str, Any]]:
    """builds: most of what is priced is what test_gfx1151.py runs."""
    try:
        interpreter()
    except EmulatorUnavailable as missing:
        pytest.skip(str(missing))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join((str(TESTS.parent / "src"), str(TESTS)))
    env["TRITON_CACHE_DIR"] = str(builds)
    command = [sys.executable, "-W", "ignore", "-c", PRICES, json.dumps(sorted(wanted)), module]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def beside_the_table(lines: list[dict[str, Any]], file: Path = FILE) -> list[str]:
    known = {
        (line["triton"], line["table"], line["row"], line["head_dim"], line["dtype"]): line for line in recorded(file)
    }
    wrong = []
    for line in lines:
        key = (line["triton"], line["table"], line["row"], str(line["head_dim"]), line["dtype"])
        before = known.get(key)
        if before is None:
            if key[0] in {triton for triton, *_ in known}:
                wrong.append(f"{key}: not in {file.name}; python tests/{file.stem.replace('-', '_')}.py --write")
            continue
        for what in ("cycles_per_unit", "global_loads_per_64_wmma", "lds_cycles_per_64_wmma"):
            if line[what] > DEARER * float(before[what]):
                wrong.append(f"{key}: {what} {line[what]}, was {before[what]}")
        if line["spilled_vgprs"] > int(before["spilled_vgprs"]):
            wrong.append(f"{key}: spills {line['spilled_vgprs']}, before {before['spilled_vgprs']}")
    return wrong


def test_what_was_asked_for_and_the_rows_that_are_chosen(builds: Path) -> None:
    lines = prices({entry.key for entry in entries() if entry.table == "WMMA"} | SEED, builds)
    found = {(line["table"], line["row"], str(line["head_dim"]), line["dtype"]): line for line in lines}
    assert set(found) >= {*ASKED, *SEED}
    for key, (floor, loads) in ASKED.items():
        line = found[key]
        assert line["floor_tflops"] >= floor, f"{key}: {line}"
        assert line["global_loads_per_64_wmma"] <= loads and line["spilled_vgprs"] == line["scratch"] == 0, (
            f"{key}: {line}"
        )
    assert [line for line in lines if line["table"] == "WMMA" and line["spilled_vgprs"]] == []
    assert beside_the_table(lines) == []


@pytest.mark.slow
def test_every_row(builds: Path) -> None:
    lines = prices(set(), builds)
    assert len(lines) > 50
    assert [line for line in lines if line["table"] == "WMMA" and line["spilled_vgprs"]] == []
    assert beside_the_table(lines) == []


def test_the_comparison_can_fail() -> None:
    line: dict[str, Any] = {**recorded(FILE)[0]}
    numbers = {name: float(line[name]) for name in
               ("cycles_per_unit", "global_loads_per_64_wmma", "lds_cycles_per_64_wmma")}  # fmt: skip
    same = line | numbers | {"spilled_vgprs": int(line["spilled_vgprs"])}
    assert beside_the_table([same]) == []
    for name in numbers:
        assert name in beside_the_table([same | {name: 1.02 * numbers[name] + 0.1}])[0]
    assert "spills" in beside_the_table([same | {"spilled_vgprs": same["spilled_vgprs"] + 1}])[0]
    assert "not in gfx1151-static.csv; python tests/gfx1151_static.py" in beside_the_table([same | {"row": "7x7"}])[0]


# ---- the backward


def beside_the_backward(lines: list[dict[str, Any]]) -> list[str]:
    assert all(line["wmma_share"] > 0.3 for line in lines)  # a loop of products was found
    return beside_the_table(lines, backward.FILE)


def test_the_backward(builds: Path) -> None:
    """What test_gfx1151.py has built by default."""
    dtype = "bf16" if FLOOR else "fp16"
    wanted = {entry.key for entry in backward.entries() if (entry.dim, entry.dtype) in ((64, dtype), (128, dtype))}
    lines = prices(wanted, builds, "gfx1151_backward_static")
    assert len(lines) == len(wanted) == 5
    assert beside_the_backward(lines) == []


@pytest.mark.slow
def test_every_row_of_the_backward(builds: Path) -> None:
    lines = prices(set(), builds, "gfx1151_backward_static")
    assert len(lines) == 22
    assert beside_the_backward(lines) == []


def test_the_price_of_the_backward() -> None:
    """The arithmetic: two kernels at the full speed of the matrix unit do seven products for five; three do eight."""
    for kernels, products in ((("dq", "dkdv"), 7), (("dq", "dv", "dk"), 8)):
        full = [{"table": kernel, "head_dim": 128, "dtype": "bf16",
                 "cycles_per_unit": 36.15 * backward.PRODUCTS[kernel] * 128} for kernel in kernels]  # fmt: skip
        assert backward.floor_of_all(full, 128, "bf16") == pytest.approx(43.51 * 5 / products)
