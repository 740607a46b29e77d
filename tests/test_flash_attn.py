"""`lazymax.compat.flash_attn` against flash-attn's documentation, and the drop-in against torch's.

Both tables say which keys each query sees, written by hand from the two documentations; the results are compared with
a softmax in float64 under that matrix, written out below. Names of the arguments, their order and defaults: flash-attn
2.8.3.
"""

import inspect
import itertools
import math
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import lazymax
from lazymax import api, testing
from lazymax.compat import flash_attn
from lazymax.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from lazymax.problem import Problem

DIM = 16
OPEN = (-1, -1)


def drawn(text):
    """ "110 111" -> boolean matrix."""
    return torch.tensor([[sign == "1" for sign in row] for row in text.split()], dtype=torch.bool)


def formula(q_len, kv_len, causal, window):
    """flash-attn's sentence: query i attends to keys i + Sk - Sq - left to i + Sk - Sq + right, -1 is infinite."""
    keep = torch.ones(q_len, kv_len, dtype=torch.bool)
    for i, j in itertools.product(range(q_len), range(kv_len)):
        left, right = window
        inside = (left == -1 or j >= i + kv_len - q_len - left) and (right == -1 or j <= i + kv_len - q_len + right)
        keep[i, j] = inside and (not causal or j <= i + kv_len - q_len)
    return keep


