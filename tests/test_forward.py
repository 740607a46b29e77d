"""The portable forward kernel, launched as the operator launches it, against float64 within the error budget."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

import lazymax
from lazymax import arch as arches
from lazymax import testing
from lazymax.backends import Tile, registry
from lazymax.dispatch import Plan
from lazymax.kernels.launch import ForwardLaunch
from lazymax.problem import Problem

INF, NAN = math.inf, math.nan
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SHORT = {FP16: "fp16", BF16: "bf16", FP32: "fp32"}


def tile(block_m, block_n, **options):
    """A row that no table holds; small ones make a case of few blocks quick in the interpreter."""
    return Tile(
        block_m=block_m, block_n=block_n, num_warps=4, num_stages=1, reason="test", provenance="test", **options
    )


SMALL, FLAT, TALL, LARGE = tile(16, 16), tile(16, 32), tile(32, 16), tile(32, 32)
ALIGNMENTS = ("top_left", "bottom_right")


@dataclass(frozen=True)
class Case:
    """One problem. heads: (Hq, Hkv); dims: (D, D_v); layout: a key of LAYOUTS."""

    q_len: int
    kv_len: int
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (16, 16)
    batch: int = 1
    dtype: torch.dtype = FP16
    causal: str | None = None
    window: tuple[int | None, int | None] | None = None
    window_align: str | None = None
    scale: float | None = None
    threshold: float | None = None
    layout: str = "bhsd"
    row: Tile = SMALL
    size: float = 1.0  # q is multiplied by it

    @property
    def id(self) -> str:
        """What differs from the defaults, in words."""
        parts = [f"{self.q_len}x{self.kv_len}"]
        if self.batch > 1 or self.heads != (1, 1):
            parts.append(f"b{self.batch}h{self.heads[0]}kv{self.heads[1]}")
        parts.append(f"d{self.dims[0]}" + (f"v{self.dims[1]}" if self.dims[0] != self.dims[1] else ""))
        parts.append(SHORT[self.dtype])
        parts += [self.causal] if self.causal else []
        parts += [f"window{self.window}".replace(" ", "")] if self.window else []
        parts += [self.window_align] if self.window_align else []
        parts += [f"scale={self.scale:g}"] if self.scale is not None else []
        parts += [f"threshold={self.threshold:g}"] if self.threshold is not None else []
        parts += [f"q*{self.size:g}"] if self.size != 1.0 else []
        parts += [self.layout] if self.layout != "bhsd" else []
        parts.append(f"{self.row.block_m}x{self.row.block_n}")
        parts += ["descriptors"] if self.row.descriptors else []
        parts += ["branch"] if self.row.rescale == "branch" else []
        return "-".join(parts)


def last_strided(t):
    """The head dimension is not contiguous: every second column of a larger buffer."""
    return torch.stack([t, torch.full_like(t, NAN)], -1)[..., 0]


def offset(t):
    """Begins at cell 3 of its storage: no alignment to 16 bytes."""
    return torch.cat([torch.full((3,), NAN, dtype=t.dtype, device=t.device), t.flatten()])[3:].view(t.shape)


def bshd(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def fused_qkv(t):
    """One of three tensors that share the rows of a (B, S, 3, H, D) buffer."""
    buffer = torch.full((t.shape[0], t.shape[2], 3, t.shape[1], t.shape[3]), NAN, dtype=t.dtype, device=t.device)
    return buffer[:, :, 1].transpose(1, 2).copy_(t)


# name -> what happens to q, k, v
LAYOUTS = {
    "bhsd": lambda q, k, v: (q, k, v),
    "bshd": lambda q, k, v: (bshd(q), bshd(k), bshd(v)),
    "q-bshd": lambda q, k, v: (bshd(q), k, v),
    "k-bshd": lambda q, k, v: (q, bshd(k), v),
    "v-bshd": lambda q, k, v: (q, k, bshd(v)),
    "fused-qkv": lambda q, k, v: (fused_qkv(q), fused_qkv(k), fused_qkv(v)),
    "nan-moat": lambda q, k, v: tuple(testing.moat(t, 1, 1, 40, 24) for t in (q, k, v)),
    "offset": lambda q, k, v: (offset(q), offset(k), offset(v)),
    "stride-0-heads": lambda q, k, v: (q, k[:1, :1].expand(k.shape), v[:1, :1].expand(v.shape)),
    "stride-0-keys": lambda q, k, v: (q, k[:, :, :1].expand(k.shape), v),
}


def inputs(case, device, seed=0):
    q, k, v = testing.make_qkv(
        case.batch, *case.heads, case.q_len, case.kv_len, *case.dims, dtype=case.dtype, device=device, seed=seed
    )
    return LAYOUTS[case.layout](q * case.size, k, v)


def problem_of(case, q, k, v):
    return Problem.from_call(
        q, k, v, causal=case.causal, window=case.window, window_align=case.window_align, scale=case.scale,
        rescale_threshold=case.threshold, return_lse=True,
    )  # fmt: skip


def run(case, q, k, v):
    """Problem -> plan made by hand from the case's row -> launch, into outputs full of NaN."""
    problem = problem_of(case, q, k, v)
    arch = arches.of(q.device)
    assert case.row.refusal(problem, arch) is None
    plan = Plan(
        route="triton", backend="test", tile=case.row, rescale=case.row.rescale, level="", reason="", rejected=()
    )
    out = testing.poisoned(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = testing.poisoned(*q.shape[:3], dtype=FP32, device=q.device)
    ForwardLaunch.prepare(problem, plan)(q, k, v, out, lse)
    return out, lse


def check(case, device, seed=0):
    q, k, v = inputs(case, device, seed)
    out, lse = run(case, q, k, v)
    for budget in testing.check_attention(out, lse, q, k, v, problem_of(case, q, k, v)):
        assert budget.ok, budget
    return out, lse


def cases(*lists):
    found = list(itertools.chain(*lists))
    assert len({case.id for case in found}) == len(found)
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in found])


