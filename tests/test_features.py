"""Every feature of the portable forward, alone and in pairs, against float64; what masked keys must not do, and what
must not change a result. Random mixtures are in test_fuzz.py, packed sequences in test_varlen.py."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import test_cases
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

import lazymax
from lazymax import arch as arches
from lazymax import dispatch, mods, reference, testing
from lazymax.backends import Tile
from lazymax.compat import tritons
from lazymax.dispatch import Plan
from lazymax.kernels import launch
from lazymax.kernels.launch import pieces
from lazymax.options import parse_options
from lazymax.problem import Problem

INF, NAN = math.inf, math.nan
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHORT = {FP16: "fp16", BF16: "bf16", FP32: "fp32"}
LOWEST = torch.finfo(FP32).min
INTERPRETED = not torch.cuda.is_available()


# ---- modifications ----


@triton.jit
def _relative(score, b, h, q_idx, k_idx, weight):
    return score + tl.load(weight + h) * (q_idx - k_idx)


@triton.jit
def _documents(b, h, q_idx, k_idx, ids):
    return tl.load(ids + q_idx) == tl.load(ids + k_idx)


@triton.jit
def _own(b, h, q_idx, k_idx, first):
    """Of every batch element and head its own."""
    return k_idx >= tl.load(first + 4 * b + h)


@triton.jit
def _causal(b, h, q_idx, k_idx):
    return k_idx <= q_idx


@triton.jit
def _but(b, h, q_idx, k_idx, key):
    """Every second query does not see one key."""
    return (k_idx != tl.load(key)) | (q_idx % 2 == 0)


@triton.jit
def _rows(b, h, q_idx, k_idx, end):
    """A column, not a tile."""
    return q_idx < tl.load(end)


@triton.jit
def _heads(b, h, q_idx, k_idx):
    """A scalar, not a tile."""
    return h % 2 == 0


mods.register_score_mod("features.relative", _relative, reference=lambda s, b, h, i, j, w: s + w[h] * (i - j))
mods.register_mask_mod("features.documents", _documents, reference=lambda b, h, i, j, ids: ids[i] == ids[j])
mods.register_mask_mod("features.own", _own, reference=lambda b, h, i, j, first: j >= first[4 * b + h])
mods.register_mask_mod("features.causal", _causal, reference=lambda b, h, i, j: j <= i)
mods.register_mask_mod("features.but", _but, reference=lambda b, h, i, j, key: (j != key[0]) | (i % 2 == 0))
mods.register_mask_mod("features.rows", _rows, reference=lambda b, h, i, j, end: i < end[0])
mods.register_mask_mod("features.heads", _heads, reference=lambda b, h, i, j: h % 2 == 0)


# ---- one problem, launched with a row of the test's own ----


def tile(block_m: int, block_n: int, **options: Any) -> Tile:
    return Tile(
        block_m=block_m, block_n=block_n, num_warps=4, num_stages=1, reason="test", provenance="test", **options
    )


SMALL, FLAT, TALL, LARGE = tile(16, 16), tile(16, 32), tile(32, 16, rescale="branch"), tile(32, 32)


class Options:
    """Random options of a call, always the same, for (B, Hq, Sq, Sk)."""

    def __init__(self, batch: int, heads: int, q_len: int, kv_len: int, device: str, seed: int = 0) -> None:
        self.full = (batch, heads, q_len, kv_len)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def shape(self, dims: str) -> list[int]:
        """ "b1qk" -> (B, 1, Sq, Sk); "." leaves a dimension out."""
        return [n if d in "bhqk" else 1 for d, n in zip(dims, self.full, strict=True) if d != "."]

    def normal(self, *shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype).to(self.device)

    def floats(self, dims: str = "bhqk", dtype: torch.dtype = FP32) -> torch.Tensor:
        return 2.0 * self.normal(*self.shape(dims), dtype=dtype)

    def bools(self, dims: str = "bhqk") -> torch.Tensor:
        return self.normal(*self.shape(dims)) > -0.3

    def holes(self, dims: str = "bhqk", lowest: float = -INF, dtype: torch.dtype = FP32) -> torch.Tensor:
        return self.floats(dims, dtype).masked_fill(~self.bools(dims), lowest)

    def per_head(self, dims: str = "h") -> torch.Tensor:
        batch, heads = self.full[:2]
        return self.normal(batch, heads) if dims == "bh" else self.normal(heads)

    def lengths(self) -> torch.Tensor:
        """From none of the keys to all of them."""
        batch, _, _, kv_len = self.full
        return torch.linspace(0 if batch > 1 else kv_len // 2, kv_len, batch).int().to(self.device)

    def ids(self) -> torch.Tensor:
        return torch.arange(max(self.full), device=self.device) // 13

    def tensor(self, *values: Any) -> torch.Tensor:
        return torch.tensor(values, device=self.device)


Make = Callable[[Options], dict[str, Any]]

# name -> the options of a call
FEATURES: dict[str, Make] = {
    "bool mask": lambda o: dict(attn_mask=o.bools()),
    "bool mask of keys": lambda o: dict(attn_mask=o.bools("b11k")),
    "bool mask of queries": lambda o: dict(attn_mask=o.bools("..q1")),
    "bool mask of rows and keys": lambda o: dict(attn_mask=o.bools("..qk")),
    "float mask": lambda o: dict(attn_mask=o.holes()),
    "float mask of keys": lambda o: dict(attn_mask=o.floats("...k")),
    "float mask of queries": lambda o: dict(attn_mask=o.holes("1hq1")),
    "fp16 mask of heads": lambda o: dict(attn_mask=o.holes("1h1k", dtype=FP16)),
    "bf16 mask, turned": lambda o: dict(attn_mask=o.floats("..qk", BF16).mT.contiguous().mT),
    "fp64 mask": lambda o: dict(attn_mask=o.holes("b1qk", dtype=FP64)),
    "softcap": lambda o: dict(softcap=0.8),
    "ALiBi": lambda o: dict(alibi_slopes=o.per_head()),
    "ALiBi, bottom right": lambda o: dict(alibi_slopes=o.per_head("bh"), window_align="bottom_right"),
    "sinks": lambda o: dict(sinks=o.per_head()),
    "sinks of batch": lambda o: dict(sinks=o.per_head("bh").to(BF16)),
    "lengths": lambda o: dict(seqlens_k=o.lengths()),
    "lengths, int64": lambda o: dict(seqlens_k=o.lengths().long()),
    "dropout": lambda o: dict(dropout_p=0.4, dropout_seed=o.tensor(2**40 + 17)),
    "score_mod": lambda o: dict(score_mod="features.relative", score_mod_args=(0.1 * o.per_head(),)),
    "mask_mod": lambda o: dict(mask_mod="features.documents", mask_mod_args=(o.ids(),)),
    "mask_mod of queries": lambda o: dict(mask_mod="features.rows", mask_mod_args=(o.tensor(20),)),
    "mask_mod of heads": lambda o: dict(mask_mod="features.heads"),
    "mask_mod of batch and head": lambda o: dict(
        mask_mod="features.own", mask_mod_args=(o.tensor(3, 17, 0, 20, 16, 1, 30, 18),)
    ),
}
CHOOSING = [name for name in FEATURES if name.startswith(("bool mask", "mask_mod"))]  # these can be listed


@dataclass(frozen=True)
class Case:
    """One problem: the features by name, and rules. heads: (Hq, Hkv); dims: (D, D_v). Small, for the interpreter takes
    50 ms for a program of a few blocks."""

    features: tuple[str, ...]
    q_len: int = 20
    kv_len: int = 35
    batch: int = 2
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = FP16
    rules: dict[str, Any] = field(default_factory=dict)
    row: Tile = SMALL
    listed: bool = False

    @property
    def id(self) -> str:
        parts = ["+".join(self.features) or "plain", f"{self.q_len}x{self.kv_len}"]
        parts += [f"{name}={value}" for name, value in self.rules.items()]
        parts += [f"d{self.dims[0]}v{self.dims[1]}"] if self.dims != (16, 16) else []
        parts += [SHORT[self.dtype]] if self.dtype != FP16 else []
        parts += [f"{self.row.block_m}x{self.row.block_n}"] if self.row != SMALL else []
        parts += ["listed"] if self.listed else []
        return "-".join(parts).replace(" ", "_")

    def qkv(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return testing.make_qkv(
            self.batch, *self.heads, self.q_len, self.kv_len, *self.dims, dtype=self.dtype, device=device
        )

    def options(self, device: str) -> dict[str, Any]:
        found = dict(self.rules)
        for number, name in enumerate(self.features):
            found |= FEATURES[name](Options(self.batch, self.heads[0], self.q_len, self.kv_len, device, number))
        return found


def by_row(
    row: Tile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, listed: bool = False, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Problem -> plan made by hand from the row -> launch, into outputs full of NaN."""
    extras, rules = parse_options(q, **options)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    arch = arches.of(q.device)
    assert dispatch.kernel_refusal(problem, arch) is None and row.refusal(problem, arch) is None
    made = Plan(
        route="triton", backend="test", tile=row, rescale=row.rescale, level="", reason="", rejected=(), listed=listed,
        least_columns=tritons.least_columns(arch.matrix_unit),
    )  # fmt: skip
    out = testing.poisoned(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = testing.poisoned(*q.shape[:3], dtype=FP32, device=q.device)
    launch.ForwardLaunch.prepare(problem, made)(q, k, v, out, lse, extras)
    return out, lse


def assert_right(
    out: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> None:
    extras, rules = parse_options(q, **options)
    problem = Problem.from_tensors(q, k, v, extras, rules)
    for budget in testing.check_attention(out, lse, q, k, v, problem, extras):
        assert budget.ok, budget


def check(case: Case, device: str) -> None:
    qkv, options = case.qkv(device), case.options(device)
    assert_right(*by_row(case.row, *qkv, listed=case.listed, **options), *qkv, **options)


def takes_the_kernel(*qkv: torch.Tensor, **options: Any) -> bool:
    return lazymax.explain(*qkv, **options, show=False).plan.route == "triton"


def cases(*lists: Any) -> Any:
    found = list(itertools.chain(*lists))
    assert len({case.id for case in found}) == len(found)
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in found])


