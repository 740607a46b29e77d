"""Inputs that showed real faults in other attention kernels (B-numbers: the bug log they were collected in).

`CASES` are values: each is built from its own seed, goes through `scaled_dot_product_attention` and is compared with a
reference written out below, which knows dense masks. `FAULTS` and the tests after them are the kinds of fault that need
another argument or another question than "are the numbers right".
"""

import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import lazymax
from lazymax import testing
from lazymax.problem import Problem

INF, NAN = math.inf, math.nan
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SHORT = {FP16: "fp16", BF16: "bf16", FP32: "fp32"}


class Maker:
    """Random inputs of one case, always the same, from a CPU generator."""

    def __init__(self, seed: str, device: str):
        self.generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        self.device = device

    def normal(self, *shape, dtype=FP32, size=1.0):
        return (torch.randn(*shape, generator=self.generator) * size).to(dtype).to(self.device)

    def keep(self, *shape, share=0.5):
        return (torch.rand(*shape, generator=self.generator) < share).to(self.device)

    def qkv(self, q_len, kv_len=None, *, b=1, h=2, hkv=None, d=64, dv=None, dtype=FP32, **rules):
        kv_len, hkv, dv = kv_len or q_len, hkv or h, dv or d
        return dict(
            q=self.normal(b, h, q_len, d, dtype=dtype),
            k=self.normal(b, hkv, kv_len, d, dtype=dtype),
            v=self.normal(b, hkv, kv_len, dv, dtype=dtype),
            **rules,
        )


@dataclass(frozen=True)
class Case:
    """build: Maker -> q, k, v and the keywords of scaled_dot_product_attention. causal, window: the same rule in the
    words of `attention()`, for cases that the drop-in can only say with a mask."""

    id: str
    bugs: str
    what: str
    build: Callable[[Maker], dict[str, Any]]
    causal: str | None = None
    window: tuple[int, int] | None = None
    gigabytes: int = 0


def band(device, q_len, kv_len, left=None, right=None):
    """Boolean window around the bottom-right diagonal, both edges inclusive."""
    distance = torch.arange(kv_len)[None, :] - torch.arange(q_len)[:, None] - (kv_len - q_len)
    keep = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left is not None:
        keep &= distance >= -left
    if right is not None:
        keep &= distance <= right
    return keep.to(device)