def around(block):
    return (1, block - 1, block, block + 1, 2 * block + 3)


# ---- shapes ----


@cases(Case(q, k) for q, k in itertools.product(around(16), around(16)))
def test_lengths(case, device):
    check(case, device)


@cases(
    [
        Case(q, k, causal=align)
        for q, k in ((1, 1), (1, 17), (17, 1), (15, 17), (17, 15), (17, 35), (35, 17), (35, 35))
        for align in ALIGNMENTS
    ],
    [
        Case(q, k, causal=align, row=row)
        for q, k in ((35, 67), (67, 35))
        for row in (FLAT, TALL)
        for align in ALIGNMENTS
    ],
)
def test_causal(case, device):
    """Rows without keys (bottom_right with Sq > Sk) are in here: exactly 0 and -inf, see below."""
    check(case, device)


@cases(
    [
        Case(q, k, window=window, window_align=align, row=row)
        for q, k, row in ((17, 50, FLAT), (50, 17, TALL))
        for window in ((8, 0), (0, 8), (15, 15), (0, 0), (40, None), (None, 3))
        for align in ALIGNMENTS
    ],
    [Case(50, 35, window=(20, None), causal=align) for align in ALIGNMENTS],
    [Case(80, 80, window=(8, 8), row=FLAT), Case(100, 100, window=(33, 1), row=LARGE)],
)
def test_window(case, device):
    check(case, device)


@cases(
    [Case(5, 19, heads, batch=2) for heads in ((3, 3), (4, 1), (6, 2))],
    [Case(19, 5, (6, 3), batch=2, causal="top_left"), Case(1, 17, (9, 3), batch=3, causal="bottom_right")],
    [Case(17, 33, (6, 2), (16, 24), batch=2, causal="top_left", row=LARGE)],
)
def test_heads(case, device):
    """Query head h uses key head h // group; batch and group both above 1, neither equal to the number of heads."""
    check(case, device)


@cases(
    [Case(17, 19, dims=(d, d)) for d in (1, 2, 8, 15, 17, 40, 64, 72, 96, 128, 160, 192, 256)],
    [Case(17, 19, dims=dims) for dims in ((8, 64), (64, 8), (40, 96), (192, 128), (1, 256), (256, 1), (72, 33))],
    [Case(17, 35, dims=dims, dtype=t, causal="top_left") for dims in ((72, 40), (128, 128)) for t in (BF16, FP32)],
)
def test_head_dims(case, device):
    check(case, device)