def softmax_attention(q, k, v, keep, dtype=torch.float64, p_dtype=None, *, scale=None, bias=0.0, softcap=0.0):
    """The explicit formula: q (B, Hq, Sq, D), k and v (B, Hkv, Sk, D), keep and bias broadcast to (B, Hq, Sq, Sk).
    Returns out and LSE; a row without keys gives 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.to(dtype).repeat_interleave(group, 1) for t in (k, v))
    s = q.to(dtype) @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = (s + bias).masked_fill(~keep.to(q.device), -math.inf).to(dtype)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return (p if p_dtype is None else p.to(p_dtype).to(dtype)) @ v, lse


def check(out, lse, q, k, v, keep, **rules):
    """All of them (B, H, S, D)."""
    exact, exact_lse = softmax_attention(q, k, v, keep, **rules)
    lowered, low_lse = softmax_attention(q, k, v, keep, torch.float32, q.dtype, **rules)
    assert out.dtype == q.dtype
    budgets = [testing.within_budget(out, exact, lowered.to(q.dtype), eps=testing.EPS[q.dtype])]
    if lse is not None:
        assert lse.dtype == torch.float32
        budgets.append(testing.within_budget(lse[..., None], exact_lse[..., None], low_lse[..., None], eps=2e-6))
    assert all(b.ok for b in budgets), [str(b) for b in budgets]


def bshd(*tensors):
    return tuple(t.transpose(1, 2) for t in tensors)


@dataclass(frozen=True)
class Row:
    """keep: drawn by hand where small; None: by the documented inequality."""

    id: str
    q_len: int
    kv_len: int
    causal: bool = False
    window: Any = OPEN
    keep: str | None = None
    heads: tuple[int, int] = (2, 2)
    dtype: torch.dtype = torch.float16


FLASH = [
    # The two matrices drawn in the docstrings and in the README.
    Row("causal, more keys", 2, 5, True, OPEN, "11110 11111"),
    Row("causal, more queries", 5, 2, True, OPEN, "00 00 00 10 11"),
    Row("causal, square", 3, 3, True, OPEN, "100 110 111"),
    Row("causal, one query sees all", 1, 5, True, OPEN, "11111"),
    Row("causal, one key", 3, 1, True, OPEN, "0 0 1"),
    Row("full", 2, 5, False, OPEN, "11111 11111"),
    Row("full, more queries", 4, 2, False, OPEN, "11 11 11 11"),
    # [i + Sk - Sq - left, i + Sk - Sq + right], both edges inclusive, without causal too.
    Row("window (1, 1), more keys", 2, 5, False, (1, 1), "00111 00011"),
    Row("window (1, 1), square", 4, 4, False, (1, 1), "1100 1110 0111 0011"),
    Row("window (1, 1), more queries", 5, 2, False, (1, 1), "00 00 10 11 11"),
    Row("window (0, 0) is the diagonal", 3, 3, False, (0, 0), "100 010 001"),
    Row("window (0, 0), more keys", 2, 5, False, (0, 0), "00010 00001"),
    Row("window (0, 0), more queries", 5, 2, False, (0, 0), "00 00 00 10 01"),
    Row("window (2, 0)", 3, 5, False, (2, 0), "11100 01110 00111"),
    Row("window (0, 2)", 3, 5, False, (0, 2), "00111 00011 00001"),
    # -1 on one side.
    Row("window (1, -1)", 3, 5, False, (1, -1), "01111 00111 00011"),
    Row("window (-1, 1)", 3, 5, False, (-1, 1), "11110 11111 11111"),
    Row("window (-1, 0) is causal", 3, 5, False, (-1, 0), "11100 11110 11111"),
    Row("window (-1, 0), more queries", 5, 2, False, (-1, 0), "00 00 00 10 11"),
    Row("window (0, -1), more queries", 5, 2, False, (0, -1), "11 11 11 11 01"),
    # causal closes the right side whatever the window says.
    Row("causal, window (1, -1)", 3, 5, True, (1, -1), "01100 00110 00011"),
    Row("causal, window (1, 0)", 3, 5, True, (1, 0), "01100 00110 00011"),
    Row("causal, window (1, 2)", 3, 5, True, (1, 2), "01100 00110 00011"),
    Row("causal, window (0, 0), more queries", 4, 2, True, (0, 0), "00 00 10 01"),
    # A window of S - 1 or S hides nothing of a square causal call; nor do S keys to both sides.
    Row("causal, window S - 1", 4, 4, True, (3, 0), "1000 1100 1110 1111"),
    Row("causal, window S", 4, 4, True, (4, 0), "1000 1100 1110 1111"),
    Row("causal, window S - 2", 4, 4, True, (2, 0), "1000 1100 1110 0111"),
    Row("window (S, S)", 3, 3, False, (3, 3), "111 111 111"),
    Row("window (S - 1, S - 1)", 3, 3, False, (2, 2), "111 111 111"),
    Row("window (S - 1, S - 1), more keys", 2, 3, False, (2, 2), "111 111"),
    Row("window (Sk, Sk), far more queries", 6, 2, False, (2, 2), "00 00 10 11 11 11"),
    # Grouped heads: with 6 over 2, query heads 0, 1, 2 use key head 0.
    Row("causal, 6 heads over 2", 2, 5, True, OPEN, "11110 11111", (6, 2)),
    Row("causal, 3 heads over 1, bf16", 5, 2, True, OPEN, "00 00 00 10 11", (3, 1), torch.bfloat16),
    Row("window, 4 heads over 2, fp32", 2, 5, False, (1, 1), "00111 00011", (4, 2), torch.float32),
    # Around the tiles, by the inequality; S - 1, S and -1 to the left are the same causal rule.
    *(Row(f"causal {s}, left {left}", s, s, True, (left, 0)) for s in (16, 17, 65) for left in (s - 1, s, -1)),
    Row("causal 17 over 65", 17, 65, True, OPEN, None, (2, 1)),
    Row("causal 65 over 17", 65, 17, True),
    Row("window (5, 3), 33 over 65", 33, 65, False, (5, 3)),
    Row("window (5, 3), 65 over 33", 65, 33, False, (5, 3)),
]


@pytest.mark.parametrize("row", FLASH, ids=lambda row: row.id)
def test_flash_table(row, device):
    keep = formula(row.q_len, row.kv_len, row.causal, row.window)
    if row.keep is not None:
        assert torch.equal(keep, drawn(row.keep)), "the drawing and the sentence disagree"
    sizes = (1, *row.heads, row.q_len, row.kv_len, DIM)
    q, k, v = testing.make_qkv(*sizes, dtype=row.dtype, device=device, layout="bshd")
    rules = dict(causal=row.causal, window_size=row.window, return_attn_probs=True)
    out, lse, s_dmask = flash_attn_func(*bshd(q, k, v), **rules)
    assert out.shape == (1, row.q_len, row.heads[0], DIM) and out.is_contiguous()
    assert lse.shape == (1, row.heads[0], row.q_len)
    assert s_dmask.shape == (0,) and s_dmask.dtype == row.dtype and s_dmask.device == q.device
    check(out.transpose(1, 2), lse, q, k, v, keep)
    assert lazymax.explain(q, k, v, return_lse=True, show=False).plan.route == "triton"
    hidden = ~keep.any(1).to(device)
    assert (out[:, hidden] == 0).all() and (lse[..., hidden] == -math.inf).all()


@dataclass(frozen=True)
class TorchRow:
    """keep: drawn, or None for all keys. mask: what `attn_mask` gets, from `keep`."""

    id: str
    q_len: int
    kv_len: int
    keep: str | None = None
    is_causal: bool = False
    mask: str | None = None
    heads: tuple[int, int] = (2, 2)
    rules: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float16


TORCH = [
    # is_causal: torch.ones(L, S).tril(diagonal=0), from the top left corner whatever the lengths.
    TorchRow("is_causal, square", 3, 3, "100 110 111", True),
    TorchRow("is_causal, more keys", 2, 5, "10000 11000", True),
    TorchRow("is_causal, more queries", 5, 2, "10 11 11 11 11", True),
    TorchRow("is_causal, one query", 1, 5, "10000", True),
    TorchRow("is_causal, bf16", 2, 5, "10000 11000", True, dtype=torch.bfloat16),
    TorchRow("is_causal, scale", 2, 5, "10000 11000", True, rules=dict(scale=0.3)),
    TorchRow("is_causal, grouped", 5, 2, "10 11 11 11 11", True, heads=(6, 2), rules=dict(enable_gqa=True)),
    TorchRow("no rule", 2, 5),
    TorchRow("no rule, grouped, scale", 2, 5, heads=(4, 2), rules=dict(enable_gqa=True, scale=0.5)),
    # A boolean mask keeps where True, a floating one is added to the scores; both broadcast.
    TorchRow("bool mask", 2, 5, "01101 10010", mask="bool"),
    TorchRow("bool mask, broadcast query", 3, 4, "0110 0110 0110", mask="bool row"),
    TorchRow("bool mask, all dimensions", 2, 5, "01101 10010", mask="bool all"),
    TorchRow("bool mask, grouped", 2, 5, "01101 10010", mask="bool", heads=(4, 2), rules=dict(enable_gqa=True)),
    TorchRow("bool mask, scale", 2, 5, "01101 10010", mask="bool", rules=dict(scale=0.25)),
    TorchRow("bool mask, a row of False", 3, 4, "0110 0000 1111", mask="bool"),
    TorchRow("float mask", 3, 4, mask="float"),
    TorchRow("float mask, fp32 beside bf16", 3, 4, mask="float fp32", dtype=torch.bfloat16),
    TorchRow("float mask of -inf", 3, 4, "0110 0011 1111", mask="float"),
    TorchRow(
        "float mask, grouped, scale", 3, 4, "0110 0011 1111", False, "float", (4, 2), dict(enable_gqa=True, scale=2)
    ),
]


def torch_mask(row, keep, device):
    """(attn_mask, the bias it means)."""
    if row.mask is None:
        return None, 0.0
    if row.mask == "bool row":
        return keep[:1].to(device), 0.0
    if row.mask.startswith("bool"):
        return (keep.expand(1, row.heads[0], -1, -1) if row.mask == "bool all" else keep).to(device), 0.0
    bias = torch.randn(keep.shape, generator=torch.Generator().manual_seed(3)).masked_fill(~keep, -math.inf)
    bias = bias.to(torch.float32 if "fp32" in row.mask else row.dtype).to(device)
    return bias, bias.double()


@pytest.mark.parametrize("row", TORCH, ids=lambda row: row.id)
def test_torch_table(row, device):
    keep = torch.ones(row.q_len, row.kv_len, dtype=torch.bool) if row.keep is None else drawn(row.keep)
    if row.is_causal:
        assert torch.equal(keep, torch.ones(row.q_len, row.kv_len, dtype=torch.bool).tril(diagonal=0))
    mask, bias = torch_mask(row, keep, device)
    q, k, v = testing.make_qkv(1, *row.heads, row.q_len, row.kv_len, DIM, dtype=row.dtype, device=device)
    rules = dict(attn_mask=mask, is_causal=row.is_causal, **row.rules)
    assert lazymax.explain(q, k, v, show=False, **rules).plan.route == "triton"
    out = lazymax.scaled_dot_product_attention(q, k, v, **rules)
    check(out, None, q, k, v, keep, bias=bias, scale=row.rules.get("scale"))


TAIL = (
    ("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0),
    ("alibi_slopes", None), ("deterministic", False), ("return_attn_probs", False),
)  # fmt: skip
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {
    "flash_attn_func": (("q", "k", "v"), TAIL),
    "flash_attn_qkvpacked_func": (("qkv",), TAIL),
    "flash_attn_kvpacked_func": (("q", "kv"), TAIL),
    "flash_attn_varlen_func": (("q", "k", "v", *OFFSETS), (*TAIL, ("block_table", None))),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), TAIL),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *OFFSETS), TAIL),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    required, optional = SIGNATURES[name]
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
    got = [(p.name, p.default) for p in parameters]
    assert got == [(name, inspect.Parameter.empty) for name in required] + list(optional)


def small(device="cpu", dtype=torch.float16):
    return bshd(*testing.make_qkv(1, 2, 2, 3, 5, DIM, dtype=dtype, device=device))


def packed(device="cpu", dtype=torch.float16, offsets_dtype=torch.int32):
    q, k, v = small(device, dtype)
    cu_q, cu_k = (torch.tensor([0, n], dtype=offsets_dtype, device=device) for n in (3, 5))
    return q[0], k[0], v[0], cu_q, cu_k, 3, 5


@dataclass(frozen=True)
class Refused:
    """One argument of a call that works otherwise, made wrong. beside: other arguments that the refusal needs."""

    function: Any
    name: str
    value: Any
    error: type[Exception]
    beside: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        text = str(tuple(self.value.shape)) if isinstance(self.value, torch.Tensor) else repr(self.value)
        return f"{self.function.__name__.removeprefix('flash_attn_')} {self.name}={text}"


REFUSED = [
    Refused(flash_attn_func, "return_attn_probs", True, NotImplementedError, dict(dropout_p=0.1)),
    Refused(flash_attn_func, "causal", "top_left", TypeError),
    Refused(flash_attn_func, "window_size", 3, TypeError),
    Refused(flash_attn_func, "window_size", (3,), TypeError),
    Refused(flash_attn_func, "window_size", (1.5, 0), TypeError),
    Refused(flash_attn_func, "window_size", (-2, 0), ValueError),
    Refused(flash_attn_func, "window_size", (0, -7), ValueError),
    Refused(flash_attn_func, "softmax_scale", "half", TypeError),
    Refused(flash_attn_func, "softmax_scale", math.inf, ValueError),
    Refused(flash_attn_func, "softcap", "30", TypeError),
    Refused(flash_attn_func, "softcap", None, TypeError),
    Refused(flash_attn_func, "softcap", math.nan, ValueError),
    Refused(flash_attn_func, "dropout_p", 1.5, ValueError),
    Refused(flash_attn_func, "dropout_p", -0.1, ValueError),
    Refused(flash_attn_func, "alibi_slopes", [0.5, 0.25], TypeError),
    Refused(flash_attn_func, "alibi_slopes", torch.ones(3), ValueError),
    Refused(flash_attn_func, "q", None, TypeError),
    Refused(flash_attn_func, "k", torch.zeros(3, 2, DIM).half(), ValueError),
    Refused(flash_attn_qkvpacked_func, "qkv", None, TypeError),
    Refused(flash_attn_qkvpacked_func, "qkv", torch.zeros(1, 3, 4, 2, DIM), ValueError),
    Refused(flash_attn_qkvpacked_func, "qkv", torch.zeros(5, 3, 2, DIM), ValueError),
    Refused(flash_attn_kvpacked_func, "kv", torch.zeros(1, 2, 4, 2, DIM), ValueError),
    Refused(flash_attn_varlen_func, "block_table", torch.zeros(1, 1).int(), NotImplementedError),
    Refused(flash_attn_varlen_func, "return_attn_probs", True, NotImplementedError, dict(dropout_p=0.1)),
    Refused(flash_attn_varlen_func, "max_seqlen_q", 2.5, TypeError),
    Refused(flash_attn_varlen_func, "max_seqlen_k", torch.tensor(5.0), TypeError),
    Refused(flash_attn_varlen_func, "max_seqlen_k", torch.tensor([5, 5]), TypeError),
    Refused(flash_attn_varlen_func, "cu_seqlens_q", torch.tensor([0.0, 3.0]), TypeError),
    Refused(flash_attn_varlen_func, "cu_seqlens_k", torch.tensor([0, 2, 5]), ValueError),
    Refused(flash_attn_varlen_func, "window_size", (-2, 0), ValueError),
    Refused(flash_attn_varlen_qkvpacked_func, "qkv", torch.zeros(5, 2, DIM), ValueError),
    Refused(flash_attn_varlen_qkvpacked_func, "max_seqlen", "5", TypeError),
    Refused(flash_attn_varlen_kvpacked_func, "kv", torch.zeros(5, 3, 2, DIM), ValueError),
]  # fmt: skip


def arguments(function):
    """A call that works, by name."""
    q, k, v, cu_q, cu_k, *longest = packed()
    offsets = dict(zip(OFFSETS, (cu_q, cu_k, *longest), strict=True))
    kv = torch.stack((k, v), 1)
    return {
        flash_attn_func: dict(q=q[None], k=k[None], v=v[None]),
        flash_attn_qkvpacked_func: dict(qkv=torch.stack((k, k, v), 1)[None]),
        flash_attn_kvpacked_func: dict(q=q[None], kv=kv[None]),
        flash_attn_varlen_func: dict(q=q, k=k, v=v, **offsets),
        flash_attn_varlen_qkvpacked_func: dict(qkv=torch.stack((k, k, v), 1), cu_seqlens=cu_k, max_seqlen=5),
        flash_attn_varlen_kvpacked_func: dict(q=q, kv=kv, **offsets),
    }[function]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused(case):
    """The message begins with or contains the argument's name, as a word."""
    call = arguments(case.function)
    assert {case.name, *case.beside} <= inspect.signature(case.function).parameters.keys()
    with pytest.raises(case.error, match=rf"\b{case.name}\b"):
        case.function(**call | {case.name: case.value} | case.beside)