def bshd(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def moated(x, *margin):
    return x | {name: testing.moat(x[name], *margin) for name in "qkv"}


def c01(make):
    keep = make.keep(1, 1, 8, 8, share=0.7)
    keep[..., 4:, :], keep[..., 0, 0] = False, True
    return make.qkv(8, d=16, attn_mask=keep)


def c02(make):
    keys = torch.arange(80, device=make.device)
    return make.qkv(80, d=32, attn_mask=(keys >= 64).expand(80, 80).contiguous())


def c04(make):
    mask = torch.zeros(1, 1, 20, 36)
    lowest = torch.finfo(FP32).min
    mask[..., 5:9, :] = lowest
    mask[..., 10, 18:] = lowest
    return make.qkv(20, 36, d=32, attn_mask=mask.to(make.device))


def c19(make):
    x = make.qkv(62)
    return x | dict(v=bshd(x["v"]))


def c20(make):
    k, v = (make.normal(1, 1, 33, 64).expand(2, 2, 33, 64) for _ in "kv")
    return dict(q=make.normal(2, 2, 24, 64), k=k, v=v, attn_mask=make.keep(2, 1, 24, 33, share=0.6))


def c22(make):
    x = make.qkv(40, d=32)
    return x | dict(q=make.normal(1, 2, 40, 64)[..., ::2], k=make.normal(1, 2, 40, 64)[..., 1::2])


def c29(make):
    return {
        name: torch.full((1, 2, length, 64), 133120.0, dtype=BF16, device=make.device)
        for name, length in zip("qkv", (3, 65, 65), strict=True)
    }


def c30(make):
    x = make.qkv(40, 200, d=32)
    x["k"][..., 0] = torch.cat([torch.linspace(-40, 40, 100), torch.linspace(40, -40, 100)]).to(make.device)
    x["q"][..., 0] = 5.0
    return x


def c35(make):
    return dict(q=make.normal(1, 2, 4, 32), k=make.normal(1, 2, 0, 32), v=make.normal(1, 2, 0, 32))


def c40(make):
    rows, step = 131, 2**24  # row 128 starts at cell 2**31
    buffer = torch.empty((rows - 1) * step + 128, dtype=FP16, device=make.device)
    x = make.qkv(20, rows, h=1, dtype=FP16)
    for name, at in (("k", 0), ("v", 64)):
        view = buffer.as_strided((1, 1, rows, 64), (rows * step, rows * step, step, 1), at)
        x[name] = view.copy_(x[name])
    return x


def c41(make):
    document = torch.repeat_interleave(torch.arange(5), torch.tensor((1, 16, 33, 0, 20))).to(make.device)
    return make.qkv(70, d=32, attn_mask=document[:, None] == document[None, :])


CASES = [
    Case("C01", "B01", "boolean mask with empty rows", c01),
    Case("C02", "B19", "every block of keys but the last is masked", c02),
    Case("C04", "B02", "mask rows filled with the lowest fp32", c04),
    Case("C05", "B04", "causal, fewer queries than keys, top left", lambda m: m.qkv(2, 5, d=16, is_causal=True)),
    Case("C06", "B04", "causal, bottom right, diagonal off the tiles",
         lambda m: m.qkv(20, 73, d=32, attn_mask=band(m.device, 20, 73, right=0)), causal="bottom_right"),
    Case("C08", "B61", "causal, more queries than keys, top left", lambda m: m.qkv(90, 17, d=32, is_causal=True)),
    Case("C09", "B20", "window (15, 0): 16 keys, both edges inclusive",
         lambda m: m.qkv(100, d=32, attn_mask=band(m.device, 100, 100, 15, 0)), window=(15, 0)),
    Case("C10", "B22", "window (16, 8), more queries than keys: empty rows",
         lambda m: m.qkv(129, 65, d=32, attn_mask=band(m.device, 129, 65, 16, 8)), window=(16, 8)),
    Case("C12", "B35 B76", "129 keys in a cache whose free slots are NaN",
         lambda m: moated(m.qkv(17, 129, d=32), 0, 0, 60, 0)),
    Case("C14", "B11", "one query, one key", lambda m: m.qkv(1, d=32)),
    Case("C15", "B11 B71", "head dim 40", lambda m: m.qkv(30, d=40)),
    Case("C16", "B12", "head dim 72 cut out of 128 columns", lambda m: moated(m.qkv(30, 50, d=72), 0, 0, 0, 56)),
    Case("C18", "B40", "head dims 192 and 80", lambda m: m.qkv(24, 40, h=1, d=192, dv=80)),
    Case("C19", "B14", "v alone is stored as B, S, H, D", c19),
    Case("C20", "B16", "stride-0 k and v, 33 keys, boolean mask", c20),
    Case("C22", "B15", "q and k with last stride 2, k from cell 1", c22),
    Case("C23", "B60", "key padding (B, 1, 1, Sk), expanded",
         lambda m: m.qkv(33, 50, b=2, d=32, attn_mask=m.keep(2, 1, 1, 50).expand(2, 1, 33, 50))),
    Case("C24", "B60", "mask of three dimensions with B == H",
         lambda m: m.qkv(20, 37, b=2, d=32, attn_mask=m.normal(2, 1, 37, size=3.0))),
    Case("C27", "B41", "4 query heads over 2, causal",
         lambda m: m.qkv(50, h=4, hkv=2, d=32, is_causal=True, enable_gqa=True)),
    Case("C29", "B47", "huge equal bf16 values", c29),
    Case("C30", "B47 B70", "the maximum moves in every block", c30),
    Case("C32", "B41", "4 query heads over 1, one query, head dim 256",
         lambda m: m.qkv(1, 70, h=4, hkv=1, d=256, enable_gqa=True)),
    Case("C33", "B46", "negative scale, causal", lambda m: m.qkv(50, d=32, is_causal=True, scale=-0.3)),
    Case("C35", "B34", "no keys", c35),
    Case("C37", "B54", "bf16 with an fp32 mask",
         lambda m: m.qkv(40, 60, dtype=BF16, attn_mask=m.normal(1, 1, 40, 60, size=8.0))),
    Case("C40", "B06 B65", "row offsets past 2**31", c40, gigabytes=6),
    Case("C41", "B33 B82", "packed sequences of 1, 16, 33, 0, 20", c41),
]  # fmt: skip


IN_HALF = ("C01", "C02", "C04", "C05", "C08", "C12", "C16", "C19", "C20", "C22", "C23", "C33")


def free_gigabytes(device):
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] / 2**30
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def build(case, device):
    if case.gigabytes > free_gigabytes(device):
        pytest.skip(f"needs {case.gigabytes} GB of free memory on {device}: {free_gigabytes(device):.1f} GB are free")
    return case.build(Maker(case.id, device))


