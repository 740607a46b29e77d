"""The public functions: bad input, torch's exact meaning, layouts, explain."""

import inspect
import itertools
import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import lazymax
from lazymax import arch as arches
from lazymax import drop_in, ops, options
from lazymax.backends import registry
from lazymax.kernels.launch import ForwardLaunch
from lazymax.problem import Problem
from lazymax.testing import EPS, check_attention, dropout_keep, make_qkv, within_budget

Make = Any  # (device) -> keyword arguments of a call


def tensors(*sizes: int, dtype: torch.dtype = torch.float32, device: str = "cpu", **more: Any) -> tuple[Any, ...]:
    return make_qkv(*sizes, dtype=dtype, device=device, **more)


Q, K, V = tensors(1, 4, 2, 5, 7, 8, 6)


@dataclass(frozen=True)
class Bad:
    id: str
    change: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]


BAD = (
    Bad("q is a number", dict(q=1), TypeError, ("q: got int", "expected a torch.Tensor")),
    Bad("k is None", dict(k=None), TypeError, ("k: got NoneType", "expected a torch.Tensor")),
    Bad("v is a list, bshd", dict(v=[1], layout="bshd"), TypeError, ("v: got list", "expected a torch.Tensor")),
    Bad("3-D q", dict(q=Q[0]), ValueError, ("q: got shape (4, 5, 8)", "expected 4 dimensions (batch, heads")),
    Bad("3-D k, bshd", dict(k=K[0], layout="bshd"), ValueError, ("k: got shape (2, 7, 8)", "(batch, length, heads")),
    Bad("integers", dict(v=V.long()), TypeError, ("v: got dtype torch.int64", "expected float16")),
    Bad("mixed dtypes", dict(v=V.half()), ValueError, ("torch.float32, torch.float32, torch.float16", "autocast")),
    Bad("devices", dict(k=K.to("meta")), ValueError, ("devices cpu, meta, cpu", "expected one")),
    Bad("batch", dict(k=K.repeat(2, 1, 1, 1)), ValueError, ("different batch sizes", "k (2, 2, 7, 8)")),
    Bad("head dim", dict(k=K[..., :4]), ValueError, ("different head dims", "k (1, 2, 7, 4)")),
    Bad("length", dict(v=V[:, :, :3]), ValueError, ("different lengths", "v (1, 2, 3, 6)")),
    Bad("heads", dict(q=Q[:, :3]), ValueError, ("3 query heads over 2 key heads", "expected a multiple")),
    Bad("causal=True", dict(causal=True), ValueError, ("causal: got True", "'top_left'", "'bottom_right'")),
    Bad("causal by another name", dict(causal="lower"), ValueError, ("causal: got 'lower'", "'bottom_right'")),
    Bad("window is a number", dict(window=3), ValueError, ("window: got 3", "a pair (left, right)")),
    Bad("window below -1", dict(window=(-2, 0)), ValueError, ("window: got (-2, 0)", "None or -1 means open")),
    Bad("window of floats", dict(window=(1.5, 0)), TypeError, ("window: got (1.5, 0)", "expected integers")),
    Bad("window_align", dict(window_align="left"), ValueError, ("window_align: got 'left'", "'top_left'")),
    Bad("alignments disagree", dict(causal="top_left", window_align="bottom_right"), ValueError, ("must agree",)),
    Bad("layout", dict(layout="sbhd"), ValueError, ("layout: got 'sbhd'", "expected 'bhsd' or 'bshd'")),
    Bad(
        "impl", dict(impl="flash"), ValueError, ("impl: got 'flash'", "expected one of auto, ", "portable", "reference")
    ),
    Bad("impl is a number", dict(impl=3), TypeError, ("impl: got 3", "expected")),
    Bad("scale is text", dict(scale="x"), TypeError, ("scale: got 'x'", "expected")),
    Bad("threshold", dict(rescale_threshold=9), ValueError, ("rescale_threshold: got 9", "to 8")),
    Bad("threshold is text", dict(rescale_threshold="x"), TypeError, ("rescale_threshold: got 'x'", "expected")),
    Bad("return_lse is text", dict(return_lse="yes"), TypeError, ("return_lse: got 'yes'", "expected")),
    Bad("mask of a wrong shape", dict(attn_mask=torch.zeros(5, 6)), ValueError,
        ("attn_mask: got shape (1, 1, 5, 6)", "broadcasts to (B, Hq, Sq, Sk) = (1, 4, 5, 7)")),
    Bad("mask of a wrong shape, bshd",
        dict(q=Q.transpose(1, 2), k=K.transpose(1, 2), v=V.transpose(1, 2), layout="bshd",
             attn_mask=torch.zeros(5, 4, 7)),
        ValueError, ("attn_mask: got shape (1, 5, 4, 7)", "(B, Hq, Sq, Sk) = (1, 4, 5, 7)")),
    Bad("softcap", dict(softcap=-1.0), ValueError, ("softcap: got -1.0", "expected 0 (none) or a finite number")),
    Bad("dropout", dict(dropout_p=1.5), ValueError, ("dropout_p: got 1.5", "expected a probability, 0 to 1")),
    Bad("score_mod", dict(score_mod="no such"), ValueError, ("score_mod: got 'no such', registered are",)),
)  # fmt: skip


UNHASHABLE = (
    Bad("causal is a list", dict(causal=["top_left"]), ValueError, ("causal: got ['top_left']", "'bottom_right'")),
    Bad("window of three", dict(window=[1, 2, 3]), ValueError, ("window: got [1, 2, 3]", "a pair (left, right)")),
    Bad("window of lists", dict(window=([1], 2)), TypeError, ("window: got ([1], 2)", "expected integers")),
    Bad("arguments of a mod are a tensor", dict(score_mod_args=torch.zeros(2)), TypeError,
        ("score_mod_args: got Tensor, expected a tuple of tensors",)),
)  # fmt: skip


@pytest.mark.parametrize("case", [*BAD, *UNHASHABLE], ids=lambda case: case.id)
def test_attention_says_what_came_and_what_was_expected(case: Bad) -> None:
    with pytest.raises(case.error) as caught:
        lazymax.attention(**{**dict(q=Q, k=K, v=V), **case.change})
    assert type(caught.value) is case.error
    for words in case.words:
        assert words in str(caught.value)


