"""The cold path of the forward: 64 rows computed once more, slowly, without two things that the fast path accepts.

The fused exponent is off when scores are huge, and a value of weight 0 still turns NaN or inf into NaN. Both show in
the result; then this takes over, as in `kernels/forward.py`: the difference to the pivot is taken first, and values
that are not finite are counted apart. It works from memory with the products of single warps, without shared memory
and barriers, and sweeps all keys once for every 16 columns of O: the fast path must not pay registers for it. So
rows, keys and columns are numbered `here`: the kernel of sm_100, which inlines this, had them prepared before its loop
over tiles, and the loops over columns unrolled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ....kernels.softmax import NEVER
from . import bounds, layouts, softmax
from .assembly import here

COLUMNS = gl.constexpr(16)  # of O in a sweep


@gluon.jit
def _scores(q_rows, q_inside, k_base, key, span, call, config):
    """(64, 16) raw, of the keys from `key` on, 16 columns of Q and K at a time."""
    A: gl.constexpr = layouts.small_operand(0, gl.num_ctas())
    B: gl.constexpr = layouts.small_operand(1, gl.num_ctas())
    keys = key + here(gl.arange(0, 16, gl.SliceLayout(0, B)))
    k_rows = k_base + keys.to(gl.int64) * call.k.row_stride
    s = gl.zeros([64 * gl.num_ctas(), 16], gl.float32, layouts.small(gl.num_ctas()))
    for first in range(0, here(config.D), 16):
        q_cols = first + here(gl.arange(0, 16, gl.SliceLayout(0, A)))
        k_cols = first + here(gl.arange(0, 16, gl.SliceLayout(1, B)))
        q = gl.load(q_rows[:, None] + q_cols[None, :], mask=q_inside[:, None] & (q_cols < config.D)[None, :], other=0.0)
        k_inside = (keys < span.kv_len)[None, :] & (k_cols < config.D)[:, None]
        k = gl.load(k_rows[None, :] + k_cols[:, None], mask=k_inside, other=0.0)
        s = mma_v2(q, k, s)
    if config.NEGATE:
        s = -s
    if config.SOFTCAP:
        s = softmax.capped(s, call.modifiers)
    return s


@gluon.jit
def _values(v_base, key, first, span, call, config):
    """(16, COLUMNS) of V, from key `key` and column `first` on; keys past the end are 0."""
    B: gl.constexpr = layouts.small_operand(1, gl.num_ctas())
    keys = key + here(gl.arange(0, 16, gl.SliceLayout(1, B)))
    cols = first + here(gl.arange(0, COLUMNS, gl.SliceLayout(0, B)))
    rows = v_base + keys.to(gl.int64) * call.v.row_stride
    inside = (keys < span.kv_len)[:, None] & (cols < config.D_V)[None, :]
    return gl.load(rows[:, None] + cols[None, :], mask=inside, other=0.0)


@gluon.jit
def _add(acc, p, v):
    """acc + P V where a key of weight 0 adds nothing, whatever its value; see `products.guarded_pv`, whose counts these
    are (16 keys, so each stays below 2**8)."""
    A: gl.constexpr = layouts.small_operand(0, gl.num_ctas())
    v32 = v.to(gl.float32)
    finite = v32 * 0.0 == 0.0
    acc = mma_v2(gl.convert_layout(p.to(v.dtype), A), gl.where(finite, v32, 0.0).to(v.dtype), acc)
    kind = gl.where(v32 == float("inf"), 0.00390625, gl.where(v32 == float("-inf"), 1.0, 256.0))
    weight = gl.convert_layout(gl.where(p > 0.0, 1.0, 0.0).to(v.dtype), A)
    counts = mma_v2(weight, gl.where(finite, 0.0, kind).to(v.dtype), gl.zeros_like(acc))
    nans = gl.floor(counts * 0.00390625)
    negative = gl.floor(counts - nans * 256.0)
    positive = counts - nans * 256.0 - negative
    acc += gl.where(positive > 0.0, float("inf"), 0.0)
    acc += gl.where(negative > 0.0, float("-inf"), 0.0)
    return acc + gl.where(nans > 0.0, float("nan"), 0.0)


@gluon.jit
def _sweep(q_rows, q_inside, bases, row, column, keys, span, call, config):
    """m, l (64,) and COLUMNS columns of O, from `column` on, over the keys [begin, end)."""
    L: gl.constexpr = layouts.small(gl.num_ctas())
    begin, end = keys
    k_base, v_base = bases
    m = gl.full([64 * gl.num_ctas()], NEVER, gl.float32, gl.SliceLayout(1, L))
    l = gl.full([64 * gl.num_ctas()], 0.0, gl.float32, gl.SliceLayout(1, L))
    acc = gl.zeros([64 * gl.num_ctas(), COLUMNS], gl.float32, L)
    for key in range(begin, end, 16):
        s = _scores(q_rows, q_inside, k_base, key, span, call, config)
        s = softmax.hide(s, row, key, span, config)
        top = gl.maximum(m, gl.max(s, 1))
        m_new = gl.where((top - m) * call.scale_log2 > call.threshold, top, m)
        alpha = gl.exp2((m - m_new) * call.scale_log2)
        p = gl.exp2((s - m_new[:, None]) * call.scale_log2)
        l = l * alpha + gl.sum(p, 1)
        v = _values(v_base, key, column, span, call, config)
        acc = _add(acc * alpha[:, None], p, v)
        m = m_new
    return m, l, acc


@gluon.jit
def _slab(view, batch, head, row):
    base = view.ptr + gl.cast(batch, gl.int64) * view.batch_stride + gl.cast(head, gl.int64) * view.head_stride
    return base + gl.cast(row, gl.int64) * view.row_stride


@gluon.jit
def rows_of(view, slab, span, query, head):
    """Where the rows of a tile begin; head counts from the tile's first. In 64 bits, as `tile_pointers` of
    `kernels/memory.py`."""
    base = _slab(view, slab, span.head, span.q_row)
    return base + head.to(gl.int64) * view.head_stride + query.to(gl.int64) * view.row_stride


@gluon.jit
def _rows(span, row, L: gl.constexpr, call, config):
    """`bounds.rows` of the 64 rows from `row` on, numbered `here`."""
    own = here(gl.arange(0, 64 * gl.num_ctas(), L))
    return bounds.numbered(span, row, own, call, config)


@gluon.jit
def _store_lse(lse, row, span, call, config):
    """Of the 64 rows from `row` on. They are numbered anew: kept through the sweeps the numbers take registers that
    sm_100 lacks with two bounds at head dim 128, 36 bytes of spills on Triton 3.9. Where O is stored too: 20 to 80 on
    3.6."""
    query, head, inside = _rows(span, row, gl.SliceLayout(1, layouts.small(gl.num_ctas())), call, config)
    gl.store(softmax.lse_row(call, span) + head * call.lse_rows + query, lse, mask=inside)


@gluon.jit
def rewrite_rows(span, row, keys, call, config):
    """O and LSE of the 64 rows from `row` on, of the keys [begin, end). Must not use shared memory or barriers: in a
    function these are those of the whole CTA."""
    L: gl.constexpr = layouts.small(gl.num_ctas())
    kv_head = span.head // call.group
    bases = _slab(call.k, span.slab, kv_head, span.k_row), _slab(call.v, span.slab, kv_head, span.k_row)
    A: gl.constexpr = layouts.small_operand(0, gl.num_ctas())
    query, head, q_inside = _rows(span, row, gl.SliceLayout(1, A), call, config)
    q_rows = rows_of(call.q, span.slab, span, query, head)
    query, head, inside = _rows(span, row, gl.SliceLayout(1, L), call, config)
    out_rows = rows_of(call.out, span.out_slab, span, query, head)
    for column in range(0, here(config.D_V), COLUMNS):
        m, l, acc = _sweep(q_rows, q_inside, bases, row, column, keys, span, call, config)
        factor, lse = softmax.finish(m, l, call.scale_log2, call, span, config)
        cols = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, L))
        gl.store(out_rows[:, None] + cols[None, :], (acc * factor[:, None]).to(call.out.ptr.dtype.element_ty),
                 mask=inside[:, None] & (cols < config.D_V)[None, :])
        if config.STORE_LSE:
            _store_lse(lse, row, span, call, config)


@gluon.jit(noinline=True)
def rewrite(i, call, config, W: gl.constexpr):
    """O and LSE of consumer W's 64 rows of this CTA's i-th tile.

    A function of its own: inlined, it has the compiler prepare its addresses before the loop over tiles and spill them,
    32 to 88 bytes at 160 registers. One for each consumer: where two shared one, and gave it the keys, they spilled 32
    to 128 bytes.
    """
    span = bounds.tile(i, call, config)
    row = bounds.own_row(span, config, W)
    first, stop = bounds.key_blocks(span, config)
    keys = first * config.BLOCK_N, gl.minimum(stop * config.BLOCK_N, span.kv_len)
    rewrite_rows(span, row, keys, call, config)