def dense(x, dtype, p_dtype=None):
    """softmax(scale * q @ k^T + mask) @ v, one explicit step at a time; rows without keys give 0."""
    q, k, v = (x[name].to(dtype) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = x.get("scale")
    s = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    mask = x.get("attn_mask")
    if x.get("is_causal"):
        s = s.masked_fill(~torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).tril(), -INF)
    if mask is not None:
        s = s.masked_fill(~mask, -INF) if mask.dtype == torch.bool else s + mask.to(dtype)
    if s.shape[3] == 0:
        return torch.zeros(*s.shape[:3], v.shape[3], dtype=dtype, device=s.device)
    top = s.amax(3, keepdim=True)
    p = torch.exp(s - torch.where(top == -INF, 0.0, top))
    p = p / p.sum(3, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
    return (p if p_dtype is None else p.to(p_dtype).to(dtype)) @ v


def check(out, x, what="out"):
    """Against float64, within twice the error of fp32 torch with P in the dtype of q."""
    dtype = x["q"].dtype
    exact = dense(x, torch.float64)
    assert out.dtype == dtype
    assert exact.isfinite().all()
    budget = testing.within_budget(out, exact, dense(x, FP32, dtype).to(dtype), eps=testing.EPS[dtype], what=what)
    assert budget.ok, budget
    assert (out[(exact == 0).all(3)] == 0).all(), "a row without keys is not exactly 0"


def named(cases):
    return [pytest.param(case, id=f"{case.id}-{case.bugs}-{case.what}".replace(" ", "-")) for case in cases]


def test_all_cases_are_here():
    """26 for every machine, and one that needs gigabytes."""
    assert len({case.id for case in CASES}) == len(CASES)
    assert sum(not case.gigabytes for case in CASES) == 26
    assert sum(case.gigabytes > 0 for case in CASES) == 1


@pytest.mark.parametrize("case", named(CASES))
def test_case(case, device):
    x = build(case, device)
    explained = {name: value for name, value in rules(x).items() if name != "enable_gqa"}
    assert lazymax.explain(x["q"], x["k"], x["v"], **explained, show=False).plan.route == "triton"
    check(lazymax.scaled_dot_product_attention(x["q"], x["k"], x["v"], **rules(x)), x)


def rules(x):
    return {name: value for name, value in x.items() if name not in "qkv"}


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=SHORT.get)
@pytest.mark.parametrize("case", named(case for case in CASES if case.id in IN_HALF))
def test_case_in_half_precision(case, dtype, device):
    """With the strides and the NaN around them; masks as they are."""
    x = build(case, device)
    for name in "qkv":
        whole = torch.empty(0, dtype=x[name].dtype, device=device).set_(x[name].untyped_storage())
        x[name] = whole.to(dtype).as_strided(x[name].size(), x[name].stride(), x[name].storage_offset())
    check(lazymax.scaled_dot_product_attention(x["q"], x["k"], x["v"], **rules(x)), x)


@pytest.mark.parametrize("case", named(case for case in CASES if case.causal or case.window))
def test_case_through_attention(case, device):
    """The same rule by its name in place of the mask."""
    x = build(case, device)
    said = dict(causal=case.causal, window=case.window)
    if case.window:
        said["window_align"] = "bottom_right"
    assert lazymax.explain(x["q"], x["k"], x["v"], **said, show=False).plan.route == "triton"
    check(lazymax.attention(x["q"], x["k"], x["v"], **said), x)


# ---- kinds of fault that take the public functions to show ----


