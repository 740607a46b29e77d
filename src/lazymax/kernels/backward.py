"""The portable backward: kernels for every GPU that Triton compiles for, without atomics, so that the same call gives
the same bits.

`gradients.prepare` makes statistics of the rows. `attention_backward_queries`, here, computes dQ: a program has BLOCK_M
queries and walks the key blocks that they see. `attention_backward_keys` (backward_keys.py) computes dK and dV. Both
recompute P.

As in the forward, the loops do not care for what is rare: a NaN or inf that hides under a weight of 0, and scores so
large that the fused exponent is off. Both leave NaN or inf in the sums, and the tile is computed again, carefully.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import bounds, gradients, memory, products, scores, sequences, softmax

GUARD_M = tl.constexpr(16)
GUARD_N = tl.constexpr(16)


class Config(NamedTuple):
    """What one build of the kernels is specialised for, as `forward.Config`."""

    BLOCK_M: Any  # query rows of a tile
    BLOCK_N: Any  # keys of a tile
    D_PIECES: Any
    DV_PIECES: Any
    D: Any
    D_V: Any
    GROUP: Any
    HAS_FIRST: Any
    HAS_LAST: Any
    BOTTOM_RIGHT: Any
    DESCRIPTOR: Any  # q, k, v and d_out come through tensor descriptors, else through pointers
    EXACT: Any  # the exact exponent, see softmax.recompute: float masks (rows of the lowest number), and fp32
    RELOAD: Any  # operands come when their product is due, a program's own anew in each round, see `backends.Half`
    LICM: Any  # see `backends.Half`
    ONE_LOOP: Any  # of dK and dV: the tiles of all heads of a group in one loop
    PRECISION: Any
    UPCAST: Any
    WIDE: Any
    NEGATE: Any
    MODIFIED: Any
    LARGE_CAP: Any
    CHOOSES: Any
    BOOL_MASK: Any
    FLOAT_MASK: Any
    MASK_ROWS: Any
    MASK_COLS: Any
    SCORE_MOD: Any
    MASK_MOD: Any
    DERIVATIVE: Any  # of the SCORE_MOD by its score


class Inputs(NamedTuple):
    """q, k, v and d_out: each a `memory.View`."""

    q: Any
    k: Any
    v: Any
    d_out: Any


class Tiles(NamedTuple):
    """Tensor descriptors of the same, one for each piece of the head dimension, or None."""

    q: Any
    k: Any
    v: Any
    d_out: Any


@triton.jit
def deal(index, n_tiles, n_heads, together):
    """(head, tile) of a program: `together` heads at a time, tile by tile. What they read stays in L2 then, and the
    longest tiles of a causal mask still start early."""
    of_group = together * n_tiles
    group = index // of_group
    first = group * together
    size = tl.minimum(n_heads - first, together)
    rest = index - group * of_group
    return first + rest % size, rest // size


@triton.jit
def unknown_zero():
    """0, which no compiler can know: it would take a load that is the same in each round out of the loop."""
    return tl.num_programs(1) // 65536


@triton.jit
def _load_q(inputs, tiles, span, head, first_row, ROWS: tl.constexpr, config, DESCRIPTOR: tl.constexpr):
    return memory.load_pieces(inputs.q, tiles.q, span.slab, head, span.q_row + first_row, span.q_row + span.q_len, ROWS,
                              True, config, config.D, config.D_PIECES, DESCRIPTOR)


@triton.jit
def _load_d_out(inputs, tiles, span, head, first_row, ROWS: tl.constexpr, config, DESCRIPTOR: tl.constexpr):
    return memory.load_pieces(inputs.d_out, tiles.d_out, span.slab, head, span.q_row + first_row,
                              span.q_row + span.q_len, ROWS, True, config, config.D_V, config.DV_PIECES, DESCRIPTOR)


@triton.jit
def _sweep_keys(q, d_out, row, inputs, tiles, stats, span, head, first_row, start, middle, resume, stop, dq, d_slope,
                scale_log2, modifiers, config, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, GUARDED: tl.constexpr):
    """Add the key blocks of [start, middle) and of [resume, stop) to dq, and to d_slope, which is empty where the
    gradient of the slopes is not wanted."""
    EXACT: tl.constexpr = GUARDED or config.EXACT
    DESCRIPTOR: tl.constexpr = config.DESCRIPTOR and not GUARDED
    RELOAD: tl.constexpr = config.RELOAD and not GUARDED
    kv_head = head // config.GROUP
    key_end = span.k_row + span.kv_len
    q_row, row_end = span.q_row + first_row, span.q_row + span.q_len
    nothing = unknown_zero()
    before = (middle - start) // BLOCK_N
    STAGES: tl.constexpr = 1 if GUARDED else None  # as of dK and dV
    n_blocks = before + (stop - resume + BLOCK_N - 1) // BLOCK_N
    for i in tl.range(0, n_blocks, num_stages=STAGES, disable_licm=not config.LICM):
        n = start + i * BLOCK_N
        if EDGE:
            n = tl.where(i < before, n, resume + (i - before) * BLOCK_N)
        k_row = span.k_row + n
        if RELOAD:
            of_q = memory.Rows(inputs.q, span.slab, head, q_row + i * nothing, row_end)
            of_k = memory.Rows(inputs.k, span.slab, kv_head, k_row, key_end)
            of_d_out = memory.Rows(inputs.d_out, span.slab, head, q_row + i * nothing, row_end)
            of_v = memory.Rows(inputs.v, span.slab, kv_head, k_row, key_end)
            s = products.scores_anew(of_q, of_k, config.BLOCK_M, BLOCK_N, True, EDGE, config, config.D, config.D_PIECES)
        else:
            k = memory.load_pieces(inputs.k, tiles.k, span.slab, kv_head, k_row, key_end, BLOCK_N, EDGE, config,
                                   config.D, config.D_PIECES, DESCRIPTOR)
            v = memory.load_pieces(inputs.v, tiles.v, span.slab, kv_head, k_row, key_end, BLOCK_N, EDGE, config,
                                   config.D_V, config.DV_PIECES, DESCRIPTOR)
            s = products.scores(q, k, config.PRECISION, config.UPCAST)
        p = gradients.probabilities(s, row, modifiers, span, head, first_row, n, scale_log2, config, EDGE, EXACT, False)
        keep = gradients.kept(modifiers, span, head, first_row, n, p.shape[0], BLOCK_N, False)
        if RELOAD:
            dp = products.scores_anew(of_d_out, of_v, config.BLOCK_M, BLOCK_N, True, EDGE, config, config.D_V,
                                      config.DV_PIECES)
        else:
            dp = products.scores(d_out, v, config.PRECISION, config.UPCAST)
        ds = gradients.of_scores(p, dp, keep, row, modifiers, config, EDGE, False)
        ds = gradients.of_biased(ds, s, modifiers, span, head, first_row, n, config, EDGE, False)
        if len(d_slope) == 1:
            place = scores.place_at(span, head, first_row, n, p.shape[0], BLOCK_N, EDGE)
            d_slope = (d_slope[0] - tl.sum(ds * scores.distance(span, place, False), 1),)
        ds = gradients.of_products(ds, s, modifiers, config)
        if RELOAD:
            k = memory.load_pieces(inputs.k, None, span.slab, kv_head, k_row + nothing, key_end, BLOCK_N, EDGE, config,
                                   config.D, config.D_PIECES, False, True)
        ds = products.narrow(ds, k[0].dtype, config.UPCAST)
        dq = products.weighted(ds, gradients.clean(k, GUARDED), dq, config.PRECISION, config.UPCAST, False)
    return dq, d_slope


@triton.jit
def _exact_statistics(q, inputs, stats, span, head, first_row, start, stop, scale_log2, lengths, modifiers, config,
                      tiles, BLOCK_N: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """(pivot, rest) of the rows of q for the exact exponent, from their scores; stores them too."""
    m = tl.full([q[0].shape[0]], softmax.NEVER, tl.float32)
    l = tl.zeros([q[0].shape[0]], tl.float32)
    acc = ()
    key_end = span.k_row + span.kv_len
    for n in tl.range(start, stop, BLOCK_N):
        k = memory.load_pieces(inputs.k, tiles.k, span.slab, head // config.GROUP, span.k_row + n, key_end, BLOCK_N,
                               True, config, config.D, config.D_PIECES, DESCRIPTOR)
        s = products.scores(q, k, config.PRECISION, config.UPCAST)
        s = scores.settle(s, modifiers, span, head, first_row, n, config, True, True)
        _, m, l, acc = softmax.step(s, m, l, acc, scale_log2, 0.0, False, True)
    sink = None
    if modifiers.sinks is not None:
        known = span.batch < lengths.count if lengths.cu_seqlens_q is not None else True
        sink = tl.load(modifiers.sinks + span.batch * modifiers.sinks_batch_stride + head, mask=known,
                       other=float("-inf")).to(tl.float32)
    rest = softmax.rest_of(m, l, scale_log2, sink)
    gradients.store_exact(stats, span, head, first_row, m, rest, q[0].shape[0])
    return m, rest


@triton.jit
def _no_slopes(d_slopes, ROWS: tl.constexpr):
    """The rows' shares of the gradient of the slopes before the first key: a tuple, empty if it is not wanted."""
    if d_slopes is not None:
        d_slope = (tl.zeros([ROWS], tl.float32),)
    else:
        d_slope = ()
    return d_slope


