"""The backward for Hopper, in Gluon: five products a tile where the portable kernels need seven.

A CTA has 128 keys of one key head: two consumer warpgroups with 64 keys each, which hold dK and dV in registers, and a
producer warp. K and V stay in shared memory; tiles of BLOCK_M queries stream through rings of Q with its statistics,
and of dO, for every query head of the group. Tiles of scores are turned (keys x queries), so that P^T and dS^T go from
registers into dV and dK. dS^T also goes to a ring in shared memory. One tile later, when the other consumer has long
handed over its own, each consumer computes half of dQ, of all 128 keys, and adds it to a sum in memory (`sums.py`).

PIPELINED: the scores of the next tile are multiplied while dQ is added, and go over the edge of the loop; else the next
tile begins when this one has ended. What is in flight over that edge costs everything: ptxas then waits behind every
product (C7514).

The maths is that of `kernels/gradients.py`. As there, what is rare leaves NaN or inf in the results, and is computed
again: `finish.py`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import assembly, backward_bounds, copies, layouts, sums
from .backward_bounds import KEYS


class Config(NamedTuple):
    """What one build is specialised for; every field a `gl.constexpr`."""

    BLOCK_M: Any  # queries of a tile: 64, or 128 where tiles have 64 columns
    WIDTH: Any  # columns of the tiles of q, k, v and d_out: 64 or 128
    SLOTS: Any  # of Q and of dO, a power of two
    HAS_FIRST: Any  # the band has a left bound
    HAS_LAST: Any  # the band has a right bound
    PIPELINED: Any
    FINISHES: Any  # a warp makes dQ of earlier CTAs' sums
    REGISTERS: Any  # of a thread of a consumer


class Call(NamedTuple):
    """The arguments of `attention_backward`, see there."""

    q_tiles: Any
    k_tiles: Any
    v_tiles: Any
    g_tiles: Any
    stats_tiles: Any
    dk_tiles: Any
    dv_tiles: Any
    dq_tiles: Any
    sum_tiles: Any
    d_queries: Any
    counts: Any
    odd: Any
    found: Any
    scale_log2: Any
    scale: Any
    q_len: Any
    kv_len: Any
    first_offset: Any
    last_offset: Any
    kv_heads: Any
    group: Any
    n_blocks: Any
    n_heads: Any
    together: Any
    lead: Any
    finished: Any
    ring: Any


class Shared(NamedTuple):
    """Shared memory and its barriers."""

    q: Any
    g: Any  # dO
    k: Any
    v: Any
    ds: Any  # dS^T, a ring of tiles; in the end dV, then dK on the way out
    stats: Any  # of each slot of Q: LSE in log2 units, delta
    keys_full: Any  # of K, of V
    q_full: Any
    g_full: Any
    empty: Any  # of both
    of_sums: Any  # `sums.Shared`, or ()


@gluon.jit
def _allocate(call, config):
    """Shared memory and barriers, ready."""
    L: gl.constexpr = mbarrier.MBarrierLayout()
    DTYPE: gl.constexpr = call.q_tiles.dtype
    ROWS: gl.constexpr = config.BLOCK_M
    COLS: gl.constexpr = config.WIDTH
    SLOTS: gl.constexpr = config.SLOTS
    q = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, ROWS, COLS], call.q_tiles.layout)
    g = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, ROWS, COLS], call.g_tiles.layout)
    k = gl.allocate_shared_memory(DTYPE, [1, 1, KEYS, COLS], call.k_tiles.layout)
    v = gl.allocate_shared_memory(DTYPE, [1, 1, KEYS, COLS], call.v_tiles.layout)
    # A consumer writes a tile when the other has handed over the one before it, hence has read the one three before.
    # Of four the place is a mask, but of 128 queries there is room for three.
    ds = gl.allocate_shared_memory(DTYPE, [4 if ROWS == 64 else 3, KEYS, ROWS],
                                   gl.NVMMASharedLayout(128, 16, rank=2))
    stats = gl.allocate_shared_memory(gl.float32, [2 * SLOTS, 1, ROWS], call.stats_tiles.layout)
    keys_full = gl.allocate_shared_memory(gl.int64, [2, 1], L)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], L)
    g_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], L)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], L)
    for i in gl.static_range(2):
        mbarrier.init(keys_full.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    of_sums = ()
    if config.FINISHES:
        of_sums = sums.allocate(call)
    fence_async_shared()
    return Shared(q, g, k, v, ds, stats, keys_full, q_full, g_full, empty, of_sums)


@gluon.jit
def _produce(shared, call, config):
    """K and V once, then Q, its statistics and dO of every tile. K is there before `gradients.prepare` has ended."""
    assembly.chain("launch_dependents")
    ROWS: gl.constexpr = config.BLOCK_M
    COLS: gl.constexpr = config.WIDTH
    work = backward_bounds.work(call, config)
    key = work.block * KEYS
    mbarrier.expect(shared.keys_full.index(0), KEYS * COLS * 2)
    copies.load(call.k_tiles, [work.batch, work.kv_head, key, 0], shared.keys_full.index(0), shared.k)
    assembly.chain("wait")
    mbarrier.expect(shared.keys_full.index(1), KEYS * COLS * 2)
    head, tile = work.kv_head * call.group, work.begin
    heads = call.kv_heads * call.group
    n_tiles = gl.cdiv(call.q_len, ROWS)
    plane = call.n_heads * call.group * n_tiles
    for i in range(work.tiles):
        slot = i & (config.SLOTS - 1)
        mbarrier.wait(shared.empty.index(slot), ((i // config.SLOTS) & 1) ^ 1)
        full = shared.q_full.index(slot)
        mbarrier.expect(full, ROWS * (COLS * 2 + 8))
        copies.load(call.q_tiles, [work.batch, head, tile * ROWS, 0], full, shared.q.index(slot))
        at = (work.batch * heads + head) * n_tiles + tile
        copies.load(call.stats_tiles, [at, 0], full, shared.stats.index(2 * slot))
        copies.load(call.stats_tiles, [plane + at, 0], full, shared.stats.index(2 * slot + 1))
        if i == 0:
            copies.load(call.v_tiles, [work.batch, work.kv_head, key, 0], shared.keys_full.index(1), shared.v)
        full = shared.g_full.index(slot)
        mbarrier.expect(full, ROWS * COLS * 2)
        copies.load(call.g_tiles, [work.batch, head, tile * ROWS, 0], full, shared.g.index(slot))
        head, tile = backward_bounds.after(head, tile, work, 1)


@gluon.jit
def _issue_turned(left, right, config):
    """(64 keys, BLOCK_M): left of the consumer's keys times what the queries have, under way."""
    ROWS: gl.constexpr = config.BLOCK_M
    zeros = gl.zeros([64, ROWS], gl.float32, layouts.accumulator(ROWS))
    right = right.reshape([ROWS, config.WIDTH]).permute((1, 0))
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)