def test_every_function_runs():
    """What `test_refused` starts from is right."""
    for function in (getattr(flash_attn, name) for name in SIGNATURES):
        assert torch.isfinite(function(**arguments(function))).all()


def same(results, others):
    for result, other in zip(results, others, strict=True):
        assert result.data_ptr() != other.data_ptr() or result.numel() == 0
        assert torch.equal(result, other)


@pytest.fixture
def seen(monkeypatch):
    """The tensors that the core was called with."""
    calls = []

    def spy(function):
        def wrapped(q, k, v, *rest, **rules):
            calls.append((q, k, v))
            return function(q, k, v, *rest, **rules)

        return wrapped

    monkeypatch.setattr(api, "attention", spy(api.attention))
    monkeypatch.setattr(api, "attention_varlen", spy(api.attention_varlen))
    return calls


def test_packed_is_unpacked_and_read_in_place(seen, device):
    """The same bits as the unpacked call, and nothing copied: the core gets strided views, which it takes as such."""
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(2, 5, 3, 2, DIM, generator=generator).half().to(device)
    q, k, v = (qkv[:, :, i].contiguous() for i in range(3))
    kv = torch.stack((k, v), 2)
    rules = dict(causal=True, window_size=(3, -1), return_attn_probs=True)
    expected = flash_attn_func(q, k, v, **rules)
    cu = torch.tensor([0, 5, 10], dtype=torch.int32, device=device)
    varlen = flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), cu, cu, 5, 5, **rules)
    seen.clear()
    same(flash_attn_qkvpacked_func(qkv, **rules), expected)
    same(flash_attn_kvpacked_func(q, kv, **rules), expected)
    same(flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 5, **rules), varlen)
    same(flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv.flatten(0, 1), cu, cu, 5, 5, **rules), varlen)

    pointers = [[t.data_ptr() - base.data_ptr() for t in call] for call, base in zip(seen, (qkv, kv) * 2, strict=True)]
    step = 2 * DIM * qkv.element_size()
    assert pointers[0] == pointers[2] == [0, step, 2 * step]
    assert pointers[1][1:] == pointers[3][1:] == [0, step]
    for call in seen[:2]:
        assert Problem.from_call(*bshd(*call)).copied == ()


