"""`kernels/softmax.py` in the layouts of Hopper's products; the maths is said there. What is different:

Pivots are in log2 units. In bf16, which has the range of fp32, a block does not look for its maxima: the pivot of a row
is the maximum of its first block, and is raised only when the row's sum outgrows 2**40. That takes the maxima and the
shuffles, whose result every exponential would wait for, out of the loop. A row whose scores rise by more than some 88
log2 units inside one block, over all that it saw before, overflows its sum; `suspect` sees that, and the cold path
computes it.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....kernels.scores import LOG2E
from ....kernels.softmax import FUSED_LIMIT, LN2, NEVER
from . import assembly, layouts

NAN_TOO = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def _for_thread(limit, L: gl.constexpr):
    """Of the last or first key that a row sees, counted in the tile: what its threads compare `_place` with. Column
    8 a + 2 b + c belongs to thread b of the four that share the row."""
    quad = assembly.here(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))))
    limit = gl.convert_layout(limit, gl.SliceLayout(1, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    return gl.expand_dims(gl.expand_dims(limit[:, None] - 2 * quad[None, :], 1), 3)


@gluon.jit
def _place(N: gl.constexpr, L: gl.constexpr):
    """8 a + c of every score of a thread: constants, where the column would take a register each."""
    a = gl.arange(0, N // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    c = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    a = gl.expand_dims(gl.expand_dims(gl.expand_dims(a, 0), 2), 3)
    return 8 * a + gl.expand_dims(gl.expand_dims(gl.expand_dims(c, 0), 1), 2)


@gluon.jit
def hide(s, row, key, span, config):
    """-inf outside the band and the length. row, key: query and key of the tile's first score."""
    ROWS: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    split = s.reshape([ROWS, N // 8, 4, 2])
    L: gl.constexpr = split.type.layout
    place = _place(N, L)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
    if config.HEADS > 1:
        rows = rows % layouts.queries(config.HEADS)
    rows = assembly.here(rows)
    last = span.kv_len - 1 - key + 0 * rows
    if config.HAS_LAST:
        last = gl.minimum(last, assembly.here(row + span.last_offset - key) + rows)
    inside = place <= _for_thread(last, L)
    if config.HAS_FIRST:
        inside = inside & (place >= _for_thread(assembly.here(row + span.first_offset - key) + rows, L))
    return gl.convert_layout(gl.where(inside, split, float("-inf")).reshape([ROWS, N]), s.type.layout)


@gluon.jit
def row_maximum(s, L: gl.constexpr):
    """(64,) in layout L: in the registers of a thread first, then over the four threads that share a row."""
    top = gl.max(gl.max(gl.max(s.reshape([64, 1, s.shape[1] // 8, 4, 2]), 2), 3), 1)
    return gl.convert_layout(gl.max(top, 1), L)


@gluon.jit
def _thread_sums(p):
    """(64, 4): of each row, a sum for each thread that shares it."""
    return gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def opened(s, L: gl.constexpr, scale_log2):
    """Pivots of a tile's first block, log2 units."""
    return gl.maximum(row_maximum(s, L) * scale_log2, NEVER)


@gluon.jit
def raised(s, m, call):
    """(pivot, factor of what was summed against the old one), from the scores."""
    L: gl.constexpr = m.type.layout
    top = row_maximum(s, L) * call.scale_log2
    m_new = gl.where(top - m > call.threshold, top, m)
    return m_new, gl.exp2(m - m_new)


@gluon.jit
def outgrown(m, l):
    """The factor of what was summed, from the sums themselves: no maximum, no exponential. Of rows that saw a key."""
    grown = gl.convert_layout(gl.max(l, 1), m.type.layout) > 1099511627776.0  # 2**40
    return gl.where(grown, 9.094947017729282e-13, 1.0)


@gluon.jit
def lifted(m, factor):
    """Pivots after `outgrown`."""
    return gl.where(factor != 1.0, m + 40.0, m)


@gluon.jit
def probabilities(s, m, scale_log2):
    """exp2 of the fused exponent, and its sums."""
    p = gl.exp2(s * scale_log2 - m[:, None])
    return p, _thread_sums(p)


@gluon.jit
def add(l, factor, sums):
    """l * factor + sums; l: (64, 4)."""
    return l * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None] + sums


@gluon.jit
def capped(s, modifiers):
    """softcap * tanh(|scale| * s / softcap), natural units, from raw scores: to 1e-7 of the softcap, and exact where it
    saturates. No overflow for any score; one that is NaN stays one."""
    x = gl.minimum(s * modifiers.cap_factor, 60.0, propagate_nan=NAN_TOO)
    e = gl.exp2(x)  # of 2 * |scale| * s / softcap
    return (e * modifiers.softcap - modifiers.softcap) * assembly.reciprocal(1.0 + e)


@gluon.jit
def natural(m, scale_log2):
    """The pivot in natural units. In this order a scale of 2**-126 does not underflow."""
    return gl.maximum((m * LN2) * scale_log2, NEVER)


@gluon.jit
def finish(m, l, scale_log2, call, span, config):
    """(factor of the accumulator, LSE in natural log) from pivots that, times scale_log2, are in log2 units; see
    `finish` and `finish_with_sink` of the portable kernel. A row that saw no key has 0 and -inf, or the sink."""
    if config.SINKS:
        place = call.modifiers.sinks + span.batch * call.modifiers.sinks_batch_stride + span.head
        if config.HEADS > 1:
            place += gl.minimum(gl.arange(0, 64, m.type.layout) // layouts.queries(config.HEADS), call.group - 1)
        sink = gl.load(place).to(gl.float32)
        own = gl.where(l == 0.0, NEVER, natural(m, scale_log2))
        top = gl.maximum(own, sink)
        weight = gl.exp2((own - top) * LOG2E)
        total = l * weight + gl.exp2((sink - top) * LOG2E)
    else:
        top = natural(m, scale_log2)
        weight = 1.0
        total = l
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    return weight / total, gl.where(empty, float("-inf"), top + gl.log2(total) * LN2)


@gluon.jit
def lse_row(call, span):
    """Where the LSE of the span's first row is, of the tile's first head."""
    head = gl.cast(span.out_slab * call.q_heads + span.head, gl.int64)
    return call.lse + head * call.lse_rows + span.q_row


@gluon.jit
def doubtful(m, l, total, has_keys):
    """Rows with huge scores, a sum that overflew, a NaN, or keys and yet no sum (its scores lie below every pivot).
    total: of O, which finds its NaNs and infs in half the instructions of comparisons."""
    found = ((m > NEVER) & (gl.abs(m) > FUSED_LIMIT)) | (l - l != 0.0) | (total - total != 0.0)
    return found | ((l == 0.0) & has_keys)


@gluon.jit
def suspect(m, l, acc, inside, has_keys, flags):
    """1 if a row of the warpgroup is doubtful, else 0; see guarded.py.

    flags: shared memory, a word for each warp. Gluon's own reduction over warps keeps two addresses and a predicate in
    registers through all loops: at 160 registers the difference between some spills and none.
    """
    found = doubtful(m, l, gl.convert_layout(gl.sum(acc, 1), m.type.layout), has_keys)
    flags.store(gl.max((found & inside).to(gl.int32).reshape([4, 16]), 1))
    return gl.max(flags.load(gl.BlockedLayout([4], [32], [4], [0])), 0)
