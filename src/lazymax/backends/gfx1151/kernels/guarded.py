"""The cold path of the forward: a workgroup computed once more, slowly, without two things that the fast path accepts.

The fast exponent is off when scores are huge, and a value of 0 weight still turns NaN or inf into NaN. Both show in the
result; then this takes over, as in `kernels/forward.py`: the difference to the pivot is taken first, and values that
are not finite are counted apart. It sweeps all keys once for every 16 columns of O, so that it needs few registers.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import rdna3

from ....kernels.softmax import FUSED_LIMIT, LN2, NEVER


class Guard(NamedTuple):
    """What this file needs of a kernel's config, for a kernel whose config has other fields."""

    BLOCK_M: Any
    W: Any
    D: Any
    GROUP: Any
    HAS_FIRST: Any
    HAS_LAST: Any
    NEGATE: Any
    STORE_LSE: Any
    FRAGMENTS: Any


@gluon.jit
def band_of(first_row, kv_len, first_offset, last_offset, config):
    """First and last key that each row sees, (BLOCK_M,). Row = position * GROUP + head."""
    position = (first_row + gl.arange(0, config.BLOCK_M, layout=gl.SliceLayout(0, config.W))) // config.GROUP
    first = position + first_offset
    last = gl.zeros_like(position) + (kv_len - 1)
    if config.HAS_LAST:
        last = gl.minimum(last, position + last_offset)
    return first, last


@gluon.jit
def suspect(m, l, acc, scale_log2, AXIS: gl.constexpr):
    """1 if a row of the workgroup has huge scores, an overflown sum or a NaN, else 0. AXIS: of the columns in acc."""
    found = ((m > NEVER) & (gl.abs(m * scale_log2) > FUSED_LIMIT)) | (l - l != 0.0)
    bad = found.to(gl.int32)
    for i in gl.static_range(len(acc)):
        nan = gl.max((acc[i] != acc[i]).to(gl.int32), AXIS)
        bad = gl.maximum(bad, gl.convert_layout(nan, bad.type.layout))
    return gl.max(bad, 0)


@gluon.jit
def _scores(q_base, q_offset, q_inside, k_base, k_row_stride, n, kv_len, config):
    """S^T (16 keys from n on, BLOCK_M), raw, 16 columns of Q and K at a time."""
    A: gl.constexpr = gl.DotOperandLayout(0, config.W, 16)
    B: gl.constexpr = gl.DotOperandLayout(1, config.W, 16)
    key = n + gl.arange(0, 16, layout=gl.SliceLayout(1, A))
    k_offset = key.to(gl.int64) * k_row_stride
    s = gl.zeros([16, config.BLOCK_M], gl.float32, layout=config.W)
    for first in range(0, config.D, 16):
        k_column = first + gl.arange(0, 16, layout=gl.SliceLayout(0, A))
        q_column = first + gl.arange(0, 16, layout=gl.SliceLayout(1, B))
        k_inside = (key < kv_len)[:, None] & (k_column < config.D)[None, :]
        k = gl.load(k_base + k_offset[:, None] + k_column[None, :], mask=k_inside, other=0.0)
        q = gl.load(q_base + q_offset[None, :] + q_column[:, None],
                    mask=q_inside[None, :] & (q_column < config.D)[:, None], other=0.0)
        if config.NEGATE:
            q = -q
        s = rdna3.wmma(k, q, s)
    return s