def around(block: int) -> tuple[int, ...]:
    return (1, block - 1, block, block + 1, 2 * block + 3)


# ---- alone and in pairs ----


@cases(
    [Case((name,), q, k, 1) for name in FEATURES for q, k in itertools.product(around(16), around(16))],
    [Case((name,), q, k, 1, listed=True) for name in CHOOSING for q, k in itertools.product((1, 17, 35), (1, 17, 35))],
)
def test_alone(case, device):
    """At lengths around the tile, in both directions."""
    check(case, device)


# Round and round: every feature with one of them, every one with many features.
ROWS = itertools.cycle(((FLAT, FP16), (TALL, BF16), (LARGE, FP32), (FLAT, FP32), (TALL, FP16), (LARGE, BF16)))


@cases(
    [Case((name,), heads=(4, 2), dtype=dtype, row=row) for name, (row, dtype) in zip(FEATURES, ROWS, strict=False)],
    [
        Case((name,), heads=(2, 1), dtype=dtype, row=row, listed=True)
        for name, (row, dtype) in zip(CHOOSING, ROWS, strict=False)
    ],
)
def test_heads_tiles_and_dtypes(case, device):
    check(case, device)


PAIRS = (
    ("bool mask", "lengths"), ("bool mask of keys", "mask_mod"), ("bool mask of queries", "sinks"),
    ("bool mask", "softcap"), ("bool mask of rows and keys", "dropout"), ("bool mask", "score_mod"),
    ("float mask", "softcap"), ("float mask of keys", "ALiBi"), ("float mask", "mask_mod"), ("float mask", "sinks"),
    ("fp16 mask of heads", "score_mod"), ("float mask", "dropout"), ("softcap", "ALiBi"), ("softcap", "sinks of batch"),
    ("softcap", "score_mod"), ("ALiBi", "lengths"), ("ALiBi, bottom right", "lengths"), ("ALiBi", "mask_mod"),
    ("sinks", "lengths"), ("sinks of batch", "mask_mod of batch and head"), ("lengths", "dropout"),
    ("lengths", "mask_mod"), ("dropout", "sinks"), ("dropout", "mask_mod"), ("score_mod", "mask_mod"),
)  # fmt: skip
EVERYTHING = (
    "softcap", "ALiBi", "float mask", "score_mod", "mask_mod of batch and head", "lengths", "sinks of batch", "dropout",
)  # fmt: skip


