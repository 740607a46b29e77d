"""Random problems against float64: shapes, strides, dtypes, rules. `--fuzz-examples N` runs N per test (on a GPU:
thousands); derandomized in CI, so that a failure there can be repeated."""

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lazymax
from lazymax import testing
from lazymax.problem import Problem

DEFAULT, SLOW = 60, 600


@dataclass(frozen=True)
class Call:
    """One call of `attention()`; `repr` is what a failure prints."""

    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    causal: str | None
    window: tuple[int | None, int | None] | None
    window_align: str | None
    scale: float | None
    threshold: float | None
    layout: str
    stored: tuple[str, str, str]  # of q, k, v
    size: float
    seed: int


@st.composite
def calls(draw, small):
    """Mostly short lengths, so that an interpreted example takes a fraction of a second; `small` False for GPUs."""
    top = 50 if small else 700
    lengths = st.one_of(st.integers(1, 30 if small else 300), st.sampled_from([1, 16, 31, 32, 33, top - 1, top]))
    dims = st.one_of(st.integers(1, 64), st.sampled_from([8, 16, 40, 64, 72, 80, 96, 128, 192, 256]))
    side = st.one_of(st.none(), st.integers(0, top))
    causal = draw(st.sampled_from([None, "top_left", "bottom_right"]))
    window = draw(st.one_of(st.none(), st.tuples(side, side)))
    align = draw(st.sampled_from([None, "top_left", "bottom_right"])) if window and causal is None else None
    return Call(
        batch=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 2 if small else 4)),
        group=draw(st.sampled_from([1, 1, 1, 2, 3])),
        q_len=draw(lengths),
        kv_len=draw(lengths),
        head_dim=draw(dims),
        v_head_dim=draw(dims),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        causal=causal,
        window=window,
        window_align=align,
        scale=draw(st.one_of(st.none(), st.floats(-2.0, 2.0, width=32))),
        threshold=draw(st.sampled_from([None, 0.0, 2.5, 8.0])),
        layout=draw(st.sampled_from(["bhsd", "bshd"])),
        stored=draw(st.tuples(*[st.sampled_from(list(STORED))] * 3)),
        size=draw(st.sampled_from([1.0, 0.1, 6.0])),
        seed=draw(st.integers(0, 2**31)),
    )


def _permuted(t, order):
    return t.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


STORED = {
    "dense": lambda t: t,
    "swapped": lambda t: _permuted(t, [0, 2, 1, 3]),
    "rows-first": lambda t: _permuted(t, [2, 1, 0, 3]),
    "columns-first": lambda t: _permuted(t, [0, 1, 3, 2]),
    "nan-moat": lambda t: testing.moat(t, 1, 2, 3, 5),
    "every-second": lambda t: testing.moat(t.repeat_interleave(2, 3), 0, 1, 1, 0)[..., ::2],
    "stride-0": lambda t: t[:1, :, :1].expand(t.shape),
}


def check(call, device):
    q, k, v = testing.make_qkv(
        call.batch, call.kv_heads * call.group, call.kv_heads, call.q_len, call.kv_len, call.head_dim, call.v_head_dim,
        dtype=call.dtype, device=device, seed=call.seed,
    )  # fmt: skip
    q, k, v = (STORED[stored](t) for stored, t in zip(call.stored, (q * call.size, k, v), strict=True))
    rules = dict(causal=call.causal, window=call.window, window_align=call.window_align, scale=call.scale)
    problem = Problem.from_call(q, k, v, **rules)
    swapped = call.layout == "bshd"
    given_q, given_k, given_v = (t.transpose(1, 2) if swapped else t for t in (q, k, v))
    out, lse = lazymax.attention(
        given_q, given_k, given_v, **rules, layout=call.layout, rescale_threshold=call.threshold, return_lse=True
    )
    assert out.shape == (*given_q.shape[:3], call.v_head_dim) and out.dtype == call.dtype
    out = out.transpose(1, 2) if swapped else out
    for budget in testing.check_attention(out, lse, q, k, v, problem):
        assert budget.ok, budget


@pytest.fixture
def fuzz(request, device):
    """Runs the property with as many examples as the command line asks for."""
    examples = request.config.getoption("--fuzz-examples")
    examples = examples or (SLOW if request.config.getoption("--slow") else DEFAULT)

    def run(small):
        @settings(
            max_examples=examples, deadline=None, database=None, print_blob=True,
            derandomize=bool(os.environ.get("CI")), suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(calls(small))
        def attention_is_exact(call):
            check(call, device)

        attention_is_exact()

    return run


def test_attention(fuzz, device):
    fuzz(small=device == "cpu")