@triton.jit
def _finish_queries(dq, d_slope, out, d_slopes, stats, span, head, first_row, scale, config):
    row = span.q_row + first_row
    gradients.store(out, span, head, row, span.q_row + span.q_len, dq, scale, config.D, config.D_PIECES, config)
    if d_slopes is not None:
        ROWS: tl.constexpr = dq[0].shape[0]
        to = gradients.pointers(d_slopes, span, head, first_row, ROWS)
        tl.store(to, d_slope[0], mask=first_row + tl.arange(0, ROWS) < span.q_len)


@triton.jit(noinline=True)
def guarded_queries(inputs, out, d_slopes, stats, span, head, first_row, start, stop, scale_log2, scale, lengths,
                     modifiers, config):
    """Compute dQ of the tile once more, the careful way and in small pieces: this cold path must not cost the hot one
    its registers. Leaves its exact statistics for the other kernel."""
    tiles = Tiles((None, None), (None, None), (None, None), (None, None))
    # Addresses that are made before the loop live through all of it: sm_100 spilled at head dims 72 and 80.
    for r in tl.range(0, config.BLOCK_M, GUARD_M, disable_licm=True):
        first = first_row + r
        q = _load_q(inputs, tiles, span, head, first, GUARD_M, config, False)
        d_out = _load_d_out(inputs, tiles, span, head, first, GUARD_M, config, False)
        row = gradients.load_row(stats, span, head, first, GUARD_M, True, False)
        pivot, rest = _exact_statistics(q, inputs, stats, span, head, first, start, stop, scale_log2, lengths,
                                        modifiers, config, tiles, GUARD_N, False)
        row = gradients.Row(pivot, rest, row.delta)
        d_slope = _no_slopes(d_slopes, GUARD_M)
        dq = gradients.zeros(GUARD_M, config.D_PIECES)
        dq, d_slope = _sweep_keys(q, d_out, row, inputs, tiles, stats, span, head, first, start, start, start, stop,
                                  dq, d_slope, scale_log2, modifiers, config, GUARD_N, True, True)
        _finish_queries(dq, d_slope, out, d_slopes, stats, span, head, first, scale, config)


