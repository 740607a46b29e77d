"""The role of the correction, four warps: O is rescaled in tensor memory where a row of the Q tile needs it (under
SPLIT), and in the end divided by the sums, checked and handed to the store."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier

from ....kernels.memory import View
from ...sm_90.kernels import guarded
from ...sm_90.kernels.assembly import here
from ...sm_90.kernels.bounds import has_keys
from ...sm_90.kernels.copies import barrier
from ...sm_90.kernels.softmax import doubtful, finish, lse_row
from . import assembly, bounds, layouts, rings, schedule
from .rescale import any_row, rescale
from .softmax import total

PART = gl.constexpr(16)  # columns of O that are stored at a time; of 32 at head dim 128 36 to 60 bytes are spilled


class Cold(NamedTuple):
    """What the cold path reads of the call, each number where it begins (`here`), or its addresses are prepared before
    the loop over tiles and kept: up to 420 bytes of spills."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    lse_rows: Any
    heads_together: Any
    scale_log2: Any
    threshold: Any
    q_len: Any
    kv_len: Any
    first_offset: Any
    last_offset: Any
    heads: Any
    q_heads: Any
    group: Any


@gluon.jit
def _visit(Q: gl.constexpr, buffer, handed, products, opened, memory, bars, config):
    """One block. opened: O holds something of this tile. The arrival at p_full of a tile's first block also says that
    the O of the tile before has been read."""
    mbarrier.wait(bars.stats_full.index(Q), handed & 1)
    alpha = memory.stats.index(2 * Q).load(layouts.rows(config.ROWS))
    own = alpha
    if config.ROWS == 256:
        own = layouts.own_rows(memory.stats.index(2 * Q))
    mbarrier.arrive(bars.stats_empty.index(Q), count=1)
    if config.S_BUFFERS == 3:
        # With two, the scores of a block are committed after the P V of the block before.
        mbarrier.wait(bars.o_full.index(Q), products & 1, pred=opened)
    rescale(memory.o.index(Q), alpha, own, opened, memory.votes.index(2), config)
    mbarrier.arrive(rings.of_scores(bars.p_full, Q, buffer, config), count=1)


@gluon.jit
def _suspect(m, l, sums, rows, span, memory, config):
    """1 if a row that this CTA has of the Q tile is doubtful, else 0; see sm_90's guarded.py."""
    found = doubtful(m, l, sums, has_keys(span, rows, config)) & (rows < span.q_len)
    if config.ROWS == 128:
        return any_row(found, memory.votes.index(2), config)
    else:
        memory.found.store(found.to(gl.int8))
        return any_row(layouts.own_rows(memory.found), memory.votes.index(2), config)


@gluon.jit
def _view(x):
    """For the cold path, see `Cold`."""
    return View(x.ptr, here(x.batch_stride), here(x.head_stride), here(x.row_stride))


@gluon.jit
def _rewrite(t, suspect0, suspect1, call, config):
    """The cold path: the rows of doubtful Q tiles once more, exactly and slowly. Inlined, for as a function of its own,
    as sm_90 has it, it takes a register for each of its 34 words of arguments; one for both Q tiles."""
    span = bounds.tile(t, call, config)
    first, stop = bounds.key_blocks(span, config)
    keys = first * bounds.KEYS, gl.minimum(stop * bounds.KEYS, span.kv_len)
    for part in range(4):
        if gl.where(part < 2, suspect0, suspect1) > 0:
            row = span.first_row + part // 2 * config.ROWS + part % 2 * 64
            guarded.rewrite_rows(span, row, keys, call, config)


@gluon.jit
def _close(t, Q: gl.constexpr, handed, products, count, memory, bars, call, config):
    """O and LSE of the Q tile. Returns 1 if it is doubtful, for the cold path to compute, else 0."""
    span = bounds.tile(t, call, config)
    mbarrier.wait(bars.stats_full.index(Q), handed & 1)
    l = memory.stats.index(2 * Q).load(layouts.rows(config.ROWS))
    m = memory.stats.index(2 * Q + 1).load(layouts.rows(config.ROWS))
    if config.SPLIT:
        mbarrier.arrive(bars.stats_empty.index(Q), count=1)
    inverse, lse = finish(m, l, 1.0, call, span, config)
    mbarrier.wait(bars.o_full.index(Q), products & 1)
    mbarrier.wait(bars.out_empty.index(Q), (count & 1) ^ 1)
    o = memory.o.index(Q)
    out = memory.out.index(Q).reshape([config.ROWS, config.D])
    factor = layouts.spread(inverse, PART)
    sums = gl.full([config.ROWS], 0.0, gl.float32, layouts.rows(config.ROWS))
    for i in gl.static_range(config.D // PART):
        part = o.slice(i * PART, PART).load(layouts.tile(config.ROWS, PART))
        sums += layouts.to_rows(total((part,)), 128)
        out.slice(i * PART, PART, dim=1).store(assembly.mul2(part, factor).to(call.out.ptr.dtype.element_ty))
        barrier()  # or the ptxas of Triton 3.9 mixes the parts: 280 bytes of spills for 52
    if not config.SPLIT:  # the softmax goes on to the next tile, whose first P V writes over this O
        mbarrier.arrive(bars.stats_empty.index(Q), count=1)
    rows = span.first_row + Q * config.ROWS + gl.arange(0, config.ROWS, layouts.rows(config.ROWS))
    suspect = _suspect(m, l, sums, rows, span, memory, config)
    memory.flags.index(Q).store(gl.full([1], 0, gl.int32, layouts.one(config.ROWS, gl.num_warps())) + suspect)
    fence_async_shared()
    mbarrier.arrive(bars.out_full.index(Q), count=1)
    if config.STORE_LSE:
        gl.store(lse_row(call, span) + rows, lse, mask=(rows < span.q_len) & (suspect == 0))
    return suspect


@gluon.jit
def correction(memory, bars, call, config):
    handed = gl.to_tensor(0)  # by each softmax so far
    products = gl.to_tensor(0)  # P V known to be done: with three score buffers of every block, else of a tile's last
    buffer0 = gl.to_tensor(0)
    buffer1 = gl.to_tensor(1)
    unused = gl.to_tensor(0)
    count = gl.to_tensor(0)
    t = schedule.first()
    while t < bounds.tiles(call, config):
        first, stop = bounds.key_blocks(bounds.tile(t, call, config), config)
        if config.SPLIT:
            for visit in range(stop - first):
                _visit(0, buffer0, handed, products, visit > 0, memory, bars, config)
                _visit(1, buffer1, handed, products, visit > 0, memory, bars, config)
                buffer0, unused = rings.next_scores(buffer0, unused, config)
                buffer1, unused = rings.next_scores(buffer1, unused, config)
                if config.S_BUFFERS == 3:
                    products += gl.where(visit > 0, 1, 0)
                handed += 1
        elif config.S_BUFFERS == 3:
            products += stop - first - 1
        suspect0 = _close(t, 0, handed, products, count, memory, bars, call, config)
        suspect1 = _close(t, 1, handed, products, count, memory, bars, call, config)
        if suspect0 + suspect1 > 0:
            cold = Cold(_view(call.q), _view(call.k), _view(call.v), _view(call.out), call.lse, here(call.lse_rows),
                        here(call.heads_together), call.scale_log2, call.threshold, here(call.q_len),
                        here(call.kv_len), here(call.first_offset), here(call.last_offset), here(call.heads),
                        here(call.q_heads), here(call.group))
            _rewrite(here(t), suspect0, suspect1, cold, config)
        products += 1
        handed += 1
        t = schedule.following(count, memory, bars, call, config)
        count += 1