@cases(
    [Case(pair) for pair in PAIRS],
    [Case(pair, listed=True) for pair in PAIRS if set(pair) & set(CHOOSING)],
    [Case(EVERYTHING, heads=(2, 1), listed=listed, rules=dict(scale=-0.4, **rules), dims=(24, 40))
     for listed in (False, True) for rules in ({}, dict(causal="bottom_right"), dict(window=(20, 3)))],
)  # fmt: skip
def test_together(case, device):
    check(case, device)


BANDS: tuple[dict[str, Any], ...] = (
    dict(causal="top_left"), dict(causal="bottom_right"), dict(window=(9, 4)),
    dict(window=(9, 4), window_align="bottom_right"), dict(scale=-0.7), dict(scale=0.0),
)  # fmt: skip
BANDED = ("bool mask", "float mask", "softcap", "ALiBi", "sinks", "lengths", "dropout", "score_mod", "mask_mod")


@cases(
    [Case((name,), batch=2 if name == "lengths" else 1, rules=rules) for name in BANDED for rules in BANDS],
    [Case((name,), 35, 20, rules=rules) for name in ("sinks", "lengths", "bool mask", "ALiBi") for rules in BANDS[:4]],
    [Case((name,), batch=1, rules=rules, listed=True) for name in ("bool mask", "mask_mod") for rules in BANDS],
)
def test_with_a_band_or_a_scale(case, device):
    check(case, device)


@cases(
    Case((name,), 17, 35, 1, dims=dims)
    for name in ("float mask", "mask_mod", "softcap", "dropout")
    for dims in ((80, 96), (192, 33), (1, 160))
)
def test_split_head_dims_with(case, device):
    check(case, device)


# ---- rows without keys ----


def _visible(o: Options) -> torch.Tensor:
    """Of 20 queries the first 12, of those all but one."""
    rows = torch.arange(20, device=o.device)
    return (rows < 12) & (rows != 7)


