"""`lazymax bench --suite varlen`: packed sequences, and what other libraries make of them, by stand-ins with their
signatures; the packages run on GPUs only."""

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from lazymax import arch
from lazymax.bench.check import LEFT_OUT, OK, WRONG, Oracle
from lazymax.bench.clock import HostClock
from lazymax.bench.features import packed
from lazymax.bench.features.calls import build, visible_pairs
from lazymax.bench.features.cases import ON_CPU, ON_GPU, SUITES, varlen
from lazymax.bench.features.measure import Suite
from lazymax.bench.features.report import closing
from lazymax.bench.peers import LAZYMAX, LeftOut, refusals
from lazymax.cli import main
from lazymax.dispatch import plan
from lazymax.testing import make_qkv

CPU = torch.device("cpu")
SMALL = varlen(ON_CPU)
FAST = ["--suite", "varlen", "--device", "cpu", "--rounds", "2", "--window-ms", "0.1"]


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch):
    """The reference route: these tests are about the tool."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def call_of(feature):
    return build(feature, make_qkv(*feature.shape, dtype=torch.float32))


def by_sequence(q, k, v, ends, causal):
    """(total, H, D): SDPA of one sequence after the other."""
    out = torch.full_like(q, float("nan"))
    for start, stop in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        part = (t[start:stop].transpose(0, 1)[None] for t in (q, k, v))
        out[start:stop] = F.scaled_dot_product_attention(*part, is_causal=causal, enable_gqa=True)[0].transpose(0, 1)
    return out


def flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    assert q.is_contiguous() and cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    return by_sequence(q, k, v, cu_seqlens_q, causal), None


def torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    assert window_size in ((-1, -1), (-1, 0)) and max_q == max_k == cu_seq_q.diff().max()
    return by_sequence(query, key, value, cu_seq_q, window_size == (-1, 0))


def torch_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


def test_the_sequences_are_uneven():
    for feature in varlen(ON_GPU):
        lengths = feature.lengths
        assert len(lengths) == 16 and 100 <= min(lengths) < 200 and 7000 < max(lengths) <= 8000
        assert 31_000 < sum(lengths) < 34_000 and sum(length % 64 != 0 for length in lengths) > 10
        q, k, v = (
            torch.empty(1, heads, sum(lengths), 128, dtype=torch.bfloat16, device="meta")
            for heads in (feature.shape[1], feature.shape[2], feature.shape[2])
        )
        assert plan(build(feature, (q, k, v)).problem, arch.by_name("sm_90")).route == "triton"
    heads = [feature.shape[1:3] for feature in varlen(ON_GPU)]
    assert heads == [(16, 16), (16, 16), (32, 8), (32, 8)]
    names = [feature.name for cases in SUITES.values() for feature in cases(ON_GPU)]
    assert len(set(names)) == len(names)  # a rehearsal knows a case by its name


@pytest.mark.parametrize("feature", SMALL, ids=lambda feature: feature.name)
def test_others_compute_the_same(feature):
    call = call_of(feature)
    oracle = Oracle(call.problem, *call.qkv, call.extras)
    ready = [packed.flash_attn_ready(flash, call)]
    ready += [packed.torch_varlen_ready(function, call) for function in (torch_2_11, torch_2_13)]
    for candidate in ready:
        assert oracle.judge(candidate.run(), budget=True).status == OK
    triangles = sum(n * (n + 1) // 2 if call.problem.causal else n * n for n in feature.lengths)
    assert visible_pairs(call.problem, call.extras, CPU) == triangles * feature.shape[1]


@pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype
def test_nested_tensors_compute_the_same():
    """On a CPU torch has its formula for them only, without causal and without grouped heads."""
    call = call_of(next(f for f in SMALL if f.shape[1] == f.shape[2] and not f.options))
    candidate = packed.nested("MATH")(call)
    with candidate.context():
        verdict = Oracle(call.problem, *call.qkv, call.extras).judge(candidate.run(), budget=True)
    assert verdict.status == OK


def test_a_wrong_peer_gets_no_time(monkeypatch):
    def shifted(q, k, v, **options):
        return flash(q, k, v.roll(1, 0), **options)

    monkeypatch.setitem(packed.PEERS, "fa3", partial(packed.flash_attn_ready, flash))
    monkeypatch.setitem(packed.PEERS, "fa4", partial(packed.flash_attn_ready, shifted))
    peers = partial(packed.peers, ("fa3", "fa4", "sdpa-flash"))
    suite = Suite(SMALL, torch.float32, HostClock(CPU), peers=peers, rounds=2, window_ms=0.1)
    own, right, wrong, absent = rows = suite.measure(SMALL[0])
    assert [row.candidate for row in rows] == [LAZYMAX, "fa3", "fa4", "sdpa-flash"]
    assert own.status == right.status == OK and own.suite == "varlen" and right.lazymax_speed > 0
    assert wrong.status == WRONG and wrong.ms is None and absent.status == LEFT_OUT
    text = closing(rows)
    assert "the speed of fa3 (geometric mean of 1 cases)" in text and "WRONG: " in text


def test_who_cannot_says_why():
    call = call_of(SMALL[0])
    with pytest.raises(LeftOut, match="runs on GPUs only"):
        packed.PEERS["fa4"](call)
    with pytest.raises(LeftOut), refusals():
        packed.PEERS["torch-varlen"](call).run()


def test_command(capsys, tmp_path: Path):
    file = tmp_path / "varlen.csv"
    assert main(["bench", *FAST, "--against", "fa3,torch-varlen", "--csv", str(file)]) == 0
    text = capsys.readouterr().out
    assert "the pairs that count" in text and "flex" not in text and "fa3 left out: runs on GPUs only" in text
    rows = list(csv.DictReader(file.open(newline="")))
    assert len(rows) == 3 * len(SMALL) and {row["suite"] for row in rows} == {"varlen"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--against", "flex"], "--suite varlen takes fa3, fa4"),
        (["--suite", "features"], "--suite varlen: goes alone"),
        (["--rows", "portable"], "--rows: got 'portable' with --suite varlen"),
    ],
)
def test_mistakes(more, message, capsys):
    assert main(["bench", *FAST, *more]) == 2
    assert message in capsys.readouterr().err