@dataclass(frozen=True)
class Fault:
    """One call of `attention()` against the reference. shape: B, Hq, Hkv, Sq, Sk, D, Dv."""

    id: str
    shape: tuple[int, int, int, int, int, int, int]
    dtype: torch.dtype = FP16
    rules: tuple[tuple[str, Any], ...] = ()
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]] | None = None


def energy_in_the_last_columns(q, k, v):
    q[..., :64], k[..., :64] = 0.0, 0.0
    v[..., :64] = 0.0
    return q, k, v


def loud_channels(q, k, v):
    q[..., 3::40] *= 200.0
    k[..., 3::40] *= 200.0
    return q, k, v


def expanded_keys(q, k, v):
    return q, k[:1, :1].expand(k.shape), v[:1, :1].expand(v.shape)


def call(**rules):
    return tuple(rules.items())


WINDOWS = [
    Fault(f"B20-window-{left}-{length}", (1, 1, 1, length, length, 16, 16), rules=call(window=(left, 0)))
    for length in (16, 17, 64, 65, 130)
    for left in (length - 1, length, -1)
]
FAULTS = [
    Fault("B04-top-left-2x5", (1, 2, 2, 2, 5, 16, 16), rules=call(causal="top_left")),
    Fault("B04-bottom-right-2x5", (1, 2, 2, 2, 5, 16, 16), rules=call(causal="bottom_right")),
    Fault("B10-energy-past-column-64", (1, 1, 1, 40, 70, 128, 128), change=energy_in_the_last_columns),
    *(Fault(f"B11-head-dim-{d}", (1, 1, 1, 3, 15, d, d)) for d in (40, 72, 80, 96, 160, 192)),
    *(Fault(f"B16-stride-0-{n}-keys", (2, 2, 2, 9, n, 32, 32), change=expanded_keys) for n in (33, 65, 129)),
    Fault("B19-window-8", (1, 1, 1, 80, 80, 16, 16), rules=call(window=(8, 8))),
    *WINDOWS,
    Fault("B22-129x65", (1, 1, 1, 129, 65, 16, 16), rules=call(window=(32, 64), window_align="bottom_right")),
    Fault("B22-33x129", (1, 1, 1, 33, 129, 16, 16), rules=call(window=(8, 0), window_align="bottom_right")),
    Fault("B31-fp32-d80-lse", (1, 2, 2, 70, 32, 80, 80), FP32, call(causal="top_left")),
    Fault("B40-6-over-2-heads", (2, 6, 2, 9, 17, 64, 32)),
    Fault("B40-6-over-3-heads-wide-v", (2, 6, 3, 9, 17, 64, 96)),
    Fault("B46-zero-scale-causal", (1, 1, 1, 50, 50, 32, 32), rules=call(scale=0.0, causal="top_left")),
    Fault("B46-negative-scale-empty-rows", (1, 1, 1, 70, 20, 32, 32), rules=call(scale=-2.0, causal="bottom_right")),
    Fault("B50-fp32", (1, 1, 1, 40, 130, 64, 64), FP32),
    Fault("B61-one-query-top-left", (1, 1, 1, 1, 9, 32, 32), rules=call(causal="top_left")),
    Fault("B61-one-query-bottom-right", (1, 1, 1, 1, 9, 32, 32), rules=call(causal="bottom_right")),
    Fault("B70-loud-channels", (1, 1, 1, 65, 300, 128, 128), BF16, change=loud_channels),
    Fault("B70-loud-channels-one-query", (1, 1, 1, 1, 300, 128, 128), BF16, change=loud_channels),
]  # fmt: skip


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.id) for fault in FAULTS])
def test_fault(fault, device):
    """Output and LSE, through the kernel."""
    b, hq, hkv, sq, sk, d, dv = fault.shape
    q, k, v = testing.make_qkv(
        b, hq, hkv, sq, sk, d, dv, dtype=fault.dtype, device=device, seed=zlib.crc32(fault.id.encode())
    )
    if fault.change:
        q, k, v = fault.change(q, k, v)
    arguments = dict(fault.rules)
    problem = Problem.from_call(q, k, v, **arguments)
    assert lazymax.explain(q, k, v, **arguments, show=False).plan.route == "triton"
    out, lse = lazymax.attention(q, k, v, **arguments, return_lse=True)
    for budget in testing.check_attention(out, lse, q, k, v, problem):
        assert budget.ok, budget


