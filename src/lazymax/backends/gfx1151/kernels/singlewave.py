"""The seed of the gfx1151 kernels: one wave of 32 lanes computes 16 query rows, 16 keys at a time.

S = Q K^T in WMMA's accumulator layout: the 16 lanes of a half-wave hold 16 keys of a row, a lane holds 8 rows. Row
maximum and sum go across the lanes; P comes out one key a lane but goes into the next product one row a lane, so it
takes a trip through LDS; V's fragment is one column a lane, a gather of 2-byte elements down the keys. These three are
what the transposed kernel does away with. This one stays as the reference to beat, in two forms: plain, and with the
scores of the next tile of keys computed before the softmax of this one.

The maths is that of `kernels/softmax.py`, spelled in Gluon.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3, rdna3

from ....kernels import bounds, softmax
from . import guarded

TILE = gl.constexpr(16)  # edge of a WMMA tile: query rows of a program, keys of a tile, columns of a fragment
PAD = gl.constexpr(8)  # elements behind each row of P in LDS: rows of 48 bytes, read 16 at a time, meet no bank twice

kv_range = gluon.jit(bounds.kv_range.fn)  # scalars only: its source compiles as Gluon, too


class SinglewaveConfig(NamedTuple):
    """What one build of the kernel is specialised for; every field a `constexpr`."""

    D: Any  # head dimension of q, k, v and out: a multiple of 16
    GROUP: Any  # query heads per key head
    HAS_FIRST: Any  # the band has a left bound (window)
    HAS_LAST: Any  # the band has a right bound (causal, window)
    NEGATE: Any  # the scale is negative: scores change sign, so that the kernel's own scale is positive
    STORE_LSE: Any
    PIPELINED: Any  # compute the scores of the next tile before the softmax of this one
    W: Any  # accumulator layout, `compat.gluon.wmma_layout(1)`
    GUARD: Any  # `guarded.Guard`, for one head


class Span(NamedTuple):
    """The query rows of a program and the keys that they may see."""

    batch: Any
    head: Any
    kv_head: Any
    first_row: Any
    q_len: Any
    kv_len: Any
    first_offset: Any  # of the band, see `bounds`
    last_offset: Any
    stop: Any  # first key that none of the rows sees, nor any behind it


@gluon.jit
def _row_pointer(view, batch, head, row):
    """Pointer to a row of one head. 64-bit, uniform: what a lane adds to it stays inside the tile, in 32 bits."""
    base = view.ptr + gl.cast(batch, gl.int64) * view.batch_stride + gl.cast(head, gl.int64) * view.head_stride
    return base + gl.cast(row, gl.int64) * view.row_stride


@gluon.jit
def _load_q(q, span, config):
    """16 rows of Q as a tuple of left operands of 16 columns, one row a lane (tensors must be powers of two, D need
    not). Rows from q_len on are not read: they, and with them their rows of S, P and O, are undefined and not stored.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, config.W, 16)
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, A))[:, None]
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, A))[None, :]
    base = _row_pointer(q, span.batch, span.head, span.first_row)
    offsets = row * gl.cast(q.row_stride, gl.int32) + column
    mask = span.first_row + row < span.q_len
    fragments = ()
    for i in gl.static_range(config.D // TILE):
        fragments = fragments + (cdna3.buffer_load(base + TILE * i, offsets, mask=mask),)
    return fragments


@gluon.jit
def _product(q_tile, k, span, n, config):
    """q @ k^T for keys [n, n + 16), (16 queries, 16 keys) in fp32. A lane reads the row of one key, 16 bytes at a time.
    Keys from `stop` on are not read, their scores undefined: `other=0` would cost a select for each register.

    Each load stands beside its product: with all loads in front, the pipelined form spills up to 27 registers at D=128.
    """
    B: gl.constexpr = gl.DotOperandLayout(1, config.W, 16)
    key = gl.arange(0, TILE, layout=gl.SliceLayout(0, B))[None, :]
    column = gl.arange(0, TILE, layout=gl.SliceLayout(1, B))[:, None]
    base = _row_pointer(k, span.batch, span.kv_head, n)
    offsets = key * gl.cast(k.row_stride, gl.int32) + column
    s = gl.zeros([TILE, TILE], gl.float32, layout=config.W)
    for i in gl.static_range(config.D // TILE):
        k_fragment = cdna3.buffer_load(base + TILE * i, offsets, mask=n + key < span.stop)
        s = rdna3.wmma(q_tile[i], k_fragment, s)
    return s


@gluon.jit
def _scores(q_tile, k, span, n, config):
    """Raw scores of keys [n, n + 16) in the sign of the kernel's positive scale, (16 queries, 16 keys); -inf for keys
    outside the length or the row's band."""
    s = _product(q_tile, k, span, n, config)
    if config.NEGATE:
        s = -s
    row = (span.first_row + gl.arange(0, TILE, layout=gl.SliceLayout(1, config.W)))[:, None]
    key = (n + gl.arange(0, TILE, layout=gl.SliceLayout(0, config.W)))[None, :]
    last_key = span.kv_len - 1
    if config.HAS_LAST:
        last_key = gl.minimum(row + span.last_offset, last_key)
    visible = key <= last_key
    if config.HAS_FIRST:
        visible = visible & (key >= row + span.first_offset)
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _step(s, m, l, scale_log2, threshold):
    """Twin of `softmax.step`. m: (16,) raw pivot, raised only if the tile's maximum exceeds it by more than `threshold`
    log2 units; l: (16,) sum of the probabilities against m. Returns p, m, l and alpha, the factor by which what was
    accumulated so far shrinks.

    The sum crosses the lanes in every tile, as the seed's does. Kept a lane until the end, it would take 3 (Triton 3.9)
    to 12 % (3.6) off the price of the loop at D=128.
    """
    m_block = gl.maximum(m, gl.max(s, 1))
    m_new = gl.where((m_block - m) * scale_log2 > threshold, m_block, m)
    alpha = gl.exp2((m - m_new) * scale_log2)
    p = gl.exp2(s * scale_log2 - gl.maximum(m_new * scale_log2, softmax.NEVER)[:, None])
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _weighted(p, p_shared, v, span, n, alpha, acc, config):
    """acc * alpha + p @ v for keys [n, n + 16). acc: a tuple of (16 queries, 16 columns) fragments in fp32.

    P goes to LDS one key a lane and comes back one row a lane. V has one column a lane: 16 loads of 2 bytes for each
    product. In place of keys from `stop` on the last one before is read again. p is 0 there, and that key is in the
    product anyway: 0 meets no NaN that it would not meet otherwise, and no value needs a select.

    The multiply by alpha is unconditional: a branch round it spills registers (215 of them in the transposed kernel).
    """
    A: gl.constexpr = gl.DotOperandLayout(0, config.W, 16)
    B: gl.constexpr = gl.DotOperandLayout(1, config.W, 16)
    p_shared.store(p.to(p_shared.dtype))
    p_tile = p_shared.load(A)
    key = gl.arange(0, TILE, layout=gl.SliceLayout(1, B))[:, None]
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, B))[None, :]
    base = _row_pointer(v, span.batch, span.kv_head, n)
    offsets = gl.minimum(key, span.stop - 1 - n) * gl.cast(v.row_stride, gl.int32) + column
    result = ()
    for i in gl.static_range(config.D // TILE):
        v_fragment = cdna3.buffer_load(base + TILE * i, offsets)
        result = result + (rdna3.wmma(p_tile, v_fragment, acc[i] * alpha[:, None]),)
    return result


@gluon.jit
def _store(out, lse, span, m, l, acc, scale_log2, config):
    """Twin of `softmax.finish`, and the stores. A row that saw no key gives 0 and -inf. One reciprocal per row."""
    empty = l == 0.0
    inverse = 1.0 / gl.where(empty, 1.0, l)
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, config.W))
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, config.W))[None, :]
    inside = span.first_row + row < span.q_len
    base = _row_pointer(out, span.batch, span.head, span.first_row)
    offsets = row[:, None] * gl.cast(out.row_stride, gl.int32) + column
    for i in gl.static_range(config.D // TILE):
        tile = (acc[i] * inverse[:, None]).to(out.ptr.dtype.element_ty)
        cdna3.buffer_store(tile, base + TILE * i, offsets, mask=inside[:, None])
    if config.STORE_LSE:
        natural = gl.maximum((m * softmax.LN2) * scale_log2, softmax.NEVER)
        value = natural + gl.log2(gl.where(empty, 1.0, l)) * softmax.LN2
        slab = gl.cast(span.batch * gl.num_programs(0) + span.head, gl.int64)
        pointers = lse + slab * span.q_len + span.first_row + row
        gl.store(pointers, gl.where(empty, float("-inf"), value), mask=inside)


@gluon.jit(do_not_specialize=["q_len", "kv_len", "first_offset", "last_offset"])
def attention_forward_singlewave(
    q, k, v, out, lse, scale_log2, threshold, q_len, kv_len, first_offset, last_offset, config
):
    """16 query rows of one head: out = softmax(scale * q @ k^T inside the band) @ v. Grid: (q_heads,
    cdiv(q_len, 16), batch); num_warps=1.

    q, k, v, out: `memory.View`, fp16 or bf16. lse: contiguous fp32 (batch, q_heads, q_len), natural log. scale_log2:
    |scale| times log2(e), not 0. threshold: of the lazy rescale, in log2 units. Query i sees the keys from
    i + first_offset to i + last_offset, both inclusive, below kv_len. config: `SinglewaveConfig`.
    """
    W: gl.constexpr = config.W
    head = gl.program_id(0)
    slot = gl.program_id(1)
    if config.HAS_LAST:
        slot = gl.num_programs(1) - 1 - slot  # the longest first
    first_row = slot * TILE
    last_row = gl.minimum(first_row + TILE, q_len) - 1
    start, _, _, stop = kv_range(
        first_row, last_row, kv_len, first_offset, last_offset, TILE, config.HAS_FIRST, config.HAS_LAST
    )
    span = Span(gl.program_id(2), head, head // config.GROUP, first_row, q_len, kv_len, first_offset, last_offset, stop)

    q_tile = _load_q(q, span, config)
    p_layout: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[TILE, PAD]], [TILE, TILE], [1, 0])
    p_shared = gl.allocate_shared_memory(v.ptr.dtype.element_ty, [TILE, TILE], p_layout)
    m = gl.full([TILE], softmax.NEVER, gl.float32, layout=gl.SliceLayout(1, W))
    l = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, W))
    acc = ()
    for _ in gl.static_range(config.D // TILE):
        acc = acc + (gl.zeros([TILE, TILE], gl.float32, layout=W),)

    if config.PIPELINED:
        s = _scores(q_tile, k, span, start, config)
    for n in range(start, stop, TILE):
        if config.PIPELINED:
            # Behind the last tile, a product that reads nothing and nobody uses: less code than a second body.
            s_next = _scores(q_tile, k, span, n + TILE, config)
        else:
            s = _scores(q_tile, k, span, n, config)
        p, m, l, alpha = _step(s, m, l, scale_log2, threshold)
        acc = _weighted(p, p_shared, v, span, n, alpha, acc, config)
        if config.PIPELINED:
            s = s_next
    _store(out, lse, span, m, l, acc, scale_log2, config)
    if guarded.suspect(m, l, acc, scale_log2, 1) > 0:
        strides = (gl.cast(k.row_stride, gl.int64), gl.cast(v.row_stride, gl.int64))
        band = guarded.band_of(first_row, kv_len, first_offset, last_offset, config.GUARD)
        guarded.rewrite(q, _row_pointer(k, span.batch, span.kv_head, 0), _row_pointer(v, span.batch, span.kv_head, 0),
                        strides, out, lse, (span.batch, head, first_row), q_len, (start, stop, kv_len), band,
                        scale_log2, threshold, config.GUARD)
