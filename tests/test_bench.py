"""`lazymax bench`: what is timed is right, what is wrong is not timed, and the files say what happened."""

import csv
import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lazymax import reference
from lazymax.bench import check, clock, command, report
from lazymax.bench.cases import SUITES, Case, label
from lazymax.bench.check import FAILED, LEFT_OUT, OK, WRONG, Oracle, pieces
from lazymax.bench.clock import HostClock, order, ratio, rounds_of
from lazymax.bench.measure import extra_memory, least_bytes, measure, overhead
from lazymax.bench.peers import LAZYMAX, PEERS, LeftOut, Ready, candidates, flex, flex_ready, refusals, sdpa
from lazymax.cli import main
from lazymax.console import parse_band, parse_shape
from lazymax.problem import Problem

CPU = torch.device("cpu")
TINY = Case("tiny", (1, 4, 2, 33, 50, 16), "bottom_right")
SQUARE = Case("square", (2, 4, 2, 40, 40, 16), "top_left")
FAST = ["--device", "cpu", "--rounds", "2", "--window-ms", "1"]


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch):
    """These tests are about the tool; one in test_cli.py times the interpreted kernel."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def garbage(case, problem, q, k, v):
    return Ready(lambda: torch.randn_like(q))


def broken(case, problem, q, k, v):
    raise RuntimeError("no such kernel\nand more")


def test_shapes_and_windows_are_parsed():
    assert parse_shape("1,32,8,4096,77,128") == (1, 32, 8, 4096, 77, 128)
    assert parse_shape("1, 2,2,3,4,64,32")[-1] == 32
    for text in ("1,2,3", "1,2,2,a,4,64", "1,2,2,-3,4,64", "", "1,2,2,3,4,64,64,64"):
        with pytest.raises(ValueError, match="--shape: got"):
            parse_shape(text)
    assert parse_band(None) is None
    assert parse_band("511,0") == (511, 0)
    assert parse_band("none,-1") == (None, -1)
    for text in ("5", "a,b", "1,2,3", "--1,0"):
        with pytest.raises(ValueError, match="--window: got"):
            parse_band(text)


def test_suites():
    assert len(SUITES["paper"]) == 18
    for case in SUITES["paper"]:
        batch, heads, _, length, _, dim = case.shape
        assert batch * length == 16384 and heads * dim == 2048
    for name, suite in SUITES.items():
        assert len({case.name for case in suite}) == len(suite)
        for case in suite:
            assert case.suite == name
            assert case.problem(torch.bfloat16).flops > 0
    assert any(case.shape[3] % 64 for case in SUITES["prefill"])
    assert any(case.shape[4] == 77 for case in SUITES["diffusion"])


def test_flops_count_visible_pairs_and_bytes_count_once():
    q, k, v = TINY.tensors(torch.float32, CPU)
    problem = Problem.from_call(q, k, v, causal=TINY.causal)
    visible = reference.keep(torch.arange(33), 50, problem.first_offset, problem.last_offset).sum().item()
    assert problem.flops == 4.0 * 4 * 16 * visible
    assert least_bytes(problem) == 4 * (2 * q.numel() + k.numel() + v.numel())


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_order_alternates(count):
    names = list("abcde"[:count])
    turns = [order(names, turn) for turn in range(2 * count)]
    assert all(sorted(turn) == names for turn in turns)
    for even, odd in zip(turns[::2], turns[1::2], strict=True):
        assert even == odd[::-1]
    assert sorted(turn[0] for turn in turns) == sorted(names * 2)  # everybody begins equally often


def test_rounds_drop_the_first_and_ratios_stay_within_a_round():
    class Counting(HostClock):
        def milliseconds(self, run, calls):
            return float(run())

    ticks = iter(range(1000))
    times = rounds_of({"a": Ready(lambda: next(ticks)), "b": Ready(lambda: 0)}, Counting(CPU), 3, 1.0)
    assert times["a"] == [3, 4, 5]  # two calls find out how many fill a window, the third is the dropped round
    assert times["b"] == [0, 0, 0]
    assert ratio([2.0, 40.0, 9.0], [1.0, 10.0, 3.0]) == 3.0


RULES = [
    {},
    {"causal": "top_left"},
    {"causal": "bottom_right"},
    {"window": (7, 3)},
    {"causal": "bottom_right", "window": (9, 0)},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_piece_is_the_same_rows_of_the_whole(rules):
    q, k, v = Case("", (2, 6, 3, 41, 29, 8)).tensors(torch.float64, CPU)
    problem = Problem.from_call(q, k, v, **rules)
    whole, _ = reference.attention(q, k, v, problem)
    for limit in (1 << 20, 3 * 2 * 41 * 29, 500):
        parts = pieces(problem, limit)
        for part in parts:
            part_q, keys, values = part.cut(q, 2), k[part.batch, part.kv_heads], v[part.batch, part.kv_heads]
            out, _ = reference.attention(part_q, keys, values, part.problem(problem))
            torch.testing.assert_close(out, part.cut(whole, 2), rtol=0, atol=1e-12)
        if limit == 500:
            assert len(parts) == 3 and {part.rows.start for part in parts} == {0, 19, 39}


def test_the_oracle_accepts_right_results_only():
    q, k, v = SQUARE.tensors(torch.float16, CPU)
    oracle = Oracle(Problem.from_call(q, k, v, causal="top_left"), q, k, v)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert oracle.judge(right, budget=True).status == OK

    one_row, one_nan, close = right.clone(), right.clone(), right.clone()
    one_row[1, 3, 39] = right[1, 3, 20]
    one_nan[0, 0, 0, 0] = float("nan")
    close[0, 0, 20] *= 1.03  # beyond what fp16 costs, below what peers are held to
    for wrong in (torch.randn_like(q), torch.zeros_like(q), one_nan, one_row, right.float(), right[:1]):
        assert oracle.judge(wrong, budget=False).status == WRONG
    assert oracle.judge(close, budget=False).status == OK
    assert "error budget" in oracle.judge(close, budget=True).why


def test_one_wrong_row_of_many_is_found():
    q, k, v = Case("", (4, 8, 8, 256, 64, 16)).tensors(torch.float32, CPU)
    oracle = Oracle(Problem.from_call(q, k, v), q, k, v)
    out = F.scaled_dot_product_attention(q, k, v)
    out[3, 7, 255] = 0  # 1 of 8192 rows: 0.011 of the Frobenius norm
    assert "a row is off" in oracle.judge(out, budget=False).why


def test_rows_without_keys_are_no_fault():
    q, k, v = Case("", (1, 2, 2, 40, 20, 16)).tensors(torch.float32, CPU)
    problem = Problem.from_call(q, k, v, causal="bottom_right")
    exact, _ = reference.attention(q, k, v, problem)
    assert Oracle(problem, q, k, v).judge(exact.float(), budget=True).status == OK


def test_a_wrong_candidate_gets_no_time():
    everyone = candidates("sdpa,sdpa-math") | {"garbage": garbage, "broken": broken, "flex": flex}
    rows = {
        row.candidate: row for row in measure(SQUARE, torch.bfloat16, everyone, HostClock(CPU), rounds=2, window_ms=1)
    }
    for name in (LAZYMAX, "sdpa", "sdpa-math"):
        row = rows[name]
        assert row.status == OK and row.ms_min <= row.ms <= row.ms_max and row.tflops > 0 and row.error < 1e-2
    assert rows[LAZYMAX].lazymax_speed == 1.0
    assert rows["garbage"].status == WRONG and "relative error" in rows["garbage"].reason
    assert rows["broken"].status == LEFT_OUT and rows["broken"].reason == "RuntimeError: no such kernel"
    assert rows["flex"].status == LEFT_OUT
    for name in ("garbage", "broken", "flex"):
        assert rows[name].ms is rows[name].tflops is rows[name].lazymax_speed is None
    text = report.case_table(list(rows.values()))
    assert "WRONG: relative error" in text and "left out: RuntimeError: no such kernel" in text


@pytest.mark.parametrize(("fault", "status"), [(garbage, WRONG), (broken, FAILED)])
def test_a_fault_of_lazymax_fails_the_command(monkeypatch, capsys, fault, status):
    monkeypatch.setattr(command, "candidates", lambda against, impl: {LAZYMAX: fault, "sdpa": PEERS["sdpa"]})
    assert main(["bench", "--shape", "1,2,2,20,20,16", "--json", "-", *FAST]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["status"] for row in rows] == [status, OK]
    assert rows[0]["ms"] is None and rows[1]["ms"] > 0 and rows[1]["lazymax_speed"] is None


def test_peers_say_what_they_do_not_take():
    q, k, v = TINY.tensors(torch.float32, CPU)
    problem = Problem.from_call(q, k, v, causal=TINY.causal)
    with pytest.raises(LeftOut, match="top-left"):
        sdpa(None)(TINY, problem, q, k, v)
    with pytest.raises(LeftOut, match="window"):
        sdpa(None)(Case("", TINY.shape, window=(3, 3)), problem, q, k, v)
    with pytest.raises(ValueError, match="--against: got 'fa9'"):
        candidates("sdpa,fa9")
    with pytest.raises(LeftOut, match="RuntimeError: no kernel because the head is odd"), refusals():
        warnings.warn("because the head is odd (Triggered internally at x.cpp)", stacklevel=1)
        raise RuntimeError("no kernel")
    with pytest.warns(UserWarning, match="kept"), refusals():
        warnings.warn("kept", stacklevel=1)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_flex_sees_the_same_keys(rules):
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = Case("", (1, 4, 2, 41, 29, 16)).tensors(torch.float32, CPU)
    problem = Problem.from_call(q, k, v, **rules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is not compiled here
        out = flex_ready(problem, q, k, v, flex_attention).run()
    assert Oracle(problem, q, k, v).judge(out, budget=False).status == OK


def test_the_clock_of_a_gpu(monkeypatch):
    """Its logic, with events and memory counters that are not a GPU's."""
    now = iter(range(1000))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(now)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(clock, "FLUSH_BYTES", 16)
    gpu = clock.GpuClock(CPU)
    assert gpu.milliseconds(lambda: next(now), 3) == 2.0  # the call's own tick lies between its two events
    assert gpu.milliseconds(lambda: None, 70) == 1.0
    assert len(gpu._events) == 70