def equal_budget(out, expected_problem, q, k, v):
    budget = testing.check_attention(out, None, q, k, v, expected_problem)[0]
    assert budget.ok, budget


@pytest.mark.parametrize("length", [16, 17, 65])
@pytest.mark.parametrize("extra", [-1, 0, 50], ids=["S-1", "S", "S+50"])
def test_b20_a_window_over_all_keys_is_causal(length, extra, device):
    q, k, v = testing.make_qkv(1, 1, 1, length, length, 16, device=device)
    out = lazymax.attention(q, k, v, window=(length + extra, 0))
    equal_budget(out, Problem.from_call(q, k, v, causal="top_left"), q, k, v)


@pytest.mark.parametrize("window", [(-1, -3), (-2, 0), (4, -9)])
def test_b21_other_negative_windows_are_refused(window):
    q, k, v = testing.make_qkv(1, 1, 1, 5, 5, 8)
    with pytest.raises(ValueError, match="window"):
        lazymax.attention(q, k, v, window=window)


EMPTY = {
    "no-keys": (2, 2, 2, 4, 0),
    "no-queries": (2, 2, 2, 0, 4),
    "no-batch": (0, 2, 2, 4, 4),
    "no-heads": (2, 0, 0, 4, 4),
    "nothing": (0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY)
def test_b34_empty_dimensions(shape, causal, device):
    """The right shape, zeros, -inf; no launch of an empty grid."""
    q, k, v = testing.make_qkv(*shape, 64, 32, device=device)
    out, lse = lazymax.attention(q, k, v, causal=causal, return_lse=True)
    b, h, _, sq, _ = shape
    assert out.shape == (b, h, sq, 32) and lse.shape == (b, h, sq)
    assert (out == 0).all() and (lse == -INF).all()
    assert lazymax.scaled_dot_product_attention(q, k, v, is_causal=causal is not None).shape == out.shape


def test_b42_one_key_head_without_enable_gqa(device):
    """torch's own answer or torch's own error, never a read past the single head."""
    q, k, v = testing.make_qkv(1, 4, 1, 8, 8, 16, dtype=FP32, device=device)
    x = dict(q=q, k=k, v=v)
    try:
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            lazymax.scaled_dot_product_attention(q, k, v)
    else:
        check(lazymax.scaled_dot_product_attention(q, k, v), x)


def test_b45_lse_merges_two_halves(device):
    """The unit is the natural log: two halves of the keys, joined by their LSE, give the whole."""
    q, k, v = testing.make_qkv(1, 2, 2, 20, 50, 32, dtype=FP32, device=device)
    halves = [lazymax.attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in (slice(0, 23), slice(23, 50))]
    lse = torch.stack([half[1] for half in halves])
    weights = torch.softmax(lse, 0)[..., None]
    merged = weights[0] * halves[0][0] + weights[1] * halves[1][0]
    check(merged, dict(q=q, k=k, v=v))


@pytest.mark.parametrize("order", ["fp32-first", "fp16-first"])
def test_b53_mixed_dtypes_under_autocast(order, device):
    """Cast as torch casts under autocast; refused outside, naming the three."""
    q, k, v = testing.make_qkv(1, 2, 2, 20, 33, 32, dtype=FP32, device=device)
    if order == "fp32-first":
        v = v.to(BF16)
    else:
        q = q.to(BF16)
    with torch.autocast(device, dtype=BF16):
        out = lazymax.scaled_dot_product_attention(q, k, v)
    check(out, dict(q=q.to(BF16), k=k.to(BF16), v=v.to(BF16)))
    with pytest.raises(ValueError, match=r"float32.*bfloat16|bfloat16.*float32"):
        lazymax.attention(q, k, v)


def test_b54_integer_mask_is_refused(device):
    q, k, v = testing.make_qkv(1, 1, 1, 5, 7, 16, dtype=FP32, device=device)
    with pytest.raises(RuntimeError):
        lazymax.scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=torch.int32, device=device))