LENGTHS = [(3, 5), (0, 4), (17, 2), (4, 0), (0, 0), (1, 9)]  # queries, keys


def make_packed(device, heads=(2, 1), dtype=torch.float16, offsets_dtype=torch.int32):
    """q, k, v (total, heads, D) of LENGTHS, as one sequence in (1, H, total, D) storage, and the offsets."""
    totals = [sum(column) for column in zip(*LENGTHS, strict=True)]
    q, k, v = bshd(*testing.make_qkv(1, *heads, *totals, DIM, dtype=dtype, device=device, layout="bshd"))
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(column)], dtype=offsets_dtype, device=device)
        for column in zip(*LENGTHS, strict=True)
    )
    return q[0], k[0], v[0], cu_q, cu_k


def sequences(q, k, v, cu_q, cu_k):
    """(slice of the queries, q, k, v with a batch of one) of every sequence."""
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        yield slice(q0, q1), q[None, q0:q1], k[None, k0:k1], v[None, k0:k1]


VARLEN = [
    dict(),
    dict(causal=True),
    dict(window_size=(2, 1)),
    dict(causal=True, window_size=(1, -1), softmax_scale=0.4),
    dict(causal=True, softcap=2.0),
]


@pytest.mark.parametrize("longest", [(17, 9), (None, None)], ids=str)
@pytest.mark.parametrize("rules", VARLEN, ids=str)
def test_varlen(rules, longest, device):
    """Sequences without queries, without keys, without both; each aligned by its own lengths."""
    q, k, v, cu_q, cu_k = make_packed(device)
    out, lse, s_dmask = flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **rules, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (q.shape[1], q.shape[0]) and s_dmask.shape == (0,)
    causal, window = rules.get("causal", False), rules.get("window_size", OPEN)
    formula_rules = dict(scale=rules.get("softmax_scale"), softcap=rules.get("softcap", 0.0))
    plan = lazymax.explain(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, show=False).plan
    assert plan.route == "triton"
    for rows, *one in sequences(q, k, v, cu_q, cu_k):
        if rows.start == rows.stop:
            continue
        q1, k1, v1 = bshd(*one)
        keep = formula(q1.shape[2], k1.shape[2], causal, window)
        check(out[None, rows].transpose(1, 2), lse[None, :, rows], q1, k1, v1, keep, **formula_rules)
        if longest != (None, None):
            one_out, one_lse, _ = flash_attn_func(*one, **rules, return_attn_probs=True)
            check(one_out.transpose(1, 2), one_lse, q1, k1, v1, keep, **formula_rules)


