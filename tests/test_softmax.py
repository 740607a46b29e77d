"""The online softmax of `kernels.softmax`, piece by piece, against float64."""

import math
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from lazymax.kernels import softmax
from lazymax.testing import EPS, within_budget

ROWS, COLS, D_V = 16, 32, 48
PIECES = (32, 16)  # columns of the tiles that make up D_V
INF, NAN = math.inf, math.nan
SCALE_LOG2 = 0.25  # a power of two: rises in log2 units are exact in raw scores


@triton.jit
def _exponent(s, pivot, l, out, need, scale_log2, EXACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    tile = rows[:, None] * COLS + cols[None, :]
    m = tl.load(pivot + rows)
    tl.store(out + tile, softmax.exponent(tl.load(s + tile), m, scale_log2, EXACT))
    tl.store(need + rows, softmax.needs_exact(m, tl.load(l + rows), scale_log2))


@triton.jit
def _columns(ROWS: tl.constexpr, FIRST: tl.constexpr, COLS: tl.constexpr, ALL: tl.constexpr):
    """Offsets of columns [FIRST, FIRST + COLS) of a (ROWS, ALL) matrix."""
    return tl.arange(0, ROWS)[:, None] * ALL + (tl.arange(0, COLS) + FIRST)[None, :]


@triton.jit
def _steps(s, v, p_out, m_out, l_out, acc_out, out, lse, blocks, scale_log2, threshold, BRANCH: tl.constexpr,
           EXACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, A: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """Online softmax over `blocks` blocks of scores (blocks, ROWS, COLS) and values (blocks, COLS, A + B); stores the
    state after every block, then what `finish` makes of it."""
    D_V: tl.constexpr = A + B
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    m = tl.full([ROWS], softmax.NEVER, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = (tl.zeros([ROWS, A], tl.float32), tl.zeros([ROWS, B], tl.float32))
    for block in range(blocks):
        scores = tl.load(s + (block * ROWS + rows[:, None]) * COLS + cols[None, :])
        p, m, l, acc = softmax.step(scores, m, l, acc, scale_log2, threshold, BRANCH, EXACT)
        of_v = v + block * COLS * D_V
        acc = (tl.dot(p, tl.load(of_v + _columns(COLS, 0, A, D_V)), acc[0], input_precision="ieee"),
               tl.dot(p, tl.load(of_v + _columns(COLS, A, B, D_V)), acc[1], input_precision="ieee"))  # fmt: skip
        tl.store(p_out + (block * ROWS + rows[:, None]) * COLS + cols[None, :], p)
        tl.store(m_out + block * ROWS + rows, m)
        tl.store(l_out + block * ROWS + rows, l)
        tl.store(acc_out + block * ROWS * D_V + _columns(ROWS, 0, A, D_V), acc[0])
        tl.store(acc_out + block * ROWS * D_V + _columns(ROWS, A, B, D_V), acc[1])
    result, row_lse = softmax.finish(m, l, acc, scale_log2)
    tl.store(out + _columns(ROWS, 0, A, D_V), result[0])
    tl.store(out + _columns(ROWS, A, B, D_V), result[1])
    tl.store(lse + rows, row_lse)


@triton.jit
def _finish(m, l, acc, sinks, out, lse, scale_log2, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """sinks: one per row, or None."""
    rows = tl.arange(0, ROWS)
    pieces = (tl.load(acc + _columns(ROWS, 0, A, A + B)), tl.load(acc + _columns(ROWS, A, B, A + B)))
    if sinks is None:
        result, row_lse = softmax.finish(tl.load(m + rows), tl.load(l + rows), pieces, scale_log2)
    else:
        result, row_lse = softmax.finish_with_sink(tl.load(m + rows), tl.load(l + rows), pieces, scale_log2,
                                                   tl.load(sinks + rows))  # fmt: skip
    tl.store(out + _columns(ROWS, 0, A, A + B), result[0])
    tl.store(out + _columns(ROWS, A, B, A + B), result[1])
    tl.store(lse + rows, row_lse)


@dataclass
class States:
    """What `_steps` stored, on the CPU: p (blocks, ROWS, COLS), m and l (blocks, ROWS), acc (blocks, ROWS, D_V)."""

    p: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor
    acc: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def run_steps(s, v, device, threshold=0.0, branch=False, exact=False, scale_log2=SCALE_LOG2):
    blocks = s.shape[0]
    sizes = ((blocks, ROWS, COLS), (blocks, ROWS), (blocks, ROWS), (blocks, ROWS, D_V), (ROWS, D_V), (ROWS,))
    stored = [torch.full(size, math.nan, device=device) for size in sizes]
    _steps[(1,)](
        s.to(device), v.to(device), *stored, blocks, scale_log2, threshold, branch, exact, ROWS, COLS, *PIECES,
        enable_fp_fusion=True,
    )  # fmt: skip
    return States(*(t.cpu() for t in stored))


def scores(*shape, seed=0, size=4.0):
    """Raw scores whose spread is `size` log2 units."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * (size / SCALE_LOG2)


def values(blocks, seed=1):
    return torch.randn(blocks, COLS, D_V, generator=torch.Generator().manual_seed(seed))


def softmax_twin(s, v, dtype):
    """out and LSE (natural log) of all blocks at once: raw scores (blocks, ROWS, COLS), values (blocks, COLS, D_V)."""
    s = s.to(dtype).transpose(0, 1).flatten(1) * (SCALE_LOG2 * math.log(2))
    lse = torch.logsumexp(s, 1)
    p = torch.exp(s - torch.where(lse == -INF, 0.0, lse)[:, None])
    return p @ v.to(dtype).flatten(0, 1), lse


def check_result(got, s, v):
    (out64, lse64), (out32, lse32) = softmax_twin(s, v, torch.float64), softmax_twin(s, v, torch.float32)
    for budget in (
        within_budget(got.out, out64, out32, eps=EPS[torch.float32]),
        within_budget(got.lse[:, None], lse64[:, None], lse32[:, None], eps=EPS[torch.float32], what="lse"),
    ):
        assert budget.ok, budget


def climbing():
    """Rows whose maximum rises by a little, by exactly 8 log2 units, by a lot, never, and falls."""
    s = scores(6, ROWS, COLS, size=0.5).clamp(-3 / SCALE_LOG2, 0)
    rise = torch.tensor([0.5, 3.0, 8.0, 8.5, 40.0, 0.0, -20.0, 100.0]).repeat(2) / SCALE_LOG2
    s += rise[None, :, None] * torch.arange(6)[:, None, None]
    s[:, :, 5] = rise * torch.arange(6)[:, None]  # the exact maximum of each block
    return s


FORMS = pytest.mark.parametrize("branch", [False, True], ids=["select", "branch"])
EXACTNESS = pytest.mark.parametrize("exact", [False, True], ids=["fused", "exact"])
THRESHOLDS = pytest.mark.parametrize("threshold", [0.0, 3.0, 8.0], ids=lambda t: f"threshold={t:g}")


@EXACTNESS
@pytest.mark.parametrize("scale_log2", [0.18, 1e-30, 7.0], ids=lambda s: f"scale={s:g}")
def test_exponent(scale_log2, exact, device):
    """Off by the rounding of the products it takes (fused) or of the difference (exact), no more."""
    s, pivot = scores(ROWS, COLS, size=50.0), scores(ROWS, seed=1, size=50.0)
    s[:, 0] = pivot  # the row's maximum
    s[3, 4] = -INF
    out = torch.full((ROWS, COLS), math.nan, device=device)
    need = torch.full((ROWS,), -1, dtype=torch.int32, device=device)
    l = torch.ones(ROWS, device=device)
    _exponent[(1,)](s.to(device), pivot.to(device), l, out, need, scale_log2, exact, ROWS, COLS, enable_fp_fusion=True)
    out, scale = out.cpu(), torch.tensor(scale_log2).double()
    exact64 = (s.double() - pivot.double()[:, None]) * scale
    assert out[3, 4] == -INF
    size = exact64.abs() if exact else (s.abs() + 2 * pivot.abs()[:, None]).double() * scale
    gap = torch.where(s == -INF, 0.0, (out.double() - exact64).abs())
    assert (gap <= 2.0**-23 * torch.where(s == -INF, 0.0, size) + 1e-45).all()
    if exact:
        assert (out[:, 0] == 0).all()
    assert (need == 0).all()


def test_needs_exact_above_a_million_log2_units(device):
    """Both signs, not rows without keys, also where the product overflows."""
    pivot = torch.tensor(
        [0.0, 1.0, 2.0**22, 2.0**22 + 1, -(2.0**22), -(2.0**22) - 1, softmax.NEVER.value, 3e38, -1e38, 1e-40]
        + [0.0] * 6
    )
    out = torch.full((ROWS, COLS), math.nan, device=device)
    need = torch.full((ROWS,), -1, dtype=torch.int32, device=device)
    l = torch.ones(ROWS, device=device)
    l[10], l[11] = INF, NAN  # an earlier, larger pivot overflowed
    _exponent[(1,)](torch.zeros(ROWS, COLS, device=device), pivot.to(device), l, out, need, 0.25, True, ROWS, COLS)
    assert need.tolist() == [0, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1, 1] + [0] * 4


@FORMS
@EXACTNESS
@THRESHOLDS
@pytest.mark.parametrize("make", [climbing, lambda: scores(5, ROWS, COLS), lambda: scores(4, ROWS, COLS, size=300.0)],
                         ids=["climbing", "normal", "wide"])  # fmt: skip
def test_steps_are_softmax(make, threshold, exact, branch, device):
    s = make()
    v = values(len(s))
    check_result(run_steps(s, v, device, threshold, branch, exact), s, v)


@FORMS
def test_threshold_zero_keeps_the_exact_running_maximum(branch, device):
    s = climbing()
    got = run_steps(s, values(6), device, 0.0, branch, exact=True)
    assert torch.equal(got.m, s.amax(2).cummax(0).values)
    assert got.p.max() == 1.0


@FORMS
@THRESHOLDS
def test_pivot_lags_at_most_the_threshold(threshold, branch, device):
    """The pivot is the running maximum of some block; it moves only when outgrown by more than the threshold."""
    s = climbing()
    got = run_steps(s, values(6), device, threshold, branch, exact=True)
    running = s.amax(2).cummax(0).values
    pivot = torch.full((ROWS,), -INF)
    for block in range(6):
        pivot = torch.where((running[block] - pivot) * SCALE_LOG2 > threshold, running[block], pivot)
        assert torch.equal(got.m[block], pivot), block
        assert ((running[block] - got.m[block]) * SCALE_LOG2).max() <= threshold
    assert got.p.max() <= 2.0**threshold


def test_threshold_is_crossed_not_reached(device):
    """A rise of exactly 8 log2 units keeps the pivot under threshold 8; the next number above moves it."""
    one, nine = 1.0 / SCALE_LOG2, 9.0 / SCALE_LOG2
    s = torch.full((2, ROWS, COLS), -INF)
    s[0, :, 0] = one
    s[1, :8, 3], s[1, 8:, 3] = nine, torch.nextafter(torch.tensor(nine), torch.tensor(INF))
    got = run_steps(s, values(2), device, 8.0, exact=True)
    assert (got.m[1, :8] == one).all() and (got.m[1, 8:] > nine).all()
    assert (got.p[1, :8, 3] == 256.0).all() and (got.p[1, 8:, 3] == 1.0).all()


@EXACTNESS
@THRESHOLDS
def test_branch_and_select_give_the_same_bits(threshold, exact, device):
    s = climbing()
    s[2:4, 3], s[:, 6] = -INF, -INF  # a row that pauses, a row without keys
    branch, select = (run_steps(s, values(6), device, threshold, form, exact) for form in (True, False))
    for name in ("p", "m", "l", "acc", "out", "lse"):
        assert torch.equal(getattr(branch, name), getattr(select, name)), name


@FORMS
@EXACTNESS
@THRESHOLDS
def test_rows_without_keys_stay_empty(threshold, exact, branch, device):
    """B19: rows whose first blocks are all masked, rows that never see a key, between rows that do."""
    s = scores(4, ROWS, COLS)
    s[:, ::4] = -INF  # never
    s[:3, 1::4] = -INF  # only the last block
    s[1:, 2::4] = -INF  # only the first block
    v = values(4)
    got = run_steps(s, v, device, threshold, branch, exact)
    for name in ("p", "l", "acc"):
        assert not getattr(got, name).isnan().any(), name
        assert (getattr(got, name)[:, ::4] == 0).all(), name
    assert (got.out[::4] == 0).all() and (got.lse[::4] == -INF).all()
    check_result(got, s, v)


@FORMS
@pytest.mark.parametrize("raw", [1e11, -1e11, 133120.0**2 * 64], ids=lambda s: f"score={s:.3g}")
def test_huge_equal_scores_weigh_one(raw, branch, device):
    """B47: max * scale and score * scale rounded apart make exp2 of a positive number, inf at this size."""
    s = torch.full((3, ROWS, COLS), raw)
    v = values(3)
    got = run_steps(s, v, device, 8.0, branch, exact=True, scale_log2=0.125 * math.log2(math.e))
    assert (got.p == 1.0).all()
    assert (got.l[-1] == 3.0 * COLS).all()
    assert got.lse.isfinite().all()
    budget = within_budget(got.out[0], v.double().mean((0, 1)), v.mean((0, 1)), eps=EPS[torch.float32])
    assert budget.ok, budget


LOWEST = torch.finfo(torch.float32).min


@FORMS
@THRESHOLDS
def test_rows_of_the_lowest_number_are_rows_of_equal_scores(threshold, branch, device):
    """What models mask with, in natural units: such a row is a mean, not an empty row; beside any other score it is
    nothing."""
    assert softmax.NEVER.value == LOWEST
    s = torch.full((3, ROWS, COLS), LOWEST)
    s[:, 4:8, 5:] = -INF  # and keys that do not count at all
    s[1, 8:12, 3] = scores(4)  # one ordinary score, in the second block
    s[0, 12:, 0] = -1e38
    v = values(3)
    got = run_steps(s, v, device, threshold, branch, exact=True, scale_log2=math.log2(math.e))
    for name in ("p", "l", "acc", "out", "lse"):
        assert getattr(got, name).isfinite().all(), name

    def twin(dtype):
        mean, some = v.to(dtype).flatten(0, 1).mean(0), v[:, :5].to(dtype).flatten(0, 1).mean(0)
        one, first = v[1, 3].to(dtype), v[0, 0].to(dtype)
        return torch.stack([mean] * 4 + [some] * 4 + [one] * 4 + [first] * 4)

    budget = within_budget(got.out, twin(torch.float64), twin(torch.float32), eps=EPS[torch.float32])
    assert budget.ok, budget
    lse = torch.cat([torch.full((8,), LOWEST), s[1, 8:12, 3], torch.full((4,), -1e38)])
    budget = within_budget(got.lse[:, None], lse[:, None].double(), lse[:, None], eps=EPS[torch.float32], what="lse")
    assert budget.ok, budget


def run_finish(m, l, acc, sinks, device, scale_log2=SCALE_LOG2):
    out, lse = torch.full((ROWS, D_V), math.nan, device=device), torch.full((ROWS,), math.nan, device=device)
    tensors = (t if t is None else t.to(device) for t in (m, l, acc, sinks))
    _finish[(1,)](*tensors, out, lse, scale_log2, ROWS, *PIECES, enable_fp_fusion=True)
    return out.cpu(), lse.cpu()


def test_finish(device):
    """m * scale + log2(l) in natural log, one division per row, and the empty row."""
    m, l, acc = scores(ROWS, seed=2), scores(ROWS, seed=3).abs() + 0.1, scores(ROWS, D_V, seed=4)
    m[3], l[3], acc[3] = softmax.NEVER.value, 0.0, 0.0
    m[5], l[5] = 2.5e4, 2.0**60
    out, lse = run_finish(m, l, acc, None, device)
    assert (out[3] == 0).all() and lse[3] == -INF
    full = [row for row in range(ROWS) if row != 3]

    def twin(dtype):
        mm, ll = m[full].to(dtype), l[full].to(dtype)
        return acc[full].to(dtype) / ll[:, None], ((mm * SCALE_LOG2 + ll.log2()) * math.log(2))[:, None]

    for got, exact, lowered in zip(
        (out[full], lse[full][:, None]), twin(torch.float64), twin(torch.float32), strict=True
    ):
        budget = within_budget(got, exact, lowered, eps=EPS[torch.float32])
        assert budget.ok, budget


def test_finish_with_sink(device):
    """The sink is one more key with the value 0, in natural units."""
    m, l, acc = scores(ROWS, seed=2), scores(ROWS, seed=3).abs() + 0.1, scores(ROWS, D_V, seed=4)
    sinks = scores(ROWS, seed=5, size=1.0)
    m[3:6], l[3:6], acc[3:6] = softmax.NEVER.value, 0.0, 0.0  # rows without keys
    sinks[4], sinks[5], sinks[6] = -INF, -1e37, -INF
    sinks[7], sinks[8] = 3e38, -3e38
    m[9], sinks[9] = 2.5e4, 4e3  # large and near each other: 2.5e4 / 4 log2 units are 4332
    m[10], l[10], sinks[10] = LOWEST, 5.0, LOWEST  # seen keys of the lowest number
    out, lse = run_finish(m, l, acc, sinks, device)

    def twin(dtype):
        natural, sink = m.to(dtype) * (SCALE_LOG2 * math.log(2)), sinks.to(dtype)
        top = torch.maximum(natural, sink)
        total = l.to(dtype) * torch.exp(natural - top) + torch.exp(sink - top)
        weight = torch.where(l == 0, 0.0, torch.exp(natural - top) / total)
        total = torch.where((l == 0) & (sink == -INF), -INF, top + total.log())
        return acc.to(dtype) * weight[:, None], total[:, None]

    for got, exact, lowered in zip((out, lse[:, None]), twin(torch.float64), twin(torch.float32), strict=True):
        budget = within_budget(got, exact, lowered, eps=EPS[torch.float32])
        assert budget.ok, budget
    # The twin itself, in words:
    assert (out[3:6] == 0).all() and torch.equal(lse[3:6], sinks[3:6])
    assert (out[7] == 0).all() and lse[7] == sinks[7]
    plain, plain_lse = run_finish(m, l, acc, None, device)
    for row in (6, 8):  # a sink that weighs nothing
        budget = within_budget(out[row], plain[row].double(), plain[row].clone(), eps=EPS[torch.float32])
        assert budget.ok, budget
        assert lse[row] == plain_lse[row]


@pytest.mark.parametrize("sink", [LOWEST, -1e38], ids=lambda sink: f"sink={sink:.3g}")
def test_a_row_without_keys_has_its_sink_for_lse(sink, device):
    m, l, acc = torch.full((ROWS,), softmax.NEVER.value), torch.zeros(ROWS), torch.zeros(ROWS, D_V)
    out, lse = run_finish(m, l, acc, torch.full((ROWS,), sink), device)
    assert (out == 0).all() and (lse == sink).all()