EMPTY_ROWS: dict[str, Make] = {
    "bool mask": lambda o: dict(attn_mask=_visible(o)[:, None].expand(20, 35).contiguous()),
    "bool mask of queries": lambda o: dict(attn_mask=_visible(o)[:, None]),
    "float mask": lambda o: dict(attn_mask=torch.where(_visible(o), 0.0, -INF)[:, None]),
    "fp16 mask": lambda o: dict(attn_mask=torch.where(_visible(o), 0.0, -INF).half()[:, None].expand(20, 35).clone()),
    "mask_mod": lambda o: dict(mask_mod="features.rows", mask_mod_args=(o.tensor(12),)),
    "lengths": lambda o: dict(seqlens_k=o.tensor(0, 35)),
    "lengths, causal": lambda o: dict(seqlens_k=o.tensor(0, 7), causal="bottom_right"),
    "lengths, window": lambda o: dict(seqlens_k=o.tensor(20, 3), window=(2, 2)),
    "bool mask beside causal": lambda o: dict(attn_mask=torch.arange(35, device=o.device) >= 10, causal="top_left"),
    "bool mask beside a mask_mod": lambda o: dict(
        attn_mask=torch.arange(35, device=o.device) >= 13, mask_mod="features.documents",
        mask_mod_args=((torch.arange(35, device=o.device) + 3) // 16,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, dict(softcap=2.0, dropout_p=0.5)], ids=["", "softcap-dropout"])
@pytest.mark.parametrize("row, listed", [(SMALL, False), (LARGE, True)], ids=["16x16", "32x32-listed"])
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_rows_without_keys_are_0_and_minus_infinity(name, row, listed, more, device):
    """Exactly, and no others are."""
    q, k, v = Case((name,)).qkv(device)
    options = EMPTY_ROWS[name](Options(2, 1, 20, 35, device))
    extras, rules = parse_options(q, **options)
    problem = Problem.from_tensors(q, k, v, extras, rules)
    _, exact = reference.attention(q, k, v, problem, extras=extras)
    empty = exact == -INF
    assert empty.any() and not empty.all()
    more = more | dict(dropout_seed=torch.tensor([3], device=device))
    listed = listed and (problem.mask == "bool" or problem.mask_mod is not None)
    out, lse = by_row(row, q, k, v, listed=listed, **options, **more)
    assert (out[empty] == 0).all() and (lse[empty] == -INF).all() and lse[~empty].isfinite().all()
    assert_right(out, lse, q, k, v, **options, **more)


def test_sinks_of_rows_without_keys(device):
    """0, and the sink as the LSE; no sink (-inf) is -inf. A sink that outweighs all keys leaves 0."""
    q, k, v = testing.make_qkv(1, 3, 1, 20, 30, 16, device=device)
    sinks = torch.tensor([0.5, -INF, 1e4], device=device)
    options = dict(sinks=sinks, attn_mask=(torch.arange(20, device=device) < 5)[:, None])
    out, lse = by_row(SMALL, q, k, v, **options)
    assert (out[:, :, 5:] == 0).all() and (out[:, 2] == 0).all()
    assert (lse[0, :, 5:] == sinks[:, None]).all() and (lse[0, 2] == 1e4).all()
    assert_right(out, lse, q, k, v, **options)


# ---- values that must not be seen ----

AT = 19


def _but_one(o: Options) -> torch.Tensor:
    """Random, but every second query does not see key AT, and the others do."""
    mask = o.bools()
    mask[..., AT] = (torch.arange(mask.shape[2], device=o.device) % 2 == 0)[:, None].squeeze(1)
    return mask


EXCLUDING: dict[str, Make] = {
    "bool mask": lambda o: dict(attn_mask=_but_one(o)),
    "bool mask of keys": lambda o: dict(attn_mask=torch.arange(35, device=o.device) != AT),
    "lengths": lambda o: dict(seqlens_k=o.tensor(AT)),
    "lengths, causal": lambda o: dict(seqlens_k=o.tensor(AT), causal="bottom_right"),
    "mask_mod": lambda o: dict(mask_mod="features.but", mask_mod_args=(o.tensor(AT),)),
    "mask_mod, causal": lambda o: dict(mask_mod="features.but", mask_mod_args=(o.tensor(AT),), causal="top_left"),
    "bool mask, mask_mod": lambda o: dict(
        attn_mask=_but_one(o), mask_mod="features.documents", mask_mod_args=(o.ids(),), window=(20, 20)
    ),
}
# where, what, and what else the call has: the softmax of modified scores is another one
POISON = (
    ("k", NAN, {}), ("k", INF, dict(softcap=2.0)), ("v", NAN, dict(softcap=2.0)), ("v", -INF, {}), ("both", NAN, {}),
)  # fmt: skip


@pytest.mark.parametrize("where, value, more", POISON, ids=lambda x: ",".join(x) if isinstance(x, dict) else str(x))
@pytest.mark.parametrize("row, listed", [(SMALL, False), (FLAT, True)], ids=["16x16", "16x32-listed"])
@pytest.mark.parametrize("name", EXCLUDING)
def test_b03_what_excluded_keys_hold_never_shows(name, row, listed, where, value, more, device):
    """Strict, for masks and mask_mods as for lengths: rows that do not see a key equal what they are without it."""
    q, k, v = Case((name,), batch=1).qkv(device)
    options = EXCLUDING[name](Options(1, 1, 20, 35, device)) | more
    listed = listed and ("attn_mask" in options or "mask_mod" in options)
    spoiled_k, spoiled_v = k.clone(), v.clone()
    keys = slice(AT, None) if "seqlens_k" in options else slice(AT, AT + 1)
    if where != "v":
        spoiled_k[:, :, keys] = value
    if where != "k":
        spoiled_v[:, :, keys] = value
    extras, rules = parse_options(q, **options)
    problem = Problem.from_tensors(q, k, v, extras, rules)
    exact = reference.attention(q, k, v, problem, extras=extras)
    low = reference.attention(q, k, v, problem, FP32, p_dtype=FP16, extras=extras)
    marked = v.clone()
    marked[:, :, keys] = NAN
    blind = reference.attention(q, k, marked, problem, extras=extras)[0].isfinite().all(-1)
    assert blind.any()
    out, lse = by_row(row, q, spoiled_k, spoiled_v, listed=listed, **options)
    for got, want, lowered, eps, what in (
        (out, exact[0], low[0].half(), testing.EPS[FP16], "out"),
        (lse[..., None], exact[1][..., None], low[1][..., None], 2e-6, "lse"),
    ):
        budget = testing.within_budget(got[blind], want[blind], lowered[blind], eps=eps, what=what)
        assert budget.ok, budget
    assert_right(out, lse, q, spoiled_k, spoiled_v, **options)  # the seeing rows: IEEE


# ---- float masks ----


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=SHORT.get)
@pytest.mark.parametrize("of", [FP16, BF16, FP32, FP64], ids=lambda dtype: f"{str(dtype).split('.')[1]}-mask")
@pytest.mark.parametrize("lowest", ["-inf", "lowest"])
def test_b02_float_masks_of_low_values(lowest, of, dtype, device):
    """Whole rows, rows from one key on, and blocks of keys that hold -inf, or the lowest number of the mask's dtype
    (that of fp32 at most: masks are added in fp32). A row of the lowest number is a row like any other."""
    q, k, v = testing.make_qkv(1, 1, 1, 20, 50, 16, dtype=dtype, device=device)
    value = -INF if lowest == "-inf" else max(torch.finfo(of).min, LOWEST)
    mask = Options(1, 1, 20, 50, device).floats(dtype=of)
    mask[..., 3:6, :], mask[..., 18, :], mask[..., 9, 20:], mask[..., 11:18, 16:48] = value, value, value, value
    mask[..., 15, :33] = value
    out, lse = by_row(SMALL, q, k, v, attn_mask=mask)
    assert_right(out, lse, q, k, v, attn_mask=mask)
    whole = lse[:, :, [3, 4, 5, 18]]
    if lowest == "-inf":
        assert (whole == -INF).all() and (out[:, :, 3:6] == 0).all()
    else:
        assert whole.isfinite().all()
    assert lse[:, :, 9].isfinite().all()


@pytest.mark.parametrize("value", [-65504.0, LOWEST], ids=["fp16", "fp32"])
def test_a_row_of_the_lowest_number_is_a_mean(value, device):
    """In fp32 nothing is left of the scores beside the lowest fp32, little beside -65504."""
    q, k, v = testing.make_qkv(1, 1, 1, 20, 40, 16, device=device)
    mask = torch.full((20, 40), value, device=device, dtype=FP32 if value == LOWEST else FP16)
    out, lse = by_row(SMALL, q, k, v, attn_mask=mask)
    assert_right(out, lse, q, k, v, attn_mask=mask)
    if value == LOWEST:
        assert ((lse / LOWEST - 1).abs() < 1e-6).all()
        budget = testing.within_budget(
            out, v.double().mean(2, keepdim=True).expand(out.shape), v.mean(2, keepdim=True).expand(out.shape),
            eps=testing.EPS[FP16],
        )  # fmt: skip
        assert budget.ok, budget


def test_a_fp64_mask_below_fp32_masks(device):
    """Masks are added in fp32, where the lowest fp64 is -inf: by the kernel as by the reference route."""
    q, k, v = testing.make_qkv(1, 1, 1, 5, 20, 16, device=device)
    mask = torch.zeros(5, 20, device=device, dtype=FP64)
    mask[2], mask[3, 7:] = torch.finfo(FP64).min, torch.finfo(FP64).min
    out, lse = lazymax.attention(q, k, v, attn_mask=mask, return_lse=True)
    want, want_lse = lazymax.attention(q, k, v, attn_mask=mask, return_lse=True, impl="reference")
    assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == -INF).all()
    assert torch.allclose(out, want, atol=2e-3) and torch.allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize("more", [{}, dict(softcap=1.0), dict(causal="top_left")], ids=["", "softcap", "causal"])
def test_nan_and_infinity_in_a_float_mask_propagate(more, device):
    """To the rows that see them. +inf is a score of +inf: NaN as well."""
    q, k, v = Case((), batch=1).qkv(device)
    mask = Options(1, 1, 20, 35, device).floats()
    mask[0, 0, 4, 2], mask[0, 0, 18, 17], mask[0, 0, 9, 34] = NAN, INF, NAN
    out, lse = by_row(SMALL, q, k, v, attn_mask=mask, **more)
    assert_right(out, lse, q, k, v, attn_mask=mask, **more)
    spoiled = [4, 18] if "causal" in more else [4, 9, 18]
    rest = [row for row in range(20) if row not in spoiled]
    assert out[:, :, spoiled].isnan().all() and lse[:, :, 4].isnan().all()
    assert out[:, :, rest].isfinite().all() and lse[:, :, rest].isfinite().all()


def test_minus_infinity_hides_what_v_holds_but_not_k(device):
    """Added to a score, -inf is a weight of 0; to a score of NaN, it is NaN. Bool masks hide both."""
    q, k, v = testing.make_qkv(1, 1, 1, 20, 40, 16, device=device)
    mask = torch.zeros(20, 40, device=device)
    mask[:, 17] = -INF
    v[:, :, 17] = NAN
    out, lse = by_row(SMALL, q, k, v, attn_mask=mask)
    assert out.isfinite().all()
    assert_right(out, lse, q, k, v, attn_mask=mask)
    k[:, :, 17] = NAN
    assert by_row(SMALL, q, k, v, attn_mask=mask)[0].isnan().all()


# ---- masks that broadcast ----


@dataclass(frozen=True)
class Broadcast:
    """A mask of `dims` (see Options.shape), expanded to `to`."""

    dims: str
    to: tuple[int, ...] = (-1, -1, -1, -1)

    @property
    def id(self) -> str:
        expanded = "".join(d for d, n in zip("bhqk", self.to, strict=True) if n > 0)
        return self.dims + (f"-expanded-{expanded}" if expanded else "")


BROADCASTS = (
    Broadcast("...k"), Broadcast("..q1"), Broadcast("..1k"), Broadcast("..qk"), Broadcast(".h11"), Broadcast(".hqk"),
    Broadcast(".h1k"), Broadcast("b111"), Broadcast("b11k"), Broadcast("b1qk"), Broadcast("1hqk"), Broadcast("1111"),
    Broadcast("bhq1"), Broadcast("bhqk"), Broadcast("b11k", (-1, 2, 17, -1)), Broadcast("11qk", (2, 2, -1, -1)),
    Broadcast("1h11", (2, -1, 17, 20)), Broadcast("bhq1", (-1, -1, -1, 20)), Broadcast("1111", (2, 2, 17, 20)),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["bool", "listed", "float"])
@pytest.mark.parametrize("case", BROADCASTS, ids=lambda case: case.id)
def test_b60_masks_of_any_shape(case, kind, device):
    """Right-aligned broadcasting, by size 1 and by stride 0."""
    o = Options(2, 2, 17, 20, device)
    mask = o.floats(case.dims) if kind == "float" else o.bools(case.dims)
    mask = mask.expand(case.to) if mask.dim() == 4 else mask
    q, k, v = testing.make_qkv(2, 2, 1, 17, 20, 16, device=device)
    assert_right(*by_row(LARGE, q, k, v, attn_mask=mask, listed=kind == "listed"), q, k, v, attn_mask=mask)


MASK_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": lambda t: t.mT.contiguous().mT,
    "heads inside": lambda t: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "every second": lambda t: t.repeat_interleave(2, 3)[..., ::2],
    "moat": lambda t: testing.moat(t, 1, 1, 3, 5),
    "offset": lambda t: torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape),
    "overlapping": lambda t: t.as_strided(t.shape, (t.stride(0), t.stride(1), 1, 1)),
}


