"""The two matrix products: S = Q K^T and O += P V, accumulated in fp32."""

import triton
import triton.language as tl

from . import memory


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b (acc may be None). PRECISION: "ieee" or "tf32", for fp32 operands. UPCAST: multiply as fp32, which
    changes no value of a 16-bit operand; for Triton's interpreter, see `tritons.interpreter_needs_upcast`."""
    if UPCAST:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        product = tl.dot(a, b, acc, input_precision=PRECISION)
    return product


@triton.jit
def scores(q, k, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """q @ k^T, raw, of tiles that are tuples of column pieces."""
    s = dot(q[0], k[0].T, None, PRECISION, UPCAST)
    for i in tl.static_range(1, len(q)):
        s = dot(q[i], k[i].T, s, PRECISION, UPCAST)
    return s


@triton.jit
def scores_anew(q, k, Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr, Q_CHECK: tl.constexpr, K_CHECK: tl.constexpr, config,
                N_COLS: tl.constexpr, PIECES):
    """The same of `memory.Rows`, piece by piece, so that one of each is in registers at a time."""
    s = dot(memory.load_piece(q, Q_ROWS, Q_CHECK, config, N_COLS, PIECES[0]),
            memory.load_piece(k, K_ROWS, K_CHECK, config, N_COLS, PIECES[0]).T, None, config.PRECISION, config.UPCAST)
    for i in tl.static_range(1, len(PIECES)):
        s = dot(memory.load_piece(q, Q_ROWS, Q_CHECK, config, N_COLS, PIECES[i]),
                memory.load_piece(k, K_ROWS, K_CHECK, config, N_COLS, PIECES[i]).T, s, config.PRECISION, config.UPCAST)
    return s


@triton.jit
def weighted(p, v, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr, GUARDED: tl.constexpr):
    """acc + p @ v, v and acc tuples of column pieces."""
    result = ()
    for i in tl.static_range(len(v)):
        if GUARDED:
            result = result + (guarded_pv(p, v[i], acc[i], PRECISION, UPCAST),)
        else:
            result = result + (dot(p, v[i], acc[i], PRECISION, UPCAST),)
    return result


@triton.jit
def poisoned(acc):
    """1 if any element of the pieces is NaN, else 0."""
    found = tl.max((acc[0] != acc[0]).to(tl.int32))
    for i in tl.static_range(1, len(acc)):
        found = tl.maximum(found, tl.max((acc[i] != acc[i]).to(tl.int32)))
    return found


@triton.jit
def narrow(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """fp32 -> dtype, to nearest even. UPCAST: Triton's interpreter drops the low half of a bf16 instead of rounding
    (3.6 to 3.9), so the rounding is done on the bits before."""
    if UPCAST:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        y = (bits >> 16).to(tl.int16).to(dtype, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def guarded_pv(p, v, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc + p @ v in which a key of weight 0 adds nothing, even where its value is NaN or inf.

    The finite values go through the dot as ever. The others enter as three counts in one more dot, kept apart by
    factors of 2**8 (a block has at most 128 keys, see `Tile`, so each count stays below 2**8 and every sum is exact).
    """
    v32 = v.to(tl.float32)
    finite = v32 * 0.0 == 0.0
    acc = dot(p, tl.where(finite, v32, 0.0).to(v.dtype), acc, PRECISION, UPCAST)
    kind = tl.where(v32 == float("inf"), 0.00390625, tl.where(v32 == float("-inf"), 1.0, 256.0))
    weight = tl.where(p.to(tl.float32) > 0.0, 1.0, 0.0).to(v.dtype)
    counts = dot(weight, tl.where(finite, 0.0, kind).to(v.dtype), None, PRECISION, UPCAST)
    nans = tl.floor(counts * 0.00390625)
    negative = tl.floor(counts - nans * 256.0)
    positive = counts - nans * 256.0 - negative
    acc += tl.where(positive > 0.0, float("inf"), 0.0)
    acc += tl.where(negative > 0.0, float("-inf"), 0.0)
    return acc + tl.where(nans > 0.0, float("nan"), 0.0)