def test_varlen_alibi_per_sequence(device):
    q, k, v, cu_q, cu_k = make_packed(device)
    slopes = torch.linspace(0.1, 0.9, len(LENGTHS) * q.shape[1], device=device).view(len(LENGTHS), -1)
    for given in (slopes, slopes[0].clone()):
        out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 17, 9, alibi_slopes=given, return_attn_probs=True)
        for item, (rows, *one) in enumerate(sequences(q, k, v, cu_q, cu_k)):
            if rows.start == rows.stop:
                continue
            q1, k1, v1 = bshd(*one)
            bias = alibi(slopes[item if given is slopes else 0], q1.shape[2], k1.shape[2])
            keep = torch.ones(q1.shape[2], k1.shape[2], dtype=torch.bool)
            check(out[None, rows].transpose(1, 2), lse[None, :, rows], q1, k1, v1, keep, bias=bias)


CONVERSIONS = {
    "int32": (int, torch.int32),
    "int64": (int, torch.int64),
    "numpy": (np.int64, torch.int32),
    "tensor": (torch.tensor, torch.int32),
    "tensor, one dimension": (lambda n: torch.tensor([n]), torch.int64),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_varlen_integers(name, device):
    """max_seqlen as other libraries hand it over, and offsets of either width: always the same bits."""
    convert, offsets_dtype = CONVERSIONS[name]
    q, k, v, cu_q, cu_k = make_packed(device)
    expected = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 17, 9, causal=True)
    cu_q, cu_k = cu_q.to(offsets_dtype), cu_k.to(offsets_dtype)
    same([flash_attn_varlen_func(q, k, v, cu_q, cu_k, convert(17), convert(9), causal=True)], [expected])