@pytest.mark.parametrize("kind", ["bool", "listed", "float"])
@pytest.mark.parametrize("layout", MASK_LAYOUTS)
def test_masks_of_any_strides(layout, kind, device):
    o = Options(2, 2, 20, 35, device)
    mask = MASK_LAYOUTS[layout](o.floats() if kind == "float" else o.bools())
    q, k, v = testing.make_qkv(2, 2, 2, 20, 35, 16, device=device)
    assert_right(*by_row(LARGE, q, k, v, attn_mask=mask, listed=kind == "listed"), q, k, v, attn_mask=mask)


class Largest(TorchDispatchMode):
    """Remembers the elements of the largest storage that an operation made inside."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.bool, FP32], ids=["bool", "float"])
@pytest.mark.parametrize("dims, to", [("b11k", (-1, 2, 50, -1)), ("...k", None), ("1111", (2, 2, 50, 60))],
                         ids=["expanded keys", "keys", "expanded number"])  # fmt: skip
def test_broadcast_masks_are_not_materialised(dims, to, dtype, device):
    """The kernel is given the mask's own memory and strides of 0, and nothing of the size of all scores is made."""
    o = Options(2, 2, 50, 60, device)
    mask = o.bools(dims) if dtype == torch.bool else o.floats(dims)
    mask = mask if to is None else mask.expand(to)
    q, k, v = testing.make_qkv(2, 2, 2, 50, 60, 16, device=device)
    extras, rules = parse_options(q, attn_mask=mask)
    problem = Problem.from_tensors(q, k, v, extras, rules)
    ready = launch.ForwardLaunch.prepare(problem, dispatch.plan(problem, arches.of(q.device)))
    arguments = ready.arguments(q, k, v, torch.empty_like(q), q.new_empty(0), extras)
    modifiers = next(x for x in arguments if hasattr(x, "mask"))
    assert modifiers.mask.data_ptr() == mask.data_ptr()
    strides = [getattr(modifiers, f"mask_{of}_stride") for of in ("batch", "head", "row", "col")]
    assert [stride != 0 for stride in strides] == [d in "bhqk" for d in dims.replace(".", "1")]
    with Largest(mask) as largest:
        lazymax.attention(q, k, v, attn_mask=mask)
    assert 0 < largest.elements < 2 * 2 * 50 * 60


# ---- one rule in four forms ----