TQ, TK, TV = (t[0].transpose(0, 1) for t in (Q, K, V))  # (total, heads, head dim)
ENDS_Q, ENDS_K = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])
BAD_VARLEN = (
    Bad("q is a list", dict(q=[1]), TypeError, ("q: got list", "expected a torch.Tensor")),
    Bad("offsets are a list", dict(cu_seqlens_q=[0, 5]), TypeError, ("cu_seqlens_q: got list", "a torch.Tensor")),
    Bad("no offsets", dict(cu_seqlens_k=None), TypeError, ("cu_seqlens_k: got NoneType", "a torch.Tensor")),
    Bad("4-D q", dict(q=Q), ValueError, ("q: got shape (1, 4, 5, 8)", "3 dimensions (total, heads, head dim)")),
    Bad("heads", dict(k=TK[:, :0], v=TV[:, :0]), ValueError, ("4 query heads over 0 key heads",)),
    Bad("length of v", dict(v=TV[:3]), ValueError, ("different lengths",)),
    Bad("offsets differ", dict(cu_seqlens_q=ENDS_Q[:2]), ValueError, ("2 and 3 offsets", "one more than sequences")),
    Bad("offsets are floats", dict(cu_seqlens_q=ENDS_Q.float()), TypeError,
        ("cu_seqlens_q: got dtype torch.float32", "expected int32 or int64")),
    Bad("longest", dict(max_seqlen_k=-1), ValueError, ("max_seqlen_k: got -1", "expected a length")),
    Bad("impl", dict(impl="flash"), ValueError, ("impl: got 'flash'", "portable")),
    Bad("threshold", dict(rescale_threshold="x"), TypeError, ("rescale_threshold: got 'x'", "expected a number")),
)  # fmt: skip


@pytest.mark.parametrize("case", BAD_VARLEN, ids=lambda case: case.id)
def test_attention_varlen_says_what_came_and_what_was_expected(case: Bad) -> None:
    with pytest.raises(case.error) as caught:
        lazymax.attention_varlen(**{**dict(q=TQ, k=TK, v=TV, cu_seqlens_q=ENDS_Q, cu_seqlens_k=ENDS_K), **case.change})
    assert type(caught.value) is case.error
    for words in case.words:
        assert words in str(caught.value)


@pytest.mark.parametrize("name", ["seqlens_k", "attn_mask"])
def test_attention_varlen_has_no_arguments_of_rectangles(name: str) -> None:
    assert name not in inspect.signature(lazymax.attention_varlen).parameters


def test_options_have_one_default_everywhere() -> None:
    """What one function calls an option, the other and the parser call it too."""
    of_attention, of_varlen, of_parser = (
        {name: p.default for name, p in inspect.signature(function).parameters.items()}
        for function in (lazymax.attention, lazymax.attention_varlen, options.parse_options)
    )
    for name in of_attention.keys() & of_varlen.keys():
        assert of_attention[name] == of_varlen[name], name
    how = {"layout", "impl", "return_lse", "rescale_threshold", "deterministic", "q", "k", "v"}
    for found in (of_attention, of_varlen):
        rest = {name: default for name, default in found.items() if name not in how | {"cu_seqlens_q", "cu_seqlens_k"}}
        assert rest == {name: of_parser[name] for name in rest}


def test_float64_by_a_kernel_is_refused(device: str) -> None:
    q, k, v = (t.double().to(device) for t in (Q, K, V))
    with pytest.raises(NotImplementedError, match=r"impl: 'portable' cannot take this problem.*float64.*impl='auto'"):
        lazymax.attention(q, k, v, impl="portable")


@pytest.mark.parametrize("name", [name for name in registry() if registry()[name].archs])
def test_impl_for_another_gpu_raises(name: str, device: str) -> None:
    if name == lazymax.explain(Q.to(device), K.to(device), V.to(device), show=False).plan.backend:
        pytest.skip(f"{name} is this device's own backend")
    with pytest.raises(NotImplementedError, match=f"impl: '{name}' cannot take this problem"):
        lazymax.attention(Q.to(device), K.to(device), V.to(device), impl=name)


def test_signature_is_torchs() -> None:
    """torch's is a builtin: its documented signature, checked by calling it with every argument by name."""
    signature = inspect.signature(lazymax.scaled_dot_product_attention)
    assert [(name, p.default) for name, p in signature.parameters.items()] == [
        ("query", inspect.Parameter.empty), ("key", inspect.Parameter.empty), ("value", inspect.Parameter.empty),
        ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None), ("enable_gqa", False),
    ]  # fmt: skip
    text = " ".join((F.scaled_dot_product_attention.__doc__ or "").split())
    assert "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False" in text


# ---- scaled_dot_product_attention against torch's own


@dataclass(frozen=True)
class Same:
    """A call that lazymax and torch must answer alike: the same values, dtype and shape, or the same exception type."""

    id: str
    sizes: tuple[int, ...] = (2, 4, 4, 19, 23, 16)
    call: dict[str, Any] = field(default_factory=dict)
    change: Any = None  # (q, k, v) -> (q, k, v)
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    raises: bool = False
    math: bool = False  # torch's rule is the one of its plain formula


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """A mask that leaves every row a key; bool, or additive."""
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[..., 0] = True
    if dtype == torch.bool:
        return keep
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype).masked_fill(~keep, float("-inf"))


def reshaped(*shape: int) -> Any:
    """All three with these leading dimensions in place of batch and heads."""
    return lambda q, k, v: tuple(t.reshape(*shape, *t.shape[2:]) for t in (q, k, v))


