"""The portable forward: one kernel for every GPU that Triton compiles for.

One program computes BLOCK_M query rows of one head. It walks the key blocks that its rows can see, in a few stretches
of one body: one with the band's mask at the left edge of a window, one without in the middle (two if the blocks there
come from a list: full and partial ones), one with it at the diagonal and the tail. `lazymax.kernels.launch` prepares
the arguments.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import blocks as lists
from . import bounds, dropout, memory, products, scores, sequences, softmax

GUARD_M = tl.constexpr(16)
GUARD_N = tl.constexpr(16)


class Config(NamedTuple):
    """What one build of the kernel is specialised for; every field a `tl.constexpr`, a tuple of them or a function."""

    BLOCK_M: Any  # query rows of a program
    BLOCK_N: Any  # keys of a block
    D_PIECES: Any  # the head dimension of q and k in tiles: (first column, columns) of each, powers of two
    DV_PIECES: Any  # the same of v and out
    D: Any
    D_V: Any
    GROUP: Any  # query heads per key head
    HAS_FIRST: Any  # the band has a left bound (window)
    HAS_LAST: Any  # the band has a right bound (causal, window)
    BOTTOM_RIGHT: Any  # alignment of the band and of ALiBi
    DESCRIPTOR: Any  # q, k and v come through tensor descriptors, else through pointers
    BRANCH: Any  # form of the lazy rescale, see softmax.step
    WARP_SPECIALIZE: Any  # Triton gives loads and products of the loop warps of their own
    PRECISION: Any  # of fp32 products: "ieee" or "tf32"
    UPCAST: Any  # see products.dot
    WIDE: Any  # see memory.tile_pointers
    NEGATE: Any  # the scale is negative: scores change sign, so that the kernel's own scale is positive
    STORE_LSE: Any
    MODIFIED: Any  # scores change beyond the scale, see scores.modify; the softmax takes natural units then
    LARGE_CAP: Any  # the softcap is so far above usual scores that its tanh must be exact near 0
    CHOOSES: Any  # bool mask or mask_mod choose keys
    BOOL_MASK: Any
    FLOAT_MASK: Any
    MASK_ROWS: Any  # the mask differs over queries
    MASK_COLS: Any  # ... over keys
    SCORE_MOD: Any  # jitted function or None
    MASK_MOD: Any
    LISTED: Any  # of the key blocks inside the band, those to visit come from a list, see blocks.py


@triton.jit
def _sweep(q_tile, k, v, k_tiles, v_tiles, blocks, span, head, first_row, start, stop, m, l, acc, scale_log2, threshold,
           modifiers, config, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, GUARDED: tl.constexpr, LISTED: tl.constexpr,
           CHOOSE: tl.constexpr):
    """Take the key blocks of [start, stop) into the running state (m, l, acc). EDGE: the band or the length may cut
    through them. GUARDED: the cold path, by pointers, with the exact exponent and the guarded product. LISTED: start
    and stop are positions in the list `blocks` instead of keys. CHOOSE: bool mask and mask_mod may hide keys."""
    DESCRIPTOR: tl.constexpr = config.DESCRIPTOR and not GUARDED
    EXACT: tl.constexpr = GUARDED or config.MODIFIED
    STEP: tl.constexpr = 1 if LISTED else BLOCK_N
    kv_head = head // config.GROUP
    key_end = span.k_row + span.kv_len
    for at in tl.range(start, stop, STEP, warp_specialize=config.WARP_SPECIALIZE and not GUARDED):
        n = at
        if LISTED:
            n = tl.load(blocks + at) * BLOCK_N
        k_row = span.k_row + n
        k_tile = memory.load_pieces(k, k_tiles, span.slab, kv_head, k_row, key_end, BLOCK_N, EDGE, config, config.D,
                                    config.D_PIECES, DESCRIPTOR)
        if DESCRIPTOR:
            # Side by side, the two copies share a barrier: 7 points of cuDNN's speed on sm_90 over loading v late.
            v_tile = memory.load_pieces(v, v_tiles, span.slab, kv_head, k_row, key_end, BLOCK_N, EDGE, config,
                                        config.D_V, config.DV_PIECES, True)
        s = products.scores(q_tile, k_tile, config.PRECISION, config.UPCAST)
        s = scores.settle(s, modifiers, span, head, first_row, n, config, EDGE, CHOOSE)
        p, m, l, acc = softmax.step(s, m, l, acc, scale_log2, threshold, config.BRANCH and not GUARDED, EXACT)
        if modifiers.seed is not None:
            kept = dropout.keep(modifiers.seed, span.batch, head, first_row, n, modifiers.dropout_p, p.shape[0],
                                BLOCK_N)
            p = tl.where(kept, p, 0.0)
        if not DESCRIPTOR:
            v_tile = memory.load_pieces(v, v_tiles, span.slab, kv_head, k_row, key_end, BLOCK_N, EDGE, config,
                                        config.D_V, config.DV_PIECES, False)
        p_tile = products.narrow(p, v_tile[0].dtype, config.UPCAST)
        acc = products.weighted(p_tile, v_tile, acc, config.PRECISION, config.UPCAST, GUARDED)
    return m, l, acc


@triton.jit
def _begin(ROWS: tl.constexpr, config):
    """The state (m, l, acc) before the first key."""
    acc = ()
    for i in tl.static_range(len(config.DV_PIECES)):
        acc = acc + (tl.zeros([ROWS, config.DV_PIECES[i][1]], tl.float32),)
    return tl.full([ROWS], softmax.NEVER, tl.float32), tl.zeros([ROWS], tl.float32), acc


@triton.jit
def _store(out, lse, lse_rows, span, head, first_row, m, l, acc, scale_log2, lengths, modifiers, config):
    """Finish the state of a tile and write its output and LSE."""
    if modifiers.sinks is not None:
        # Rows behind the last packed sequence have no sink.
        known = span.batch < lengths.count if lengths.cu_seqlens_q is not None else True
        sink = tl.load(modifiers.sinks + span.batch * modifiers.sinks_batch_stride + head, mask=known,
                       other=float("-inf")).to(tl.float32)
        acc, lse_tile = softmax.finish_with_sink(m, l, acc, scale_log2, sink)
    else:
        acc, lse_tile = softmax.finish(m, l, acc, scale_log2)
    if modifiers.seed is not None:
        acc = softmax.scaled(acc, tl.zeros_like(l) + modifiers.growth)
    row = span.q_row + first_row
    row_end = span.q_row + span.q_len
    for i in tl.static_range(len(acc)):
        tile = products.narrow(acc[i], out.ptr.dtype.element_ty, config.UPCAST)
        memory.store_tile(out, span.slab, head, row, row_end, tile, config.D_V, config.WIDE, config.DV_PIECES[i][0])
    if config.STORE_LSE:
        rows = row + tl.arange(0, l.shape[0])
        head_index = tl.cast(span.slab * tl.num_programs(0) + head, tl.int64)
        tl.store(lse + head_index * lse_rows + rows, lse_tile, mask=rows < row_end)


@triton.jit(noinline=True)
def _rewrite_guarded(q, k, v, out, lse, lse_rows, span, head, first_row, start, stop, scale_log2, threshold, lengths,
                     modifiers, config):
    """Compute and store the tile once more, the careful way and in small pieces: this cold path must not cost the hot
    one its registers."""
    for r in tl.range(0, config.BLOCK_M, GUARD_M):
        chunk = first_row + r
        q_tile = memory.load_pieces(q, None, span.slab, head, span.q_row + chunk, span.q_row + span.q_len, GUARD_M,
                                    True, config, config.D, config.D_PIECES, False)
        m, l, acc = _begin(GUARD_M, config)
        m, l, acc = _sweep(q_tile, k, v, None, None, None, span, head, chunk, start, stop, m, l, acc, scale_log2,
                           threshold, modifiers, config, GUARD_N, True, True, False, True)
        _store(out, lse, lse_rows, span, head, chunk, m, l, acc, scale_log2, lengths, modifiers, config)


@triton.jit(do_not_specialize=["q_len", "kv_len", "first_offset", "last_offset", "lse_rows"])
def attention_forward(q, k, v, out, lse, q_tiles, k_tiles, v_tiles, q_tails, k_tails, v_tails, scale_log2, threshold,
                      q_len, kv_len, first_offset, last_offset, lse_rows, lengths, modifiers, blocks, config):
    """One query tile of one head: out = softmax(scale * q @ k^T inside the band) @ v. Grid: (q_heads, query tiles,
    batch), or (q_heads, slots, 1) for packed sequences, see `sequences.find`.

    q, k, v, out: `memory.View`. q_tiles, k_tiles, v_tiles: tensor descriptors of them, or None; q_tails, ...: of the
    columns that the first piece of a head dimension leaves. lse: fp32 (batch, q_heads, lse_rows), natural log.
    scale_log2: |scale| times log2(e), not 0; log2(e) if scores are modified. threshold: of the lazy rescale, in log2
    units. first_offset, last_offset: the band, see `bounds.kv_range`. lengths: `sequences.Lengths`. modifiers:
    `scores.Modifiers`. blocks: `blocks.List`. Lengths are not specialised: one build serves them all.

    The heads of a batch element run side by side, tile by tile: heads of a group share their keys in L2, and under a
    causal mask the longest tiles start first. Plain program ids, not divisions of one, keep head and batch in uniform
    registers; a few registers fewer is what lets two programs of 256 threads share an SM of Hopper.
    """
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    head = tl.program_id(0)
    slot = tl.program_id(1)
    if config.HAS_LAST:
        slot = tl.num_programs(1) - 1 - slot
    span, tile = sequences.locate((slot, tl.program_id(2)), q_len, kv_len, first_offset, last_offset, lengths, BLOCK_M,
                                  config.BOTTOM_RIGHT)
    first_row = tile * BLOCK_M

    q_tile = memory.load_pieces(q, (q_tiles, q_tails), span.slab, head, span.q_row + first_row, span.q_row + span.q_len,
                                BLOCK_M, True, config, config.D, config.D_PIECES, config.DESCRIPTOR)
    k_tiles = (k_tiles, k_tails)
    v_tiles = (v_tiles, v_tails)
    m, l, acc = _begin(BLOCK_M, config)
    start, inner_start, inner_stop, stop = bounds.kv_range(first_row, tl.minimum(first_row + BLOCK_M, span.q_len) - 1,
                                                           span.kv_len, span.first_offset, span.last_offset, BLOCK_N,
                                                           config.HAS_FIRST, config.HAS_LAST)
    if config.HAS_FIRST:
        m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, None, span, head, first_row, start, inner_start, m, l, acc,
                           scale_log2, threshold, modifiers, config, BLOCK_N, True, False, False, True)
    if config.LISTED:
        row = lists.row_of(blocks, tl.program_id(2), head, slot)
        full = lists.HEADER + tl.load(row)
        end = lists.HEADER + tl.cdiv(kv_len, BLOCK_N)
        m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, row, span, head, first_row, lists.HEADER, full, m, l, acc,
                           scale_log2, threshold, modifiers, config, BLOCK_N, False, False, True, False)
        partial = end - tl.load(row + 1)
        m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, row, span, head, first_row, partial, end, m, l, acc,
                           scale_log2, threshold, modifiers, config, BLOCK_N, False, False, True, True)
    else:
        m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, None, span, head, first_row, inner_start, inner_stop, m, l,
                           acc, scale_log2, threshold, modifiers, config, BLOCK_N, False, False, False, True)
    m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, None, span, head, first_row, inner_stop, stop, m, l, acc,
                       scale_log2, threshold, modifiers, config, BLOCK_N, True, False, False, True)
    _store(out, lse, lse_rows, span, head, first_row, m, l, acc, scale_log2, lengths, modifiers, config)
    # Two things the loops above do not care about, because caring costs: scores so large that the fused exponent is
    # off, and 0 * NaN, a value that a row may not see but that lies in its tile poisoned it. Both show at the end.
    suspect = products.poisoned(acc)
    if not config.MODIFIED:
        suspect = tl.maximum(suspect, tl.max(softmax.needs_exact(m, l, scale_log2)))
    if suspect > 0:
        _rewrite_guarded(q, k, v, out, lse, lse_rows, span, head, first_row, start, stop, scale_log2, threshold,
                         lengths, modifiers, config)
