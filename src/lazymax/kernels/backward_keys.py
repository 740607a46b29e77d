"""The kernel of dK and dV: a program has BLOCK_N keys, walks the query tiles that see them, for every query head of the
group, and holds its tiles turned (keys along the first dimension), so that P^T and dS^T go from registers into the next
product. See backward.py.

A launch computes both or one of them, the other being None and its sums an empty tuple. Two launches do five products
for four, with half of the sums in registers.
"""

import triton
import triton.language as tl

from . import backward, bounds, gradients, memory, products, sequences


@triton.jit
def _load_k(inputs, tiles, span, kv_head, first_col, ROWS: tl.constexpr, config, DESCRIPTOR: tl.constexpr):
    return memory.load_pieces(inputs.k, tiles.k, span.slab, kv_head, span.k_row + first_col, span.k_row + span.kv_len,
                              ROWS, True, config, config.D, config.D_PIECES, DESCRIPTOR)


@triton.jit
def _load_v(inputs, tiles, span, kv_head, first_col, ROWS: tl.constexpr, config, DESCRIPTOR: tl.constexpr):
    return memory.load_pieces(inputs.v, tiles.v, span.slab, kv_head, span.k_row + first_col, span.k_row + span.kv_len,
                              ROWS, True, config, config.D_V, config.DV_PIECES, DESCRIPTOR)


@triton.jit
def _no_sums(d_k, d_v, ROWS: tl.constexpr, config):
    """dK and dV before the first query: tuples, empty if they are not wanted."""
    dk, dv = (), ()
    if d_k is not None:
        dk = gradients.zeros(ROWS, config.D_PIECES)
    if d_v is not None:
        dv = gradients.zeros(ROWS, config.DV_PIECES)
    return dk, dv