MASKS = [(1, 7), (5, 1), (5, 7), (4, 1, 7), (2, 1, 1, 7), (1, 4, 5, 7), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", [pytest.param(shape, id="x".join(map(str, shape))) for shape in MASKS])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_b60_mask_shapes(shape, kind, device):
    """Plain broadcasting from the right to (B, H, Sq, Sk)."""
    make = Maker(f"B60-{shape}", device)
    mask = make.keep(*shape, share=0.7) if kind == "bool" else make.normal(*shape)
    x = make.qkv(5, 7, b=2, h=4, d=16, attn_mask=mask)
    check(lazymax.scaled_dot_product_attention(**torch_names(x)), x)


def torch_names(x):
    return dict(query=x["q"], key=x["k"], value=x["v"]) | rules(x)


def test_b62_mask_beside_is_causal_is_refused(device):
    """As torch documents; its CPU flash kernel applies both. Never one of the two dropped."""
    make = Maker("B62", device)
    keep = make.keep(8, 8, share=0.7)
    keep[:, 0] = True
    x = make.qkv(8, d=16, attn_mask=keep, is_causal=True)
    with pytest.raises(RuntimeError, match="attn_mask beside is_causal"):
        lazymax.scaled_dot_product_attention(**torch_names(x))


@pytest.mark.parametrize("d, route", [(257, "triton"), (320, "triton"), (512, "triton"), (513, "reference")])
def test_b71_large_head_dims(d, route, device):
    """By the kernel where it can, by the reference beyond; never refused."""
    x = Maker("B71", device).qkv(5, 9, h=1, d=d, dv=min(d, 513))
    assert lazymax.explain(x["q"], x["k"], x["v"], show=False).plan.route == route
    check(lazymax.scaled_dot_product_attention(x["q"], x["k"], x["v"]), x)


def test_b76_lengths_in_one_process(device):
    """128 keys first, then lengths that no tile divides, in one cache slot whose rest is NaN."""
    for length in (128, 129, 100, 1):
        x = moated(Maker(f"B76-{length}", device).qkv(4, length, h=1, d=16, dtype=FP16), 0, 0, 130 - length, 0)
        check(lazymax.scaled_dot_product_attention(x["q"], x["k"], x["v"]), x)


# ---- masks, dropout, lengths ----


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("rows", [1, 20], ids=["of-keys", "of-queries-and-keys"])
def test_b03_what_a_bool_mask_excludes_is_not_read_into_a_result(rows, value, device):
    """Free slots of a cache, the middle of a key block, a whole block: selected away, not multiplied by 0."""
    keep = torch.ones(rows, 70, dtype=torch.bool, device=device)
    keep[:, 5], keep[:, 20:23], keep[:, 32:64] = False, False, False
    if rows > 1:
        keep[3] = False
    make = Maker("B03", device)
    x = make.qkv(20, 70, h=1, d=16, dtype=FP16, attn_mask=keep)
    want = dense(x, torch.float64)
    x["k"][:, :, ~keep[0]], x["v"][:, :, ~keep[0]] = value, value
    for impl in ("auto", "reference"):
        out = lazymax.attention(x["q"], x["k"], x["v"], attn_mask=keep, impl=impl)
        budget = testing.within_budget(out, want, want.half(), eps=2 * testing.EPS[FP16], what=impl)
        assert budget.ok, budget
        assert rows == 1 or (out[:, :, 3] == 0).all()


BIASES = {"keys": (7,), "queries": (5, 1), "heads": (1, 4, 5, 7), "batch-and-keys": (2, 1, 1, 7), "one": (1, 1, 1, 1)}


@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_b38_b39_the_gradient_of_a_broadcast_mask(shape, device):
    """Of the mask alone, in the mask's own shape: the sum over what it was broadcast to."""
    x = Maker("B39", device).qkv(5, 7, b=2, h=4, d=16)
    bias = Maker(f"B39-{shape}", device).normal(*shape)

    def gradient(call, kind):
        mask = bias.to(kind, copy=True).requires_grad_()
        call({n: t.to(kind) for n, t in x.items()} | dict(attn_mask=mask)).square().sum().backward()
        return mask.grad

    got = gradient(lambda y: lazymax.attention(**y), FP32)
    exact, low = (gradient(lambda y, kind=kind: dense(y, kind), kind) for kind in (torch.float64, FP32))
    assert got.shape == shape
    # Over all keys of a query it is a sum that cancels to 0: its rounding goes by the terms, not by the sum.
    whole = bias.double().expand(2, 4, 5, 7).clone().requires_grad_()
    dense({n: t.double() for n, t in x.items()} | dict(attn_mask=whole), torch.float64).square().sum().backward()
    terms = whole.grad.abs().sum_to_size(shape)
    gap, cost = (got - exact).abs(), (low - exact).abs()
    assert (gap <= 2 * cost + testing.EPS[FP32] * terms).all(), (gap.max(), cost.max(), terms.max())
    assert terms.max() > 0.1


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=SHORT.get)
@pytest.mark.parametrize("cap", [50.0, 1e-3, 1e6])
def test_b49_softcap_saturates(cap, dtype, device):
    """Scores to 1e5: +-cap, not NaN, and a gradient of 0 where it saturates."""
    q, k, v = testing.make_qkv(1, 2, 2, 20, 40, 16, dtype=dtype, device=device)
    q, k = (q * 200).requires_grad_(), (k * 200).requires_grad_()
    out, lse = lazymax.attention(q, k, v, softcap=cap, return_lse=True)
    problem = Problem.from_call(q, k, v, softcap=cap, return_lse=True)
    with torch.no_grad():
        for budget in testing.check_attention(out, lse, q, k, v, problem):
            assert budget.ok, budget
    out.float().sum().backward()
    assert q.grad.isfinite().all() and k.grad.isfinite().all()