FORMS: dict[str, Make] = {
    "causal": lambda o: dict(causal="top_left"),
    "window": lambda o: dict(window=(None, 0)),
    "window of all": lambda o: dict(window=(o.full[2] - 1, 0)),
    "bool mask": lambda o: dict(attn_mask=torch.ones(o.full[2:], dtype=torch.bool, device=o.device).tril()),
    "mask_mod": lambda o: dict(mask_mod="features.causal"),
    "float mask": lambda o: dict(attn_mask=torch.full(o.full[2:], -INF, device=o.device).triu(1)),
}
# Whether listed or not: the same blocks in the same order, or more of which nothing counts.
SAME_BITS = ("causal", "window", "window of all", "bool mask", "mask_mod")


@pytest.mark.parametrize("row", [SMALL, FLAT, TALL], ids=lambda row: f"{row.block_m}x{row.block_n}")
@pytest.mark.parametrize("q_len, kv_len", [(35, 67), (67, 35)])
def test_a_causal_problem_in_every_form(q_len, kv_len, row, device):
    """Within the budget of the causal problem, each. Bit by bit too, but for the float mask (whose scores go into the
    softmax in natural units), and but for lists of which a row of blocks has two that are partial (TALL: visited in
    another order). On a GPU only causal and window are one binary; the bits of the others are asserted where the
    interpreter makes each operation the same."""
    q, k, v = testing.make_qkv(1, 1, 1, q_len, kv_len, 16, device=device)
    o = Options(1, 1, q_len, kv_len, device)
    want, want_lse = by_row(row, q, k, v, causal="top_left")
    for name, make in FORMS.items():
        for listed in (False, True) if name in ("bool mask", "mask_mod") else (False,):
            out, lse = by_row(row, q, k, v, listed=listed, **make(o))
            assert_right(out, lse, q, k, v, causal="top_left")
            one_binary = name in ("causal", "window")
            in_order = name in SAME_BITS and not (listed and row.block_m > row.block_n)
            if one_binary or (INTERPRETED and in_order):
                assert torch.equal(out, want) and torch.equal(lse, want_lse), (name, listed)


# ---- dropout ----


