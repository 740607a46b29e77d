"""`lazymax bench --suite features`: every case means what its name says, is checked before it is timed, and is timed
beside its base."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from lazymax import arch, attention, reference
from lazymax.bench import measure as bench_measure
from lazymax.bench.check import FAILED, LEFT_OUT, OK, WRONG, Oracle, pieces
from lazymax.bench.clock import HostClock
from lazymax.bench.features import calls, mods, rehearse, report
from lazymax.bench.features.calls import build, visible_pairs
from lazymax.bench.features.cases import ON_CPU, ON_GPU, features
from lazymax.bench.features.flex import Flex, peers
from lazymax.bench.features.make import partition
from lazymax.bench.features.measure import Suite
from lazymax.bench.features.rehearse import LOST, READY, Rehearsal
from lazymax.bench.peers import LAZYMAX, LeftOut, Ready
from lazymax.cli import main
from lazymax.dispatch import plan
from lazymax.testing import make_qkv

CPU = torch.device("cpu")
SMALL = {feature.name: feature for feature in features(ON_CPU)}
FAST = ["--suite", "features", "--device", "cpu", "--rounds", "2", "--window-ms", "0.1"]

mods.register()


@pytest.fixture
def plain_cpu(monkeypatch):
    """The reference route: these tests are about the tool."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def call_of(name, dtype=torch.float32):
    feature = SMALL[name]
    return build(feature, make_qkv(*feature.shape, dtype=dtype))


def suite(dtype=torch.float32, **options):
    return Suite(tuple(SMALL.values()), dtype, HostClock(CPU), rounds=2, window_ms=0.1, **options)