@triton.jit(do_not_specialize=["q_len", "kv_len", "first_offset", "last_offset", "n_tiles", "n_heads", "together"])
def attention_backward_queries(inputs, q_tiles, k_tiles, v_tiles, g_tiles, q_tails, k_tails, v_tails, g_tails, out,
                               d_slopes, stats, scale_log2, scale, q_len, kv_len, first_offset, last_offset, n_tiles,
                               n_heads, together, lengths, modifiers, config):
    """dQ of one query tile of one head. Grid: (query heads * n_tiles, batch), or (query heads * slots, 1) if packed.

    inputs: `Inputs`. q_tiles, ..., g_tails: the descriptors of `Tiles`, one by one; the launcher of Triton 3.6 finds
    none inside of tuples. out: `memory.View` of dQ. d_slopes: `gradients.Stats` of one plane, for each row's share of
    the gradient of the slopes, or None. scale_log2: as in `attention_forward`. scale: natural units, signed. The rest
    as there.
    """
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    tiles = Tiles((q_tiles, q_tails), (k_tiles, k_tails), (v_tiles, v_tails), (g_tiles, g_tails))
    head, slot = deal(tl.program_id(0), n_tiles, n_heads, together)
    if config.HAS_LAST:
        slot = n_tiles - 1 - slot
    span, tile = sequences.locate((slot, tl.program_id(1)), q_len, kv_len, first_offset, last_offset, lengths, BLOCK_M,
                                  config.BOTTOM_RIGHT)
    first_row = tile * BLOCK_M
    start, inner_start, inner_stop, stop = bounds.kv_range(first_row, tl.minimum(first_row + BLOCK_M, span.q_len) - 1,
                                                           span.kv_len, span.first_offset, span.last_offset, BLOCK_N,
                                                           config.HAS_FIRST, config.HAS_LAST)
    q = _load_q(inputs, tiles, span, head, first_row, BLOCK_M, config, config.DESCRIPTOR)
    d_out = _load_d_out(inputs, tiles, span, head, first_row, BLOCK_M, config, config.DESCRIPTOR)
    row = gradients.load_row(stats, span, head, first_row, BLOCK_M, True, config.EXACT)
    if config.EXACT:
        pivot, rest = row.pivot, row.rest
        if gradients.rough(rest, q[0].dtype):
            pivot, rest = _exact_statistics(q, inputs, stats, span, head, first_row, start, stop, scale_log2, lengths,
                                            modifiers, config, tiles, BLOCK_N, config.DESCRIPTOR)
        row = gradients.Row(pivot, rest, row.delta)
    d_slope = _no_slopes(d_slopes, BLOCK_M)
    dq = gradients.zeros(BLOCK_M, config.D_PIECES)
    dq, d_slope = _sweep_keys(q, d_out, row, inputs, tiles, stats, span, head, first_row, inner_start, inner_stop, stop,
                              stop, dq, d_slope, scale_log2, modifiers, config, BLOCK_N, False, False)
    dq, d_slope = _sweep_keys(q, d_out, row, inputs, tiles, stats, span, head, first_row, start, inner_start,
                              inner_stop, stop, dq, d_slope, scale_log2, modifiers, config, BLOCK_N, True, False)
    _finish_queries(dq, d_slope, out, d_slopes, stats, span, head, first_row, scale, config)
    if gradients.suspect(dq) > 0:
        guarded_queries(inputs, out, d_slopes, stats, span, head, first_row, start, stop, scale_log2, scale, lengths,
                         modifiers, config)