def alibi(slopes, q_len, kv_len):
    """-slope * |i + Sk - Sq - j|, (1, H, Sq, Sk); slopes (H,)."""
    distance = torch.arange(q_len)[:, None] + kv_len - q_len - torch.arange(kv_len)
    return -slopes.double()[None, :, None, None] * distance.abs().to(slopes.device)


@pytest.mark.parametrize("causal, window", [(False, OPEN), (True, OPEN), (False, (2, 1))], ids=str)
@pytest.mark.parametrize("q_len, kv_len", [(3, 7), (7, 3)])
def test_alibi(q_len, kv_len, causal, window, device):
    """Aligned to the bottom right also where nothing else is."""
    q, k, v = testing.make_qkv(2, 4, 2, q_len, kv_len, DIM, dtype=torch.float16, device=device)
    slopes = torch.tensor([[0.5, 0.25, 0.1, 0.0], [1.0, 0.3, 0.2, 0.7]], device=device)
    keep = formula(q_len, kv_len, causal, window)
    for given in (slopes, slopes[1].clone()):
        out, lse, _ = flash_attn_func(
            *bshd(q, k, v), causal=causal, window_size=window, alibi_slopes=given, return_attn_probs=True
        )
        rows = slopes if given is slopes else slopes[1:].expand(2, -1)
        bias = torch.cat([alibi(row, q_len, kv_len) for row in rows])
        check(out.transpose(1, 2), lse, q, k, v, keep, bias=bias)