def one_hot(q_len: int, kv_len: int, device: str, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v (two batch elements) of which the output is the probabilities."""
    q, k, _ = testing.make_qkv(2, heads, heads, q_len, kv_len, 16, dtype=FP32, device=device)
    return q, k, torch.eye(kv_len, device=device).expand(2, heads, kv_len, kv_len).contiguous()


def test_what_dropout_keeps_does_not_depend_on_tiles(device):
    """It is what `testing.dropout_keep` says, exactly."""
    q, k, v = one_hot(20, 35, device)
    seed = torch.tensor([-(2**62) - 12345], device=device)
    keep = testing.dropout_keep(seed, 2, 2, 20, 35, 0.3, device)
    for row in (SMALL, FLAT, TALL, LARGE, tile(64, 32), tile(16, 64)):
        options = dict(dropout_p=0.3, dropout_seed=seed)
        out, lse = by_row(row, q, k, v, **options)
        assert torch.equal(out != 0, keep)
        assert_right(out, lse, q, k, v, **options)


def test_what_dropout_keeps_depends_on_the_seed_and_the_place_alone(device):
    """B55, B56: a seed is its value, not its memory. B57: not on what else the call has."""
    q, k, v = one_hot(20, 40, device)
    seed = torch.tensor([0, 77, 5], device=device)[1:2]
    kept = by_row(SMALL, q, k, v, dropout_p=0.5, dropout_seed=seed)[0] != 0
    again = by_row(SMALL, q, k, v, dropout_p=0.5, dropout_seed=torch.tensor([77], device=device))[0] != 0
    assert torch.equal(kept, again)
    other = by_row(SMALL, q, k, v, dropout_p=0.5, dropout_seed=torch.tensor([78], device=device))[0] != 0
    assert not torch.equal(kept, other)
    fewer = by_row(SMALL, q[:1, :1, :7], k[:1, :1], v[:1, :1], dropout_p=0.5, dropout_seed=seed, softcap=3.0)[0] != 0
    assert torch.equal(kept[:1, :1, :7], fewer)


def test_dropout_draws_its_seed_from_torchs_generator(device):
    """B55: another mask every call, the same after the same manual_seed; the generator moves on, and only then."""
    q, k, v = one_hot(20, 40, device)

    def state() -> torch.Tensor:
        return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()

    torch.manual_seed(5)
    start = state()
    first = lazymax.attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(state(), start)
    second = lazymax.attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(first != 0, second != 0)
    torch.manual_seed(5)
    assert torch.equal(lazymax.attention(q, k, v, dropout_p=0.5), first)
    assert torch.equal(lazymax.attention(q, k, v, dropout_p=0.5), second)
    before = state()
    lazymax.attention(q, k, v)
    lazymax.attention(q, k, v, dropout_p=0.0)
    lazymax.attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor([1], device=device))
    assert torch.equal(state(), before)


def test_dropout_of_nothing_and_of_everything(device):
    q, k, v = testing.make_qkv(2, 2, 1, 20, 35, 16, device=device)
    plain, plain_lse = by_row(SMALL, q, k, v)
    out, lse = by_row(SMALL, q, k, v, dropout_p=0.0, dropout_seed=torch.tensor([1], device=device))
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    v[:, :, 7] = INF
    for row in (SMALL, LARGE):
        out, lse = by_row(row, q, k, v, dropout_p=1.0, dropout_seed=torch.tensor([1], device=device))
        assert (out == 0).all()
        assert_right(out, lse, q, k, v, dropout_p=1.0, dropout_seed=torch.tensor([1], device=device))


@pytest.mark.parametrize("more", [{}, dict(softcap=2.0), dict(causal="bottom_right")], ids=["", "softcap", "causal"])
def test_dropout_leaves_the_lse_alone(more, device):
    """Bit by bit in the interpreter, where both builds make the same operations."""
    q, k, v = testing.make_qkv(1, 2, 1, 20, 35, 16, device=device)
    _, plain = by_row(SMALL, q, k, v, **more)
    _, lse = by_row(SMALL, q, k, v, **more, dropout_p=0.7, dropout_seed=torch.tensor([1], device=device))
    assert torch.equal(lse, plain) if INTERPRETED else torch.allclose(lse, plain, atol=1e-5)


# ---- softcap ----


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=SHORT.get)
@pytest.mark.parametrize("cap", [50.0, 0.01])
def test_b49_softcap_of_huge_scores_saturates(cap, dtype, device):
    """Scores up to 1e5 and beyond: +-cap, no NaN. LSE and outputs are those of scores +-cap."""
    q, k, v = testing.make_qkv(1, 2, 1, 20, 40, 16, dtype=dtype, device=device)
    q = q * 1e3
    k = k * 1e2
    out, lse = by_row(SMALL, q, k, v, softcap=cap)
    assert (q.double() @ k.double().mT).abs().max() / 4 > 1e5
    assert out.isfinite().all() and lse.isfinite().all() and (lse.abs() <= cap + math.log(40) + 1e-3).all()
    assert_right(out, lse, q, k, v, softcap=cap)


@pytest.mark.parametrize("cap", [50.0, 1e3, 1e5, 1e8, 1e30])
def test_a_softcap_far_above_the_scores_changes_nothing(cap, device):
    q, k, v = testing.make_qkv(1, 2, 1, 20, 40, 16, dtype=FP32, device=device)
    out, lse = by_row(SMALL, q, k, v, softcap=cap)
    assert_right(out, lse, q, k, v, softcap=cap)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=SHORT.get)
@pytest.mark.parametrize("cap", [16.0, 50.0, 900.0])
def test_the_lse_of_one_small_capped_score(cap, dtype, device):
    """It is that score: the short tanh, off by 6e-8 of the cap, is not enough."""
    q, k, v = testing.make_qkv(1, 2, 1, 40, 40, 16, dtype=dtype, device=device)
    out, lse = by_row(SMALL, q * 0.3, k * 0.3, v, softcap=cap, window=(0, 0))
    assert_right(out, lse, q * 0.3, k * 0.3, v, softcap=cap, window=(0, 0))


@pytest.mark.parametrize("cap", [0.1, 1.0, 30.0])
def test_softcap_of_scores_of_any_size(cap, device):
    """From 2**-20 to 2**10: neither end of tanh loses precision."""
    q, k, v = testing.make_qkv(1, 1, 1, 40, 40, 16, dtype=FP32, device=device)
    q = q * torch.logspace(-20, 10, 40, base=2.0, device=device)[:, None]
    out, lse = by_row(SMALL, q, k, v, softcap=cap)
    assert_right(out, lse, q, k, v, softcap=cap)


# ---- head dims ----


def columns(dim: int, least: int) -> int:
    return sum(cols for _, cols in pieces(dim, least))


def test_split_head_dims_multiply_no_more_than_the_next_multiple_of_16():
    """Where tiles of 16 columns compile: D = 80, 96, 160, 192 and all that two powers of two make up."""
    assert {dim: columns(dim, 16) for dim in (80, 96, 160, 192)} == {80: 80, 96: 96, 160: 160, 192: 192}
    next16 = {dim: -(-dim // 16) * 16 for dim in range(1, 577)}
    # What remains: these multiply up to the next power of two, or 512 and what is left of 576.
    wasted = sorted({n for dim, n in next16.items() if columns(dim, 16) > n})
    assert [n for n in wasted if n <= 256] == [112, 176, 208, 224, 240]
    assert columns(576, 16) == 576 and columns(320, 16) == 320


def test_split_head_dims_where_tiles_have_64_columns():
    """wgmma and tcgen05: the same, for a narrow tile may follow one of 64 columns, but nothing is below 64."""
    assert [dim for dim in range(1, 577) if columns(dim, 64) != max(64, columns(dim, 16))] == []


@pytest.mark.parametrize("least", [16, 64])
def test_pieces_cover_the_head_dim_in_powers_of_two(least):
    for dim in range(1, 577):
        found = pieces(dim, least)
        assert len(found) <= 2 and found[0][0] == 0
        assert all(cols & (cols - 1) == 0 for _, cols in found)
        assert found[0][1] >= least and found[-1][1] >= 16
        assert [first for first, _ in found[1:]] == [found[0][1]][: len(found) - 1]
        assert found[-1][0] < dim <= sum(found[-1])
        assert columns(dim, least) <= max(least, triton.next_power_of_2(dim))


@cases(
    Case((), 17, 19, 1, (1, 1), dims=dims, dtype=dtype)
    for dims in ((80, 80), (96, 96), (160, 160), (192, 192), (192, 128), (72, 240), (33, 96), (160, 64))
    for dtype in (FP16, BF16, FP32)
)
def test_split_head_dims(case, device):
    check(case, device)


@dataclass(frozen=True)
class Latent:
    """Head dims of multi-head latent attention."""

    id: str
    dims: tuple[int, int]
    dtype: torch.dtype
    rules: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (4, 1)


LATENT = (
    Latent("prefill", (192, 128), BF16, dict(causal="bottom_right"), (2, 2)),
    Latent("prefill, fp32", (192, 128), FP32, heads=(1, 1)),
    Latent("absorbed", (576, 512), BF16, dict(causal="bottom_right", scale=192**-0.5)),
    Latent("absorbed, fp16, mask", (576, 512), FP16, dict(attn_mask=torch.arange(40) % 3 != 0)),
)


@pytest.mark.parametrize("case", LATENT, ids=lambda case: case.id)
def test_mla_head_dims_run_on_the_kernel(case, device):
    q, k, v = testing.make_qkv(1, *case.heads, 5, 40, *case.dims, dtype=case.dtype, device=device)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in case.rules.items()}
    assert takes_the_kernel(q, k, v, **options)
    out, lse = lazymax.attention(q, k, v, **options, return_lse=True)
    assert_right(out, lse, q, k, v, **options)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", ["gfx1151", "gfx942", "gfx1201", "sm_120", "sm_89", "sm_90", "sm_100"])
def test_large_head_dims_on_every_gpu(arch, dtype):
    """To 576 for q and k and 512 for v: MLA in its latent form fits in 48 KiB by small tiles. Beyond, the reference by
    default; by name an error that says what was asked, what the kernel takes, and what would do."""
    where = arches.by_name(arch)
    for sizes in ((192, 128), (576, 512), (320, 320), (512, 512)):
        assert dispatch.plan(Problem.from_shape((1, 16, 1, 64, 4096, *sizes), dtype), where).route == "triton"
    for sizes, name, limit in (((577, 512), "q and k", 576), ((576, 513), "v", 512)):
        problem = Problem.from_shape((1, 16, 1, 64, 4096, *sizes), dtype)
        chosen = dispatch.plan(problem, where)
        assert chosen.route == "reference"
        assert f"head dim of {name}: the kernel takes 1 to {limit}, got {limit + 1}" in chosen.reason
        with pytest.raises(NotImplementedError) as caught:
            dispatch.plan(problem, where, "portable")
        for words in ("'portable'", arch, f"head dim of {name}", f"1 to {limit}, got {limit + 1}", "impl='auto'"):
            assert words in str(caught.value)


# ---- gradients flow through the kernel's forward ----

GRADIENTS = {"sinks": (4,), "sinks of batch": (2, 4), "mask of keys": (9,), "mask of queries": (7, 1),
             "mask of heads": (1, 4, 7, 9), "mask of batch": (2, 1, 1, 9), "slopes": (4,)}  # fmt: skip


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with q, k, v"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_masks_sinks_and_slopes(name, others, device):
    """B38: also where nothing else needs one. B39: of the tensor's own shape, summed over what it broadcasts to."""
    shape = GRADIENTS[name]
    q, k, v = testing.make_qkv(2, 4, 2, 7, 9, 16, dtype=FP32, device=device)
    t = Options(2, 4, 7, 9, device).normal(*shape)
    leaves = [x.requires_grad_(others) for x in (q, k, v)] + [t.requires_grad_()]
    argument = "sinks" if "sinks" in name else "alibi_slopes" if name == "slopes" else "attn_mask"
    assert takes_the_kernel(q, k, v, **{argument: t})
    out, lse = lazymax.attention(q, k, v, **{argument: t}, return_lse=True)
    weight = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)
    ((out * weight).sum() + lse.sum()).backward()

    def textbook(dtype: torch.dtype) -> list[torch.Tensor]:
        q_, k_, v_, t_ = (x.detach().to(dtype).requires_grad_() for x in leaves)
        s = q_ @ k_.repeat_interleave(2, 1).mT / 4
        if argument == "attn_mask":
            s = s + t_
        if argument == "alibi_slopes":
            i, j = torch.arange(7, device=device)[:, None], torch.arange(9, device=device)
            s = s - t_[..., None, None] * (i - j).abs()
        if argument == "sinks":
            s = torch.cat([s, t_.expand(2, 4)[..., None, None].expand(2, 4, 7, 1)], -1)
        p = torch.softmax(s, -1)[..., :9]
        ((p @ v_.repeat_interleave(2, 1) * weight).sum() + torch.logsumexp(s, -1).sum()).backward()
        return [x.grad for x in (q_, k_, v_, t_)]

    for leaf, exact, low in zip(leaves, textbook(FP64), textbook(FP32), strict=True):
        if leaf.requires_grad:
            assert leaf.grad.shape == leaf.shape
            budget = testing.within_budget(leaf.grad, exact, low, eps=testing.EPS[FP32], what=argument)
            assert budget.ok, budget
        else:
            assert leaf.grad is None