MASKS = [
    Same(f"mask {shape} {str(dtype).removeprefix('torch.')}", call=dict(attn_mask=mask(*shape, dtype=dtype)))
    for shape in ((1, 23), (19, 1), (19, 23), (4, 1, 23), (2, 1, 1, 23), (1, 4, 19, 23), (1, 1, 1, 1))
    for dtype in (torch.bool, torch.float32)
]
SAME = (
    Same("plain"),
    Same("causal", call=dict(is_causal=True)),
    Same("causal, more keys", (1, 2, 2, 3, 40, 16), dict(is_causal=True)),
    Same("causal, fewer keys", (1, 2, 2, 40, 3, 16), dict(is_causal=True)),
    Same("causal decode sees key 0 only", (1, 2, 2, 1, 9, 16), dict(is_causal=True)),
    Same("scale", call=dict(scale=0.7)),
    Same("scale is an int", call=dict(scale=2)),
    Same("negative scale", call=dict(scale=-0.3)),
    Same("zero scale", call=dict(scale=0.0)),
    Same("D_v != D", (1, 2, 2, 9, 11, 16, 24)),
    Same("fp16", dtype=torch.float16),
    Same("bf16, causal", call=dict(is_causal=True), dtype=torch.bfloat16),
    Same("float64", dtype=torch.float64),
    Same("float64, causal", call=dict(is_causal=True), dtype=torch.float64),
    Same("grouped", (1, 4, 2, 9, 11, 16), dict(enable_gqa=True)),
    Same("grouped, causal", (1, 4, 2, 9, 11, 16), dict(enable_gqa=True, is_causal=True)),
    Same("grouped without enable_gqa", (1, 4, 2, 9, 11, 16), raises=True),
    Same("one key head without enable_gqa", (1, 4, 1, 9, 11, 16)),
    Same("heads no multiple", (1, 4, 3, 9, 11, 16), dict(enable_gqa=True), raises=True),
    Same("2-D", (1, 1, 1, 9, 11, 16), change=lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0])),
    Same("3-D", change=lambda q, k, v: (q[0], k[0], v[0])),
    Same("3-D, causal", call=dict(is_causal=True), change=lambda q, k, v: (q[0], k[0], v[0])),
    Same("5-D", change=reshaped(2, 2, 2)),
    Same("1-D", change=lambda q, k, v: (q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]), raises=True),
    Same("4-D q over 3-D k", change=lambda q, k, v: (q, k[0], v[0])),
    Same("broadcast batch of k and v", change=lambda q, k, v: (q, k[:1], v[:1])),
    Same("broadcast batch of q", change=lambda q, k, v: (q[:1], k, v)),
    Same("expanded heads", change=lambda q, k, v: (q, k[:, :1].expand_as(k), v[:, :1].expand_as(v))),
    Same("batch mismatch", change=lambda q, k, v: (q, torch.cat([k, k[:1]]), torch.cat([v, v[:1]])), raises=True),
    Same("head dim mismatch", change=lambda q, k, v: (q, k[..., :8], v), raises=True),
    Same("length mismatch", change=lambda q, k, v: (q, k, v[:, :, :5]), raises=True, math=True),
    Same("mixed dtypes", change=lambda q, k, v: (q, k, v.half()), raises=True),
    Same("integers", change=lambda q, k, v: (q.int(), k.int(), v.int()), raises=True),
    Same("mixed devices", change=lambda q, k, v: (q, k.to("meta"), v), raises=True),
    Same(
        "stored as B, S, H, D",
        change=lambda q, k, v: [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)],
    ),
    Same("head dimension not contiguous", change=lambda q, k, v: [t.mT.contiguous().mT for t in (q, k, v)]),
    *MASKS,
    Same("mask and is_causal", call=dict(attn_mask=mask(19, 23), is_causal=True), raises=True, math=True),
    Same("mask of a wrong shape", call=dict(attn_mask=mask(19, 22)), raises=True),
    Same("mask of integers", call=dict(attn_mask=mask(19, 23).long()), raises=True),
    Same("bf16 with an fp32 mask", call=dict(attn_mask=mask(19, 23, dtype=torch.float32)), dtype=torch.bfloat16),
    Same("mask with grouped heads", (1, 4, 2, 9, 11, 16), dict(enable_gqa=True, attn_mask=mask(9, 11))),
    Same("dropout 1", call=dict(dropout_p=1.0)),
    Same("no batch", (0, 2, 2, 9, 11, 16)),
    Same("no heads", (2, 0, 0, 9, 11, 16)),
    Same("no queries", (2, 2, 2, 0, 11, 16)),
    Same("no keys", (2, 2, 2, 9, 0, 16)),
    Same("no keys, causal", (2, 2, 2, 9, 0, 16), dict(is_causal=True)),
    Same("no head dim", (2, 2, 2, 9, 11, 0, 16)),
    Same("no head dim of v", (2, 2, 2, 9, 11, 16, 0)),
    Same("autocast", autocast=torch.bfloat16),
    Same("autocast, v is bf16", change=lambda q, k, v: (q, k, v.bfloat16()), autocast=torch.bfloat16),
    Same("autocast, three dtypes", change=lambda q, k, v: (q.half(), k, v.bfloat16()), autocast=torch.bfloat16),
    Same("autocast, causal", call=dict(is_causal=True), autocast=torch.bfloat16),
    Same("autocast of fp16 inputs", dtype=torch.float16, autocast=torch.bfloat16),
    Same("autocast keeps float64", dtype=torch.float64, autocast=torch.bfloat16),
    Same("autocast, mask", call=dict(attn_mask=mask(19, 23)), autocast=torch.bfloat16),
    Same("meta tensors", change=lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta"))),
    Same("q is no tensor", change=lambda q, k, v: (1, k, v), raises=True),
    Same("v is None", change=lambda q, k, v: (q, k, None), raises=True),
    Same("scale is text", call=dict(scale="x"), raises=True),
    Same("dropout is None", call=dict(dropout_p=None), raises=True),
    Same("is_causal is text", call=dict(is_causal="x"), raises=True),
    Same("enable_gqa is text", call=dict(enable_gqa="x"), raises=True),
)


def arguments(case: Same, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    qkv: Any = tensors(*case.sizes, dtype=case.dtype, device=device)
    if case.change:
        qkv = case.change(*qkv)
    call = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in case.call.items()}
    return tuple(qkv), call


def answer(function: Any, case: Same, device: str) -> torch.Tensor:
    qkv, call = arguments(case, device)
    with torch.autocast(device, case.autocast) if case.autocast else nullcontext():
        out: torch.Tensor = function(*qkv, **call)
    return out