@cases(
    Case(35, 50, dims=(32, 32), dtype=dtype, causal=causal, row=row)
    for dtype in (FP16, BF16, FP32)
    for causal in (None, "bottom_right")
    for row in (LARGE, replace(FLAT, rescale="branch"))
)
def test_dtypes(case, device):
    check(case, device)


# ---- layouts ----


@cases(Case(35, 33, (2, 2), (24, 24), batch=2, causal="top_left", layout=layout, row=LARGE) for layout in LAYOUTS)
def test_layouts(case, device):
    """B14: each of q, k, v the odd one; B16: stride 0; a moat of NaN: nothing outside is read."""
    check(case, device)


@cases(Case(20, 33, (2, 2), (16, 16), batch=2, layout=layout, row=replace(FLAT, descriptors=True))
       for layout in ("bhsd", "bshd", "v-bshd", "fused-qkv", "nan-moat"))  # fmt: skip
def test_descriptor_layouts(case, device):
    if not arches.of(torch.device(device)).descriptors:
        pytest.skip(f"needs tensor descriptors: {arches.of(torch.device(device)).id} has none")
    check(case, device)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_head_dimension_not_contiguous(name, device):
    """B15: last stride 2, through the public function, which copies."""
    tensors = dict(zip("qkv", testing.make_qkv(1, 2, 2, 20, 33, 24, device=device), strict=True))
    tensors[name] = last_strided(tensors[name])
    assert tensors[name].stride(3) == 2
    out, lse = lazymax.attention(**tensors, return_lse=True)
    for budget in testing.check_attention(out, lse, **tensors, problem=Problem.from_tensors(**tensors)):
        assert budget.ok, budget


def test_head_dimension_not_contiguous_on_a_descriptor_row(device):
    """k and v are copied first, so the row has to judge the copy: its rows are 2 * 20 bytes, no multiple of 16."""
    q, k, v = testing.make_qkv(1, 1, 1, 20, 33, 20, device=device)
    k, v = last_strided(k), last_strided(v)
    problem = Problem.from_tensors(q, k, v)
    row = replace(FLAT, descriptors=True)
    if row.refusal(problem, replace(arches.by_name("sm_90"))) is None:
        plan = Plan(route="triton", backend="test", tile=row, rescale="select", level="", reason="", rejected=())
        ForwardLaunch.prepare(problem, plan).arguments(
            q, k.contiguous(), v.contiguous(), torch.empty_like(v), torch.empty(0)
        )


@pytest.mark.parametrize(
    "order", list(itertools.permutations(range(3))), ids=lambda o: "".join("bhs"[dim] for dim in o)
)
def test_output_follows_the_order_of_q(order, device):
    """B17: dense, in the order in which q stores batch, heads and rows."""
    shape = (2, 3, 5, 16)
    back = [order.index(dim) for dim in range(3)]
    q, k, v = testing.make_qkv(2, 3, 3, 5, 7, 16, 24, device=device)
    q = q.permute(*order, 3).contiguous().permute(*back, 3)
    out = lazymax.attention(q, k, v)
    assert out.shape == (*shape[:3], 24)
    assert out.permute(*order, 3).is_contiguous()
    budget = testing.check_attention(out, None, q, k, v, Problem.from_tensors(q, k, v))[0]
    assert budget.ok, budget


# ---- numbers ----


@cases(
    [
        Case(35, 50, dims=(32, 32), scale=scale, causal="bottom_right", row=LARGE)
        for scale in (-0.3, 0.0, 1e-4, 1e-38, 1e-44, 30.0, -30.0)
    ],
    [Case(20, 35, dims=(32, 32), dtype=t, scale=scale, row=FLAT) for t in (BF16, FP32) for scale in (-0.3, 0.0, 5.0)],
    [Case(50, 17, scale=scale, causal="bottom_right", row=TALL) for scale in (-3.0, 0.0, 3.0)],
    [Case(20, 50, scale=scale, window=(3, 3)) for scale in (-3.0, 3.0)],
)
def test_scale(case, device):
    """B46: negative and zero too, where the largest raw score is not the largest scaled one."""
    check(case, device)


