"""`kernels.scores`: what happens to a tile of scores between the product and the softmax, piece by piece."""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from calls import SIEVE, TILT, moved, normal, sieve_reference, tilt_reference

from lazymax.backends import Tile
from lazymax.dispatch import Plan
from lazymax.kernels import scores, sequences
from lazymax.kernels.launch import ForwardLaunch, modifiers_of
from lazymax.options import parse_options
from lazymax.problem import Problem
from lazymax.testing import EPS, within_budget

INF, NAN = math.inf, math.nan
ROWS, COLS = 16, 32


# ---- tanh


@triton.jit
def _tanh(x, out, RELATIVE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, scores.tanh(tl.load(x + at), RELATIVE))


def tanh(x: torch.Tensor, relative: bool, device: str) -> torch.Tensor:
    out = torch.full_like(x, NAN, device=device)
    _tanh[(x.numel() // 512,)](x.to(device), out, relative, 512)
    return out.cpu()


def numbers() -> torch.Tensor:
    """Of both signs, from denormals to 1e30, and closely around the places where the formula changes."""
    spread = torch.logspace(-44, 30, 1500, dtype=torch.float64)
    seams = torch.cat([torch.linspace(a, b, 500, dtype=torch.float64) for a, b in ((0.2, 0.3), (0, 1), (4, 12))])
    x = torch.cat([spread, seams, torch.tensor([0.0, 0.25, math.nextafter(0.25, 0), 1e5, 3e38])]).float()
    x = torch.cat([x, -x])
    return torch.nn.functional.pad(x, (0, -x.numel() % 512))


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
def test_tanh_keeps_what_it_promises(relative: bool, device: str) -> None:
    x = numbers()
    out, exact = tanh(x, relative, device).double(), torch.tanh(x.double())
    gap = (out - exact).abs()
    assert (gap <= 2.0**-23).all(), gap.max()
    assert (out.abs() <= 1).all()
    if relative:
        smallest = torch.finfo(torch.float32).tiny  # below, a GPU may flush
        wrong = (gap > 1e-6 * exact.abs() + smallest).nonzero().flatten()
        assert not len(wrong), [(x[i].item(), out[i].item(), exact[i].item()) for i in wrong[:3]]


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
def test_tanh_saturates_is_odd_and_lets_nan_through(relative: bool, device: str) -> None:
    """B49: two exponentials of a large number would make inf / inf."""
    x = torch.tensor([INF, 1e30, 3.4e38, 100.0, 20.0, 0.0, 0.5, 1e-3, NAN, *[0.0] * 503])
    out = tanh(x, relative, device)
    assert (out[:5] == 1.0).all() and out[5] == 0.0 and out[8].isnan()
    assert torch.equal(tanh(-x, relative, device)[:8], -out[:8])


# ---- the tile's place


@dataclass(frozen=True)
class Call:
    """One call of `attention`: 2 batch elements of 3 heads, 21 queries over 37 keys."""

    id: str
    options: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, int, int, int] = (2, 3, 21, 37)

    def prepare(self, device: str) -> tuple[Any, Any, Problem]:
        """Arguments of the kernel: modifiers and config, as the launcher makes them, and the problem."""
        batch, heads, q_len, kv_len = self.sizes
        q = torch.empty(batch, heads, q_len, 16, device=device)
        k = torch.empty(batch, heads, kv_len, 16, device=device)
        extras, rules = parse_options(q, **moved(self.options, device))
        problem = Problem.from_tensors(q, k, k, extras, rules)
        row = Tile(block_m=ROWS, block_n=COLS, num_warps=4, num_stages=1, reason="test", provenance="test")
        plan = Plan(route="triton", backend="test", tile=row, rescale="select", level="", reason="", rejected=())
        launch = ForwardLaunch.prepare(problem, plan)
        return modifiers_of(problem, extras), launch.config, problem


@triton.jit
def _mask(out, modifiers, batch, head, first_row, first_col, q_len, kv_len, config, ROWS: tl.constexpr,
          COLS: tl.constexpr):  # fmt: skip
    span = sequences.Span(batch, batch, 0, 0, q_len, kv_len, 0, 0, 0)
    place = scores.place_at(span, head, first_row, first_col, ROWS, COLS, True)
    tile = scores.mask_tile(modifiers, span, place, config)
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out + at, tl.zeros([ROWS, COLS], tl.float32) + tile.to(tl.float32))


def clamped(first: int, count: int, length: int) -> torch.Tensor:
    return (first + torch.arange(count)).clamp(max=length - 1)