def torchs(case: Same, device: str) -> torch.Tensor:
    """torch's answer by its plain formula: its CPU kernel has faults of its own (B46, and it takes what it should not:
    a mask beside is_causal, a v shorter than k)."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return answer(F.scaled_dot_product_attention, case, device)


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.id)
def test_scaled_dot_product_attention_answers_as_torch_does(case: Same, device: str) -> None:
    if case.raises:
        with pytest.raises(Exception) as theirs:  # whatever torch raises
            (torchs if case.math else answer_default)(case, device)
        with pytest.raises(type(theirs.value)) as ours:
            answer(lazymax.scaled_dot_product_attention, case, device)
        assert type(ours.value) is type(theirs.value)
        return
    low = torchs(case, device)
    out = answer(lazymax.scaled_dot_product_attention, case, device)
    assert (out.dtype, out.shape, out.device) == (low.dtype, low.shape, low.device)
    if out.is_meta:
        return
    exact = torchs(Same(case.id, case.sizes, case.call, doubled(case), case.dtype), device)
    budget = within_budget(out, exact.double(), low.clone(), eps=EPS[out.dtype])
    assert budget.ok, str(budget)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5, math.nan])
def test_dropout_that_is_no_probability_raises(dropout_p: float, device: str) -> None:
    """As by torch on a CPU; its CUDA kernels and its formula take some of it."""
    q, k, v = tensors(2, 2, 2, 9, 11, 16, device=device)
    with pytest.raises(RuntimeError, match=f"dropout_p={dropout_p}"):
        lazymax.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)


def answer_default(case: Same, device: str) -> torch.Tensor:
    return answer(F.scaled_dot_product_attention, case, device)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_mask_of_one_dimension_is_what_torch_makes_of_it(dtype: torch.dtype, device: str) -> None:
    """torch's CPU kernel raises IndexError for a mask (Sk,); other devices and versions take it."""
    case = Same("mask (Sk,)", call=dict(attn_mask=mask(23, dtype=dtype)))
    try:
        want = answer_default(case, device)
    except Exception as theirs:
        with pytest.raises(type(theirs)):
            answer(lazymax.scaled_dot_product_attention, case, device)
        return
    assert torch.equal(answer(lazymax.scaled_dot_product_attention, case, device), want)


def doubled(case: Same) -> Any:
    """The same inputs, rounded as autocast would, in float64."""

    def change(*qkv: torch.Tensor) -> list[torch.Tensor]:
        changed = case.change(*qkv) if case.change else qkv
        lowered = [t.to(case.autocast) if case.autocast and t.dtype != torch.float64 else t for t in changed]
        return [t.double() for t in lowered]

    return change


KERNELS = (
    Same("plain, causal", call=dict(is_causal=True)),
    Same("scale", call=dict(scale=-0.3), dtype=torch.float16),
    Same("grouped", (1, 4, 2, 9, 11, 16), dict(enable_gqa=True)),
    Same("one key head without enable_gqa", (1, 4, 1, 9, 11, 16)),
    Same("2-D", (1, 1, 1, 9, 11, 16), change=lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0])),
    Same("3-D, mask", call=dict(attn_mask=mask(4, 1, 23)), change=lambda q, k, v: (q[0], k[0], v[0])),
    Same("5-D, mask", call=dict(attn_mask=mask(2, 1, 2, 19, 23)), change=reshaped(2, 2, 2)),
    Same("broadcast batch of k and v, mask", call=dict(attn_mask=mask(2, 1, 1, 23)),
         change=lambda q, k, v: (q, k[:1], v[:1])),
    Same("mask of rows", call=dict(attn_mask=mask(19, 1, dtype=torch.float32))),
    Same("mask with grouped heads", (1, 4, 2, 9, 11, 16), dict(enable_gqa=True, attn_mask=mask(9, 11))),
    Same("bf16 with an fp32 mask", call=dict(attn_mask=mask(19, 23, dtype=torch.float32)), dtype=torch.bfloat16),
    Same("dropout", call=dict(dropout_p=0.5)),
    Same("dropout of all", call=dict(dropout_p=1)),
    Same("head dimension not contiguous", change=lambda q, k, v: [t.mT.contiguous().mT for t in (q, k, v)]),
    Same("autocast, mask", call=dict(attn_mask=mask(19, 23)), autocast=torch.bfloat16),
    Same("no keys", (2, 2, 2, 9, 0, 16)),
)  # fmt: skip
TORCHS = (
    Same("float64", dtype=torch.float64),
    Same("autocast keeps float64", dtype=torch.float64, autocast=torch.bfloat16),
    Same("mixed dtypes", change=lambda q, k, v: (q, k, v.half())),
    Same("mask of integers", call=dict(attn_mask=mask(19, 23).long())),
    Same("mask of a wrong shape", call=dict(attn_mask=mask(19, 22))),
    Same("scale is inf", call=dict(scale=float("inf"))),
    Same("grouped without enable_gqa", (1, 4, 2, 9, 11, 16)),
)


class Called(Exception):
    pass