@gluon.jit
def _load_stats(shared, slot, PLANE: gl.constexpr, config):
    """One number of each query of a tile, as the columns of a turned tile."""
    ROWS: gl.constexpr = config.BLOCK_M
    L: gl.constexpr = gl.SliceLayout(0, layouts.accumulator(ROWS))
    return shared.stats.index(2 * slot + PLANE).reshape([ROWS]).load(L)


@gluon.jit
def _probabilities(s, rest, tile, key, call, config):
    """Raw turned scores of the keys from `key` on -> P^T. rest: the LSE of the queries, in log2 units."""
    p = gl.exp2(s * call.scale_log2 - rest[None, :])
    if config.HAS_FIRST or config.HAS_LAST:
        row = tile * config.BLOCK_M
        if backward_bounds.cut(row, key, call, config):
            # A column is 8 times a register's place plus a lane's: the first is a constant.
            EIGHTS: gl.constexpr = config.BLOCK_M // 8
            apart = p.reshape([64, EIGHTS, 8])
            L: gl.constexpr = apart.type.layout
            keys = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, L)))
            lanes = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))
            places = gl.arange(0, EIGHTS, gl.SliceLayout(0, gl.SliceLayout(2, L))) * 8
            if config.HAS_LAST:
                ahead = (keys + assembly.here(key - row - call.last_offset))[:, None, None] - lanes[None, None, :]
                apart = gl.where(ahead <= places[None, :, None], apart, 0.0)
            if config.HAS_FIRST:
                ahead = (keys + assembly.here(key - row - call.first_offset))[:, None, None] - lanes[None, None, :]
                apart = gl.where(ahead >= places[None, :, None], apart, 0.0)
            p = gl.convert_layout(apart.reshape([64, config.BLOCK_M]), s.type.layout)
    return p


