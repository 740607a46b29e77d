"""`python -m lazymax.bench.cycles`: what ncu prints becomes a row per kernel, and what goes wrong is said."""

import csv
import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lazymax.bench import cycles
from lazymax.bench.check import LEFT_OUT, OK
from lazymax.bench.cycles import (
    METRICS,
    Called,
    Failed,
    by_call,
    find_ncu,
    known_metrics,
    main,
    number,
    parse_launches,
    rows_of,
    short_name,
)

SHOWN = ("sm__cycles_elapsed.max", METRICS["tensor"], METRICS["dram_bytes"])
FA3 = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<a, (int)1>>>(T1::Params)"
SPIN = "at::cuda::<unnamed>::spin_kernel(long)"


def output(kernels, values=("1,234,567", "71.25", "n/a")):
    """As `ncu --csv --page raw` writes it: its remarks, the columns, a line of units, a line per launch."""
    fixed = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
             "Grid Size", "Device", "CC")  # fmt: skip
    lines = [[*fixed, *SHOWN], [*("" for _ in fixed), "cycle", "%", "byte"]]
    for place, kernel in enumerate(kernels):
        lines.append([str(place), "77", "python3.12", "127.0.0.1", kernel, "1", "7", "(384, 1, 1)", "(132, 1, 1)", "0",
                      "9.0", *values])  # fmt: skip
    told = ["==PROF== Connected to process 77 (/usr/bin/python3.12)", f'==PROF== Profiling "{kernels[0]}": 0%....100%']
    return "\n".join([*told, *(",".join(f'"{cell}"' for cell in line) for line in lines), "==PROF== Disconnected", ""])


def called(candidate, status=OK):
    return Called(
        case="D=128 S=16384 full", shape="1,16,16,16384,16384,128", dtype="bfloat16", band="full", candidate=candidate,
        plan="", status=status, reason="" if status == OK else "not here", error=0.002, flops=1e9,
    )  # fmt: skip


def test_a_row_per_kernel_and_one_for_who_was_not_launched():
    launches = parse_launches(output([SPIN, "attention_forward", SPIN, "fill(int)", FA3]))
    assert [launch["ID"] for launch in launches] == ["0", "1", "2", "3", "4"]
    calls = [called("lazymax"), called("fa4", LEFT_OUT), called("fa3")]
    rows = rows_of(calls, launches, 132)
    assert [(row["candidate"], row["kernel"]) for row in rows] == [
        ("lazymax", "attention_forward"), ("fa4", ""), ("fa3", "fill"), ("fa3", "cutlass::device_kernel"),
    ]  # fmt: skip
    first, absent = rows[:2]
    assert first["cycles"] == 1234567 and first["tensor"] == 71.25
    assert first["dram_bytes"] is first["alu"] is None  # not read, not asked for
    assert first["flop_per_cycle"] == pytest.approx(1e9 / 1234567 / 132)
    assert absent["cycles"] is absent["flop_per_cycle"] is None and absent["reason"] == "not here"
    text = cycles._table(rows)
    assert "1,234,567" in text and "left out: not here" in text


def test_launches_come_by_their_number():
    lines = output([SPIN, "a", "b"]).splitlines()
    shuffled = "\n".join([*lines[:4], *lines[4:][::-1]])
    assert [launch["Kernel Name"] for launch in parse_launches(shuffled)] == [SPIN, "a", "b"]


@pytest.mark.parametrize("kernels", [[SPIN, "a"], [SPIN, "a", SPIN], [SPIN, "a", SPIN, "b", SPIN, "c"]], ids=len)
def test_calls_that_do_not_match_the_launches_are_refused(kernels):
    with pytest.raises(Failed, match="2 calls were made"):
        by_call(parse_launches(output(kernels)), 2)


def test_no_counters_say_why():
    text = "==PROF== Connected\n==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n==PROF== Disconnected"
    with pytest.raises(Failed, match=r"no counters: ==ERROR== Failed to initialize the profiler: LibraryNotLoaded$"):
        parse_launches(text)
    with pytest.raises(Failed, match="it said nothing"):
        parse_launches("")