def test_extra_memory_leaves_out_output_and_lse(monkeypatch):
    q, k, v = SQUARE.tensors(torch.float32, CPU)
    problem = Problem.from_call(q, k, v)
    out, lse = torch.zeros_like(q), 4 * 2 * 4 * 40
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + out.nbytes + lse + (3 << 20))
    host = HostClock(CPU)
    assert extra_memory(Ready(lambda: out), problem, host) is None
    host.device = torch.device("cuda")
    assert extra_memory(Ready(lambda: out), problem, host) == 3.0


def test_files(tmp_path: Path, capsys):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "png")}
    arguments = [
        "bench",
        "--shape",
        "1,2,1,33,47,16",
        "--shape",
        "1,2,2,20,20,16,8",
        "--causal",
        "--dtype",
        "fp16,fp32",
    ]
    arguments += ["--against", "sdpa,sdpa-cudnn", "--commit", "abc123", *FAST]
    arguments += ["--json", str(files["json"]), "--csv", str(files["csv"]), "--plot", str(files["png"])]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "times of a CPU" in text and "lazymax" in text and "geometric mean of 2 cases" in text
    written = json.loads(files["json"].read_text())
    rows = list(csv.DictReader(files["csv"].open(newline="")))
    assert len(rows) == len(written["rows"]) == 2 * 2 * 3
    for line, row in zip(rows, written["rows"], strict=True):
        assert (
            line["candidate"] == row["candidate"] and line["shape"] == row["shape"] and line["status"] == row["status"]
        )
        assert float(line["flops"]) == row["flops"] and float(line["bytes"]) == row["bytes"]
        assert (line["ms"] == "") == (row["ms"] is None)
        if row["ms"] is not None:
            assert float(line["ms"]) == pytest.approx(row["ms"], rel=1e-3)
            assert row["tflops"] == pytest.approx(row["flops"] / row["ms"] / 1e9)
        assert line["commit"] == "abc123" and line["arch"] == "cpu" and line["torch"] == torch.__version__
        assert line["command"].startswith("lazymax bench --shape 1,2,1,33,47,16")
    about = written["about"]
    assert (
        set(about["matmul_tflops"]) == {"float16", "float32"} and about["copy_gbs"] > 0 and about["date"].endswith("Z")
    )
    assert files["png"].read_bytes().startswith(b"\x89PNG") and files["png"].stat().st_size > 10_000


def test_plot_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--shape", "1,2,2,20,20,16", "--plot", "x.png", *FAST]) == 2
    assert "lazymax[bench]" in capsys.readouterr().err


def test_json_has_no_nan():
    assert report._finite({"a": [float("nan"), 1.0, float("inf")], "b": "x"}) == {"a": [None, 1.0, None], "b": "x"}


def test_overhead():
    rows = overhead(torch.float32, HostClock(CPU), rounds=2, block=2)
    assert [row.call for row in rows][-1] == "F.scaled_dot_product_attention" and rows[-1].ratio == 1.0
    assert all(row.us_min <= row.us <= row.us_max for row in rows)
    text = report.overhead_table(rows)
    assert "lazymax.attention" in text and "microseconds" in text


def test_labels():
    assert label((1, 2, 2, 3, 4, 8), "top_left", (5, None)) == "1,2,2,3,4,8 causal top_left window 5,None"
    assert check.FROBENIUS == 1.5e-2