@triton.jit
def _sweep_queries(k, v, inputs, tiles, stats, span, head, first_col, start, middle, resume, stop, dk, dv,
                   scale_log2, modifiers, config, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr,
                   GUARDED: tl.constexpr):
    """Add the query tiles of [start, middle) and of [resume, stop) to dk and dv. k, v: empty where they come anew.
    ONE_LOOP: those of all heads of the group, of which head is the first. (In a loop of heads around those of tiles
    with and without a mask, what each of them needs lives through the other: gfx1151 spilled scalar registers too,
    sm_100 a sum.)"""
    EXACT: tl.constexpr = GUARDED or config.EXACT
    DESCRIPTOR: tl.constexpr = config.DESCRIPTOR and not GUARDED
    RELOAD: tl.constexpr = config.RELOAD and not GUARDED
    row_end = span.q_row + span.q_len
    k_row, key_end, kv_head = span.k_row + first_col, span.k_row + span.kv_len, head // config.GROUP
    before = (middle - start) // BLOCK_M
    n_tiles = before + (stop - resume + BLOCK_M - 1) // BLOCK_M
    nothing = backward.unknown_zero()
    HEADS: tl.constexpr = config.GROUP if config.ONE_LOOP and not GUARDED else 1
    done = 0 * n_tiles  # of this head
    STAGES: tl.constexpr = 1 if GUARDED else None  # loads ahead cost registers, and sm_100's cold path spilled
    for i in tl.range(0, n_tiles * HEADS, num_stages=STAGES, disable_licm=not config.LICM):
        if HEADS > 1:
            whole = done == n_tiles
            head += tl.where(whole, 1, 0)
            i = tl.where(whole, 0, done)
            done = i + 1
        m = start + i * BLOCK_M
        if EDGE:
            m = tl.where(i < before, m, resume + (i - before) * BLOCK_M)
        at = span.q_row + m
        if RELOAD:
            of_q = memory.Rows(inputs.q, span.slab, head, at, row_end)
            of_k = memory.Rows(inputs.k, span.slab, kv_head, k_row + i * nothing, key_end)
            of_v = memory.Rows(inputs.v, span.slab, kv_head, k_row + i * nothing, key_end)
            of_d_out = memory.Rows(inputs.d_out, span.slab, head, at, row_end)
            s = products.scores_anew(of_k, of_q, BLOCK_N, BLOCK_M, EDGE, EDGE, config, config.D, config.D_PIECES)
            # Addresses of one register each, not a sum of known parts that is kept in registers for every plane.
            anew = gradients.Stats(stats.ptr, stats.plane + i * nothing, stats.batch_stride + i * nothing,
                                   stats.head_stride)
            row = gradients.load_row(anew, span, head, m, BLOCK_M, EDGE, EXACT, True)
        else:
            q = memory.load_pieces(inputs.q, tiles.q, span.slab, head, at, row_end, BLOCK_M, EDGE, config, config.D,
                                   config.D_PIECES, DESCRIPTOR)
            if not GUARDED:
                d_out = memory.load_pieces(inputs.d_out, tiles.d_out, span.slab, head, at, row_end, BLOCK_M, EDGE,
                                           config, config.D_V, config.DV_PIECES, DESCRIPTOR)
            row = gradients.load_row(stats, span, head, m, BLOCK_M, EDGE, EXACT)
            s = products.scores(k, q, config.PRECISION, config.UPCAST)
        p = gradients.probabilities(s, row, modifiers, span, head, m, first_col, scale_log2, config, EDGE, EXACT, True)
        if GUARDED:  # only now: sm_100's cold path spilled at head dim 72
            d_out = memory.load_pieces(inputs.d_out, tiles.d_out, span.slab, head, at, row_end, BLOCK_M, EDGE,
                                       config, config.D_V, config.DV_PIECES, DESCRIPTOR)
        keep = gradients.kept(modifiers, span, head, m, first_col, BLOCK_M, p.shape[0], True)
        if len(dv) > 0:
            if RELOAD:
                d_out = memory.load_pieces(inputs.d_out, None, span.slab, head, at, row_end, BLOCK_M, EDGE, config,
                                           config.D_V, config.DV_PIECES, False, True)
            weight = tl.where(keep, p, 0.0) if modifiers.seed is not None else p
            weight = products.narrow(weight, d_out[0].dtype, config.UPCAST)
            dv = products.weighted(weight, d_out, dv, config.PRECISION, config.UPCAST, False)
        if len(dk) > 0:
            if RELOAD:
                dp = products.scores_anew(of_v, of_d_out, BLOCK_N, BLOCK_M, EDGE, EDGE, config, config.D_V,
                                          config.DV_PIECES)
                row = gradients.load_row(anew, span, head, m, BLOCK_M, EDGE, EXACT, True)  # delta when it is due
            else:
                dp = products.scores(v, d_out, config.PRECISION, config.UPCAST)
            ds = gradients.of_scores(p, dp, keep, row, modifiers, config, EDGE, True)
            ds = gradients.of_biased(ds, s, modifiers, span, head, m, first_col, config, EDGE, True)
            ds = gradients.of_products(ds, s, modifiers, config)
            if RELOAD:
                q = memory.load_pieces(inputs.q, None, span.slab, head, at + nothing, row_end, BLOCK_M, EDGE, config,
                                       config.D, config.D_PIECES, False, True)
            ds = products.narrow(ds, q[0].dtype, config.UPCAST)
            dk = products.weighted(ds, gradients.clean(q, GUARDED), dk, config.PRECISION, config.UPCAST, False)
    return dk, dv


@triton.jit
def _finish_keys(dk, dv, d_k, d_v, span, kv_head, first_col, end, scale, modifiers, config):
    at = span.k_row + first_col
    growth = modifiers.growth if modifiers.seed is not None else 1.0
    if d_k is not None:
        gradients.store(d_k, span, kv_head, at, span.k_row + end, dk, scale, config.D, config.D_PIECES, config)
    if d_v is not None:
        gradients.store(d_v, span, kv_head, at, span.k_row + end, dv, growth, config.D_V, config.DV_PIECES, config)