@cases(
    Case(35, 67, dtype=dtype, causal=causal, threshold=threshold, size=12.0, row=replace(LARGE, rescale=rescale))
    for dtype, causal in ((FP16, None), (BF16, "bottom_right"))
    for threshold in (0.0, 8.0)
    for rescale in ("select", "branch")
)
def test_rescale_threshold(case, device):
    """Large scores: the maximum moves, by less and by more than the threshold."""
    check(case, device)


@pytest.mark.parametrize("causal", [None, "top_left"], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=SHORT.get)
def test_scores_far_apart(dtype, causal, device):
    """The first block of keys scores near -1e10, the next one near 0: what the first left behind has to vanish.

    Rounding the pivot's product may put an exponent of the first block far above 0, so inf in its sum, then 0 * inf.
    """
    case = Case(48, 48, dims=(64, 64), dtype=dtype, causal=causal)
    q, k, v = inputs(case, device)
    q[...], k[:, :, :16] = 5e4, -5e4
    k[:, :, :16, ::3] = -4.7e4  # not all of one score
    k[:, :, 7:16, ::5] = -3.9e4
    k[:, :, 16:] *= 1e-5
    out, lse = run(case, q, k, v)
    for budget in testing.check_attention(out, lse, q, k, v, problem_of(case, q, k, v)):
        assert budget.ok, budget


@pytest.mark.parametrize("causal", [None, "top_left"], ids=["full", "causal"])
def test_huge_equal_scores(causal, device):
    """B47: q, k, v full of 133120 in bf16; every output is that number."""
    case = Case(3, 65, (2, 2), (64, 64), dtype=BF16, causal=causal)
    q, k, v = (torch.full_like(t, 133120.0) for t in inputs(case, device))
    out, lse = run(case, q, k, v)
    assert (out == 133120.0).all()
    assert lse.isfinite().all()


def test_fp32_products_keep_all_bits(device):
    """B50: the error stays that of fp32. tf32 keeps 10 bits, which the budget would not forgive."""
    case = Case(33, 50, dims=(64, 64), dtype=FP32, size=3.0)
    assert problem_of(case, *inputs(case, device)).fp32_precision == "ieee"
    check(case, device)


@cases(
    Case(35, 67, dims=(32, 32), dtype=dtype, causal=causal, row=row)
    for dtype, causal in ((FP16, None), (BF16, "top_left"), (FP32, "top_left"))
    for row in (LARGE, replace(FLAT, rescale="branch"))
)
def test_same_bits_every_run(case, device):
    """B31, B74: output and LSE, in poisoned buffers each time."""
    q, k, v = inputs(case, device)
    out, lse = run(case, q, k, v)
    for _ in range(1 if device == "cpu" else 50):
        again, lse_again = run(case, q, k, v)
        assert torch.equal(again, out) and torch.equal(lse_again, lse)


def test_same_bits_alone_and_in_a_batch(device):
    """A head's result depends on its own data only."""
    case = Case(17, 17, (4, 2), batch=3, causal="top_left")
    q, k, v = inputs(case, device)
    out, lse = run(case, q, k, v)
    alone, lse_alone = run(replace(case, batch=1, heads=(1, 1)), q[2:, 3:], k[2:, 1:], v[2:, 1:])
    assert torch.equal(alone, out[2:, 3:]) and torch.equal(lse_alone, lse[2:, 3:])


def test_one_process_many_lengths(device):
    """B76: nothing about a length that divides by the tile is kept for the next one."""
    for kv_len in (128, 129, 100, 1, 16):
        check(Case(17, kv_len), device, seed=kv_len)


def test_lse_is_natural_log_of_the_scaled_scores(device):
    """B45: torch.logsumexp, nothing else; scale not the default."""
    q, k, v = testing.make_qkv(2, 2, 1, 19, 37, 16, dtype=FP32, device=device)
    _, lse = lazymax.attention(q, k, v, scale=0.7, return_lse=True)
    assert lse.dtype == torch.float32 and lse.shape == (2, 2, 19)

    def twin(dtype):
        return torch.logsumexp(0.7 * q.to(dtype) @ k.to(dtype).transpose(2, 3), -1)

    budget = testing.within_budget(lse, twin(torch.float64), twin(torch.float32), eps=testing.EPS[FP32], what="lse")
    assert budget.ok, budget