def test_numbers_and_names():
    assert [number(text) for text in ("1,234.5", "7", "n/a", "", None)] == [1234.5, 7.0, None, None, None]
    names = {FA3: "cutlass::device_kernel", SPIN: "at::cuda::spin_kernel", "cudnn_sdpa_sm90": "cudnn_sdpa_sm90"}
    names |= {"void at::(anonymous namespace)::fill<int>(int)": "at::fill"}
    for kernel, expected in names.items():
        assert short_name(kernel) == expected


def test_metrics_that_ncu_does_not_know_are_left_out():
    bases = [name.split(".")[0] for name in METRICS.values() if not name.startswith("launch__")]
    lines = [f"{base}   Counter   cycle   # of" for base in bases if "xu" not in base]
    listing = "\n".join(["Device NVIDIA H200 (GH100)", *lines])
    assert known_metrics(listing) == [name for name in METRICS.values() if "pipe_xu" not in name]
    assert known_metrics("another format") == list(METRICS.values())


def test_what_cannot_be_done_is_one_line(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(cycles.shutil, "which", lambda name: None)
    monkeypatch.setattr(cycles.Path, "glob", lambda self, pattern: iter(()))
    assert main([]) == 2
    assert capsys.readouterr().err == "cycles: no ncu on PATH; it is Nsight Compute, of the CUDA toolkit\n"
    assert main(["--ncu", "/no/such"]) == 2 and "no ncu at /no/such" in capsys.readouterr().err
    for wrong in (["--only", "S=3"], ["--against", "fa9"], ["--dtype", "int8"], ["--suite", "no"]):
        assert main(wrong) == 2 and capsys.readouterr().err.startswith("cycles: ")


def test_the_whole_way_but_the_gpu(monkeypatch, capsys, tmp_path: Path):
    """ncu and the device are stand-ins; the file is read back."""
    ncu, log = tmp_path / "ncu", []
    ncu.touch(mode=0o755)

    def run(command, **options):
        log.append(command)
        if "--launch" in command:
            Path(command[command.index("--log-file") + 1]).write_text(output([SPIN, "attention_forward", SPIN, FA3]))
            lines = [json.dumps(asdict(called(name))) for name in ("lazymax", "fa3")]
            Path(command[command.index("--launch") + 1]).write_text("\n".join(lines) + "\n")
        return subprocess.CompletedProcess(command, 0, stdout="NVIDIA (R) Nsight Compute\nVersion 2025.3.1.0\n")

    class H200:
        multi_processor_count = 132

    monkeypatch.setattr(cycles.subprocess, "run", run)
    for name, value in (("is_available", True), ("current_device", 0), ("get_device_properties", H200)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(cycles, "origin", lambda device, commit: {"device": "NVIDIA H200", "commit": commit})
    file = tmp_path / "cycles.csv"
    assert main(["--ncu", str(ncu), "--against", "fa3", "--csv", str(file), "--commit", "abc"]) == 0
    assert "NVIDIA H200, Version 2025.3.1.0" in capsys.readouterr().out
    rows = list(csv.DictReader(file.open(newline="")))
    assert [(row["candidate"], row["kernel"], row["cycles"]) for row in rows] == [
        ("lazymax", "attention_forward", "1234567.0"), ("fa3", "cutlass::device_kernel", "1234567.0"),
    ]  # fmt: skip
    assert rows[0]["commit"] == "abc" and rows[0]["command"].startswith("python -m lazymax.bench.cycles --ncu")
    profiled = next(command for command in log if "--launch" in command)
    assert profiled[0] == str(ncu) and "sm__cycles_elapsed.max" in profiled[profiled.index("--metrics") + 1]
    assert profiled[profiled.index("--clock-control") + 1] == "none"


def test_a_fault_under_ncu_is_told(monkeypatch, capsys, tmp_path: Path):
    ncu = tmp_path / "ncu"
    ncu.touch(mode=0o755)

    def late(command, **options):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cycles, "_output", lambda command: "")
    monkeypatch.setattr(cycles.subprocess, "run", late)
    assert main(["--ncu", str(ncu), "--timeout", "1"]) == 1
    assert capsys.readouterr().err == "cycles: ncu was not back within 1 s\n"
    assert find_ncu(str(ncu)) == str(ncu)