def test_b55_b56_b58_dropout_is_of_the_seeds_value(device):
    """A new mask at each call, the same after the same manual_seed, whatever tensor holds the seed, also when a
    checkpoint computes it again."""
    q, k, v = testing.make_qkv(1, 2, 2, 20, 33, 16, dtype=FP32, device=device)
    one, other = (lazymax.attention(q, k, v, dropout_p=0.3, dropout_seed=torch.tensor([n], device=device))
                  for n in (7, 8))  # fmt: skip
    again = torch.full((3,), 7, device=device)[1:2]
    assert torch.equal(one, lazymax.attention(q, k, v, dropout_p=0.3, dropout_seed=again))
    assert not torch.equal(one, other)

    def loss(q):
        return lazymax.attention(q, k, v, dropout_p=0.3).square().sum()

    grads = []
    for call in (loss, lambda q: torch.utils.checkpoint.checkpoint(loss, q, use_reentrant=False)):
        torch.manual_seed(5)
        leaf = q.clone().requires_grad_()
        call(leaf).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def ends(*lengths, device="cpu"):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


LENGTHS = {
    "B32": (9, 3, 32, (0, 1, 0, 1), (0, 3, 0, 5)),
    "B33": (2, 1, 256, (0, 5, 4, 0), (7, 5, 8, 13)),
    "B33-D_v": (2, 2, 64, (5, 0, 3), (0, 0, 4)),
    "B82": (1, 1, 16, (1, 64, 65), (1, 64, 65)),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_b32_b33_b82_packed_lengths(name, device):
    """Forward and gradients, each sequence against the formula alone; what no query reads has gradients of 0."""
    heads, kv_heads, d, q_lengths, k_lengths = LENGTHS[name]
    x = Maker(name, device).qkv(sum(q_lengths), sum(k_lengths), h=heads, hkv=kv_heads, d=d)
    packed = {n: x[n][0].transpose(0, 1).detach().requires_grad_() for n in "qkv"}
    cu_q, cu_k = ends(*q_lengths, device=device), ends(*k_lengths, device=device)
    out = lazymax.attention_varlen(**packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out.square().sum().backward()
    rows, keys = (list(zip(cu.tolist(), cu.tolist()[1:], strict=False)) for cu in (cu_q, cu_k))
    wants = []
    for kind in (torch.float64, FP32):
        whole = {n: x[n].to(kind).requires_grad_() for n in "qkv"}
        parts = [
            dense(dict(q=whole["q"][:, :, slice(*row)], k=whole["k"][:, :, slice(*key)],
                       v=whole["v"][:, :, slice(*key)]), kind)
            for row, key in zip(rows, keys, strict=True)
        ]  # fmt: skip
        want = torch.cat(parts, 2)
        (want.square().sum() + 0.0 * sum(t.sum() for t in whole.values())).backward()
        wants.append([want, *(whole[n].grad for n in "qkv")])
    got = [out, *(packed[n].grad for n in "qkv")]
    for what, x1, exact, low in zip(("out", *"qkv"), got, *wants, strict=True):
        budget = testing.within_budget(x1.transpose(0, 1)[None].detach(), exact.detach(), low.detach(), eps=2e-6,
                                       what=what)  # fmt: skip
        assert budget.ok, budget


def test_b63_b66_lengths_are_each_batch_elements_own(device):
    """3, 7 and 1 keys, by the kernel and by the reference; another length of one changes no bit of the others."""
    q, k, v = testing.make_qkv(3, 2, 1, 4, 7, 16, device=device)
    lengths = torch.tensor([3, 7, 1], device=device)
    for impl in ("auto", "reference"):
        out, lse = lazymax.attention(q, k, v, seqlens_k=lengths, impl=impl, return_lse=True)
        for i, length in enumerate(lengths.tolist()):
            one = q[i : i + 1], k[i : i + 1, :, :length], v[i : i + 1, :, :length]
            problem = Problem.from_call(*one, return_lse=True)
            for budget in testing.check_attention(out[i : i + 1], lse[i : i + 1], *one, problem):
                assert budget.ok, f"{impl} {i}: {budget}"
        other = lazymax.attention(q, k, v, seqlens_k=torch.tensor([5, 7, 1], device=device), impl=impl)
        assert torch.equal(other[1:], out[1:]) and not torch.equal(other[0], out[0])


def test_b77_b44_gradients_through_the_lse_under_compile(device):
    def call(q, k, v):
        out, lse = lazymax.attention(q, k, v, causal="top_left", return_lse=True)
        return (out * torch.exp(lse)[..., None]).sum()

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (20, 37):
        ours, theirs = ([t.requires_grad_() for t in testing.make_qkv(1, 2, 2, length, length, 16, dtype=FP32,
                                                                      device=device)] for _ in range(2))  # fmt: skip
        compiled(*ours).backward()
        call(*theirs).backward()
        for x, y in zip(ours, theirs, strict=True):
            assert x.grad.isfinite().all() and torch.equal(x.grad, y.grad)
    torch._dynamo.reset()


def test_b81_offsets_that_do_not_rise(device):
    """Rows behind the last offset are 0; offsets that fall or leave the rows give some numbers, and no crash."""
    q, k, v = (t[0].transpose(0, 1) for t in testing.make_qkv(1, 2, 1, 20, 20, 16, device=device))
    good = torch.tensor([0, 5, 17], device=device)
    out, lse = lazymax.attention_varlen(q, k, v, good, good, return_lse=True)
    assert (out[17:] == 0).all() and (lse[:, 17:] == -INF).all() and (out[:17] != 0).any(-1).all()
    for bad in ([0, 12, 5], [0, 90, 95], [-7, 3, 20], [0, 2**40, 20]):
        offsets = torch.tensor(bad, device=device)
        for impl in ("auto", "reference"):
            assert lazymax.attention_varlen(q, k, v, offsets, good, impl=impl).shape == q.shape
            assert lazymax.attention_varlen(q, k, v, good, offsets, impl=impl).isfinite().all()


def test_b83_lengths_are_read_at_each_call(device):
    """Changed in place, as a graph replays them: the same decision, another result."""
    q, k, v = testing.make_qkv(2, 2, 2, 4, 40, 16, device=device)
    lengths = torch.tensor([40, 7], device=device)
    for values in ([40, 7], [3, 40], [0, 1]):
        lengths.copy_(torch.tensor(values))
        out = lazymax.attention(q, k, v, seqlens_k=lengths)
        fresh = lazymax.attention(q, k, v, seqlens_k=torch.tensor(values, device=device), impl="reference")
        budget = testing.within_budget(out, fresh.double(), fresh.clone(), eps=2 * testing.EPS[FP16])
        assert budget.ok, budget