# ---- rows without keys, values that must not be seen ----


@cases([
    Case(35, 20, causal="bottom_right"),
    Case(67, 3, causal="bottom_right", row=TALL),
    Case(50, 17, window=(8, 0)),
    Case(50, 17, window=(3, 0), window_align="bottom_right"),
    Case(17, 50, window=(0, 5), window_align="top_left"),
    Case(60, 5, window=(16, None), row=FLAT),
])  # fmt: skip
def test_rows_without_keys(case, device):
    """Exactly 0 and -inf, and only there; V holds NaN, which may not show either."""
    q, k, v = inputs(case, device)
    first, last = (getattr(problem_of(case, q, k, v), name) for name in ("first_offset", "last_offset"))
    row, key = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)[None, :]
    keep = (key >= row + (-INF if first is None else first)) & (key <= row + (INF if last is None else last))
    empty = ~keep.any(1)
    assert empty.any() == (case.window != (0, 5))
    out, lse = run(case, q, k, torch.full_like(v, NAN))
    assert (out[:, :, empty] == 0).all() and (lse[:, :, empty] == -INF).all()
    assert out[:, :, ~empty].isnan().all() and lse[:, :, ~empty].isfinite().all()
    check(case, device)


BANDS = [
    Case(35, 35, (2, 1), causal="top_left", row=LARGE),
    Case(20, 30, causal="bottom_right", row=FLAT),
    Case(40, 40, window=(6, 2), row=TALL),
    Case(50, 50, window=(20, None), row=LARGE),
    Case(35, 35, dtype=BF16, causal="top_left", row=replace(LARGE, descriptors=True)),
    Case(20, 20, dtype=FP32, dims=(8, 40), causal="top_left", window=(9, None)),
]


@cases(BANDS)
@pytest.mark.parametrize(
    "where, value", [("k", NAN), ("k", INF), ("v", NAN), ("v", INF), ("v", -INF), ("both", NAN)], ids=lambda x: str(x)
)
def test_unseen_values_stay_unseen(case, where, value, device):
    """One key in the middle holds NaN or inf: rows that may not see it equal what they are without it."""
    if case.row.descriptors and not arches.of(torch.device(device)).descriptors:
        pytest.skip(f"needs tensor descriptors: {arches.of(torch.device(device)).id} has none")
    q, k, v = inputs(case, device)
    problem = problem_of(case, q, k, v)
    at = case.kv_len // 2 + 3
    first, last = problem.first_offset, problem.last_offset
    rows = torch.arange(case.q_len)
    blind = (at < rows + (-INF if first is None else first)) | (at > rows + (INF if last is None else last))
    assert blind.any() and not blind.all()
    clean_k, clean_v = k.clone(), v.clone()
    if where != "v":
        k[:, :, at] = value
    if where != "k":
        v[:, :, at] = value
    out, lse = run(case, q, k, v)
    for budget in testing.check_attention(out, None, q, k, v, problem):  # the seeing rows: IEEE
        assert budget.ok, budget
    assert not out[:, :, ~blind].isfinite().all()
    rest = [
        testing.within_budget(got[:, :, blind], exact[:, :, blind], lowered[:, :, blind], eps=eps, what=what)
        for got, exact, lowered, eps, what in zip(
            (out, lse[..., None]),
            *(
                (o, l[..., None])
                for o, l in (
                    lazymax.reference.attention(q, clean_k, clean_v, problem),
                    lazymax.reference.attention(q, clean_k, clean_v, problem, torch.float32, p_dtype=case.dtype),
                )
            ),
            (testing.EPS[case.dtype], testing.EPS[FP32]),
            ("out", "lse"),
            strict=True,
        )
    ]
    for budget in rest:
        assert budget.ok, budget