@pytest.mark.parametrize("case", [*KERNELS, *TORCHS], ids=lambda case: case.id)
def test_who_computes_a_call(case: Same, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan of a kernel for what is ours, no plan and torch's own function for what is not."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise Called

    monkeypatch.setattr(drop_in, "TORCH_SDPA", refuse)
    monkeypatch.setattr(ForwardLaunch, "__call__", lambda *arguments: None)
    plans: list[Any] = []
    monkeypatch.setattr(ops, "observers", [plans.append])
    if case in TORCHS:
        with pytest.raises(Called):
            answer(lazymax.scaled_dot_product_attention, case, device)
        assert plans == [None]
    else:
        answer(lazymax.scaled_dot_product_attention, case, device)
        assert [plan.route for plan in plans] == ["triton"]


def test_a_mask_of_fp32_beside_bf16_is_not_rounded_first(device: str) -> None:
    q, k, v = tensors(1, 1, 1, 4, 8, 16, dtype=torch.bfloat16, device=device)
    bias = mask(4, 8, dtype=torch.float32).to(device)
    out = lazymax.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


def test_dropout_draws_from_torchs_generator(device: str) -> None:
    q, k, v = tensors(1, 2, 2, 33, 33, 16, device=device)

    def draw() -> torch.Tensor:
        return lazymax.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    again = draw()
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_dropout_drops_what_testing_says(device: str) -> None:
    """By the textbook formula: drop after the softmax, let the others grow; the LSE does not know of it."""
    q, k, v = tensors(2, 4, 2, 19, 23, 16, device=device)
    seed = torch.tensor([2**33 + 5], device=device)
    out, lse = lazymax.attention(q, k, v, dropout_p=0.25, dropout_seed=seed, return_lse=True)
    kept = dropout_keep(seed, 2, 4, 19, 23, 0.25, device)
    assert 0.7 < kept.float().mean() < 0.8

    def twin(dtype: torch.dtype) -> torch.Tensor:
        keys, values = (t.to(dtype).repeat_interleave(2, 1) for t in (k, v))
        p = torch.softmax(q.to(dtype) @ keys.mT / 4, -1)
        return (p * kept / 0.75) @ values

    budget = within_budget(out, twin(torch.float64), twin(torch.float32), eps=EPS[torch.float32])
    assert budget.ok, str(budget)
    assert torch.equal(lse, lazymax.attention(q, k, v, return_lse=True)[1])


def test_gradients_of_the_drop_in(device: str) -> None:
    grads = []
    for function in (lazymax.scaled_dot_product_attention, F.scaled_dot_product_attention):
        for dtype in (torch.float32, torch.float64):
            qkv = [t.to(dtype).requires_grad_() for t in tensors(2, 4, 2, 19, 19, 16, device=device)]
            function(*qkv, is_causal=True, enable_gqa=True).square().sum().backward()
            grads.append([t.grad for t in qkv])
    ours, _, theirs, exact = grads
    for name, x, low, x64 in zip("qkv", ours, theirs, exact, strict=True):
        budget = within_budget(x, x64, low, eps=EPS[torch.float32], what=f"d{name}")
        assert budget.ok, str(budget)


# ---- attention()


@dataclass(frozen=True)
class Layout:
    id: str
    sizes: tuple[int, ...]
    rules: dict[str, Any] = field(default_factory=dict)


LAYOUTS = (
    Layout("plain", (2, 4, 4, 19, 23, 16)),
    Layout("grouped, causal, D_v", (2, 4, 2, 19, 23, 16, 24), dict(causal="bottom_right")),
    Layout("window", (1, 2, 1, 40, 40, 16), dict(window=(7, 3))),
)


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.id)
def test_bshd_is_bhsd_transposed(case: Layout, return_lse: bool, device: str) -> None:
    q, k, v = tensors(*case.sizes, dtype=torch.float16, device=device)
    bshd = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    rules = dict(case.rules, return_lse=return_lse)
    want, got = lazymax.attention(q, k, v, **rules), lazymax.attention(*bshd, layout="bshd", **rules)
    if return_lse:
        (want, want_lse), (got, lse) = want, got
        assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and torch.equal(lse, want_lse)
    assert got.shape == (*bshd[0].shape[:3], v.shape[3])
    assert got.is_contiguous(), "the output of bshd is stored as bshd"
    assert torch.equal(got.transpose(1, 2), want)


def test_optional_tensors_mean_the_same_in_both_layouts(device: str) -> None:
    q, k, v = tensors(2, 2, 1, 19, 23, 16, dtype=torch.float16, device=device)
    options = moved(dict(attn_mask=mask(2, 2, 19, 23), alibi_slopes=torch.rand(2, 2), sinks=torch.rand(2),
                         seqlens_k=torch.tensor([23, 9])), device)  # fmt: skip
    bshd = [t.transpose(1, 2) for t in (q, k, v)]
    got = lazymax.attention(*bshd, layout="bshd", **options)
    assert torch.equal(got.transpose(1, 2), lazymax.attention(q, k, v, **options))


@triton.jit
def _fold(score, b, h, q_idx, k_idx, weight):
    return tl.where((q_idx + k_idx) % 2 == 0, score * tl.load(weight + h), score - b)


def _fold_reference(score, b, h, q_idx, k_idx, weight):
    return torch.where((q_idx + k_idx) % 2 == 0, score * weight[h], score - b)


@triton.jit
def _near(b, h, q_idx, k_idx, reach):
    return tl.abs(q_idx - k_idx) <= tl.load(reach + h)


def _near_reference(b, h, q_idx, k_idx, reach):
    return (q_idx - k_idx).abs() <= reach[h]


lazymax.register_score_mod("test_api.fold", _fold, reference=_fold_reference)
lazymax.register_mask_mod("test_api.near", _near, reference=_near_reference)
FOLD = dict(score_mod="test_api.fold", score_mod_args=(torch.tensor([0.5, -2.0, 1.0, 3.0]),))
NEAR = dict(mask_mod="test_api.near", mask_mod_args=(torch.tensor([3, 50, 0, 7]),))
WITH_EXTRAS = (2, 2, 1, 17, 33, 16)

RULES = (
    Layout("plain", (1, 2, 2, 17, 33, 16)),
    Layout("causal", (1, 4, 2, 17, 33, 16), dict(causal="top_left")),
    Layout("bottom right", (1, 4, 2, 17, 33, 16), dict(causal="bottom_right")),
    Layout("window", (1, 2, 2, 33, 33, 16), dict(window=(5, 2))),
    Layout("open window", (1, 2, 2, 33, 33, 16), dict(window=(-1, None))),
    Layout("window, bottom right", (1, 2, 2, 17, 33, 16), dict(window=(5, 2), window_align="bottom_right")),
    Layout("scale", (1, 2, 2, 17, 33, 16), dict(scale=-0.3)),
    Layout("exact maximum", (1, 2, 2, 17, 33, 16), dict(rescale_threshold=0)),
    Layout("rows without keys", (1, 2, 2, 33, 17, 16), dict(causal="bottom_right")),
    Layout("bool mask of batch and keys", WITH_EXTRAS, dict(attn_mask=mask(2, 1, 1, 33))),
    Layout("float mask, causal", WITH_EXTRAS, dict(attn_mask=mask(17, 33, dtype=torch.float32), causal="top_left")),
    Layout("softcap, slopes", WITH_EXTRAS, dict(softcap=2.0, alibi_slopes=torch.rand(2, 2), causal="bottom_right")),
    Layout("slopes, window align alone", WITH_EXTRAS, dict(alibi_slopes=torch.rand(2), window_align="bottom_right")),
    Layout("sinks, rows without keys", (1, 2, 2, 33, 17, 16), dict(sinks=torch.rand(2), causal="bottom_right")),
    Layout("lengths", WITH_EXTRAS, dict(seqlens_k=torch.tensor([9, 0]), causal="bottom_right")),
    Layout("score_mod", WITH_EXTRAS, FOLD),
    Layout("mask_mod", WITH_EXTRAS, NEAR),
    Layout("dropout", WITH_EXTRAS, dict(dropout_p=0.3, dropout_seed=torch.tensor([3]))),
    Layout("all at once", WITH_EXTRAS, dict(
        **FOLD, **NEAR, attn_mask=mask(2, 1, 33, dtype=torch.bfloat16), softcap=3.0, alibi_slopes=torch.rand(2),
        sinks=torch.rand(2, 2), seqlens_k=torch.tensor([30, 33]), dropout_p=0.3, dropout_seed=torch.tensor([-3]),
        causal="bottom_right", window=(20, None), scale=0.4)),
)  # fmt: skip