@triton.jit(noinline=True)
def guarded_keys(inputs, d_k, d_v, stats, span, kv_head, first_col, end, scale_log2, scale, modifiers, config):
    """Compute what is wanted of dK and dV of the tile once more, as `backward.guarded_queries` does dQ: every query,
    every mask."""
    tiles = backward.Tiles((None, None), (None, None), (None, None), (None, None))
    for c in tl.range(0, config.BLOCK_N, backward.GUARD_N, disable_licm=True):  # as there
        first = first_col + c
        k = _load_k(inputs, tiles, span, kv_head, first, backward.GUARD_N, config, False)
        v = _load_v(inputs, tiles, span, kv_head, first, backward.GUARD_N, config, False)
        dk, dv = _no_sums(d_k, d_v, backward.GUARD_N, config)
        for g in tl.range(0, config.GROUP):
            dk, dv = _sweep_queries(k, v, inputs, tiles, stats, span, kv_head * config.GROUP + g, first, 0, 0, 0,
                                    span.q_len, dk, dv, scale_log2, modifiers, config, backward.GUARD_M,
                                    backward.GUARD_N, True, True)
        _finish_keys(dk, dv, d_k, d_v, span, kv_head, first, end, scale, modifiers, config)


@triton.jit(do_not_specialize=["q_len", "kv_len", "first_offset", "last_offset", "n_tiles", "n_heads", "together"])
def attention_backward_keys(inputs, q_tiles, k_tiles, v_tiles, g_tiles, q_tails, k_tails, v_tails, g_tails, d_k, d_v,
                            stats, scale_log2, scale, q_len, kv_len, first_offset, last_offset, n_tiles, n_heads,
                            together, lengths, modifiers, config):
    """dK and dV of one key tile of one key head, summed over the query heads of its group in registers. Grid: (key
    heads * n_tiles, batch), or (key heads * slots, 1) if packed. d_k, d_v: `memory.View`, or None for one of them that
    another launch computes; the rest as above."""
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    tiles = backward.Tiles((q_tiles, q_tails), (k_tiles, k_tails), (v_tiles, v_tails), (g_tiles, g_tails))
    kv_head, slot = backward.deal(tl.program_id(0), n_tiles, n_heads, together)
    span, tile, end = sequences.locate_keys((slot, tl.program_id(1)), q_len, kv_len, first_offset, last_offset,
                                            lengths, BLOCK_N, config.BOTTOM_RIGHT)
    first_col = tile * BLOCK_N
    start, inner_start, inner_stop, stop = bounds.q_range(first_col, tl.minimum(first_col + BLOCK_N, span.kv_len) - 1,
                                                          span.q_len, span.first_offset, span.last_offset, BLOCK_M,
                                                          config.HAS_FIRST, config.HAS_LAST)
    if first_col + BLOCK_N > span.kv_len:  # keys outside: every tile needs the mask
        inner_start = start
        inner_stop = start
    k, v = (), ()
    if not config.RELOAD:
        k = _load_k(inputs, tiles, span, kv_head, first_col, BLOCK_N, config, config.DESCRIPTOR)
        v = _load_v(inputs, tiles, span, kv_head, first_col, BLOCK_N, config, config.DESCRIPTOR)
    dk, dv = _no_sums(d_k, d_v, BLOCK_N, config)
    for g in tl.range(0, 1 if config.ONE_LOOP else config.GROUP):
        head = kv_head * config.GROUP + g
        dk, dv = _sweep_queries(k, v, inputs, tiles, stats, span, head, first_col, start, inner_start, inner_stop, stop,
                                dk, dv, scale_log2, modifiers, config, BLOCK_M, BLOCK_N, True, False)
        dk, dv = _sweep_queries(k, v, inputs, tiles, stats, span, head, first_col, inner_start, inner_stop, stop, stop,
                                dk, dv, scale_log2, modifiers, config, BLOCK_M, BLOCK_N, False, False)
    _finish_keys(dk, dv, d_k, d_v, span, kv_head, first_col, end, scale, modifiers, config)
    if gradients.suspect(dk + dv) > 0:
        guarded_keys(inputs, d_k, d_v, stats, span, kv_head, first_col, end, scale_log2, scale, modifiers, config)