@gluon.jit
def _narrow(x, dtype: gl.constexpr, config):
    """P^T or dS^T as the left operand of its product; moves no data."""
    return gl.convert_layout(x.to(dtype), layouts.left_operand(config.WIDTH))


@gluon.jit
def _hand_over(ds, shared, i, W: gl.constexpr):
    """dS^T of the consumer's keys and tile i to shared memory, for both consumers."""
    shared.ds.index(i % shared.ds.shape[0]).slice(W * (KEYS // 2), KEYS // 2, 0).store(ds)
    fence_async_shared()
    assembly.tell(W, i)


@gluon.jit
def _issue_queries(shared, i, config, W: gl.constexpr):
    """The consumer's half of dQ of tile i, (64, 64), under way: of the columns of a tile of 64 queries, of the queries
    of one of 128."""
    ds = shared.ds.index(i % shared.ds.shape[0])
    k = shared.k.reshape([KEYS, config.WIDTH])
    if config.WIDTH == 128:
        k = k.slice(W * 64, 64, 1)
    else:
        ds = ds.slice(W * 64, 64, 1)
    zeros = gl.zeros([64, 64], gl.float32, layouts.accumulator(64))
    return warpgroup_mma(ds.permute((1, 0)), k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_queries(dq, at, call, config, W: gl.constexpr):
    """at: the tile's number, of all heads."""
    sums.add(dq, call.d_queries + at.to(gl.int64) * (config.BLOCK_M * config.WIDTH) + W * 4096)


@gluon.jit
def _issue_scores(keys, shared, i, config):
    """Raw turned scores of tile i, under way."""
    slot = i & (config.SLOTS - 1)
    mbarrier.wait(shared.q_full.index(slot), (i // config.SLOTS) & 1)
    return _issue_turned(keys, shared.q.index(slot), config)


@gluon.jit
def _step(s, dk, dv, keys, values, shared, work, i, tile, last, key, call, config, W: gl.constexpr,
          FIRST: gl.constexpr):
    """(s, dK, dV) behind tile i. PIPELINED: s are the scores of that tile, returned are those of the next. last: the
    number of the tile before this one, whose dQ is computed and added, unless FIRST."""
    COLS: gl.constexpr = config.WIDTH
    DTYPE: gl.constexpr = shared.q.dtype
    slot = i & (config.SLOTS - 1)
    if not config.PIPELINED:
        s_issued = _issue_scores(keys, shared, i, config)
    mbarrier.wait(shared.g_full.index(slot), (i // config.SLOTS) & 1)
    dp_issued = _issue_turned(values, shared.g.index(slot), config)
    rest = _load_stats(shared, slot, 0, config)
    if config.PIPELINED:
        raw = s
    else:
        raw = warpgroup_mma_wait(1, [s_issued])
    p = _probabilities(raw, rest, tile, key, call, config)
    g = shared.g.index(slot).reshape([config.BLOCK_M, COLS])
    dv_issued = warpgroup_mma(_narrow(p, DTYPE, config), g, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp_issued])
    delta = _load_stats(shared, slot, 1, config)
    ds = (p * (dp - delta[None, :])).to(DTYPE)
    if not FIRST:
        assembly.hear(1 - W, i - 1)
    _hand_over(ds, shared, i, W)
    if not FIRST:
        dq_issued = _issue_queries(shared, i - 1, config, W)
    q = shared.q.index(slot).reshape([config.BLOCK_M, COLS])
    dk_issued = warpgroup_mma(_narrow(ds, DTYPE, config), q, dk, is_async=True)
    if config.PIPELINED:
        dv = warpgroup_mma_wait(1 if FIRST else 2, [dv_issued])
        # Behind the last tile its own scores are computed once more.
        s_issued = _issue_scores(keys, shared, gl.minimum(i + 1, work.tiles - 1), config)
    if not FIRST:
        dq = warpgroup_mma_wait(2 if config.PIPELINED else 1, [dq_issued])
        _add_queries(dq, last, call, config, W)
    if config.PIPELINED:
        dk, s = warpgroup_mma_wait(0, [dk_issued, s_issued])
    else:
        dk, dv = warpgroup_mma_wait(0, [dk_issued, dv_issued])
    mbarrier.arrive(shared.empty.index(slot), count=1)
    return s, dk, dv


@gluon.jit
def _walk(keys, values, shared, work, key, call, config, W: gl.constexpr):
    """dK (without the scale) and dV of 64 keys: one tile of queries after the other."""
    COLS: gl.constexpr = config.WIDTH
    dk = gl.zeros([64, COLS], gl.float32, layouts.accumulator(COLS))
    dv = gl.zeros([64, COLS], gl.float32, layouts.accumulator(COLS))
    n_tiles = gl.cdiv(call.q_len, config.BLOCK_M)
    before, tile = backward_bounds.tiles_before(work, call, config), work.begin
    s = 0.0
    if config.PIPELINED:
        s = warpgroup_mma_wait(0, [_issue_scores(keys, shared, 0, config)])
    s, dk, dv = _step(s, dk, dv, keys, values, shared, work, 0, tile, 0, key, call, config, W, True)
    for i in range(1, work.tiles):
        last = before + tile
        before, tile = backward_bounds.after(before, tile, work, n_tiles)
        s, dk, dv = _step(s, dk, dv, keys, values, shared, work, i, tile, last, key, call, config, W, False)
    assembly.hear(1 - W, work.tiles - 1)
    dq = warpgroup_mma_wait(0, [_issue_queries(shared, work.tiles - 1, config, W)])
    _add_queries(dq, before + tile, call, config, W)
    return dk, dv


@gluon.jit
def _consume(shared, call, config, W: gl.constexpr):
    """Consumer W: 64 keys."""
    COLS: gl.constexpr = config.WIDTH
    DTYPE: gl.constexpr = shared.q.dtype
    work = backward_bounds.work(call, config)
    key = work.block * KEYS + W * (KEYS // 2)
    keys = shared.k.reshape([KEYS, COLS]).slice(W * (KEYS // 2), KEYS // 2, 0)
    values = shared.v.reshape([KEYS, COLS]).slice(W * (KEYS // 2), KEYS // 2, 0)
    mbarrier.wait(shared.keys_full.index(0), 0)
    mbarrier.wait(shared.keys_full.index(1), 0)
    if config.FINISHES:
        mbarrier.wait(shared.of_sums.cleared, 0)
    dk, dv = _walk(keys, values, shared, work, key, call, config, W)
    if config.FINISHES:
        mbarrier.arrive(shared.of_sums.added, count=1)
    assembly.meet()  # the other one has read dS too
    out = copies.view_as(shared.ds, DTYPE, [2, 1, 1, 64, COLS], call.dk_tiles.layout).index(W)
    out.reshape([64, COLS]).store(dv.to(DTYPE))
    fence_async_shared()
    copies.store(call.dv_tiles, [work.batch, work.kv_head, key, 0], out)
    odd = gl.sum(dk * 0.0, 1) + gl.sum(dv * 0.0, 1)  # NaN where any of a row is NaN or inf
    at = ((work.batch * call.kv_heads + work.kv_head) * call.n_blocks + work.block) * KEYS + W * (KEYS // 2)
    rows = gl.arange(0, 64, odd.type.layout)
    gl.store(call.found + at.to(gl.int64) + rows, (odd != 0.0).to(gl.int8))
    dk = (dk * call.scale).to(DTYPE)
    tma.store_wait(0)
    copies.barrier()
    out.reshape([64, COLS]).store(dk)
    fence_async_shared()
    copies.store(call.dk_tiles, [work.batch, work.kv_head, key, 0], out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["q_len", "kv_len", "first_offset", "last_offset", "kv_heads", "group", "n_blocks",
                              "n_heads", "together", "lead", "finished", "ring"])
def attention_backward(q_tiles, k_tiles, v_tiles, g_tiles, stats_tiles, dk_tiles, dv_tiles, dq_tiles, sum_tiles,
                       d_queries, counts, odd, found, scale_log2, scale, q_len, kv_len, first_offset,
                       last_offset, kv_heads, group, n_blocks, n_heads, together, lead, finished, ring, config):
    """dK and dV, and the sums that dQ is made of, or dQ. Grid: (blocks of 128 keys * key heads * batch,), 4 warps and
    those of the other roles.

    q_tiles, ..., dv_tiles: descriptors of q, k, v, the gradient of out, and of dk and dv, with blocks of BLOCK_M rows
    (queries), 128 (keys) or 64 (dk, dv), WIDTH columns wide. stats_tiles: of the statistics that `gradients.prepare`
    makes, in rows of BLOCK_M: a plane of LSE in log2 units (inf where there is no query), then one of delta.
    dq_tiles: of dq, 64 x 8. sum_tiles: of d_queries in rows of 64 numbers, 64 of them. d_queries: fp32, 0, a ring of
    sums (see `sums.py`): `ring` groups of `together` key heads have one each at a time, the groups behind have it after
    them. counts: int32, 0, for each group how many CTAs have added to its sums, and how many parts of them have been
    cleared. odd: int8, 0; 1 for tiles of 64 queries whose dq, where CTAs make it, has NaN or inf. found: int8, for each
    key of each block: 1 if its dk or dv has.
    scale_log2: scale * log2(e), signed. scale: natural units. Query i sees the keys i + first_offset to i +
    last_offset, as far as the band has bounds. group: query heads per key head. n_heads: key heads of the batch.
    together: of them, those whose CTAs run side by side. lead: how many CTAs later one finishes the part of a CTA; more
    than the CTAs of a group. finished: groups whose dQ is made here; the sums of the rest are left.
    """
    call = Call(q_tiles, k_tiles, v_tiles, g_tiles, stats_tiles, dk_tiles, dv_tiles, dq_tiles, sum_tiles,
                d_queries, counts, odd, found, scale_log2, scale, q_len, kv_len, first_offset, last_offset, kv_heads,
                group, n_blocks, n_heads, together, lead, finished, ring)
    shared = _allocate(call, config)
    R: gl.constexpr = config.REGISTERS
    if config.FINISHES:
        gl.warp_specialize([(_consume, (shared, call, config, 0)), (_consume, (shared, call, config, 1)),
                            (_produce, (shared, call, config)), (sums.finish, (shared.of_sums, call, config))],
                           [4, 1, 1], [R, 24, 24])
    else:
        gl.warp_specialize([(_consume, (shared, call, config, 0)), (_consume, (shared, call, config, 1)),
                            (_produce, (shared, call, config))], [4, 1], [R, 24])
