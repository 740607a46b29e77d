"""`lazymax bench`: what is timed is right, what is wrong is not timed, and the files say what happened."""

import contextlib
import csv
import json
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lazymax import arch as arches
from lazymax import ops, reference
from lazymax.backends import Tile, When, registry
from lazymax.bench import check, clock, command, report
from lazymax.bench.cases import SUITES, Case, label
from lazymax.bench.check import FAILED, LEFT_OUT, OK, WRONG, Oracle, pieces
from lazymax.bench.clock import GraphClock, HostClock, clock_for, order, ratio, rounds_of
from lazymax.bench.measure import Row, extra_memory, least_bytes, measure, overhead
from lazymax.bench.peers import (
    LAZYMAX,
    PEERS,
    LeftOut,
    Ready,
    candidates,
    flash_attn_ready,
    flex,
    flex_ready,
    ours,
    refusals,
    sdpa,
)
from lazymax.bench.rows import ALL, others, portable, row_of
from lazymax.cli import main
from lazymax.compat import tritons
from lazymax.console import parse_band, parse_shape
from lazymax.dispatch import plan
from lazymax.problem import Problem

with contextlib.suppress(ImportError):
    import triton  # noqa: F401  here, while TRITON_INTERPRET is what conftest.py made it: plain_cpu removes it

