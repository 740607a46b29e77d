"""`kernels/softmax.py` in the layouts of Hopper's products; the maths is said there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....kernels.softmax import FUSED_LIMIT, LN2, NEVER
from . import assembly


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
def hide(s, row, key, call, config):
    """-inf outside the band and the length. row, key: of the tile's first score."""
    N: gl.constexpr = s.shape[1]
    split = s.reshape([64, N // 8, 4, 2])
    L: gl.constexpr = split.type.layout
    place = _place(N, L)
    rows = assembly.here(gl.arange(0, 64, gl.SliceLayout(1, s.type.layout)))
    last = call.kv_len - 1 - key + 0 * rows
    if config.HAS_LAST:
        last = gl.minimum(last, assembly.here(row + call.last_offset - key) + rows)
    inside = place <= _for_thread(last, L)
    if config.HAS_FIRST:
        inside = inside & (place >= _for_thread(assembly.here(row + call.first_offset - key) + rows, L))
    return gl.convert_layout(gl.where(inside, split, float("-inf")).reshape([64, N]), s.type.layout)


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
def probabilities(s, m, scale_log2):
    """exp2 of the fused exponent, and its sums."""
    shift = gl.maximum(m * scale_log2, NEVER)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, _thread_sums(p)


@gluon.jit
def step(s, m, l, scale_log2, threshold):
    """Take a block of raw scores into pivot and sums: p, factor of the old state, m, l. l: (64, 4)."""
    L: gl.constexpr = m.type.layout
    top = row_maximum(s, L)
    m_new = gl.where((top - m) * scale_log2 > threshold, top, m)
    p, sums = probabilities(s, m_new, scale_log2)
    alpha = gl.exp2((m - m_new) * scale_log2)
    return p, alpha, m_new, l * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None] + sums


@gluon.jit
def lse(m, l, scale_log2):
    """Natural log; -inf for a row that saw no key."""
    empty = l == 0.0
    natural = gl.maximum((m * LN2) * scale_log2, NEVER)  # in this order a scale of 2**-126 does not underflow
    return gl.where(empty, float("-inf"), natural + gl.log2(gl.where(empty, 1.0, l)) * LN2)


@gluon.jit
def suspect(m, l, acc, inside, scale_log2, flags):
    """1 if a row of the warpgroup has huge scores, an overflown sum or a NaN, else 0; see guarded.py. A sum over the
    row finds its NaNs (and infs of both signs) in half the instructions of comparisons.

    flags: shared memory, a word for each warp. Gluon's own reduction over warps keeps two addresses and a predicate in
    registers through all loops: at 160 registers the difference between some spills and none.
    """
    total = gl.convert_layout(gl.sum(acc, 1), m.type.layout)
    found = ((m > NEVER) & (gl.abs(m * scale_log2) > FUSED_LIMIT)) | (l - l != 0.0) | (total != total)
    flags.store(gl.max((found & inside).to(gl.int32).reshape([4, 16]), 1))
    return gl.max(flags.load(gl.BlockedLayout([4], [32], [4], [0])), 0)
