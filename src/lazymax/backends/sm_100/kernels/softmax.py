"""The role of the softmax, four warps for each Q tile, one thread a row: S from tensor memory, P back into its place.

The maths is that of `kernels/softmax.py`, with pivots in log2 units. What was summed before is not rescaled here: the
factors go to the correction through shared memory. But without SPLIT it is, before P is published.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from ....kernels.softmax import NEVER
from ...sm_90.kernels.assembly import here
from . import assembly, bounds, layouts, rings, schedule
from .rescale import rescale


@gluon.jit
def _read(s, config):
    """The scores, in four tiles of 32 columns."""
    COLS: gl.constexpr = 128 // config.READS
    tiles = ()
    for i in gl.static_range(config.READS):
        tiles = tiles + layouts.split(s.slice(i * COLS, COLS).load(layouts.tile(config.ROWS, COLS)), 4 // config.READS)
    if config.NEGATE:
        negated = ()
        for i in gl.static_range(4):
            negated = negated + (-tiles[i],)
        tiles = negated
    return tiles


@gluon.jit
def _hide(tiles, row, key, call, config):
    """-inf outside the band and the length. row, key: query and key of the first score. What a row sees is computed at
    this place, or it takes registers in the loop that needs no mask."""
    rows = here(gl.arange(0, config.ROWS, layouts.rows(config.ROWS)))
    end = here(call.kv_len) - key + 0 * rows
    if config.HAS_LAST:
        end = gl.minimum(end, row + here(call.last_offset) + 1 - key + rows)
    first = end
    if config.HAS_FIRST:
        first = row + here(call.first_offset) - key + rows
    result = ()
    for i in gl.static_range(4):
        column = i * 32 + gl.arange(0, 32, gl.SliceLayout(0, layouts.tile(config.ROWS, 32)))
        inside = column[None, :] < layouts.to_rows(end, 32)[:, None]
        if config.HAS_FIRST:
            inside = inside & (column[None, :] >= layouts.to_rows(first, 32)[:, None])
        result = result + (gl.where(inside, tiles[i], float("-inf")),)
    return result


@gluon.jit
def _maximum(tiles, config):
    """Of each row, in independent chains of maxima of three."""
    if config.MAX3:
        x0, x1, x2, x3 = layouts.split(assembly.max3(tiles[0], tiles[1], tiles[2]), 4)
        y0, y1, y2, y3 = layouts.split(tiles[3], 4)
        a = assembly.max3(x0, x1, y0)
        b = assembly.max3(x2, x3, y1)
        c = assembly.max3(a, y2, y3)
        a0, a1, a2, a3 = layouts.split(assembly.max3(a, b, c), 4)
        return gl.max(assembly.max3(gl.maximum(a0, a1), a2, a3), 1)
    else:
        m = gl.max(tiles[0], 1)
        for i in gl.static_range(1, 4):
            m = gl.maximum(m, gl.max(tiles[i], 1))
        return m


@gluon.jit
def total(tiles):
    """Of each row, by halves, in pairs."""
    if len(tiles) == 1:
        if tiles[0].shape[1] > 2:
            return total(layouts.split(tiles[0], 2))
        else:
            return gl.sum(tiles[0], 1)
    else:
        HALF: gl.constexpr = len(tiles) // 2
        sums = ()
        for i in gl.static_range(HALF):
            sums = sums + (assembly.add2(tiles[i], tiles[i + HALF]),)
        return total(sums)


@gluon.jit
def _last_column(x):
    if x.shape[1] == 1:
        return gl.sum(x, 1)
    else:
        return _last_column(layouts.split(x, 2)[1])


@gluon.jit
def _probabilities(tiles, m, p, early, Q: gl.constexpr, buffer, bars, call, config):
    """P in chunks of CHUNK columns, each stored as it is done; `early` is told when the first EARLY columns are there.
    Returns the chunks, in tiles of 16 columns.

    ORDER = k: no chunk before the one k earlier is done. Without it ptxas mixes all of them: the first columns come
    late, and more registers are live.
    """
    CHUNK: gl.constexpr = config.CHUNK
    scale = gl.full([config.ROWS, CHUNK], 0.0, gl.float32, layouts.tile(config.ROWS, CHUNK)) + call.scale_log2
    chunks = layouts.regrouped(tiles, CHUNK)
    negated = layouts.to_rows(-m, CHUNK)
    done = ()
    result = ()
    for i in gl.static_range(128 // CHUNK):
        shift = negated
        if config.ORDER > 0 and i >= config.ORDER:
            shift = assembly.after(negated, layouts.to_rows(done[i - config.ORDER], CHUNK))
        x = assembly.exp2_shared(assembly.fma2(chunks[i], scale, layouts.spread(shift, CHUNK)), config)
        if config.ORDER > 0:
            done = done + (_last_column(x),)
        p.slice(i * CHUNK, CHUNK).store(x.to(call.out.ptr.dtype.element_ty))
        result = result + layouts.split(x, CHUNK // 16)
        if (i + 1) * CHUNK == config.EARLY:
            mbarrier.arrive(early, count=1)
    return result


@gluon.jit
def _visit(m, l, row, key, top, Q: gl.constexpr, buffer, phase, count, memory, bars, call, config,
           MASK: gl.constexpr):
    """One block: pivots and sums. row, key: query and key of its first score. top: key of the tile's first block."""
    mbarrier.wait(rings.of_scores(bars.s_full, Q, buffer, config), phase)
    s = rings.of_scores(memory.s, Q, buffer, config)
    tiles = _read(s, config)
    if MASK:
        tiles = _hide(tiles, row, key, call, config)
    highest = gl.maximum(m, layouts.to_rows(_maximum(tiles, config), 128) * call.scale_log2)
    m_new = gl.where(highest - m > call.threshold, highest, m)
    alpha = assembly.exp2(m - m_new)
    if config.SPLIT:
        memory.stats.index(2 * Q).store(alpha)
        mbarrier.arrive(bars.stats_full.index(Q), count=1)
    else:
        if config.S_BUFFERS == 3:  # as in the correction
            mbarrier.wait(bars.o_full.index(Q), (count & 1) ^ 1, pred=key < top)
        rescale(memory.o.index(Q), alpha, alpha, key < top, memory.votes.index(Q), config)
    early = rings.of_scores(bars.p_full, Q, buffer, config)
    p = layouts.probabilities(s, call.out.ptr.dtype.element_ty)
    chunks = _probabilities(tiles, m_new, p, early, Q, buffer, bars, call, config)
    if config.EARLY < 128:
        mbarrier.arrive(rings.of_scores(bars.p_rest, Q, buffer, config), count=1)
    if config.SPLIT:
        mbarrier.wait(bars.stats_empty.index(Q), count & 1)
    return m_new, l * alpha + layouts.to_rows(total(chunks), 128)