@gluon.jit
def _values(v_base, v_row_stride, n, first, kv_len, config):
    """V^T (16 columns from `first` on, 16 keys from n on); keys past the end are 0."""
    A: gl.constexpr = gl.DotOperandLayout(0, config.W, 16)
    column = gl.arange(0, 16, layout=gl.SliceLayout(1, A))
    key = n + gl.arange(0, 16, layout=gl.SliceLayout(0, A))
    if config.FRAGMENTS:
        place = (first // 16 * 256 + (column % 8 * 2 + column // 8) * 8)[:, None]
        offset = place + (key // 16 * 16 * config.D + key % 16 // 8 * 128 + key % 8)[None, :].to(gl.int64)
    else:
        offset = (first + column)[:, None] + (key.to(gl.int64) * v_row_stride)[None, :]
    inside = (key < kv_len)[None, :] & (first + column < config.D)[:, None]
    return gl.load(v_base + offset, mask=inside, other=0.0)


@gluon.jit
def _add(acc, p, v, config):
    """acc + V^T P^T where a key of weight 0 adds nothing, whatever its value; see `products.guarded_pv`, whose counts
    these are (16 keys, so each stays below 2**8)."""
    B: gl.constexpr = gl.DotOperandLayout(1, config.W, 16)
    v32 = v.to(gl.float32)
    finite = v32 * 0.0 == 0.0
    acc = rdna3.wmma(gl.where(finite, v32, 0.0).to(v.dtype), gl.convert_layout(p.to(v.dtype), B), acc)
    kind = gl.where(v32 == float("inf"), 0.00390625, gl.where(v32 == float("-inf"), 1.0, 256.0))
    weight = gl.convert_layout(gl.where(p > 0.0, 1.0, 0.0).to(v.dtype), B)
    counts = rdna3.wmma(gl.where(finite, 0.0, kind).to(v.dtype), weight, gl.zeros_like(acc))
    nans = gl.floor(counts * 0.00390625)
    negative = gl.floor(counts - nans * 256.0)
    positive = counts - nans * 256.0 - negative
    acc += gl.where(positive > 0.0, float("inf"), 0.0)
    acc += gl.where(negative > 0.0, float("-inf"), 0.0)
    return acc + gl.where(nans > 0.0, float("nan"), 0.0)


@gluon.jit
def _sweep(q_base, q_offset, q_inside, k_base, v_base, strides, column, keys, band, scale_log2, threshold, config):
    """m, l (BLOCK_M,) and 16 columns of O^T, from `column` on, over all keys."""
    begin, end, kv_len = keys
    first, last = band
    k_row_stride, v_row_stride = strides
    m = gl.full([config.BLOCK_M], NEVER, gl.float32, layout=gl.SliceLayout(0, config.W))
    l = gl.full([config.BLOCK_M], 0.0, gl.float32, layout=gl.SliceLayout(0, config.W))
    acc = gl.zeros([16, config.BLOCK_M], gl.float32, layout=config.W)
    for n in range(begin, end, 16):
        s = _scores(q_base, q_offset, q_inside, k_base, k_row_stride, n, kv_len, config)
        key = n + gl.arange(0, 16, layout=gl.SliceLayout(1, config.W))[:, None]
        inside = key <= last[None, :]
        if config.HAS_FIRST:
            inside = inside & (key >= first[None, :])
        s = gl.where(inside, s, float("-inf"))
        top = gl.maximum(m, gl.max(s, 0))
        m_new = gl.where((top - m) * scale_log2 > threshold, top, m)
        alpha = gl.exp2((m - m_new) * scale_log2)
        p = gl.exp2((s - m_new[None, :]) * scale_log2)
        l = l * alpha + gl.sum(p, 0)
        acc = _add(acc * alpha[None, :], p, _values(v_base, v_row_stride, n, column, kv_len, config), config)
        m = m_new
    return m, l, acc


@gluon.jit
def rewrite(q, k_base, v_base, strides, out, lse, place, q_len, keys, band, scale_log2, threshold, config):
    """O and LSE of the workgroup once more. place: (batch, key head, first row)."""
    batch, kv_head, first_row = place
    GROUP: gl.constexpr = config.GROUP
    row = first_row + gl.arange(0, config.BLOCK_M, layout=gl.SliceLayout(0, gl.DotOperandLayout(1, config.W, 16)))
    q_offset = (row // GROUP).to(gl.int64) * q.row_stride + (row % GROUP).to(gl.int64) * q.head_stride
    q_base = q.ptr + gl.cast(batch, gl.int64) * q.batch_stride + gl.cast(kv_head, gl.int64) * GROUP * q.head_stride
    out_row = first_row + gl.arange(0, config.BLOCK_M, layout=gl.SliceLayout(0, config.W))
    out_inside = out_row < q_len * GROUP
    out_offset = (out_row // GROUP).to(gl.int64) * out.row_stride + (out_row % GROUP).to(gl.int64) * out.head_stride
    base = out.ptr + gl.cast(batch, gl.int64) * out.batch_stride + gl.cast(kv_head, gl.int64) * GROUP * out.head_stride
    for column in range(0, config.D, 16):
        m, l, acc = _sweep(q_base, q_offset, row < q_len * GROUP, k_base, v_base, strides, column, keys, band,
                           scale_log2, threshold, config)
        empty = l == 0.0
        o = acc * (1.0 / gl.where(empty, 1.0, l))[None, :]
        columns = column + gl.arange(0, 16, layout=gl.SliceLayout(1, config.W))
        gl.store(base + out_offset[None, :] + columns[:, None], o.to(out.ptr.dtype.element_ty),
                 mask=out_inside[None, :] & (columns < config.D)[:, None])
        if config.STORE_LSE:
            natural = gl.maximum((m * LN2) * scale_log2, NEVER)
            value = gl.where(empty, float("-inf"), natural + gl.log2(gl.where(empty, 1.0, l)) * LN2)
            head = (gl.cast(batch, gl.int64) * gl.num_programs(0) + kv_head) * GROUP
            gl.store(lse + (head + out_row % GROUP) * q_len + out_row // GROUP, value, mask=out_inside)