def moved(value: Any, device: str) -> Any:
    """Options of a call on the device."""
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("impl", ["auto", "portable", "reference"])
@pytest.mark.parametrize("case", RULES, ids=lambda case: case.id)
def test_attention_by_every_route(case: Layout, impl: str, device: str) -> None:
    if impl == "auto" and device == "cpu" and case.sizes is WITH_EXTRAS:
        pytest.skip("auto is portable in the interpreter, shown by the cases without optional tensors")
    q, k, v = tensors(*case.sizes, dtype=torch.float16, device=device)
    rules = moved(case.rules, device)
    out, lse = lazymax.attention(q, k, v, **rules, impl=impl, return_lse=True)
    threshold = rules.pop("rescale_threshold", None)
    extras, parsed = options.parse_options(q, **rules)
    problem = Problem.from_tensors(q, k, v, extras, parsed, return_lse=True, rescale_threshold=threshold)
    for budget in check_attention(out, lse, q, k, v, problem, extras):
        assert budget.ok, str(budget)
    plan = lazymax.explain(q, k, v, impl=impl, show=False, **rules).plan
    assert plan.route == ("reference" if impl == "reference" else "triton")


def test_keys_outside_the_band_reach_no_result_of_any_route(device: str) -> None:
    q, k, v = tensors(1, 2, 2, 8, 8, 16, device=device)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[:, :, -1], bad_v[:, :, -1] = float("nan"), float("inf")
    for impl in ("portable", "reference"):
        want = lazymax.attention(q, k, v, causal="top_left", impl=impl)[:, :, :-1]
        got = lazymax.attention(q, bad_k, bad_v, causal="top_left", impl=impl)[:, :, :-1]
        budget = within_budget(got, want.double(), want.clone(), eps=EPS[torch.float32], what=impl)
        assert budget.ok, str(budget)


# ---- attention_varlen()


@dataclass(frozen=True)
class Packed:
    """Sequences of these lengths in q and in k; `rest`: rows of q and of k that belong to none."""

    id: str
    lengths: tuple[tuple[int, int], ...]
    rules: dict[str, Any] = field(default_factory=dict)
    rest: tuple[int, int] = (0, 0)
    dtype: torch.dtype = torch.int32  # of the offsets

    def offsets(self, which: int, device: str) -> torch.Tensor:
        ends = [0, *itertools.accumulate(pair[which] for pair in self.lengths)]
        return torch.tensor(ends, dtype=self.dtype, device=device)

    def tensors(self, device: str, heads: tuple[int, int] = (2, 1)) -> list[torch.Tensor]:
        """q, k, v as (total, heads, head dim)."""
        totals = [sum(pair[which] for pair in self.lengths) + self.rest[which] for which in (0, 1)]
        qkv = tensors(1, *heads, *totals, 16, 24, dtype=torch.float16, device=device, layout="bshd")
        return [t[0].transpose(0, 1) for t in qkv]


THREE = ((19, 33), (3, 2), (9, 9))
PACKED = (
    Packed("lengths of q and k differ", THREE),
    Packed("causal, top left", THREE, dict(causal="top_left")),
    Packed("causal, bottom right", THREE, dict(causal="bottom_right"), dtype=torch.int64),
    Packed("window, bottom right", THREE, dict(window=(9, 2), window_align="bottom_right")),
    Packed("empty sequences", ((0, 0), (5, 0), (0, 9), (17, 33), (0, 0))),
    Packed("rows of no sequence", ((5, 9), (17, 20)), dict(causal="top_left"), (70, 40)),
    Packed("decode", ((1, 33), (1, 1), (1, 40)), dict(causal="bottom_right", max_seqlen_q=1, max_seqlen_k=40)),
    Packed("one sequence", ((70, 40),), dict(scale=-0.5)),
    Packed("features", THREE, dict(
        softcap=2.0, alibi_slopes=torch.rand(2), sinks=torch.rand(2), causal="bottom_right",
        score_mod="test_api.scaled", score_mod_args=FOLD["score_mod_args"], **NEAR)),
    Packed("per sequence", THREE, dict(alibi_slopes=torch.rand(3, 2), sinks=torch.rand(3, 2), **FOLD)),
    Packed("dropout", THREE, dict(dropout_p=0.3, dropout_seed=torch.tensor([3])), (2, 3)),
)  # fmt: skip


@triton.jit
def _scaled(score, b, h, q_idx, k_idx, weight):
    return score * tl.load(weight + h) + (q_idx - k_idx) * 0.125


def _scaled_reference(score, b, h, q_idx, k_idx, weight):
    return score * weight[h] + (q_idx - k_idx) * 0.125


lazymax.register_score_mod("test_api.scaled", _scaled, reference=_scaled_reference)


