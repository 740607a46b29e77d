"""The forward for RDNA 3's WMMA, in Gluon: everything transposed, S^T = K Q^T and O^T = V^T P^T.

With queries on the lanes a row of the softmax lies in one lane and its twin in the other half-wave: the maximum is a
chain of v_max3 and one exchange, pivot and sum are one register, and P becomes the operand of the second product
without LDS and without a barrier. One workgroup holds the query heads of one key head (row = position * GROUP + head),
so that K and V pass once through LDS for all of them.

The maths is that of `kernels/softmax.py`; what is different is said where it is. Prices: docs/notes/gfx1151.md.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3, rdna3

from ....kernels.softmax import LN2, NEVER
from . import assembly, guarded, layouts, staging

# P is cut to 16 bits, not rounded: one instruction for two. A cut takes 0.7213 half units in the last place on average
# (over mantissas as exponentials have them); the exponent makes P larger by as much, the sum is made smaller again.
HALF_UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
MEAN_CUT = 0.7213


class Config(NamedTuple):
    """What one build is specialised for; every field a `gl.constexpr`."""

    BLOCK_M: Any  # rows of a workgroup: positions times GROUP
    BLOCK_N: Any  # keys of a block
    WAVES: Any
    W: Any  # accumulator layout, see compat/gluon.py
    PIECES: Any  # of the head dimension: (first column, columns), powers of two
    D: Any
    GROUP: Any  # query heads per key head
    HAS_FIRST: Any  # the band has a left bound
    HAS_LAST: Any  # the band has a right bound
    NEGATE: Any  # the scale is negative: Q changes sign
    STORE_LSE: Any
    BF16: Any
    CUT: Any  # log2 of what the exponent makes up for the cut of P
    ASM: Any  # with inline assembly, see assembly.py
    LAZY: Any  # the rescale is jumped over where no row needs it; needs ASM
    FRAGMENTS: Any  # V comes in fragment order, see fragments.py
    VALUE_LDS: Any  # V through LDS; else every wave reads its fragments from memory
    QUERY_LDS: Any  # Q stays in LDS instead of registers
    PREFETCH: Any  # the next block is loaded into registers before this one is used
    PRIORITY: Any  # a wave in its softmax yields to those in their products


@gluon.jit
def _scores(q, k_tiles, config):
    """S^T of a block, raw: a tile (16, BLOCK_M) for each 16 keys."""
    A: gl.constexpr = gl.DotOperandLayout(0, config.W, 16)
    B: gl.constexpr = gl.DotOperandLayout(1, config.W, 16)
    s = ()
    for _ in gl.static_range(config.BLOCK_N // 16):
        s = s + (gl.zeros([16, config.BLOCK_M], gl.float32, layout=config.W),)
    for i in gl.static_range(len(config.PIECES)):
        memory = k_tiles[i][2]
        if config.QUERY_LDS:  # 16 columns at a time, so that Q is read once and not held
            for d in gl.static_range(config.PIECES[i][1] // 16):
                q_part = q[i].slice(16 * d, 16, 0).load(B)
                more = ()
                for j in gl.static_range(config.BLOCK_N // 16):
                    k_part = memory.slice(16 * j, 16, 0).slice(16 * d, 16, 1).load(A)
                    more = more + (rdna3.wmma(k_part, q_part, s[j]),)
                s = more
        else:
            more = ()
            for j in gl.static_range(config.BLOCK_N // 16):
                more = more + (rdna3.wmma(memory.slice(16 * j, 16, 0).load(A), q[i], s[j]),)
            s = more
    return s


@gluon.jit
def _hide_by_select(s, first, last, config):
    """As below, for the twin without assembly."""
    hidden = ()
    for j in gl.static_range(config.BLOCK_N // 16):
        key = 16 * j + staging.sigma(gl.arange(0, 16, layout=gl.SliceLayout(1, config.W)))[:, None]
        inside = key <= last[None, :]
        if config.HAS_FIRST:
            inside = inside & (key >= first[None, :])
        hidden = hidden + (gl.where(inside, s[j], float("-inf")),)
    return hidden


@gluon.jit
def _hide(s, first, last, config):
    """-inf outside the band and the length. first, last: (BLOCK_M,) keys that each row sees, counted in the block."""
    TIED: gl.constexpr = assembly.mask_constraints()
    half = ((gl.arange(0, 16, layout=gl.SliceLayout(1, config.W)) & 1) * 8)[:, None]  # a lane's first key
    hidden = ()
    for j in gl.static_range(config.BLOCK_N // 16):
        tile = gl.inline_asm_elementwise(assembly.mask(16 * j, False), TIED, [s[j], last[None, :] - half],
                                         dtype=gl.float32, is_pure=True, pack=8)
        if config.HAS_FIRST:
            tile = gl.inline_asm_elementwise(assembly.mask(16 * j, True), TIED, [tile, first[None, :] - half],
                                             dtype=gl.float32, is_pure=True, pack=8)
        hidden = hidden + (tile,)
    return hidden


@gluon.jit
def _block_maximum(s, config):
    """(BLOCK_M,) raw maximum of a block: in the lane first, then over the two halves."""
    top = gl.max(s[0].reshape([8, 2, config.BLOCK_M]), 0)
    for j in gl.static_range(1, config.BLOCK_N // 16):
        top = gl.maximum(top, gl.max(s[j].reshape([8, 2, config.BLOCK_M]), 0))
    return gl.convert_layout(gl.max(top, 0), gl.SliceLayout(0, config.W))


@gluon.jit
def _rescale_tile(acc, alpha, COLS: gl.constexpr, config):
    HELD: gl.constexpr = COLS // 2 * (config.BLOCK_M // (16 * config.WAVES))  # accumulators of a lane
    COUNT: gl.constexpr = HELD if HELD < 64 else 64
    factor = gl.maximum(alpha, 0.0)[None, :]  # so that no assembly reads a transcendental result
    return gl.inline_asm_elementwise(assembly.rescale(COUNT), assembly.rescale_constraints(COUNT), [acc, factor],
                                     dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def _rescale(acc, alpha, config):
    """acc times alpha; LAZY: jumped over where every alpha of the wave is 1."""
    scaled = ()
    for i in gl.static_range(len(config.PIECES)):
        if config.LAZY:
            scaled = scaled + (_rescale_tile(acc[i], alpha, config.PIECES[i][1], config),)
        else:
            scaled = scaled + (acc[i] * alpha[None, :],)
    return scaled


@gluon.jit
def _narrow(p, config):
    """P to 16 bits: cut, two in an instruction; rounded in the twin without assembly."""
    if not config.ASM:
        narrow = p.to(gl.bfloat16 if config.BF16 else gl.float16)
    elif config.BF16:
        narrow = (p.to(gl.int32, bitcast=True) >> 16).to(gl.int16)
    else:
        narrow = p.to(gl.float16, fp_downcast_rounding="rtz")
    return narrow


@gluon.jit
def _halves_sum(x, BLOCK_M: gl.constexpr):
    """(2, BLOCK_M) sums over the 8 keys that each half-wave holds of a tile (16, BLOCK_M)."""
    return gl.sum(x.reshape([8, 2, BLOCK_M]), 0)


@gluon.jit
def _probabilities(s, m, l, scale_log2, config):
    """P of a block as operands B in the keys' own order, and l with them added (one sum for each half-wave)."""
    B: gl.constexpr = gl.DotOperandLayout(1, config.W, 16)
    shift = config.CUT - gl.maximum(m * scale_log2, NEVER)
    p = ()
    for j in gl.static_range(config.BLOCK_N // 16):
        like = gl.zeros_like(s[j])
        probability = gl.exp2(gl.fma(s[j], like + scale_log2, like + shift[None, :]))
        l += _halves_sum(probability, config.BLOCK_M)
        narrow = _narrow(probability, config)
        narrow = narrow.reshape([8, 2, config.BLOCK_M]).permute([1, 0, 2]).reshape([16, config.BLOCK_M])
        narrow = gl.convert_layout(narrow, B)
        if config.BF16 and config.ASM:
            narrow = narrow.to(gl.bfloat16, bitcast=True)
        p = p + (narrow,)
    return p, l


@gluon.jit
def _add_values(acc, p, v_tiles, pointer, config):
    """O^T += V^T P^T."""
    A: gl.constexpr = gl.DotOperandLayout(0, config.W, 16)
    result = ()
    for i in gl.static_range(len(config.PIECES)):
        total = acc[i]
        for j in gl.static_range(config.BLOCK_N // 16):
            if config.VALUE_LDS:
                value = v_tiles[i][2].slice(j * config.PIECES[i][1], config.PIECES[i][1], 0).load(A)
            else:
                value = cdna3.buffer_load(pointer + 16 * j * config.D, v_tiles[i][0])
            total = rdna3.wmma(value, p[j], total)
        result = result + (total,)
    return result


@gluon.jit
def _priority(x, LEVEL: gl.constexpr):
    """`s_setprio` where x is ready."""
    return gl.inline_asm_elementwise("s_setprio 1" if LEVEL else "s_setprio 0", "=v,0", [x], dtype=gl.float32,
                                     is_pure=False, pack=1)


@gluon.jit
def _softmax(s, m, l, acc, scale_log2, threshold, config):
    """`softmax.step` on transposed tiles; P in 16 bits, l as a sum for each half-wave."""
    top = gl.maximum(m, _block_maximum(s, config))
    if config.PRIORITY:
        top = _priority(top, 1)
    m_new = gl.where((top - m) * scale_log2 > threshold, top, m)
    alpha = gl.exp2((m - m_new) * scale_log2)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(0, l.type.layout))[None, :]
    acc = _rescale(acc, alpha, config)
    p, l = _probabilities(s, m_new, l, scale_log2, config)
    if config.PRIORITY:
        l = _priority(l, 0)
    return p, m_new, l, acc


@gluon.jit
def _key_range(first_row, q_len, kv_len, first_offset, last_offset, config):
    """Keys [begin, end) that the rows of this workgroup can see; begin is a multiple of BLOCK_N."""
    begin = 0 * kv_len
    end = kv_len
    if config.HAS_LAST:
        last_position = gl.minimum((first_row + config.BLOCK_M - 1) // config.GROUP, q_len - 1)
        end = gl.minimum(end, gl.maximum(last_position + last_offset + 1, 0))
    if config.HAS_FIRST:
        begin = gl.minimum(gl.maximum(first_row // config.GROUP + first_offset, 0), end)
        begin = begin // config.BLOCK_N * config.BLOCK_N
    return begin, end


@gluon.jit
def _sweep(q, k_tiles, v_tiles, k_ptr, v_ptr, strides, band, keys, scale_log2, threshold, config):
    """All key blocks of the workgroup: m (BLOCK_M,), l (2, BLOCK_M), acc a tile for each piece of O^T."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    first, last = band
    begin, end, kv_len = keys
    k_step, v_step = strides
    m = gl.full([config.BLOCK_M], NEVER, gl.float32, layout=gl.SliceLayout(0, config.W))
    l = _halves_sum(gl.zeros([16, config.BLOCK_M], gl.float32, layout=config.W), config.BLOCK_M)
    acc = ()
    for i in gl.static_range(len(config.PIECES)):
        acc = acc + (gl.zeros([config.PIECES[i][1], config.BLOCK_M], gl.float32, layout=config.W),)
    k_ptr += begin * k_step
    v_ptr += begin * v_step
    if config.PREFETCH:
        k_in, v_in = staging.fetch(k_ptr, v_ptr, k_tiles, v_tiles, kv_len - begin, config)
    for n in range(begin, end, BLOCK_N):
        if not config.PREFETCH:
            k_in, v_in = staging.fetch(k_ptr, v_ptr, k_tiles, v_tiles, kv_len - n, config)
        staging.keep(k_tiles, v_tiles, k_in, v_in, config)
        if config.PREFETCH:
            ahead = gl.where(n + BLOCK_N < end, BLOCK_N, 0)
            k_in, v_in = staging.fetch(k_ptr + ahead * k_step, v_ptr + ahead * v_step, k_tiles, v_tiles,
                                     kv_len - n - ahead, config)
        s = _scores(q, k_tiles, config)
        if config.ASM:
            s = _hide(s, first - n, last - n, config)
        else:
            s = _hide_by_select(s, first - n, last - n, config)
        p, m, l, acc = _softmax(s, m, l, acc, scale_log2, threshold, config)
        acc = _add_values(acc, p, v_tiles, v_ptr, config)
        k_ptr += BLOCK_N * k_step
        v_ptr += BLOCK_N * v_step
    return m, l, acc


@gluon.jit
def _store_tile(out, base, first_row, n_rows, o, FIRST: gl.constexpr, COLS: gl.constexpr, config):
    """Columns [FIRST, FIRST + COLS) of O^T, brought into their own order, 16 bytes at a time."""
    GROUP: gl.constexpr = config.GROUP
    L: gl.constexpr = layouts.out_store(COLS, config.BLOCK_M, config.WAVES)
    o = o.reshape([COLS // 16, 8, 2, config.BLOCK_M]).permute([0, 2, 1, 3]).reshape([COLS, config.BLOCK_M])
    o = gl.convert_layout(o.to(out.ptr.dtype.element_ty), L)
    row = first_row + gl.arange(0, config.BLOCK_M, layout=gl.SliceLayout(0, L))
    column = FIRST + gl.arange(0, COLS, layout=gl.SliceLayout(1, L))
    offset = (row // GROUP).to(gl.int64) * out.row_stride + (row % GROUP).to(gl.int64) * out.head_stride
    inside = (row < n_rows)[None, :]
    if config.D % 16 != 0:
        inside = inside & (column < config.D)[:, None]
    gl.store(base + offset[None, :] + column[:, None], o, mask=inside)


@gluon.jit
def _store(out, lse, batch, kv_head, first_row, q_len, m, l, acc, scale_log2, config):
    """O and LSE of the rows that exist; a row that saw no key gives 0 and -inf. l: (BLOCK_M,), the cut taken out."""
    GROUP: gl.constexpr = config.GROUP
    empty = l == 0.0
    inverse = 1.0 / gl.where(empty, 1.0, l)
    base = out.ptr + gl.cast(batch, gl.int64) * out.batch_stride + gl.cast(kv_head, gl.int64) * GROUP * out.head_stride
    for i in gl.static_range(len(config.PIECES)):
        _store_tile(out, base, first_row, q_len * GROUP, acc[i] * inverse[None, :], config.PIECES[i][0],
                    config.PIECES[i][1], config)
    if config.STORE_LSE:
        row = first_row + gl.arange(0, config.BLOCK_M, layout=gl.SliceLayout(0, config.W))
        natural = gl.maximum((m * LN2) * scale_log2, NEVER)  # in this order a scale of 2**-126 does not underflow
        value = gl.where(empty, float("-inf"), natural + gl.log2(gl.where(empty, 1.0, l)) * LN2)
        head = (gl.cast(batch, gl.int64) * gl.num_programs(0) + kv_head) * GROUP
        gl.store(lse + (head + row % GROUP) * q_len + row // GROUP, value, mask=row < q_len * GROUP)


@gluon.jit(do_not_specialize=["q_len", "kv_len", "first_offset", "last_offset"])
def attention_forward(q, k, v, out, lse, scale_log2, threshold, q_len, kv_len, first_offset, last_offset, config):
    """Grid (key heads, tiles of rows, batch).

    q, out (B, Hq, Sq, D), k, v (B, Hkv, Sk, D): `memory.View`s, fp16 or bf16; v with FRAGMENTS: see fragments.py, its
    row stride is that of a key. lse: (B, Hq, Sq) fp32, contiguous. scale_log2: |scale| * log2(e), not 0. threshold: of
    the lazy rescale, log2 units. Query i sees keys i + first_offset to i + last_offset, as far as the band has bounds.
    """
    kv_head = gl.program_id(0)
    tile = gl.program_id(1)
    batch = gl.program_id(2)
    if config.HAS_LAST:
        tile = gl.num_programs(1) - 1 - tile  # the longest first
    first_row = tile * config.BLOCK_M
    q_tiles = staging.load_query(q, batch, kv_head, first_row, q_len, config)
    k_ptr = k.ptr + gl.cast(batch, gl.int64) * k.batch_stride + gl.cast(kv_head, gl.int64) * k.head_stride
    v_ptr = v.ptr + gl.cast(batch, gl.int64) * v.batch_stride + gl.cast(kv_head, gl.int64) * v.head_stride
    strides = (gl.cast(k.row_stride, gl.int64), gl.cast(v.row_stride, gl.int64))
    begin, end = _key_range(first_row, q_len, kv_len, first_offset, last_offset, config)
    band = guarded.band_of(first_row, kv_len, first_offset, last_offset, config)
    k_tiles, v_tiles = staging.tiles(k, v, config)
    m, l, acc = _sweep(q_tiles, k_tiles, v_tiles, k_ptr, v_ptr, strides, band, (begin, end, kv_len), scale_log2,
                       threshold, config)
    l = gl.convert_layout(gl.sum(l, 0), gl.SliceLayout(0, config.W)) * gl.exp2(-config.CUT)
    _store(out, lse, batch, kv_head, first_row, q_len, m, l, acc, scale_log2, config)
    if guarded.suspect(m, l, acc, scale_log2, 0) > 0:
        guarded.rewrite(q, k_ptr, v_ptr, strides, out, lse, (batch, kv_head, first_row), q_len, (begin, end, kv_len),
                        band, scale_log2, threshold, config)