# ---- merging ----

SPLIT: dict[str, Make] = {
    "plain": lambda o: {},
    "bool mask": lambda o: dict(attn_mask=o.bools()),
    "float mask": lambda o: dict(attn_mask=o.holes()),
    "softcap": lambda o: dict(softcap=1.0),
}


@pytest.mark.parametrize("at", [0, 16, 23])
@pytest.mark.parametrize("name", SPLIT)
def test_two_halves_merge_into_the_whole(name, at, device):
    """By their LSEs; one half may have no key at all. A sink goes to one of them."""
    q, k, v = testing.make_qkv(1, 2, 1, 20, 50, 16, dtype=FP32, device=device)
    options = SPLIT[name](Options(1, 2, 20, 50, device))
    sinks = torch.tensor([0.5, -1.0], device=device)
    halves = []
    for part, own in ((slice(0, at), {}), (slice(at, 50), dict(sinks=sinks))):
        mask = options.get("attn_mask")
        own |= options if mask is None else options | dict(attn_mask=mask[..., part])
        halves += lazymax.attention(q, k[:, :, part], v[:, :, part], **own, return_lse=True)
    assert_right(*lazymax.merge_states(*halves), q, k, v, sinks=sinks, **options)


# ---- the collected cases of other kernels' faults, those with a mask ----

MASKED = [
    case for case in test_cases.CASES if not case.gigabytes and "attn_mask" in test_cases.build(case, "cpu")
]  # fmt: skip


@pytest.mark.parametrize("dtype, listed", [(None, False), (FP16, True)], ids=["own", "fp16-listed"])
@pytest.mark.parametrize("case", test_cases.named(MASKED))
def test_masked_cases_on_small_tiles(case, dtype, listed, device):
    """test_cases.py runs them in the dtype they have with the table's rows; here many blocks, listed and not."""
    x = test_cases.build(case, device)
    if dtype:
        x |= {name: x[name].to(dtype) for name in "qkv"}
    options = dict(attn_mask=x["attn_mask"], scale=x.get("scale"))
    assert takes_the_kernel(x["q"], x["k"], x["v"], **options)
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (x["q"], x["k"], x["v"]))
    out, _ = by_row(LARGE, q, k, v, listed=listed and x["attn_mask"].dtype == torch.bool, **options)
    test_cases.check(out, x)


def test_masked_cases_are_all_here():
    assert [case.id for case in MASKED] == ["C01", "C02", "C04", "C06", "C09", "C10", "C20", "C23", "C24", "C37", "C41"]


# ---- faults that were found ----


def test_extras_of_a_batch_that_takes_several_launches(monkeypatch, device):
    """A grid has 65535 places for batch elements; a larger batch is launched in slices."""
    monkeypatch.setattr(launch, "MAX_GRID", 2)
    q, k, v = testing.make_qkv(3, 1, 1, 4, 40, 16, device=device)
    o = Options(3, 1, 4, 40, device)
    for name in ("bool mask of keys", "float mask", "ALiBi, bottom right", "sinks of batch", "lengths"):
        options = FEATURES[name](o)
        for listed in (False, True) if "bool" in name else (False,):
            assert_right(*by_row(SMALL, q, k, v, listed=listed, **options), q, k, v, **options)
