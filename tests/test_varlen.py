"""Packed sequences on the kernel: each equals what it is alone, whatever lies around it; offsets stay on the device.

The public function's route and rules are in test_api.py, random problems in test_fuzz.py.
"""

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import test_cases
import torch
from test_features import FLAT, INTERPRETED, LARGE, SMALL, TALL, assert_right, by_row, tile
from torch.utils._python_dispatch import TorchDispatchMode

import lazymax
from lazymax import testing
from lazymax.backends import Tile

INF, NAN = math.inf, math.nan
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHORT = {FP16: "fp16", BF16: "bf16", FP32: "fp32"}
INT32, INT64 = torch.int32, torch.int64

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Sequences of these (q, k) lengths; behind: rows of q and of k that belong to none."""

    id: str
    lengths: tuple[tuple[int, int], ...]
    rules: dict[str, Any] = field(default_factory=dict)
    behind: tuple[int, int] = (0, 0)
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = FP16
    offsets: tuple[torch.dtype, torch.dtype] = (INT32, INT32)
    row: Tile = SMALL
    listed: bool = False

    def ends(self, device: str) -> dict[str, torch.Tensor]:
        found = {}
        for which, name in enumerate("qk"):
            ends = [0, *itertools.accumulate(pair[which] for pair in self.lengths)]
            found[f"cu_seqlens_{name}"] = torch.tensor(ends, dtype=self.offsets[which], device=device)
        return found

    def qkv(self, device: str) -> Triple:
        """(1, H, total, D), stored as (total, H, D)."""
        q_rows, k_rows = (sum(pair[which] for pair in self.lengths) + self.behind[which] for which in (0, 1))
        return testing.make_qkv(
            1, *self.heads, q_rows, k_rows, *self.dims, dtype=self.dtype, device=device, layout="bshd"
        )

    def options(self, device: str) -> dict[str, Any]:
        return moved(self.rules, device) | self.ends(device)


def moved(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def packed(*qkv: torch.Tensor) -> list[torch.Tensor]:
    """(1, H, total, D) -> (total, H, D), as `attention_varlen` takes them."""
    return [t[0].transpose(0, 1) for t in qkv]


def run(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return by_row(case.row, *case.qkv(device), listed=case.listed, **case.options(device))


def named(found: Any) -> Any:
    found = list(found)
    assert len({case.id for case in found}) == len(found)
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id.replace(" ", "-")) for case in found])


def per_sequence(case: Case, qkv: Triple, device: str):  # type: ignore[no-untyped-def]
    """Number, rows of q and of k, and q, k, v of every sequence."""
    ends = [t.tolist() for t in case.ends(device).values()]
    for number, (rows, keys) in enumerate(zip(*map(itertools.pairwise, ends), strict=True)):
        rows, keys = slice(*rows), slice(*keys)
        yield number, rows, keys, (qkv[0][:, :, rows], qkv[1][:, :, keys], qkv[2][:, :, keys])


# ---- lengths ----

THREE = ((19, 33), (3, 2), (9, 40))
ALIGNED = dict(causal="bottom_right")

CASES = (
    Case("q and k differ", THREE),
    Case("causal, top left", THREE, dict(causal="top_left")),
    Case("causal, bottom right", THREE, ALIGNED),
    Case("rows without keys", ((19, 3), (20, 0), (5, 9)), ALIGNED),
    Case("window", THREE, dict(window=(5, 2))),
    Case("window, bottom right", THREE, dict(window=(5, 2), window_align="bottom_right")),
    Case("causal window", THREE, dict(causal="bottom_right", window=(7, None))),
    Case("window to the right", THREE, dict(window=(-1, 3), window_align="bottom_right")),
    Case("empty on either side", ((0, 0), (5, 0), (0, 9), (17, 20), (0, 0), (0, 3))),
    Case("empty ones first and last", ((0, 5), (0, 0), (18, 18), (7, 0)), dict(causal="top_left")),
    Case("nothing but empty ones", ((0, 0), (0, 0)), behind=(5, 5)),
    Case("no sequence", (), behind=(20, 5)),
    Case("no rows", ((0, 4), (0, 0))),
    Case("no keys", ((4, 0), (17, 0))),
    Case("one sequence", ((35, 20),)),
    Case("at the ends of tiles", ((16, 16), (32, 32), (16, 32), (1, 16)), dict(causal="top_left")),
    Case("around the ends of tiles", ((15, 17), (17, 15), (1, 1), (16, 31)), ALIGNED),
    Case("many of one row", tuple((1, n) for n in (3, 17, 1, 0, 33, 16, 2, 9)), ALIGNED),
    Case("rows of no sequence", ((5, 9), (17, 20)), dict(causal="top_left"), (37, 40)),
    Case("rows of no sequence in the last tile", ((18, 9),), dict(window=(3, 3)), (2, 0)),
    Case("keys of no sequence", ((5, 9), (17, 20)), dict(window=(None, 50)), (0, 40)),
    Case("grouped heads", THREE, ALIGNED, heads=(6, 2), row=LARGE),
    Case("B32: decode and nothing, 9 heads over 3", ((0, 0), (1, 3), (0, 0), (1, 5)), ALIGNED, heads=(9, 3)),
    Case("B82: 1, 64, 65", ((1, 1), (64, 64), (65, 65)), dict(causal="top_left"), row=LARGE),
    Case("D_v", THREE, heads=(2, 1), dims=(24, 40), row=FLAT, dtype=BF16),
    Case("D_v, split dims, fp32", THREE, ALIGNED, dims=(80, 96), row=FLAT, dtype=FP32),
    Case("B33: D=256", ((0, 7), (5, 5), (4, 8), (0, 13)), dims=(256, 256)),
    Case("int64 offsets", THREE, ALIGNED, offsets=(INT64, INT64)),
    Case("int32 and int64 offsets", THREE, ALIGNED, offsets=(INT32, INT64)),
    Case("branch", THREE, ALIGNED, row=TALL),
    Case("scale", THREE, dict(scale=-0.7, causal="top_left")),
    Case("longest given", THREE, dict(max_seqlen_q=19, max_seqlen_k=40, window=(100, 100))),
    Case("bounds of the longest given", THREE, dict(max_seqlen_q=1000, max_seqlen_k=64, causal="bottom_right")),
)

PER_HEAD, PER_SEQUENCE = torch.tensor([0.5, -0.25]), torch.tensor([[0.5, -1.0], [2.0, 0.1], [-0.3, 5.0]])
IDS = torch.arange(64) // 7
FEATURES = (
    Case("softcap", THREE, dict(softcap=1.0)),
    Case("ALiBi", THREE, dict(alibi_slopes=PER_HEAD), heads=(2, 1)),
    Case("ALiBi of each, bottom right", THREE, dict(alibi_slopes=PER_SEQUENCE, causal="bottom_right"), heads=(2, 1)),
    Case("sinks", THREE, dict(sinks=PER_HEAD), (5, 0), heads=(2, 1)),
    Case("sinks of each", THREE, dict(sinks=PER_SEQUENCE), (37, 3), heads=(2, 1)),
    Case("sinks without keys", ((5, 0), (17, 3), (0, 0)), dict(sinks=PER_SEQUENCE), heads=(2, 1)),
    Case("dropout", THREE, dict(dropout_p=0.4, dropout_seed=torch.tensor([7])), heads=(2, 1)),
    Case("score_mod", THREE, dict(score_mod="features.relative", score_mod_args=(PER_HEAD,)), heads=(2, 1)),
    Case("mask_mod", THREE, dict(mask_mod="features.documents", mask_mod_args=(IDS,))),
    Case("mask_mod, listed", THREE, dict(mask_mod="features.documents", mask_mod_args=(IDS,)), (20, 3), listed=True),
    Case("mask_mod of each and head, listed", THREE, dict(
        mask_mod="features.own", mask_mod_args=(torch.arange(12) * 3,), causal="bottom_right"), heads=(2, 1), row=FLAT,
        listed=True),
    Case("mask_mod, empty ones, listed", ((0, 0), (20, 0), (0, 5), (17, 33)), dict(mask_mod="features.causal"),
         listed=True),
    Case("all at once", THREE, dict(
        softcap=2.0, scale=-0.4, alibi_slopes=PER_SEQUENCE, sinks=PER_SEQUENCE, dropout_p=0.3, window=(12, 3),
        dropout_seed=torch.tensor([-7]), score_mod="features.relative", score_mod_args=(PER_HEAD,),
        mask_mod="features.documents", mask_mod_args=(IDS,), window_align="bottom_right"), (3, 3), heads=(2, 1)),
)  # fmt: skip


@named([*CASES, *FEATURES])
def test_packed(case, device):
    """Against float64; rows behind the last offset are exactly 0 and -inf."""
    out, lse = run(case, device)
    assert_right(out, lse, *case.qkv(device), **case.options(device))
    last = sum(q for q, _ in case.lengths)
    assert (out[:, :, last:] == 0).all() and (lse[:, :, last:] == -INF).all()


@named([*CASES, *FEATURES])
def test_a_sequence_has_the_bits_it_has_alone(case, device):
    """Its tiles begin with its own first row and key, wherever these lie in the packed tensors: each equals the call
    with this sequence alone, launched with the same row. Bit by bit in the interpreter, where the two builds make the
    same operations. (Dropout and mods count sequences, so that only the first can be compared there.)"""
    qkv, options = case.qkv(device), case.options(device)
    out, lse = run(case, device)
    alone = {name: value for name, value in options.items() if not name.startswith(("cu_", "max_"))}
    for number, rows, _, of in per_sequence(case, qkv, device):
        if rows.start == rows.stop or (number and {"dropout_p", "mask_mod", "score_mod"} & set(alone)):
            continue
        own = {
            name: value[number] if getattr(value, "ndim", 0) == 2 else value for name, value in alone.items()
        }  # fmt: skip
        want, want_lse = by_row(case.row, *of, listed=case.listed, **own)
        if INTERPRETED:
            assert torch.equal(out[:, :, rows], want) and torch.equal(lse[:, :, rows], want_lse), number
        assert_right(out[:, :, rows].clone(), lse[:, :, rows].clone(), *of, **own)


def test_the_public_function(device):
    """(total, H, D_v) and (H, total); tensors and numbers for the longest lengths say nothing new."""
    case = Case("", THREE, dims=(16, 24), heads=(4, 2), behind=(2, 2))
    qkv, ends = case.qkv(device), case.ends(device)
    out, lse = lazymax.attention_varlen(*packed(*qkv), *ends.values(), causal="bottom_right", return_lse=True)
    assert out.shape == (33, 4, 24) and out.is_contiguous() and lse.shape == (4, 33) and lse.dtype == FP32
    assert_right(out.transpose(0, 1)[None], lse[None], *qkv, causal="bottom_right", **ends)
    again = lazymax.attention_varlen(*packed(*qkv), *ends.values(), 19, 40, causal="bottom_right")
    assert torch.equal(out, again)


def test_c41_of_the_collected_cases(device):
    """B33, B82: lengths 1, 16, 33, 0, 20, against a dense mask and a reference of its own."""
    case = next(case for case in test_cases.CASES if case.id == "C41")
    x = test_cases.build(case, device)
    ends = torch.tensor([0, 1, 17, 50, 50, 70], device=device)
    for dtype in (FP32, BF16):
        x |= {name: x[name].to(dtype) for name in "qkv"}
        out = lazymax.attention_varlen(*packed(x["q"], x["k"], x["v"]), ends, ends)
        test_cases.check(out.transpose(0, 1)[None], x)


# ---- what lies around a sequence ----


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("row", [SMALL, LARGE], ids=lambda row: f"{row.block_m}x{row.block_n}")
def test_nothing_around_a_sequence_reaches_it(row, value, device):
    """Bit by bit: whatever the other sequences and the rows behind the last hold, and whatever lies around the tensors.
    (Only a sequence that sees a NaN is computed again, the careful way, and that one is not compared.)"""
    case = Case("", ((19, 18), (7, 9), (5, 20)), ALIGNED, (5, 5), row=row)
    q, k, v = case.qkv(device)
    options = case.options(device)
    want, want_lse = by_row(row, q, k, v, **options)
    q[:, :, 19:26], k[:, :, 18:27], v[:, :, 18:27] = value, value, value
    for t in (q, k, v):
        t[:, :, -5:] = value
    moats = (testing.moat(t, 1, 1, 3, 5) for t in (q, k, v))
    out, lse = by_row(row, *moats, **options)
    for rows in (slice(0, 19), slice(26, None)):
        assert torch.equal(out[:, :, rows], want[:, :, rows]) and torch.equal(lse[:, :, rows], want_lse[:, :, rows])
    assert out[:, :, 19:26].isnan().all()
    assert (out[:, :, -5:] == 0).all() and (lse[:, :, -5:] == -INF).all()


def test_b81_rows_behind_the_last_offset(device):
    """20 rows, of which the offsets end at 17: 0 and -inf, also with a sink; gradients 0 there."""
    case = Case("", ((10, 10), (7, 7)), dict(sinks=PER_HEAD), (3, 3), (2, 1), dtype=FP32)
    leaves = [t.requires_grad_() for t in packed(*(t.clone() for t in case.qkv(device)))]
    ends = case.ends(device)
    out, lse = lazymax.attention_varlen(*leaves, *ends.values(), sinks=PER_HEAD.to(device), return_lse=True)
    assert (out[17:] == 0).all() and (lse[:, 17:] == -INF).all()
    (out.square().sum() + lse[:, :17].sum()).backward()
    for leaf in leaves:
        assert (leaf.grad[17:] == 0).all() and leaf.grad[:17].abs().sum() > 0


BAD_OFFSETS = {
    "falling": ([0, 12, 5, 20], [0, 12, 5, 20]),
    "beyond the rows": ([0, 12, 40], [0, 15, 99]),
    "negative": ([0, -5, 20], [0, -7, 20]),
    "not from 0": ([4, 20], [4, 20]),
}


@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_b81_offsets_that_are_wrong(name, device):
    """`verification()` says so. Without it nothing outside the tensors is read: the infinity around them shows nowhere.
    Rows that two sequences claim, or none, hold anything."""
    of_q, of_k = (torch.tensor(of, device=device) for of in BAD_OFFSETS[name])
    q, k, v = testing.make_qkv(1, 1, 1, 20, 20, 16, device=device)
    around = [torch.cat([torch.full_like(t, INF), t, torch.full_like(t, INF)], 2)[:, :, 20:40] for t in (q, k, v)]
    out, _ = by_row(SMALL, *around, cu_seqlens_q=of_q, cu_seqlens_k=of_k)
    assert not out.isinf().any() and not out[:, :, : 5 if name == "falling" else 0].isnan().any()
    if name == "beyond the rows":
        assert_right(out, None, q, k, v, cu_seqlens_q=of_q.clamp(max=20), cu_seqlens_k=of_k.clamp(max=20))
    with lazymax.verification(), pytest.raises(ValueError, match=r"cu_seqlens_q: got .*expected offsets that begin"):
        lazymax.attention_varlen(*packed(q, k, v), of_q, of_k)


@pytest.mark.slow  # gigabytes
def test_b09_first_rows_past_2_to_the_31(device):
    """Rows 2**24 cells apart: the second sequence begins at cell 2**31. Offsets are 64-bit before strides meet them."""
    if test_cases.free_gigabytes(device) < 6:
        pytest.skip(f"needs 6 GB of free memory on {device}")
    rows, step = 133, 2**24
    buffer = torch.empty((rows - 1) * step + 64, dtype=FP16, device=device)
    case = Case("", ((20, 128), (3, 5)), heads=(1, 1))
    q, k, v = case.qkv(device)
    far = [
        buffer.as_strided((1, 1, rows, 16), (rows * step, rows * step, step, 1), at).copy_(t)
        for t, at in ((k, 0), (v, 16))
    ]
    out, lse = by_row(LARGE, q, *far, **case.ends(device))
    assert_right(out, lse, q, k, v, **case.ends(device))
    # and of q, which the output follows: three rows, the last of them 2**31 cells behind the first
    step = 2**30
    few = Case("", ((2, 128), (1, 5)))
    q = few.qkv(device)[0]
    far_q = buffer.as_strided((1, 1, 3, 16), (1, 1, step, 1), 32).copy_(q)
    far_q = far_q.as_strided((1, 1, 3, 16), (3 * step, 3 * step, step, 1), 32)
    out, lse = by_row(SMALL, far_q, k, v, **few.ends(device))
    assert_right(out, lse, q, k, v, **few.ends(device))


# ---- strides ----


def of_fused(t: torch.Tensor) -> torch.Tensor:
    """The middle one of three in a (total, 3, H, D) buffer."""
    buffer = torch.full((t.shape[2], 3, t.shape[1], t.shape[3]), NAN, dtype=t.dtype, device=t.device)
    return buffer[:, 1].transpose(0, 1)[None].copy_(t)


LAYOUTS = {
    "fused QKV": of_fused,
    "heads first": lambda t: t.contiguous(),
    "moat": lambda t: testing.moat(t, 1, 1, 20, 8),
    "rows backwards in a larger buffer": lambda t: testing.moat(t.repeat_interleave(2, 2), 0, 0, 1, 0)[:, :, ::2],
    "one head for all": lambda t: t[:, :1].expand(t.shape),
}


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout, which, device):
    case = Case("", THREE, ALIGNED, heads=(2, 2), row=LARGE)
    qkv = [LAYOUTS[layout](t) if name in which else t for name, t in zip("qkv", case.qkv(device), strict=True)]
    assert_right(*by_row(case.row, *qkv, **case.options(device)), *qkv, **case.options(device))


def test_fused_qkv_without_a_copy(device):
    """(total, 3, H, D), as projections give it, through the public function."""
    qkv = torch.randn(33, 3, 2, 16, generator=torch.Generator().manual_seed(3)).half().to(device)
    ends = torch.tensor([0, 20, 20, 31], device=device, dtype=INT32)
    out, lse = lazymax.attention_varlen(*qkv.unbind(1), ends, ends, causal="top_left", return_lse=True)
    split = [t.transpose(0, 1)[None] for t in qkv.unbind(1)]
    assert not lazymax.explain(*qkv.unbind(1), cu_seqlens_q=ends, cu_seqlens_k=ends, show=False).problem.copied
    assert_right(out.transpose(0, 1)[None], lse[None], *split, causal="top_left", cu_seqlens_q=ends, cu_seqlens_k=ends)


# ---- numbers of keys ----


@pytest.mark.parametrize("dtype", [INT32, INT64], ids=["int32", "int64"])
@pytest.mark.parametrize("rules", [{}, ALIGNED, dict(window=(4, 4)), dict(window=(6, 0), window_align="bottom_right")],
                         ids=["full", "causal", "window", "window-bottom-right"])  # fmt: skip
def test_lengths_are_slices(rules, dtype, device):
    """`seqlens_k` is each batch element with its keys cut off, bit by bit in the interpreter; NaN behind does not
    show. Lengths beyond the keys are all of them."""
    q, k, v = testing.make_qkv(4, 1, 1, 17, 35, 16, device=device)
    lengths = torch.tensor([35, 17, 0, 99], dtype=dtype, device=device)
    k[1, :, 17:], v[1, :, 17:], k[2], v[2] = NAN, INF, INF, NAN
    out, lse = by_row(SMALL, q, k, v, seqlens_k=lengths, **rules)
    assert (out[2] == 0).all() and (lse[2] == -INF).all()
    assert_right(out, lse, q, k, v, seqlens_k=lengths, **rules)
    for b, length in ((0, 35), (1, 17), (3, 35)):
        one = q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length]
        want, want_lse = by_row(SMALL, *one, **rules)
        if INTERPRETED:
            assert torch.equal(out[b : b + 1], want) and torch.equal(lse[b : b + 1], want_lse)


# ---- gradients ----

B33 = Case("B33", ((0, 7), (5, 5), (4, 8), (0, 13)), dims=(256, 256), dtype=FP32)


@named([
    B33,
    Case("causal, grouped, rows of none", ((7, 9), (0, 3), (5, 2), (3, 0)), ALIGNED, (2, 3), (4, 2), dtype=FP32),
    Case("window, D_v", ((7, 9), (6, 6)), dict(window=(2, 1)), heads=(2, 1), dims=(16, 24), dtype=FP32),
    Case("sinks and slopes of each", ((7, 9), (6, 6), (2, 2)), dict(sinks=PER_SEQUENCE, alibi_slopes=PER_SEQUENCE),
         heads=(2, 1), dtype=FP32),
])  # fmt: skip
def test_gradients_are_those_of_each_sequence(case, device):
    """B33: keys that no query reads have gradients of exactly 0."""
    options = case.options(device)
    ends = {name: options.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    leaves = [t.contiguous().requires_grad_() for t in packed(*case.qkv(device))]
    extra = {name: value.clone().requires_grad_() for name, value in options.items() if hasattr(value, "ndim")}
    out, lse = lazymax.attention_varlen(*leaves, *ends.values(), **(options | extra), return_lse=True)
    (out.square().sum() + lse[lse.isfinite()].sum()).backward()

    def alone(dtype: torch.dtype) -> list[torch.Tensor]:
        copies = [t.detach().to(dtype).requires_grad_() for t in leaves]
        more = {name: t.detach().to(dtype).requires_grad_() for name, t in extra.items()}
        total = torch.zeros((), dtype=dtype, device=device)
        for number, rows, keys, _ in per_sequence(case, case.qkv(device), device):
            if rows.start < rows.stop:
                one = [t[part].transpose(0, 1)[None] for t, part in zip(copies, (rows, keys, keys), strict=True)]
                own = options | {name: t[number] for name, t in more.items()}
                part, part_lse = lazymax.attention(*one, **own, return_lse=True, impl="reference")
                total = total + part.square().sum() + part_lse[part_lse.isfinite()].sum()
        total.backward()
        return [t.grad for t in (*copies, *more.values())]

    for leaf, exact, low in zip((*leaves, *extra.values()), alone(FP64), alone(FP32), strict=True):
        budget = testing.within_budget(leaf.grad, exact, low, eps=testing.EPS[FP32])
        assert budget.ok, budget
    if case is B33:
        assert (leaves[1].grad[:7] == 0).all() and (leaves[1].grad[20:] == 0).all()
        assert (leaves[2].grad[:7] == 0).all() and leaves[2].grad[7:20].abs().sum() > 0


# ---- nothing waits for the offsets, nothing is compiled for them ----


class NoReads(TorchDispatchMode):
    """No operation inside reads a value of a tensor on the host."""

    READS = ("_local_scalar_dense", "is_nonzero", "item", "nonzero", "equal", "unique", "masked_select")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.READS, f"{name} would wait for the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("more", [
    {}, dict(causal="bottom_right", window=(3, 3)), dict(max_seqlen_q=19, max_seqlen_k=40),
    dict(mask_mod="features.documents", mask_mod_args=(IDS,)), dict(sinks=PER_HEAD, softcap=1.0, dropout_p=0.5),
], ids=["plain", "band", "longest", "mask_mod", "features"])  # fmt: skip
def test_offsets_are_not_read_on_the_host(more, monkeypatch, device):
    case = Case("", THREE, heads=(2, 1))
    given, ends, more = packed(*case.qkv(device)), case.ends(device), moved(more, device)
    seed = torch.tensor([5], device=device)
    more = more | dict(dropout_seed=seed)
    watched = [*ends.values(), seed, *more.get("mask_mod_args", ())]

    def refuse(name: str) -> None:
        original = getattr(torch.Tensor, name)

        def reading(t, *args, **options):
            assert all(t.data_ptr() != other.data_ptr() for other in watched), f"{name} would wait for the device"
            return original(t, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, reading)

    for name in ("tolist", "item", "__int__", "__index__", "__bool__", "__float__", "__array__", "__iter__"):
        refuse(name)
    with NoReads():
        out = lazymax.attention_varlen(*given, *ends.values(), **more)
    monkeypatch.undo()
    assert_right(out.transpose(0, 1)[None], None, *case.qkv(device), **more, **ends)


@pytest.mark.gpu
def test_no_synchronisation():
    case = Case("", THREE, dict(causal="bottom_right"), heads=(2, 1))
    given, ends = packed(*case.qkv("cuda")), case.ends("cuda")
    lazymax.attention_varlen(*given, *ends.values(), **case.rules)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lazymax.attention_varlen(*given, *ends.values(), **case.rules)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_captured_graph_follows_new_offsets():
    """B83: nothing of the lengths is baked in."""
    case = Case("", ((20, 30), (13, 5)), dict(causal="bottom_right"), heads=(2, 1))
    qkv, ends = case.qkv("cuda"), case.ends("cuda")
    given = packed(*qkv)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        lazymax.attention_varlen(*given, *ends.values(), **case.rules, return_lse=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = lazymax.attention_varlen(*given, *ends.values(), **case.rules, return_lse=True)
    for lengths in (((20, 30), (13, 5)), ((1, 35), (30, 0)), ((0, 5), (33, 30))):
        for t, new in zip(ends.values(), replace(case, lengths=lengths).ends("cuda").values(), strict=True):
            t.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert_right(out.clone().transpose(0, 1)[None], lse.clone()[None], *qkv, **case.rules, **ends)


@pytest.fixture
def strict_compile():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


COMPILED: dict[str, dict[str, Any]] = {
    "causal": dict(causal="bottom_right", return_lse=True),
    "features": dict(window=(5, 2), softcap=2.0, sinks=PER_HEAD, mask_mod="features.documents", mask_mod_args=(IDS,)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_for_all_offsets(name, strict_compile, device):
    """Other values, other totals, another number of sequences: one compilation, without a break, backward included."""
    rules = moved(COMPILED[name], device)

    def call(q, k, v, of_q, of_k):
        result = lazymax.attention_varlen(q, k, v, of_q, of_k, **rules)
        return result if isinstance(result, tuple) else (result,)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (((7, 9), (5, 5)), ((3, 6), (9, 8)), ((4, 4), (5, 0), (1, 6)), THREE):
        case = Case("", lengths, heads=(2, 1), dtype=FP32)
        ends = case.ends(device)
        ours, theirs = (
            [t.contiguous().requires_grad_() for t in packed(*(t.clone() for t in case.qkv(device)))] for _ in "ab"
        )
        got, want = compiled(*ours, *ends.values()), call(*theirs, *ends.values())
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y) and x.stride() == y.stride()
        got[0].square().sum().backward()
        want[0].square().sum().backward()
        assert all(torch.equal(x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))


def test_compiled_with_the_longest_lengths(strict_compile, device):
    """B80: numbers that change from call to call are symbols of the graph."""

    def call(q, k, v, of_q, of_k, longest_q, longest_k):
        return lazymax.attention_varlen(q, k, v, of_q, of_k, longest_q, longest_k, causal="bottom_right")

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (((7, 9), (5, 5)), ((13, 6), (9, 8)), THREE):
        case = Case("", lengths, heads=(2, 1))
        given, ends = packed(*case.qkv(device)), case.ends(device)
        longest = [max(pair[which] for pair in lengths) for which in (0, 1)]
        out = compiled(*given, *ends.values(), *longest)
        assert_right(out.transpose(0, 1)[None], None, *case.qkv(device), causal="bottom_right", **ends)


# ---- tiles ----


OTHER_ROWS = ((tile(64, 32), FP16), (tile(32, 64), BF16), (tile(16, 64), FP32), (tile(64, 16), FP16))


@named(
    Case(f"{row.block_m}x{row.block_n}, {SHORT[dtype]}", ((70, 65), (1, 9), (33, 33)), ALIGNED, row=row, dtype=dtype)
    for row, dtype in OTHER_ROWS
)
def test_rows_of_other_sizes(case, device):
    assert_right(*run(case, device), *case.qkv(device), **case.options(device))