@pytest.mark.parametrize("impl", ["portable", "reference"])
@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.id)
def test_packed_sequences_by_every_route(case: Packed, impl: str, device: str) -> None:
    q, k, v = case.tensors(device)
    rules = moved(case.rules, device)
    ends = dict(cu_seqlens_q=case.offsets(0, device), cu_seqlens_k=case.offsets(1, device))
    out, lse = lazymax.attention_varlen(q, k, v, **ends, **rules, impl=impl, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((q.shape[0], 2, 24), (2, q.shape[0]), torch.float32)
    qkv = [t.transpose(0, 1)[None] for t in (q, k, v)]
    extras, parsed = options.parse_options(q, **ends, **rules)
    problem = Problem.from_tensors(*qkv, extras, parsed, return_lse=True)
    for budget in check_attention(out.transpose(0, 1)[None], lse[None], *qkv, problem, extras):
        assert budget.ok, str(budget)
    last = int(ends["cu_seqlens_q"][-1])
    assert (out[last:] == 0).all() and (lse[:, last:] == float("-inf")).all()


ALONE = [case for case in PACKED if case.id in ("causal, bottom right", "empty sequences", "features")]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.id)
def test_a_packed_sequence_is_what_it_is_alone(case: Packed, device: str) -> None:
    """By `attention`, sequence by sequence; what lies around a sequence is not its business."""
    q, k, v = case.tensors(device)
    rules = moved(case.rules, device)
    ends = case.offsets(0, device), case.offsets(1, device)
    out, lse = lazymax.attention_varlen(q, k, v, *ends, **rules, return_lse=True)
    alone = {name: value for name, value in rules.items() if not name.startswith("max_")}
    for rows, keys in zip(*(itertools.pairwise(t.tolist()) for t in ends), strict=True):
        one = [t[slice(*part)].transpose(0, 1)[None] for t, part in ((q, rows), (k, keys), (v, keys))]
        want, want_lse = lazymax.attention(*one, **alone, return_lse=True, impl="reference")
        exact, exact_lse = lazymax.attention(*(t.double() for t in one), **alone, return_lse=True)
        got, got_lse = out[slice(*rows)].transpose(0, 1)[None], lse[None, :, slice(*rows)]
        for budget in (
            within_budget(got, exact, want, eps=EPS[torch.float16]),
            within_budget(got_lse[..., None], exact_lse[..., None].double(), want_lse[..., None],
                          eps=EPS[torch.float32], what="lse"),
        ):  # fmt: skip
            assert budget.ok, f"{rows}, {keys}: {budget}"


def test_other_sequences_reach_no_result(device: str) -> None:
    """NaN and inf in the rows of one sequence, and behind the last, leave the others as they are."""
    case = Packed("", ((19, 33), (7, 9), (20, 20)), rest=(5, 5))
    q, k, v = case.tensors(device)
    ends = case.offsets(0, device), case.offsets(1, device)
    want, want_lse = lazymax.attention_varlen(q, k, v, *ends, return_lse=True)
    for t, (start, stop) in ((q, (19, 26)), (k, (33, 42)), (v, (33, 42))):
        t[start:stop] = float("nan")
        t[-5:] = float("inf")
    out, lse = lazymax.attention_varlen(q, k, v, *ends, return_lse=True)
    others = torch.ones(len(q), dtype=torch.bool, device=device)
    others[19:26] = False
    assert torch.equal(out[others], want[others]) and torch.equal(lse[:, others], want_lse[:, others])
    assert out[19:26].isnan().all()


STORED = {
    "heads first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "head dimension not contiguous": lambda t: t.mT.contiguous().mT,
    "a slice": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
}


def test_packed_tensors_of_any_strides(device: str) -> None:
    case = PACKED[2]
    q, k, v = case.tensors(device)
    ends = case.offsets(0, device), case.offsets(1, device)
    want = lazymax.attention_varlen(q, k, v, *ends, **case.rules)
    for name, stored in STORED.items():
        got = lazymax.attention_varlen(stored(q), stored(k), stored(v), *ends, **case.rules)
        assert torch.equal(got, want), name
        by_q = sorted(range(2), key=lambda dim: -stored(q).stride(dim))
        assert got.permute(*by_q, 2).is_contiguous(), f"{name}: the output is dense in q's order of dimensions"


# ---- explain()


@pytest.mark.parametrize("name", [*arches.names(), "cpu"])
def test_explain_for_every_gpu_without_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    explanation = lazymax.explain(shape=(1, 4, 2, 300, 300, 128), causal="top_left", arch=name)
    assert capsys.readouterr().out == f"{explanation}\n"
    data = json.loads(explanation.to_json())
    assert data["arch"]["id"] == name and data["problem"]["dtype"] == "bfloat16" and data["problem"]["causal"]
    plan = explanation.plan
    candidates = {r.candidate for r in plan.rejected if " row " not in r.candidate}
    assert candidates | {plan.backend} == {*registry(), "reference"}
    for refused in plan.rejected:
        assert f"refused   {refused.candidate}: {refused.reason}" in str(explanation)


def test_explain_prints_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    lazymax.explain(shape=(1, 4, 2, 300, 300, 128, 64), dtype="fp16", arch="gfx1151")
    printed = capsys.readouterr().out
    assert printed.startswith("problem   float16 B=1 Hq=4 Hkv=2 Sq=300 Sk=300 D=128 Dv=64\n")
    assert "arch      gfx1151" in printed and "route     triton:" in printed
    lazymax.explain(shape=(1, 4, 2, 300, 300, 128), arch="gfx1151", show=False)
    assert capsys.readouterr().out == ""


def test_explain_of_tensors_is_the_plan_of_the_call(device: str) -> None:
    q, k, v = tensors(1, 4, 2, 19, 23, 16, dtype=torch.float16, device=device)
    plan = lazymax.explain(q, k, v, show=False).plan
    assert plan.route == "triton"
    bshd = [t.transpose(1, 2) for t in (q, k, v)]
    assert lazymax.explain(*bshd, layout="bshd", show=False).plan == plan
    assert lazymax.explain(q, k, v, impl="reference", show=False).plan.route == "reference"
    assert lazymax.explain(q, k, v, arch="gfx1151", show=False).arch.id == "gfx1151"


@dataclass(frozen=True)
class Route:
    id: str
    call: dict[str, Any]
    words: str


ROUTES = (
    Route("asked for", dict(impl="reference"), "asked for"),
    Route("asked for, mask", dict(impl="reference", attn_mask=mask(19, 23)), "asked for"),
)


@pytest.mark.parametrize("case", ROUTES, ids=lambda case: case.id)
def test_explain_says_why_the_reference_runs(case: Route, device: str) -> None:
    q, k, v = tensors(1, 4, 2, 19, 23, 16, dtype=torch.float16, device=device)
    explanation = lazymax.explain(q, k, v, show=False, **moved(case.call, device))
    assert explanation.plan.route == "reference"
    assert f"because   {case.words}" in str(explanation)