# the interpreter's, as in conftest.py; the bench shows warnings of a candidate once more, without their module
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
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
    for case in SUITES["short"]:  # at most two tiles for a processor
        assert case.shape[0] * case.shape[1] * -(-case.shape[3] // 128) <= 2 * 132
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


class Graphs(GraphClock):
    """Graphs of candidates, one after the other: right, refused, wrong."""

    def __init__(self) -> None:
        self.device, self.turn = CPU, 0

    synchronize, milliseconds = HostClock.synchronize, HostClock.milliseconds

    def captured(self, candidate: Ready) -> Ready:
        self.turn += 1
        if self.turn == 2:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return Ready((lambda: 2 * candidate.run()) if self.turn == 3 else candidate.run)


def test_graphs_are_judged_too():
    everyone = candidates("sdpa,sdpa-math,sdpa-flash")
    found = measure(SQUARE, torch.bfloat16, everyone, Graphs(), rounds=2, window_ms=1)  # type: ignore[arg-type]
    rows = {row.candidate: row for row in found}
    assert rows[LAZYMAX].status == OK and rows[LAZYMAX].ms > 0
    assert rows["sdpa"].status == LEFT_OUT
    assert rows["sdpa"].reason == "no CUDA graph of it: operation not permitted when stream is capturing"
    assert rows["sdpa-math"].status == WRONG and rows["sdpa-math"].ms is None

    refused = Graphs()
    refused.turn = 1
    found = measure(SQUARE, torch.bfloat16, candidates(""), refused, rounds=2, window_ms=1)  # type: ignore[arg-type]
    assert [row.status for row in found] == [FAILED]


@pytest.mark.parametrize(
    ("other", "got"),
    [(["--overhead"], "--overhead"), (["--suite", "varlen"], "--suite varlen"), (["--suite", "short"], "device cpu")],
)
def test_graphs_need_shapes_and_a_gpu(capsys, other, got):
    assert main(["bench", "--graphs", *other, *FAST]) == 2
    assert f"--graphs: got {got}; it goes with --shape" in capsys.readouterr().err


@pytest.mark.gpu
def test_graphs_on_a_gpu(device):
    if device != "cuda":
        pytest.skip("needs a GPU: CUDA graphs")
    clock = clock_for(torch.device(device), graphs=True)
    found = measure(SQUARE, torch.bfloat16, candidates("sdpa"), clock, rounds=2, window_ms=1)
    assert [row.status for row in found] == [OK, OK]


def test_lazymax_compiled_and_as_a_graph(device):
    names = ["lazymax", "lazymax:compiled", "lazymax:graph"]
    clock = clock_for(torch.device(device))
    found = measure(SQUARE, torch.bfloat16, candidates(",".join(names[1:])), clock, rounds=2, window_ms=1)
    assert [row.candidate for row in found] == names
    assert [row.status for row in found] == [OK, OK, OK if device == "cuda" else FAILED]
    assert device == "cuda" or found[2].reason == "CUDA graphs are for GPUs"


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


def test_flash_attn_takes_its_own_layout_and_says_what_it_cannot() -> None:
    """By a stand-in with its signature; the packages run on GPUs only."""

    def stand_in(q, k, v, causal):
        assert q.is_contiguous() and q.shape[1:3] == (9, 4)
        repeated = (t.transpose(1, 2).repeat_interleave(2, 1) for t in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *repeated, is_causal=causal)
        return out.transpose(1, 2), None

    case = Case("x", (1, 4, 2, 9, 9, 16), "bottom_right")
    q, k, v = case.tensors(torch.float32, torch.device("cpu"))
    out = flash_attn_ready(stand_in, case, case.problem(torch.float32), q, k, v).run()
    expected = sdpa(None)(case, case.problem(torch.float32), q, k, v).run()
    torch.testing.assert_close(out, expected)
    for other, message in (
        (replace(case, window=(1, 1)), "without a window"),
        (replace(case, causal="top_left", shape=(1, 4, 2, 9, 8, 16)), "its causal is bottom-right"),
    ):
        with pytest.raises(LeftOut, match=message):
            flash_attn_ready(stand_in, other, other.problem(torch.float32), q, k, v)
    with pytest.raises(LeftOut, match="runs on GPUs only"):
        PEERS["fa3"](case, case.problem(torch.float32), q, k, v)
    with pytest.raises(LeftOut, match="pip install flash-attn-4: No module named 'flash_attn'"):
        PEERS["fa4"](case, case.problem(torch.float32), *(t.to("meta") for t in (q, k, v)))


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


# --rows all


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyTile(Tile):
    """A row that is found, and then fails: "unbuilt" as a compiler does, "silent" as a kernel that writes nothing,
    "close" by what is more than rounding costs."""

    fault: str
    block_m: int = 64
    block_n: int = 32
    num_warps: int = 2
    num_stages: int = 1
    reason: str = "to fail"
    provenance: str = "never run"

    @property
    def name(self):
        return self.fault

    def prepare(self, problem, plan):
        def launch(q, k, v, out, lse, extras):
            if self.fault == "unbuilt":
                raise RuntimeError("PassManager::run failed")
            if self.fault == "close":
                out.copy_(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
                out[0, 0, 4] *= 1.03

        return launch


@pytest.fixture
def table(monkeypatch, device):
    """Gives the backend that lazymax takes here other rows: table(forward=lambda rows: ..., alternatives=...)."""
    pytest.importorskip("triton")
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    def change(forward=lambda rows: rows, alternatives=()):
        name = plan(LITTLE.problem(torch.float32), arches.of(torch.device(device))).backend
        table = registry()[name]
        rows = forward(table.forward)
        monkeypatch.setitem(registry(), name, replace(table, forward=rows, alternatives=alternatives))
        return name

    before = list(ops.observers)
    ops._decided.clear()
    yield change
    ops._decided.clear()  # a decision for a faulty row must not outlive it
    assert ops.observers == before


LITTLE = Case("little", (1, 2, 1, 9, 13, 16), "top_left")


def all_rows(device, **options):
    everyone = candidates("sdpa")
    given = dict(rows=ALL, rounds=1, window_ms=0.1) | options
    found = measure(LITTLE, torch.float32, everyone, clock_for(torch.device(device)), **given)
    return {row.candidate: row for row in found}


@pytest.mark.parametrize("arch", arches.names())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_other_row_that_takes_the_problem_is_a_candidate(arch, dtype, dim):
    pytest.importorskip("triton")
    gpu = arches.by_name(arch)
    problem = Problem.from_shape((4, 16, 16, 4096, 4096, dim), dtype, causal="top_left")
    planned = plan(problem, gpu)
    found = others(problem, gpu, planned, planned)
    if planned.route == "reference":
        assert found == {}
        return

    def build(tile):
        bare = replace(tile, when=When(), reason="", provenance="", tuned=False)
        return replace(bare, rescale="select") if branch_fault else bare

    branch_fault = tritons.branch_rescale_fault(gpu.triton, gpu.matrix_unit)
    backend, portable = registry()[planned.backend], registry()["portable"]
    first = next(row for row in portable.forward if row.refusal(problem, gpu) is None)
    rows = [row for row in (*backend.forward, *backend.alternatives) if row.refusal(problem, gpu) is None]
    expected = {build(row) for row in (*rows, first)} - {build(planned.tile)}
    # none is missing, none is there twice, none shares its name with another (a dictionary would have kept one of two)
    assert Counter(build(each.tile) for each in found.values()) == Counter(expected)
    for name, each in found.items():
        own = each.backend == planned.backend
        assert own or (each.backend == "portable" and build(each.tile) == build(first))
        assert name == f"lazymax:{'' if own else 'portable:'}{each.tile.name}" and ours(name)
        # as dispatch would have planned it, were it the only row
        assert each.route == "triton" and each.describe() == f"triton:{each.backend}:{each.tile.name}"
        assert each.level == (each.tile.level or registry()[each.backend].level_on(gpu))
        assert each.least_columns == planned.least_columns and each.reason == each.tile.reason


def test_hidden_rows_alternatives_and_a_portable_row():
    """On a table made for this: of six rows, one is hidden, one an alternative; two repeat a build, two refuse."""
    pytest.importorskip("triton")
    gpu, problem = arches.by_name("sm_90"), Problem.from_shape((1, 2, 2, 64, 64, 64), torch.float16)
    words = dict(num_warps=4, num_stages=1, reason="", provenance="")
    chosen = Tile(block_m=64, block_n=64, **words)
    rows = (
        Tile(block_m=16, block_n=64, when=When(dtypes=("float32",)), **words),
        chosen,
        replace(chosen, when=When(max_head_dim=64), reason="again", provenance="x", tuned=True),
        Tile(block_m=32, block_n=64, **words),
    )
    more = replace(chosen, num_warps=8), replace(chosen, num_warps=2, when=When(max_head_dim=32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry(), "sm_90", replace(registry()["sm_90"], forward=rows, alternatives=more))
        planned = plan(problem, gpu)
        found = others(problem, gpu, planned, planned)
    portable = registry()["portable"].forward[0].name
    assert list(found) == [
        "lazymax:32x64-w4-s1-ptr-select", "lazymax:64x64-w8-s1-ptr-select", f"lazymax:portable:{portable}",
    ]  # fmt: skip


def test_a_rescale_that_this_triton_cannot_compile_is_no_build_of_its_own(monkeypatch):
    pytest.importorskip("triton")
    gpu, problem = arches.by_name("sm_90"), Problem.from_shape((1, 2, 2, 64, 64, 64), torch.float16)
    select = Tile(block_m=64, block_n=64, num_warps=4, num_stages=1, reason="", provenance="")
    branch = replace(select, rescale="branch")
    monkeypatch.setitem(registry(), "sm_90", replace(registry()["sm_90"], forward=(select, branch), alternatives=()))
    monkeypatch.setattr(tritons, "branch_rescale_fault", lambda version, unit: None)
    planned = plan(problem, gpu)
    assert others(problem, gpu, planned, planned)[f"lazymax:{branch.name}"].rescale == "branch"
    monkeypatch.setattr(tritons, "branch_rescale_fault", lambda version, unit: "miscompiled")
    assert f"lazymax:{branch.name}" not in others(problem, gpu, planned, planned)


def test_all_rows_are_checked_and_timed(table, device):
    name = table()
    found = all_rows(device)
    arch = arches.of(torch.device(device))
    default = plan(LITTLE.problem(torch.float32), arch)
    rows = [row for row in found.values() if row.candidate not in (LAZYMAX, "sdpa")]
    names = [LAZYMAX, *(row.candidate for row in rows), "sdpa"]
    assert rows and list(found) == names
    assert found[LAZYMAX].plan == default.describe() and found["sdpa"].plan == ""
    for row in rows:
        assert row.status == OK and row.ms > 0 and row.lazymax_speed > 0 and row.error < 1e-5
        tile = row.candidate.removeprefix("lazymax:")
        assert row.plan == ("triton:" + tile if tile.startswith("portable:") else f"triton:{name}:{tile}")
        assert row.plan != default.describe()
    assert list(all_rows(device, rows="best")) == [LAZYMAX, "sdpa"]
    text = report.case_table(list(found.values()))
    assert all(f"  {row.candidate} " in text and row.plan in text for row in rows)


FAULTS = {"silent": (WRONG, "relative error nan"), "close": (WRONG, "error budget"), "unbuilt": (FAILED, "PassManager")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_row_is_not_timed_and_fails_the_command(table, device, tmp_path, capsys, fault):
    table(forward=lambda rows: rows[-1:], alternatives=(FaultyTile(fault=fault),))
    file = tmp_path / "rows.csv"
    arguments = ["bench", "--shape", "1,2,1,9,13,16", "--dtype", "fp32", "--against", "", "--rounds", "1"]
    arguments += ["--window-ms", "0.1", "--device", device, "--csv", str(file)]
    assert main([*arguments, "--rows", "all"]) == 1
    rows = {row["candidate"]: row for row in csv.DictReader(file.open(newline=""))}
    assert rows[LAZYMAX]["status"] == OK and float(rows[LAZYMAX]["ms"]) > 0
    row = rows[f"lazymax:{fault}"]
    status, why = FAULTS[fault]
    assert row["status"] == status and row["ms"] == "" and row["plan"].endswith(f":{fault}")
    assert why in row["reason"]
    text = capsys.readouterr().out
    assert f"{status.upper()}: {row['reason']}" in text and "fastest row: " in text
    assert main(arguments) == 0  # the default --rows best does not look at it


def test_a_default_that_cannot_be_built_shows(table, device):
    """lazymax gives way to other rows by itself; the bench must not give their times to the first."""
    table(forward=lambda rows: (FaultyTile(fault="unbuilt"), rows[-1]))
    with pytest.warns(UserWarning, match="takes over"):
        found = all_rows(device)
    assert found[LAZYMAX].status == OK and not found[LAZYMAX].plan.endswith(":unbuilt")
    assert found["lazymax:unbuilt"].status == FAILED and found["lazymax:unbuilt"].ms is None
    assert [row.plan for row in found.values()].count(found[LAZYMAX].plan) == 1


def test_a_row_starts_from_nan_when_it_is_judged_only(monkeypatch):
    seen = []

    class Recorder(FaultyTile):
        def prepare(self, problem, plan):
            return lambda q, k, v, out, lse, extras: seen.append(out.isnan().all().item())

    q, k, v = LITTLE.tensors(torch.float32, CPU)
    problem = Problem.from_call(q, k, v)
    planned = replace(plan(problem, arches.by_name("cpu")), tile=Recorder(fault="none"))
    ready = row_of(planned)(LITTLE, problem, q, k, v)
    monkeypatch.setattr(torch, "empty_strided", lambda size, strides, **options: torch.zeros(size, **options))
    outs = [ready.run() for _ in range(3)]
    assert seen == [True, False, False]  # a fill in the calls that are timed would be time
    assert len({out.data_ptr() for out in outs}) == 3


@pytest.mark.parametrize("name", ["sm_90", "gfx1151"])
def test_the_portable_row_has_one_name(name):
    arch = arches.by_name(name)
    problem = Problem.from_shape((1, 16, 16, 4096, 4096, 128), torch.bfloat16)
    planned = plan(problem, arch)
    assert planned.backend == name
    (candidate, found), *more = portable(problem, arch, planned, planned).items()
    assert candidate == "lazymax:portable" and not more
    rows = [row for row in registry()[name].forward if type(row) is Tile and row.refusal(problem, arch) is None]
    assert type(planned.tile) is not Tile and (found.backend, found.tile) == (name, rows[0])
    assert portable(problem, arch, planned, found) == {}  # it is lazymax itself, or took over
    own = plan(problem, arch, "portable")
    assert portable(problem, arch, own, own) == {}


def row(candidate, speed, ms=1.0, plan=""):
    status = OK if ms else FAILED
    return Row(
        suite="s", case="c", shape="1", dtype="float16", band="full", candidate=candidate, plan=plan, status=status,
        reason="", flops=1.0, bytes=1.0, intensity=1.0, error=0.0, ms=ms, tflops=1.0, lazymax_speed=speed,
    )  # fmt: skip


DEFAULT = row(LAZYMAX, 1.0, plan="triton:gfx1151:128x32-w8")
FASTEST = {
    "another": ([DEFAULT, row("lazymax:256x32-w16", 1 / 1.04), row("lazymax:64x32-w4", 0.97), row("sdpa", 0.5)],
                "256x32-w16, 1.04x of the default 128x32-w8"),
    "the default": ([DEFAULT, row("lazymax:a", 1.5), row("lazymax:portable:b", 1.25), row("sdpa", 0.5)],
                    "128x32-w8, the default; 1.25x of the next, portable:b"),
    "ratios, not medians": ([DEFAULT, row("lazymax:a", 1.02, ms=0.9), row("lazymax:b", 0.98, ms=1.1)],
                            "b, 1.02x of the default 128x32-w8"),
    "alone": ([DEFAULT, row("lazymax:a", None, ms=None), row("sdpa", 0.5)], "128x32-w8, the default; no other was"),
    "no default": ([replace(DEFAULT, ms=None, lazymax_speed=None), row("lazymax:a", None, ms=2.0),
                    row("lazymax:b", None, ms=1.5)], "b; the default 128x32-w8 has no time"),
    "none": ([replace(DEFAULT, ms=None, lazymax_speed=None), row("sdpa", None)], "none, no result was right"),
}  # fmt: skip


@pytest.mark.parametrize("name", FASTEST)
def test_the_fastest_row_is_named(name):
    rows, text = FASTEST[name]
    assert report.fastest_row(rows).startswith(f"fastest row: {text}")


def test_rows_of_the_reference_there_are_none(capsys):
    """Without a kernel, as here without the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert main(["bench", "--shape", "1,2,2,20,20,16", "--rows", "all", "--against", "sdpa", *FAST]) == 0
    assert "fastest row: reference, the default; no other was timed" in capsys.readouterr().out


@pytest.mark.parametrize("rows", ["all", "best"])
@pytest.mark.parametrize("other", [["--suite", "features"], ["--overhead"]], ids=" ".join)
def test_rows_go_with_shapes_only(capsys, rows, other):
    assert main(["bench", "--rows", rows, *other, *FAST]) == 2
    error = capsys.readouterr().err
    assert f"--rows: got {rows!r} with {' '.join(other)}" in error and error.count("\n") == 1


def test_rows_are_best_or_all(capsys):
    assert main(["bench", "--shape", "1,2,2,20,20,16", "--rows", "some", *FAST]) == 2
    assert "--rows" in capsys.readouterr().err