@gluon.jit
def softmax(memory, bars, call, config, Q: gl.constexpr):
    """Of Q tile Q of every tile."""
    L: gl.constexpr = layouts.rows(config.ROWS)
    buffer = gl.to_tensor(Q)
    phase = gl.to_tensor(0)
    handed = gl.to_tensor(0)  # to the correction so far; without SPLIT: blocks so far
    count = gl.to_tensor(0)
    t = schedule.first()
    while t < bounds.tiles(call, config):
        span = bounds.tile(t, call, config)
        start, stop = bounds.key_blocks(span, config)
        row = span.first_row + Q * config.ROWS
        begin, end = bounds.whole(row, start, stop, span, config)
        top = (stop - 1) * bounds.KEYS
        key = top
        m = gl.full([config.ROWS], NEVER, gl.float32, L)
        l = gl.full([config.ROWS], 0.0, gl.float32, L)
        for _ in range(begin):
            m, l = _visit(m, l, row, key, top, Q, buffer, phase, handed, memory, bars, call, config, True)
            buffer, phase = rings.next_scores(buffer, phase, config)
            handed += 1
            key -= bounds.KEYS
        for _ in range(end - begin):
            m, l = _visit(m, l, row, key, top, Q, buffer, phase, handed, memory, bars, call, config, False)
            buffer, phase = rings.next_scores(buffer, phase, config)
            handed += 1
        if config.HAS_FIRST:
            key -= (end - begin) * bounds.KEYS
            for _ in range(stop - start - end):
                m, l = _visit(m, l, row, key, top, Q, buffer, phase, handed, memory, bars, call, config, True)
                buffer, phase = rings.next_scores(buffer, phase, config)
                handed += 1
                key -= bounds.KEYS
        memory.stats.index(2 * Q).store(l)
        memory.stats.index(2 * Q + 1).store(m)
        mbarrier.arrive(bars.stats_full.index(Q), count=1)
        if config.SPLIT:
            mbarrier.wait(bars.stats_empty.index(Q), handed & 1)
            handed += 1
        else:
            mbarrier.wait(bars.stats_empty.index(Q), count & 1)
        t = schedule.following(count, memory, bars, call, config)
        count += 1
