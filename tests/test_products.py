"""`kernels.products`: the two matrix products, rounding to 16 bits, and weights of 0 that meet NaN."""

import math

import pytest
import torch
import triton
import triton.language as tl

from lazymax.compat import tritons
from lazymax.kernels import products
from lazymax.testing import within_budget

M, N, K = 16, 16, 32
INF, NAN = math.inf, math.nan
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])


def upcast(dtype):
    """What the launcher passes for UPCAST."""
    return tritons.interpreter_needs_upcast(str(dtype).removeprefix("torch."))


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@triton.jit
def _dot(a, b, c, out, HAS_ACC: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, M: tl.constexpr,
         N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a_tile = tl.load(a + m[:, None] * K + k[None, :])
    b_tile = tl.load(b + k[:, None] * N + n[None, :])
    if HAS_ACC:
        acc = products.dot(a_tile, b_tile, tl.load(c + m[:, None] * N + n[None, :]), PRECISION, UPCAST)
    else:
        acc = products.dot(a_tile, b_tile, None, PRECISION, UPCAST)
    tl.store(out + m[:, None] * N + n[None, :], acc)


@triton.jit
def _narrow(x, out, UPCAST: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, products.narrow(tl.load(x + at), out.dtype.element_ty, UPCAST))


@triton.jit
def _guarded(p, v, acc, out, PRECISION: tl.constexpr, UPCAST: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
             K: tl.constexpr):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    p_tile = tl.load(p + m[:, None] * K + k[None, :])
    v_tile = tl.load(v + k[:, None] * N + n[None, :])
    acc_tile = tl.load(acc + m[:, None] * N + n[None, :])
    result = products.guarded_pv(p_tile, v_tile, acc_tile, PRECISION, UPCAST)
    tl.store(out + m[:, None] * N + n[None, :], result)


@triton.jit
def _columns(ROWS: tl.constexpr, FIRST: tl.constexpr, COLS: tl.constexpr, ALL: tl.constexpr):
    """Offsets of columns [FIRST, FIRST + COLS) of a (ROWS, ALL) matrix."""
    return tl.arange(0, ROWS)[:, None] * ALL + (tl.arange(0, COLS) + FIRST)[None, :]


@triton.jit
def _scores(q, k, out, PRECISION: tl.constexpr, UPCAST: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
            A: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """Of pieces of A and, unless it is 0, of B columns."""
    q_tile = (tl.load(q + _columns(M, 0, A, A + B)),)
    k_tile = (tl.load(k + _columns(N, 0, A, A + B)),)
    if B:
        q_tile = q_tile + (tl.load(q + _columns(M, A, B, A + B)),)
        k_tile = k_tile + (tl.load(k + _columns(N, A, B, A + B)),)
    tl.store(out + _columns(M, 0, N, N), products.scores(q_tile, k_tile, PRECISION, UPCAST))


@triton.jit
def _weighted(p, v, acc, out, found, PRECISION: tl.constexpr, UPCAST: tl.constexpr, GUARDED: tl.constexpr,
              M: tl.constexpr, K: tl.constexpr, A: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """acc + p @ v in two pieces; found: what `poisoned` says of the result."""
    v_tile = (tl.load(v + _columns(K, 0, A, A + B)), tl.load(v + _columns(K, A, B, A + B)))
    acc_tile = (tl.load(acc + _columns(M, 0, A, A + B)), tl.load(acc + _columns(M, A, B, A + B)))
    result = products.weighted(tl.load(p + _columns(M, 0, K, K)), v_tile, acc_tile, PRECISION, UPCAST, GUARDED)
    tl.store(out + _columns(M, 0, A, A + B), result[0])
    tl.store(out + _columns(M, A, B, A + B), result[1])
    tl.store(found, products.poisoned(result))


@DTYPES
@pytest.mark.parametrize("a, b", [(32, 0), (32, 16), (16, 32)], ids=str)
def test_scores_are_the_sum_over_all_pieces(dtype, a, b, device):
    q, k = randn(M, a + b, dtype=dtype), randn(N, a + b, seed=1, dtype=dtype)
    out = torch.full((M, N), NAN, device=device)
    _scores[(1,)](q.to(device), k.to(device), out, "ieee", upcast(dtype), M, N, a, b)
    budget = within_budget(out.cpu(), q.double() @ k.double().T, q.float() @ k.float().T, eps=2e-6)
    assert budget.ok, budget


def run_weighted(p, v, acc, guarded, device):
    """(acc + p @ v, whether NaN was found); v of 32 and 16 columns."""
    out, found = torch.full((M, 48), 7.0, device=device), torch.full((1,), -1, dtype=torch.int32, device=device)
    tensors = (t.to(device) for t in (p, v, acc))
    _weighted[(1,)](*tensors, out, found, "ieee", upcast(p.dtype), guarded, M, K, 32, 16)
    return out.cpu(), found.item()


@DTYPES
@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_weighted_is_the_product_of_every_piece(dtype, guarded, device):
    p, v, acc = randn(M, K, dtype=dtype).abs(), randn(K, 48, seed=1, dtype=dtype), randn(M, 48, seed=2)
    out, found = run_weighted(p, v, acc, guarded, device)
    exact, low = acc.double() + p.double() @ v.double(), acc + p.float() @ v.float()
    budget = within_budget(out, exact, low, eps=2e-6)
    assert budget.ok, budget
    assert found == 0


@pytest.mark.parametrize("column", [0, 31, 32, 47])
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_poison_of_any_piece_shows_unless_guarded(value, column, device):
    """A key of weight 0 whose value is not finite: 0 * inf is NaN in the plain product."""
    p, v, acc = randn(M, K).abs(), randn(K, 48, seed=1), randn(M, 48, seed=2)
    p[:, 5], v[5, column] = 0.0, value
    out, found = run_weighted(p, v, acc, False, device)
    assert found == 1 and out[:, column].isnan().all()
    out, found = run_weighted(p, v, acc, True, device)
    v[5, column] = 0.0
    budget = within_budget(out, acc.double() + p.double() @ v.double(), acc + p @ v, eps=2e-6)
    assert budget.ok and found == 0, budget


def test_infinity_is_no_poison(device):
    p, v, acc = randn(M, K).abs() + 0.1, randn(K, 48, seed=1), randn(M, 48, seed=2)
    v[5, 40] = INF
    out, found = run_weighted(p, v, acc, False, device)
    assert found == 0 and (out[:, 40] == INF).all()


@DTYPES
@pytest.mark.parametrize("has_acc", [False, True], ids=["alone", "onto-acc"])
def test_dot(dtype, has_acc, device):
    """fp32 sums of exact products; fp32 operands in full precision (B50: not tf32)."""
    a, b, c = randn(M, K, dtype=dtype), randn(K, N, seed=1, dtype=dtype), randn(M, N, seed=2) * has_acc
    out = torch.full((M, N), NAN, device=device)
    _dot[(1,)](a.to(device), b.to(device), c.to(device), out, has_acc, "ieee", upcast(dtype), M, N, K)
    budget = within_budget(out.cpu(), c.double() + a.double() @ b.double(), c + a.float() @ b.float(), eps=2e-6)
    assert budget.ok, budget


def test_dot_upcast_changes_no_value(device):
    """Sums that fp32 holds exactly: with and without UPCAST every bit agrees (fp16, which the interpreter can do)."""
    a, b = (torch.randint(-8, 9, size, generator=torch.Generator().manual_seed(3)).half() for size in ((M, K), (K, N)))
    plain, raised = (torch.full((M, N), NAN, device=device) for _ in range(2))
    for out, up in ((plain, False), (raised, True)):
        _dot[(1,)](a.to(device), b.to(device), out, out, False, "ieee", up, M, N, K)
    assert torch.equal(plain, raised)
    assert torch.equal(plain.cpu(), a.float() @ b.float())


def rounding_cases():
    """Numbers at, just below and just above every kind of halfway point of bf16 and fp16, and the specials."""
    bits = []
    for top in (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x42FE, 0x477F, 0x7F7E, 0x7F7F, 0x7F80):
        for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
            bits += [top << 16 | low, 0x8000_0000 | top << 16 | low]
    for top in (0x3880_0000, 0x3300_0000, 0x3F80_0000, 0x477F_E000):  # fp16: smallest normal, denormal, 1, largest
        for low in (0, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001):
            bits += [top + low, 0x8000_0000 | top + low]
    specials = torch.tensor([0.0, -0.0, INF, -INF, NAN, 65504.0, 65519.9, 65520.0, 3.4028235e38, 1e-45, -1e-45])
    listed = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    spread = torch.randint(-(2**31), 2**31, (2048,), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    x = torch.cat([listed, specials, spread.view(torch.float32)])
    return torch.nn.functional.pad(x, (0, -x.numel() % 256))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_narrow_rounds_as_torch_does(dtype, device):
    """To nearest even, bit for bit: ties, denormals, the step from the largest number to inf, NaN."""
    x = rounding_cases()
    out = torch.zeros(x.shape, dtype=dtype, device=device)
    _narrow[(x.numel() // 256,)](x.to(device), out, upcast(dtype), 256)
    expected = x.to(dtype)
    nan = x.isnan()
    assert torch.equal(out.cpu()[nan].isnan(), expected[nan].isnan())  # a NaN stays one, its payload is free
    same = out.cpu().view(torch.int16) == expected.view(torch.int16)
    wrong = (~same & ~nan).nonzero().flatten()
    assert not len(wrong), [(x[i].item(), out[i].item(), expected[i].item()) for i in wrong[:3].tolist()]


def test_narrow_leaves_fp32_alone(device):
    x = rounding_cases()
    out = torch.zeros(x.shape, device=device)
    _narrow[(x.numel() // 256,)](x.to(device), out, upcast(torch.float32), 256)
    torch.testing.assert_close(out.cpu(), x, rtol=0, atol=0, equal_nan=True)


def run_guarded(p, v, acc, device):
    out = torch.full((M, N), 7.0, device=device)
    _guarded[(1,)](p.to(device), v.to(device), acc.to(device), out, "ieee", upcast(p.dtype), M, N, K)
    return out.cpu()


def guarded_twin(p, v, acc, dtype):
    """Row by row over the keys of weight > 0 only, in plain IEEE arithmetic."""
    rows = []
    for row in range(M):
        used = p[row] > 0
        rows.append(acc[row].to(dtype) + p[row, used].to(dtype) @ v[used].to(dtype))
    return torch.stack(rows)


def guarded_inputs(dtype):
    """Weights of which row r uses the keys 0..r only; positive values, so that finite sums are far from 0."""
    p = randn(M, K, dtype=dtype).abs() + 0.01
    p[torch.arange(K)[None, :] > torch.arange(M)[:, None]] = 0.0
    return p, randn(K, N, seed=1, dtype=dtype), randn(M, N, seed=2)


@DTYPES
@pytest.mark.parametrize("value", [None, NAN, INF, -INF], ids=["finite", "nan", "inf", "-inf"])
def test_guarded_pv_weight_zero_adds_nothing(dtype, value, device):
    p, v, acc = guarded_inputs(dtype)
    if value is not None:
        v[M:] = value  # keys that no row uses
    out = run_guarded(p, v, acc, device)
    assert out.isfinite().all()
    budget = within_budget(
        out, guarded_twin(p, v, acc, torch.float64), guarded_twin(p, v, acc, torch.float32), eps=2e-6
    )
    assert budget.ok, budget


@DTYPES
def test_guarded_pv_positive_weight_is_ieee(dtype, device):
    """Each column another mixture at keys that some rows use: NaN, inf, -inf, and inf with -inf, which is NaN."""
    p, v, acc = guarded_inputs(dtype)
    v[3, 0] = NAN
    v[5, 1] = INF
    v[0, 2] = -INF
    v[2, 3], v[9, 3] = INF, -INF
    v[4, 4], v[6, 4] = -INF, NAN
    v[: M - 1, 5] = INF  # many of one kind must not carry into the count of another
    v[: M - 1, 6] = -INF
    v[: M - 1, 7] = NAN
    v[M:, 8] = torch.tensor([NAN, INF, -INF, NAN] * 4)
    out = run_guarded(p, v, acc, device)
    expected = guarded_twin(p, v, acc, torch.float64)
    budget = within_budget(out, expected, guarded_twin(p, v, acc, torch.float32), eps=2e-6)
    assert budget.ok, budget
    # The twin itself, in words:
    assert out[:3, 0].isfinite().all() and out[3:, 0].isnan().all()
    assert out[:5, 1].isfinite().all() and (out[5:, 1] == INF).all()
    assert (out[:, 2] == -INF).all()
    assert (out[2:9, 3] == INF).all() and out[9:, 3].isnan().all()
    assert (out[:, 5] == INF).all() and (out[:, 6] == -INF).all() and out[:, 7].isnan().all()
    assert out[:, 8].isfinite().all()


@DTYPES
def test_guarded_pv_smallest_weight_counts(dtype, device):
    """A weight far below 1 is a weight; in fp16 a denormal one. (fp32 and bf16 denormals may be flushed.)"""
    p, v, acc = guarded_inputs(dtype)
    p[:, 20] = torch.finfo(dtype).tiny / (4 if dtype == torch.float16 else 1)
    v[20, 0], v[20, 1] = NAN, -INF
    out = run_guarded(p, v, acc, device)
    assert out[:, 0].isnan().all() and (out[:, 1] == -INF).all()
    assert out[:, 2:].isfinite().all()