@pytest.mark.parametrize("softcap, scale", [(1.5, None), (0.5, 2.0), (-1.0, None), (0, 0.7)])
def test_softcap_and_scale(softcap, scale, device):
    """Above 0 it caps, else it is off; the scale comes first."""
    q, k, v = testing.make_qkv(1, 2, 1, 3, 5, DIM, dtype=torch.float16, device=device)
    out, lse, _ = flash_attn_func(
        *bshd(q, k, v), softmax_scale=scale, causal=True, softcap=softcap, return_attn_probs=True
    )
    keep = formula(3, 5, True, OPEN)
    check(out.transpose(1, 2), lse, q, k, v, keep, scale=scale, softcap=max(softcap, 0.0))


def test_numbers_and_windows_of_other_types(device):
    """A list, None sides and NumPy's numbers mean what ints and floats mean; `deterministic` changes nothing."""
    qkv = small(device)
    expected = flash_attn_func(*qkv, 0.0, 0.5, True, (2, -1))
    for rules in (
        dict(window_size=[2, -1]), dict(window_size=(np.int64(2), None)), dict(softmax_scale=np.float32(0.5)),
        dict(deterministic=True), dict(causal=1), dict(softcap=0), dict(dropout_p=np.float32(0)),
    ):  # fmt: skip
        same([flash_attn_func(*qkv, **dict(softmax_scale=0.5, causal=True, window_size=(2, -1)) | rules)], [expected])