@pytest.mark.parametrize("causal", [None, "top_left"], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=SHORT.get)
def test_nan_and_inf_inside_propagate(dtype, causal, device):
    """What IEEE says of a weighted mean: NaN stays NaN, inf stays inf, inf and -inf make NaN. Column by column."""
    case = Case(35, 35, dtype=dtype, causal=causal, row=LARGE)
    q, k, v = inputs(case, device)
    v[:, :, 4, 0] = NAN
    v[:, :, 20, 1] = INF
    v[:, :, 0, 2] = -INF
    v[:, :, 3, 3], v[:, :, 30, 3] = INF, -INF
    out, lse = run(case, q, k, v)
    for budget in testing.check_attention(out, lse, q, k, v, problem_of(case, q, k, v)):
        assert budget.ok, budget
    seen = (lambda row: row) if causal else (lambda row: 0)  # first row that sees a key
    assert out[0, 0, seen(4) :, 0].isnan().all() and out[0, 0, : seen(4), 0].isfinite().all()
    assert (out[0, 0, seen(20) :, 1] == INF).all() and out[0, 0, : seen(20), 1].isfinite().all()
    assert (out[0, 0, :, 2] == -INF).all()
    assert (out[0, 0, seen(3) : seen(30), 3] == INF).all() and out[0, 0, seen(30) :, 3].isnan().all()


@pytest.mark.parametrize("row", [SMALL, FLAT], ids=lambda row: row.name)
def test_nan_in_a_query_stays_in_its_row(row, device):
    case = Case(35, 35, causal="top_left", row=row)
    q, k, v = inputs(case, device)
    q[:, :, 5] = NAN
    out, lse = run(case, q, k, v)
    assert out[:, :, 5].isnan().all() and lse[:, :, 5].isnan().all()
    for budget in testing.check_attention(out, lse, q, k, v, problem_of(case, q, k, v)):
        assert budget.ok, budget


# ---- every row of the tables ----


def table_rows():
    """Each build of the portable kernel once: rows of different GPUs often differ in warps and stages only, which the
    interpreter ignores."""
    found = {}
    for name, backend in registry().items():
        for row in filter(lambda row: type(row) is Tile, backend.forward):
            build = (row.block_m, row.block_n, row.descriptors, row.rescale, row.warp_specialize)
            found.setdefault(build, (name, row))
    return [pytest.param(name, row, id=f"{name}-{row.name}") for name, row in found.values()]


@pytest.mark.parametrize("name, row", table_rows())
@pytest.mark.parametrize("causal", [None, "bottom_right"], ids=["full", "causal"])
def test_table_rows(name, row, causal, device):
    """Two tiles and a bit each way. On a GPU its own rows and the portable ones run; the interpreter takes all."""
    arch = arches.of(torch.device(device))
    backend = registry()[name]
    if device == "cuda" and backend.archs and arch.id not in backend.archs:
        pytest.skip(f"needs one of {', '.join(backend.archs)}: this is {arch.id}")
    q_len, kv_len = row.block_m + 3, 2 * row.block_n + 3
    dim = min(row.when.max_head_dim or 64, 64)
    dtype = FP32 if row.when.dtypes is None and name == "portable" else BF16
    case = Case(q_len, kv_len, dims=(dim, dim), dtype=dtype, causal=causal, row=row)
    problem = problem_of(case, *inputs(case, device))
    if row.when.refusal(problem, arch, row.block_m):  # conditions on the size choose speed, not correctness
        case = replace(case, row=replace(row, when=type(row.when)()))
    check(case, device)


@pytest.mark.slow
@cases(
    Case(q, k, (4, 2), dims, 2, dtype, causal, window, threshold=threshold, layout=layout, row=row)
    for q, k in itertools.product((1, 63, 64, 65, 131), repeat=2)
    for dims, dtype in (((64, 64), BF16), ((72, 128), FP16), ((128, 40), FP32))
    for causal, window in ((None, None), ("top_left", None), ("bottom_right", None), ("bottom_right", (40, None)))
    for threshold, layout, row in ((0.0, "bshd", tile(64, 32)), (8.0, "nan-moat", tile(32, 64, rescale="branch")))
)
def test_sweep(case, device):
    check(case, device)