def check_mask(mask: torch.Tensor, device: str) -> None:
    """Every tile of some heads, the last ones with their tails: positions are clamped to the inside."""
    case = Call("", dict(attn_mask=mask))
    modifiers, config, _ = case.prepare(device)
    whole = mask.cpu().expand(*case.sizes)
    for batch, head in ((0, 0), (1, 2)):
        for first_row, first_col in itertools.product((0, ROWS), (0, COLS)):
            out = torch.full((ROWS, COLS), NAN, device=device)
            _mask[(1,)](out, modifiers, batch, head, first_row, first_col, 21, 37, config, ROWS, COLS)
            rows, cols = clamped(first_row, ROWS, 21), clamped(first_col, COLS, 37)
            assert torch.equal(out.cpu(), whole[batch, head][rows][:, cols].float()), (
                batch,
                head,
                first_row,
                first_col,
            )


PATTERNS = list(itertools.product((1, 2), (1, 3), (1, 21), (1, 37)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("shape", PATTERNS, ids=str)
def test_mask_of_every_broadcast_pattern(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    mask = normal(*shape).to(device)
    check_mask(mask > 0 if dtype == torch.bool else mask, device)


STORED = {
    "keys first": lambda m: m.mT.contiguous().mT,
    "heads last": lambda m: m.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "batch last": lambda m: m.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "a slice": lambda m: torch.full((3, 4, 25, 40), NAN, device=m.device)[1:, 1:, 2:23, 3:].copy_(m),
    "every second": lambda m: torch.stack([m, torch.full_like(m, NAN)], -1)[..., 0],
    "expanded queries": lambda m: m[:, :, :1].expand(m.shape),
    "expanded keys": lambda m: m[..., :1].expand(m.shape),
    "expanded batch and heads": lambda m: m[:1, :1].expand(m.shape),
    "one number, expanded": lambda m: m[:1, :1, :1, :1].expand(m.shape),
    "fp16": lambda m: m.half(),
    "bf16": lambda m: m.bfloat16(),
    "float64": lambda m: m.float().double(),
}


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
def test_mask_of_any_strides_and_dtypes(stored: Any, device: str) -> None:
    check_mask(stored(normal(2, 3, 21, 37).to(device)), device)


def test_wide_strides_give_the_same_tile(device: str) -> None:
    """The 64-bit offsets of a mask whose rows lie 2**23 elements apart, without such a mask."""
    mask = normal(2, 3, 21, 37)
    modifiers, config, _ = Call("", dict(attn_mask=mask)).prepare(device)
    assert not config.WIDE.value
    wide = config._replace(WIDE=tl.constexpr(True))
    tiles = [torch.full((ROWS, COLS), NAN, device=device) for _ in range(2)]
    for out, how in zip(tiles, (config, wide), strict=True):
        _mask[(1,)](out, modifiers, 1, 2, ROWS, COLS, 21, 37, how, ROWS, COLS)
    assert torch.equal(*tiles) and tiles[0].isfinite().all()


# ---- a whole tile


@triton.jit
def _settle(s, out, modifiers, batch, head, first_row, first_col, q_len, kv_len, first, last, shift, config,
            EDGE: tl.constexpr, CHOOSE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    span = sequences.Span(batch, batch, 0, 0, q_len, kv_len, first, last, shift)
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(
        out + at, scores.settle(tl.load(s + at), modifiers, span, head, first_row, first_col, config, EDGE, CHOOSE)
    )


SHAPE = (2, 2, 21, 37)
SLOPES = normal(2, 2)
MASK = normal(21, 37).masked_fill(normal(21, 37, seed=9) > 1, -INF)
CALLS = (
    Call("plain: raw products", {}, SHAPE),
    Call("negative scale: only the sign", dict(scale=-0.3), SHAPE),
    Call("causal", dict(causal="top_left"), SHAPE),
    Call("causal, bottom right", dict(causal="bottom_right"), SHAPE),
    Call("window", dict(window=(5, 3)), SHAPE),
    Call("softcap", dict(softcap=1.5, scale=-0.7), SHAPE),
    Call("slopes", dict(alibi_slopes=SLOPES, causal="top_left"), SHAPE),
    Call("slopes, bottom right", dict(alibi_slopes=SLOPES[0], window_align="bottom_right"), SHAPE),
    Call("float mask with -inf", dict(attn_mask=MASK), SHAPE),
    Call("bool mask", dict(attn_mask=normal(2, 1, 1, 37) > 0), SHAPE),
    Call("score_mod", TILT, SHAPE),
    Call("mask_mod", SIEVE, SHAPE),
    Call("bool mask and mask_mod", dict(attn_mask=normal(21, 1) > 0, **SIEVE), SHAPE),
    Call("all in their order", dict(
        causal="bottom_right", window=(9, None), softcap=1.5, scale=0.5, alibi_slopes=SLOPES, attn_mask=MASK, **TILT,
        **SIEVE), SHAPE),
)  # fmt: skip


def twin(s: torch.Tensor, case: Call, batch: int, head: int, rows: Any, cols: Any, dtype: torch.dtype) -> torch.Tensor:
    """The order of the docstring of `attention`: scale, softcap, ALiBi, float mask, score_mod; then who counts."""
    o = case.options
    _, _, q_len, kv_len = case.sizes
    bottom = "bottom_right" in (o.get("causal"), o.get("window_align"))
    s, shift = s.to(dtype), kv_len - q_len if bottom else 0
    mask = o.get("attn_mask")
    mask = None if mask is None else mask.expand(*case.sizes)[batch, head][rows][:, cols]
    b, h, q_idx, k_idx = torch.tensor(batch), torch.tensor(head), rows[:, None], cols[None, :]
    changed = {"softcap", "alibi_slopes", "score_mod"} & o.keys() or (mask is not None and mask.dtype != torch.bool)
    if changed:
        s = s * o.get("scale", 0.25)
    elif o.get("scale", 1.0) < 0:
        s = -s
    if "softcap" in o:
        s = o["softcap"] * torch.tanh(s / o["softcap"])
    if "alibi_slopes" in o:
        slopes = o["alibi_slopes"].expand(2, 2)
        s = s - slopes[batch, head].to(dtype) * (q_idx + shift - k_idx).abs()
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.to(dtype)
    if "score_mod" in o:
        s = tilt_reference(s, b, h, q_idx, k_idx, *(t.to(dtype) for t in o["score_mod_args"]))
    keep = torch.ones(s.shape, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    if "mask_mod" in o:
        keep = keep & sieve_reference(b, h, q_idx, k_idx, *o["mask_mod_args"])
    left, right = o.get("window", (None, None))
    if left is not None:
        keep = keep & (k_idx >= q_idx + shift - left)
    if right is not None:
        keep = keep & (k_idx <= q_idx + shift + right)
    if o.get("causal"):
        keep = keep & (k_idx <= q_idx + shift)
    return s.masked_fill(~keep, -INF)


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.id)
def test_settled_scores(case: Call, device: str) -> None:
    """Edge tiles of both batch elements and heads, with rows and keys beyond the ends."""
    modifiers, config, problem = case.prepare(device)
    s = normal(ROWS, COLS, seed=7) * 4
    first, last = problem.first_offset, problem.last_offset
    shift = 16 if problem.align == "bottom_right" else 0
    for (batch, head), (first_row, first_col) in itertools.product(((0, 1), (1, 0)), ((0, 0), (ROWS, COLS))):
        out = torch.full((ROWS, COLS), NAN, device=device)
        _settle[(1,)](s.to(device), out, modifiers, batch, head, first_row, first_col, 21, 37, first or 0, last or 0,
                      shift, config, True, True, ROWS, COLS)  # fmt: skip
        n_rows, n_cols = min(ROWS, 21 - first_row), min(COLS, 37 - first_col)
        rows, cols = first_row + torch.arange(n_rows), first_col + torch.arange(n_cols)
        inside = s[:n_rows, :n_cols]
        want, low = (twin(inside, case, batch, head, rows, cols, kind) for kind in (torch.float64, torch.float32))
        budget = within_budget(out.cpu()[:n_rows, :n_cols], want, low + 0.0, eps=EPS[torch.float32])
        assert budget.ok, f"{first_row}, {first_col}: {budget}"
        assert (out[:, n_cols:] == -INF).all(), "a key beyond the length counts"


def test_inner_tiles_pay_for_nothing_they_do_not_need(device: str) -> None:
    """EDGE off: no band, no length. CHOOSE off, in a tile that a list calls full: no mask."""
    case = Call("", dict(attn_mask=torch.zeros(37) > 0, causal="top_left"), SHAPE)  # would hide every key
    modifiers, config, _ = case.prepare(device)
    s = normal(ROWS, COLS)
    for edge, choose, want in ((False, False, s), (False, True, torch.full_like(s, -INF))):
        out = torch.full((ROWS, COLS), NAN, device=device)
        _settle[(1,)](s.to(device), out, modifiers, 0, 0, 0, 0, 21, 37, 0, 0, 0, config, edge, choose, ROWS, COLS)
        assert torch.equal(out.cpu(), want)


def test_keys_that_do_not_count_may_hold_anything(device: str) -> None:
    """NaN in, -inf out: chosen away after every modification."""
    options = dict(CALLS[-1].options, attn_mask=MASK.nan_to_num(0.0, 0.0, 0.0))
    case = replace(CALLS[-1], options=options)
    modifiers, config, problem = case.prepare(device)
    keep = twin(torch.zeros(ROWS, COLS), case, 0, 1, torch.arange(ROWS), torch.arange(COLS), torch.float64) != -INF
    assert keep.any() and not keep.all()
    s = normal(ROWS, COLS).masked_fill(~keep, NAN)
    out = torch.full((ROWS, COLS), NAN, device=device)
    _settle[(1,)](s.to(device), out, modifiers, 0, 1, 0, 0, 21, 37, problem.first_offset or 0, problem.last_offset or 0,
                  16, config, True, True, ROWS, COLS)  # fmt: skip
    assert torch.equal(out.cpu() == -INF, ~keep) and out.cpu()[keep].isfinite().all()