def test_explain_says_that_float64_is_the_references(device: str) -> None:
    explanation = lazymax.explain(
        *(t.double().to(device) for t in (Q, K, V)), attn_mask=mask(5, 7).to(device), show=False
    )
    assert explanation.plan.route == "reference" and "float64 goes to the reference" in str(explanation)


FEATURES = (
    Route("mask", dict(attn_mask=mask(19, 23)), "mask bool"),
    Route("float mask", dict(attn_mask=mask(2, 1, 19, 23, dtype=torch.float16)), "mask float16"),
    Route("dropout", dict(dropout_p=0.1), "dropout 0.1"),
    Route("softcap", dict(softcap=30), "softcap 30"),
    Route("slopes", dict(alibi_slopes=torch.rand(4)), "ALiBi"),
    Route("sinks", dict(sinks=torch.rand(2, 4)), "sinks"),
    Route("lengths", dict(seqlens_k=torch.tensor([9, 2])), "seqlens_k"),
    Route("score_mod", FOLD, "score_mod test_api.fold"),
    Route("mask_mod", NEAR, "mask_mod test_api.near"),
    Route("is_causal", dict(is_causal=True), "causal top_left"),
)


@pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.id)
def test_explain_says_that_the_kernel_takes_it(case: Route, device: str) -> None:
    q, k, v = tensors(2, 4, 2, 19, 23, 16, dtype=torch.float16, device=device)
    here = lazymax.explain(q, k, v, show=False, **moved(case.call, device))
    there = lazymax.explain(shape=(2, 4, 2, 19, 23, 16), dtype="fp16", arch="gfx1151", show=False, **case.call)
    for explanation in (here, there):
        assert explanation.plan.route == "triton"
        assert case.words in str(explanation).splitlines()[0]
    assert replace(there.problem, descriptor_refusal=None) == replace(here.problem, descriptor_refusal=None)


def test_explain_of_packed_sequences(device: str) -> None:
    q, k, v = (t.half().to(device) for t in (TQ, TK, TV))
    explanation = lazymax.explain(
        q, k, v, cu_seqlens_q=ENDS_Q.to(device), cu_seqlens_k=ENDS_K.to(device), max_seqlen_q=3, show=False
    )
    assert explanation.plan.route == "triton"
    assert "B=2 Hq=4 Hkv=2 Sq=3 Sk=7 D=8 Dv=6, packed, 5 and 7 rows" in str(explanation)


@dataclass(frozen=True)
class Drawn:
    """A call of the drop-in and the problem that it is: (batch, query length, key length), where the mask varies."""

    id: str
    case: Same
    sizes: tuple[int, int, int]
    varies: tuple[bool, bool, bool, bool] | None = None


DRAWN = (
    Drawn("2-D", Same("", (1, 1, 1, 9, 11, 16), change=lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0])), (1, 9, 11)),
    Drawn("3-D, mask", Same("", call=dict(attn_mask=mask(4, 1, 23)), change=lambda q, k, v: (q[0], k[0], v[0])),
          (1, 19, 23), (False, True, False, True)),
    Drawn("5-D, mask", Same("", call=dict(attn_mask=mask(2, 1, 1, 19, 23)), change=reshaped(2, 2, 2)),
          (4, 19, 23), (True, False, True, True)),
    Drawn("5-D, one mask for all", Same("", call=dict(attn_mask=mask(1, 1, 1, 19, 23)), change=reshaped(2, 2, 2)),
          (4, 19, 23), (False, False, True, True)),
)  # fmt: skip


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.id)
def test_explain_of_the_drop_in(case: Drawn, device: str) -> None:
    qkv, call = arguments(case.case, device)
    problem = lazymax.explain(*qkv, **call, show=False).problem
    assert (problem.batch, problem.q_len, problem.kv_len) == case.sizes
    assert problem.mask is None if case.varies is None else problem.mask_varies == case.varies


EXPLAIN_BAD = (
    Bad("nothing", {}, ValueError, ("explain: got neither q, k, v nor shape", "expected one of the two")),
    Bad("q alone", dict(q=Q), ValueError, ("explain:", "expected")),
    Bad("arch", dict(shape=(1, 1, 1, 1, 1, 8), arch="gfx9999"), ValueError, ("arch: got 'gfx9999'", "gfx1151")),
    Bad("shape", dict(shape=(1, 2, 3)), ValueError, ("shape: got (1, 2, 3)", "6 or 7 sizes: B, Hq, Hkv")),
    Bad("dtype", dict(shape=(1, 1, 1, 1, 1, 8), dtype="fp12"), ValueError, ("dtype: got 'fp12'", "bf16")),
    Bad("impl", dict(shape=(1, 1, 1, 1, 1, 8), impl="flash"), ValueError, ("impl: got 'flash'", "portable")),
    Bad(
        "impl refuses",
        dict(shape=(1, 1, 1, 1, 1, 577), arch="sm_90", impl="portable"),
        NotImplementedError,
        ("impl: 'portable' cannot take", "577"),
    ),
    Bad("an option of no function", dict(q=Q, k=K, v=V, atn_mask=mask(5, 7)), TypeError, ("atn_mask",)),
    Bad("softcap", dict(q=Q, k=K, v=V, softcap=-1), ValueError, ("softcap: got -1",)),
    Bad("sinks", dict(shape=(1, 2, 2, 3, 3, 8), sinks=torch.zeros(3)), ValueError, ("sinks: got shape (3,)",)),
    Bad("layout", dict(q=Q, k=K, v=V, layout="sbhd"), ValueError, ("layout: got 'sbhd'",)),
    Bad(
        "mask beside is_causal", dict(q=Q, k=K, v=V, attn_mask=mask(5, 7), is_causal=True), RuntimeError, ("is_causal",)
    ),
    Bad("bad tensors", dict(q=Q, k=K, v=V[:, :, :3]), ValueError, ("different lengths",)),
)


@pytest.mark.parametrize("case", EXPLAIN_BAD, ids=lambda case: case.id)
def test_explain_raises_what_the_call_would(case: Bad) -> None:
    with pytest.raises(case.error) as caught:
        lazymax.explain(show=False, **case.change)
    for words in case.words:
        assert words in str(caught.value)


def test_public_names() -> None:
    assert set(lazymax.__all__) <= set(dir(lazymax))
    assert all(getattr(lazymax, name).__doc__ for name in lazymax.__all__)