def test_dropout(device):
    """Reproducible through torch's generator; what remains of constant values says how much was dropped."""
    q, k, v = bshd(*testing.make_qkv(1, 2, 2, 17, 33, DIM, dtype=torch.float32, device=device))
    v = torch.ones_like(v)
    torch.manual_seed(3)
    first, second = (flash_attn_func(q, k, v, dropout_p=0.25) for _ in range(2))
    torch.manual_seed(3)
    same([flash_attn_func(q, k, v, dropout_p=0.25)], [first])
    assert not torch.equal(first, second)
    # 34 rows of 33 places, kept with probability 3/4 and scaled by 4/3: the mean is 1, its deviation 0.02 or so.
    assert abs(first.mean().item() - 1.0) < 0.1 and (first != 1.0).any()


def reference_gradients(q, k, v, keep, g):
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, _ = softmax_attention(*bshd(*inputs), keep)
    return torch.autograd.grad((out.transpose(1, 2) * g.double()).sum(), inputs)


def close(actual, exact):
    """Gradients of fp32 inputs: eps of fp32 on the largest element, times the terms of a sum."""
    torch.testing.assert_close(actual.double(), exact, rtol=0.0, atol=1e-4 * exact.abs().max().item() + 1e-6)


@pytest.mark.parametrize(
    "q_len, kv_len, causal, window", [(3, 5, True, OPEN), (5, 3, True, OPEN), (4, 6, False, (1, 1))]
)
def test_gradients(q_len, kv_len, causal, window, device):
    q, k, v = bshd(*testing.make_qkv(1, 4, 2, q_len, kv_len, DIM, dtype=torch.float32, device=device))
    g = torch.randn(1, q_len, 4, DIM, generator=torch.Generator().manual_seed(9)).to(device)
    expected = reference_gradients(q, k, v, formula(q_len, kv_len, causal, window), g)
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    flash_attn_func(*leaves, causal=causal, window_size=window).backward(g)
    kv = torch.stack((k, v), 2).requires_grad_()
    q_leaf = q.detach().clone().requires_grad_()
    flash_attn_kvpacked_func(q_leaf, kv, causal=causal, window_size=window).backward(g)
    for gradient, packed_gradient, exact in zip(
        (leaf.grad for leaf in leaves), (q_leaf.grad, *kv.grad.unbind(2)), expected, strict=True
    ):
        close(gradient, exact)
        close(packed_gradient, exact)


def test_gradients_packed_varlen(device):
    """qkv packed, two sequences, an empty one between."""
    qkv = torch.randn(7, 3, 2, DIM, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    g = torch.randn(7, 2, DIM, generator=torch.Generator().manual_seed(9)).to(device)
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32, device=device)
    flash_attn_varlen_qkvpacked_func(qkv, cu, 4, causal=True).backward(g)
    for rows in (slice(0, 3), slice(3, 7)):
        one = (t[None, rows] for t in qkv.detach().unbind(1))
        exact = reference_gradients(*one, formula(rows.stop - rows.start, rows.stop - rows.start, True, OPEN), g[rows])
        for gradient, expected in zip(qkv.grad.unbind(1), exact, strict=True):
            close(gradient[None, rows], expected)


def test_compiles_without_graph_break(device):
    """One graph, also with maxima that are tensors while tracing: they are dropped."""
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    qkv = small(device)
    same([compiled(*qkv, causal=True, window_size=(3, -1))], [flash_attn_func(*qkv, causal=True, window_size=(3, -1))])
    q, k, v, cu_q, cu_k = make_packed(device)
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    for longest, eager in (((17, 9), (17, 9)), ((cu_q.diff().max(), cu_k.diff().max()), (None, None))):
        expected = flash_attn_varlen_func(q, k, v, cu_q, cu_k, *eager, causal=True)
        same([compiled(q, k, v, cu_q, cu_k, *longest, causal=True)], [expected])


def test_import_is_light(clean_env):
    code = "import sys, torch, lazymax.compat.flash_attn; assert not torch.cuda.is_initialized(); "
    code += "print(sorted(name for name in sys.modules if name.split('.')[0] in ('triton', 'flash_attn', 'numba')))"
    run = subprocess.run([sys.executable, "-c", code], env=clean_env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