@pytest.mark.parametrize("sizes", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
def test_every_base_comes_first(sizes):
    names = [feature.name for feature in features(sizes)]
    assert len(set(names)) == len(names)
    for position, feature in enumerate(features(sizes)):
        assert feature.base is None or feature.base in names[:position]
        assert feature.base is not None or not (feature.same or feature.allowed)
        assert sum(feature.lengths) in (0, feature.shape[0] * feature.shape[3])


def test_the_issue_is_covered():
    named = {feature.name for feature in features(ON_GPU)}
    for dim in (64, 128):
        for what in ("as is_causal", "as window (none, 0)", "as bool mask (1, 1, S, S)", "as mask_mod", "ALiBi"):
            assert f"D={dim} causal, {what}" in named
        for what in ("softcap 50", "sinks", "dropout 0.1", "varlen, the same lengths", "float mask (1, 1, S, S)"):
            assert f"D={dim} full, {what}" in named
        assert f"D={dim} causal, S=16384, 16 documents, mask_mod" in named
    beside_flex = {feature.name for feature in features(ON_GPU) if feature.flex}
    assert "D=64 causal, S=16384, 16 documents, mask_mod" in beside_flex and "D=64 full, softcap 50" in beside_flex
    assert "D=64 causal, ALiBi" not in beside_flex


def test_on_a_hopper_every_case_is_planned_on_a_kernel():
    hopper = arch.by_name("sm_90")
    for feature in features(ON_GPU):
        batch, q_heads, kv_heads, q_len, kv_len, dim = feature.shape[:6]
        sizes = ((q_heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, feature.shape[-1]))
        q, k, v = (torch.empty(batch, *size, dtype=torch.bfloat16, device="meta") for size in sizes)
        problem = build(feature, (q, k, v)).problem
        assert plan(problem, hopper).route == "triton", feature.name
        assert problem.return_lse == ("return_lse" in feature.name)


def triangle(n):
    return n * (n + 1) // 2


BATCH, LENGTH, LONG = ON_CPU.batch, ON_CPU.length, ON_CPU.long
RAGGED, DOCUMENTS = partition(BATCH * LENGTH, 8, seed=1), partition(LONG, ON_CPU.documents, seed=2)
PAIRS = {  # of one head
    "D=128 causal": BATCH * triangle(LENGTH),
    "D=128 causal, as is_causal": BATCH * triangle(LENGTH),
    "D=128 causal, as window (23, 0)": BATCH * triangle(LENGTH),
    "D=128 causal, as bool mask (1, 1, S, S)": BATCH * triangle(LENGTH),
    "D=128 causal, as mask_mod": BATCH * triangle(LENGTH),
    "D=128 causal, window 6": BATCH * (triangle(6) + 6 * (LENGTH - 6)),
    "D=128 causal, varlen, ragged": sum(map(triangle, RAGGED)),
    "D=128 causal, prefix-LM mask_mod": sum(
        triangle(LENGTH) + sum(max(0, prefix - i - 1) for i in range(LENGTH)) for prefix in (LENGTH // 4, LENGTH // 2)
    ),
    "D=128 full, varlen, ragged": sum(n * n for n in RAGGED),
    "D=128 full, bool mask, key padding": LENGTH * (LENGTH * 3 // 4 + LENGTH // 2),
    "D=128 full, float mask, key padding": LENGTH * (LENGTH * 3 // 4 + LENGTH // 2),
    "D=128 full, seqlens_k, half": BATCH * LENGTH * LENGTH // 2,
    "D=128 full, dropout 0.1": BATCH * LENGTH * LENGTH,
    "D=128 full, float mask (B, H, S, S)": BATCH * LENGTH * LENGTH,
    "D=64 causal, S=40, 4 documents, mask_mod": sum(map(triangle, DOCUMENTS)),
    "D=64 causal, S=40, 4 documents, causal and mask_mod": sum(map(triangle, DOCUMENTS)),
    "D=64 causal, S=40, 4 documents, varlen": sum(map(triangle, DOCUMENTS)),
    "head dim 576, 512 of v, causal, 2 over 1 heads": triangle(LENGTH),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_counted(name, monkeypatch):
    call = call_of(name)
    for scores in (1 << 26, 1000):  # all rows at once, and in chunks
        monkeypatch.setattr("lazymax.reference_scores.CHUNK_SCORES", scores)
        assert visible_pairs(call.problem, call.extras, CPU) == PAIRS[name] * call.problem.q_heads


@pytest.mark.parametrize(
    "name", ["D=128 full, bool mask (1, 1, S, S), half", "D=128 full, bool mask (B, H, S, S), half"]
)
def test_pairs_of_random_masks_are_counted(name):
    call = call_of(name)
    shown = call.extras.mask.expand(BATCH, call.problem.q_heads, LENGTH, LENGTH)
    assert visible_pairs(call.problem, call.extras, CPU) == int(shown.sum())


def test_every_case_passes_its_check(plain_cpu):
    cases = suite(torch.bfloat16)
    for feature in SMALL.values():
        prepared = cases.prepare(feature)
        verdict = prepared.examined.verdicts[LAZYMAX]
        assert verdict.status == OK and prepared.ready and prepared.flops > 0, (feature.name, verdict)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's turn; a GPU runs the suite itself")
@pytest.mark.parametrize("name", [name for name in SMALL if name.startswith("D=128") and "_mod" in name])
def test_the_modifications_are_their_torch_forms(name):
    prepared = suite(torch.float16).prepare(SMALL[name])
    assert prepared.plan.startswith("triton:portable") and prepared.examined.verdicts[LAZYMAX].status == OK


@pytest.mark.filterwarnings("ignore")  # flex_attention warns that it is not compiled here
@pytest.mark.parametrize("name", [feature.name for feature in SMALL.values() if feature.flex])
def test_flex_computes_the_same(name):
    call = call_of(name)
    flex, oracle = Flex(call, lambda function: function), Oracle(call.problem, *call.qkv, call.extras)
    assert oracle.judge(flex.before().run(), budget=True).status == OK
    if flex.mask_mod is None:
        with pytest.raises(LeftOut, match="no block mask"):
            flex.inside()
    else:
        assert oracle.judge(flex.inside().run(), budget=True).status == OK
    assert list(peers(call)) == ["flex", "flex+mask"][: 1 if flex.mask_mod is None else 2]


def test_a_sample_of_heads_is_the_same_as_in_the_whole():
    for name in (
        "D=64 causal, ALiBi",
        "D=64 full, sinks",
        "D=64 full, dropout 0.1",
        "D=64 full, varlen, the same lengths",
    ):
        call = call_of(name, torch.float64)
        whole, _ = reference.attention(*call.qkv, call.problem, extras=call.extras)
        one_head = BATCH * LENGTH * (BATCH * LENGTH if call.feature.lengths else LENGTH)
        (piece,) = pieces(call.problem, 2 * one_head)
        assert piece.kv_heads == slice(0, 2)
        q, k, v = call.qkv
        part, extras = piece.problem(call.problem), piece.extras(call.extras, 1)
        out, _ = reference.attention(piece.cut(q, 1), k[:, piece.kv_heads], v[:, piece.kv_heads], part, extras=extras)
        torch.testing.assert_close(out, whole[:, :2], rtol=0, atol=1e-12)
    call = call_of("D=128 full, float mask (B, H, S, S)")
    (piece,) = pieces(call.problem, 1)
    assert piece.extras(call.extras, 1).mask.shape == (BATCH, 1, LENGTH, LENGTH)


def test_a_case_is_timed_beside_its_base(plain_cpu):
    cases = suite(matmul_tflops=2.0)
    (base,) = cases.measure(SMALL["D=64 full"])
    assert base.status == OK and base.cost is base.differs is base.base_ms is None and base.ms > 0
    (same,) = cases.measure(SMALL["D=64 full, seqlens_k, all full"])
    assert same.base == "D=64 full" and same.base_ms > 0 and same.cost_min <= same.cost <= same.cost_max
    assert same.rate == pytest.approx(1 / same.cost) and same.differs < 1e-5
    (mask,) = cases.measure(SMALL["D=64 full, bool mask, key padding"])
    assert mask.rate == pytest.approx(0.625 / mask.cost) and mask.differs is None
    assert mask.tflops == pytest.approx(mask.flops / mask.ms / 1e9) and mask.matmul_share == mask.tflops / 2.0
    q_bytes = 4 * BATCH * 4 * LENGTH * 64
    assert mask.bytes == 4 * q_bytes + BATCH * LENGTH
    # what lazymax was compared with is left out where it cannot run, and does not stop the case
    own, flex, inside = suite(peers=peers).measure(SMALL["D=64 causal, S=40, 4 documents, mask_mod"])
    assert own.status == OK and own.cost > 0 and flex.status == inside.status == LEFT_OUT
    assert "flex left out: compiled for GPUs only" in report.case_line([own, flex, inside])


def test_the_values_of_packed_rows_are_compared_with_those_of_the_base(plain_cpu):
    (row,) = suite().measure(SMALL["D=64 causal, varlen, the same lengths"])
    assert row.status == OK and row.differs < 1e-5
    cases = suite()
    case, base = (cases.prepare(SMALL[name]) for name in ("D=64 causal, as mask_mod", "D=64 causal"))
    case.examined.ready[LAZYMAX] = Ready(lambda: torch.full(base.call.qkv[0].shape, float("nan")))
    assert cases._compare(case, base) == torch.inf


def test_what_is_wrong_or_failed_elsewhere_gets_no_time(plain_cpu, monkeypatch):
    name = "D=64 full, sinks"
    (row,) = suite(faults={name: "illegal address"}).measure(SMALL[name])
    assert row.status == FAILED and "illegal address" in row.reason and row.ms is row.cost is row.tflops is None
    assert "FAILED: " in report.case_line([row]) and "FAILED: D=64 full, sinks" in report.closing([row])

    def wrong(*tensors, **options):
        return attention(*tensors, **options) * (1.1 if "sinks" in options else 1.0)

    monkeypatch.setattr(calls, "attention", wrong)
    (row,) = suite().measure(SMALL[name])
    assert row.status == WRONG and row.ms is row.cost is None and row.base == "D=64 full"
    assert main(["bench", *FAST, "--only", name, "--json", "-"]) == 1


def test_a_wrong_lse_is_wrong(plain_cpu, monkeypatch):
    def wrong(*tensors, **options):
        found = attention(*tensors, **options)
        return (found[0], found[1] + 0.01) if options.get("return_lse") else found

    monkeypatch.setattr(calls, "attention", wrong)
    (row,) = suite().measure(SMALL["D=128 full, return_lse"])
    assert row.status == WRONG and "lse" in row.reason and row.ms is None


def test_a_reference_in_the_place_of_a_kernel_gets_no_time(plain_cpu):
    cases = suite()
    cases.clock.device = torch.device("cuda")
    with pytest.raises(LeftOut, match="no kernel ran but reference:reference"):
        cases._first(call_of("D=64 full, sinks"), [])


def test_command(plain_cpu, capsys, tmp_path: Path):
    files = {name: tmp_path / f"features.{name}" for name in ("csv", "json")}
    arguments = [*FAST, "--only", "D=64 causal, as", "--csv", str(files["csv"]), "--json", str(files["json"])]
    assert main(["bench", *arguments, "--commit", "abc"]) == 0
    text = capsys.readouterr().out
    assert "times of a CPU" in text and text.count("  cost ") == 5
    assert text.count("within 3%") == 3 and "cases that mean the same" in text
    written = json.loads(files["json"].read_text())
    rows = list(csv.DictReader(files["csv"].open(newline="")))
    assert [row["case"] for row in rows] == [row["case"] for row in written["rows"]]
    assert len(rows) == 5 and all(row["base"] == "D=64 causal" and float(row["cost"]) > 0 for row in rows)
    assert rows[0]["commit"] == "abc" and rows[0]["command"].startswith("lazymax bench --suite features")
    assert written["about"]["window_ms"] == 0.1


MISTAKES = {
    "beside a suite": (["--suite", "paper"], "goes alone"),
    "beside a shape": (["--shape", "1,2,2,8,8,64"], "goes alone"),
    "rules": (["--causal"], "goes alone"),
    "plot": (["--plot", "x.png"], "goes alone"),
    "peers": (["--against", "sdpa"], "takes flex or none"),
    "none left": (["--only", "no such"], "--only 'no such'"),
    "jobs": (["--jobs", "-1"], "--jobs"),
}


@pytest.mark.parametrize(("more", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(more, message, capsys):
    assert main(["bench", *FAST, *more]) == 2
    assert message in capsys.readouterr().err


def test_the_closing_lines(plain_cpu):
    row = replace(_row("D=64 causal, as window (none, 0)"), cost=1.04, allowed=0.03, differs=0.0)
    good = replace(row, cost=0.98)
    text = report.closing([row, good])
    assert "cost 1.040, within 3%: NO" in text and "cost 0.980, within 3%: yes" in text and "2 of 2 cases" in text


def _row(name):
    cases = suite(faults={name: "not here"})
    return replace(cases.measure(SMALL[name])[0], status=OK, base="D=64 causal")


SPEC = Rehearsal("cpu", "float32", "auto")


def test_rehearsal_goes_on_behind_a_fault(monkeypatch):
    started = []

    def process(names, what):
        started.append(list(names))
        lines = [READY]
        for name in names:
            if name == "dies":
                return "\n".join([*lines, "noise"]), -11, "the process ended with -11"
            lines.append(json.dumps([name, "bad address" if name == "lost" else "no row" if name == "odd" else ""]))
            if name == "lost":
                return "\n".join(lines), LOST, ""
        return "\n".join(lines), 0, ""

    monkeypatch.setattr(rehearse, "_process", process)
    faults = rehearse.rehearse(["a", "dies", "odd", "lost", "b"], SPEC, 1)
    assert faults == {"dies": "the process ended with -11", "odd": "no row", "lost": "bad address"}
    assert started == [["a", "dies", "odd", "lost", "b"], ["odd", "lost", "b"], ["b"]]
    started.clear()
    assert rehearse.rehearse(["a", "b", "c"], SPEC, 2) == {} and sorted(started) == [["a", "c"], ["b"]]


def test_a_process_that_does_not_start_blames_no_case(monkeypatch, capsys):
    monkeypatch.setattr(rehearse, "_process", lambda names, what: ("", 1, "no module named torch"))
    assert rehearse.rehearse(["a", "b"], SPEC, 1) == {}
    assert "no rehearsal: no module named torch" in capsys.readouterr().err


def test_one_process_of_a_rehearsal(plain_cpu, monkeypatch, capsys):
    def refuse(*tensors, **options):
        if "sinks" in options:
            raise RuntimeError("too many resources\nmore")
        return attention(*tensors, **options)

    monkeypatch.setattr(calls, "attention", refuse)
    names = ["D=64 full, sinks", "D=64 full, softcap 50"]
    rehearse.main([json.dumps({"device": "cpu", "dtype": "float32", "impl": "auto"}), json.dumps(names)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == READY
    assert [json.loads(line) for line in lines[1:]] == [[names[0], "RuntimeError: too many resources"], [names[1], ""]]


def test_a_base_that_has_one_itself_is_named(plain_cpu):
    name = "D=64 causal, S=40, 4 documents, mask_mod beside varlen"
    row = suite(faults={name: "x"}).measure(SMALL[name])[0]
    assert " beside D=64 causal, S=40, 4 documents, varlen\n" in report.case_line([row])


def test_bands_of_rows():
    assert bench_measure.band_of(call_of("D=64 full").problem) == "full"
    assert bench_measure.band_of(call_of("D=128 causal, window 6").problem) == "causal top_left window (5, 0)"
