"""The portable forward: one kernel for every GPU that Triton compiles for.

One program computes BLOCK_M query rows of one head. It walks the key blocks that its rows can see, in up to three
stretches of one body: a masked one at the left edge of a window, an unmasked one, a masked one at the diagonal and
the tail. `lazymax.kernels.launch` prepares the arguments.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import bounds, masking, memory, products, softmax

GUARD_M = tl.constexpr(16)
GUARD_N = tl.constexpr(16)


class Config(NamedTuple):
    """What one build of the kernel is specialised for; every field a `tl.constexpr`."""

    BLOCK_M: Any  # query rows of a program
    BLOCK_N: Any  # keys of a block
    BLOCK_D: Any  # head dimension of q and k, rounded up to what a tile can hold
    BLOCK_DV: Any  # the same of v and out
    D: Any
    D_V: Any
    GROUP: Any  # query heads per key head
    HAS_FIRST: Any  # the band has a left bound (window)
    HAS_LAST: Any  # the band has a right bound (causal, window)
    DESCRIPTOR: Any  # q, k and v come through tensor descriptors, else through pointers
    BRANCH: Any  # form of the lazy rescale, see softmax.step
    PRECISION: Any  # of fp32 products: "ieee" or "tf32"
    UPCAST: Any  # see products.dot
    WIDE: Any  # see memory.tile_pointers
    NEGATE: Any  # the scale is negative: scores change sign, so that the kernel's own scale is positive
    STORE_LSE: Any


@triton.jit
def _sweep(q_tile, k, v, k_tiles, v_tiles, batch, kv_head, first_row, start, stop, m, l, acc, scale_log2, threshold,
           kv_len, first_offset, last_offset, config, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
           GUARDED: tl.constexpr):
    """Take the key blocks [start, stop) into the running state (m, l, acc). GUARDED: the cold path, by pointers, with
    the exact exponent and the guarded product."""
    DESCRIPTOR: tl.constexpr = config.DESCRIPTOR and not GUARDED
    for n in tl.range(start, stop, BLOCK_N):
        if DESCRIPTOR:
            # Side by side, the two copies share a barrier: 7 points of cuDNN's speed on sm_90 over loading v late.
            k_tile = memory.load_described(k_tiles, batch, kv_head, n, BLOCK_N, config.BLOCK_D)
            v_tile = memory.load_described(v_tiles, batch, kv_head, n, BLOCK_N, config.BLOCK_DV)
        else:
            k_tile = memory.load_tile(k, batch, kv_head, n, kv_len, config.D, BLOCK_N, config.BLOCK_D, MASKED,
                                      config.WIDE)
        s = products.dot(q_tile, k_tile.T, None, config.PRECISION, config.UPCAST)
        if config.NEGATE:
            s = -s
        if MASKED:
            rows = first_row + tl.arange(0, m.shape[0])
            inside = masking.keep(rows, n + tl.arange(0, BLOCK_N), kv_len, first_offset, last_offset, config.HAS_FIRST,
                                  config.HAS_LAST)
            s = tl.where(inside, s, float("-inf"))
        p, m, l, acc = softmax.step(s, m, l, acc, scale_log2, threshold, config.BRANCH and not GUARDED, GUARDED)
        if not DESCRIPTOR:
            v_tile = memory.load_tile(v, batch, kv_head, n, kv_len, config.D_V, BLOCK_N, config.BLOCK_DV, MASKED,
                                      config.WIDE)
        p_tile = products.narrow(p, v_tile.dtype, config.UPCAST)
        if GUARDED:
            acc = products.guarded_pv(p_tile, v_tile, acc, config.PRECISION, config.UPCAST)
        else:
            acc = products.dot(p_tile, v_tile, acc, config.PRECISION, config.UPCAST)
    return m, l, acc


@triton.jit
def _store(out, lse, batch, head, head_index, first_row, q_len, m, l, acc, scale_log2, config):
    """Finish the state of a tile and write its output and LSE."""
    out32, lse_tile = softmax.finish(m, l, acc, scale_log2)
    out_tile = products.narrow(out32, out.ptr.dtype.element_ty, config.UPCAST)
    memory.store_tile(out, batch, head, first_row, q_len, out_tile, config.D_V, config.WIDE)
    if config.STORE_LSE:
        rows = first_row + tl.arange(0, acc.shape[0])
        tl.store(lse + tl.cast(head_index, tl.int64) * q_len + rows, lse_tile, mask=rows < q_len)


@triton.jit(noinline=True)
def _rewrite_guarded(q, k, v, out, lse, batch, head, kv_head, head_index, first_row, start, stop, scale_log2, threshold,
                     q_len, kv_len, first_offset, last_offset, config):
    """Compute and store the tile once more, the careful way and in small pieces: this cold path must not cost the hot
    one its registers."""
    for r in tl.range(0, config.BLOCK_M, GUARD_M):
        chunk = first_row + r
        q_tile = memory.load_tile(q, batch, head, chunk, q_len, config.D, GUARD_M, config.BLOCK_D, True, config.WIDE)
        m = tl.full([GUARD_M], softmax.NEVER, tl.float32)
        l = tl.zeros([GUARD_M], tl.float32)
        acc = tl.zeros([GUARD_M, config.BLOCK_DV], tl.float32)
        m, l, acc = _sweep(q_tile, k, v, None, None, batch, kv_head, chunk, start, stop, m, l,
                           acc, scale_log2, threshold, kv_len, first_offset, last_offset, config, GUARD_N, True, True)
        _store(out, lse, batch, head, head_index, chunk, q_len, m, l, acc, scale_log2, config)


@triton.jit(do_not_specialize=["q_len", "kv_len", "first_offset", "last_offset"])
def attention_forward(q, k, v, out, lse, q_tiles, k_tiles, v_tiles, scale_log2, threshold, q_len, kv_len, first_offset,
                      last_offset, config):
    """One query tile of one head: out = softmax(scale * q @ k^T inside the band) @ v. Grid: (q_heads, query tiles,
    batch).

    q, k, v, out: `memory.View`. q_tiles, k_tiles, v_tiles: tensor descriptors of them, or None. lse: fp32 (batch,
    q_heads, q_len), natural log. scale_log2: |scale| times log2(e), not 0. threshold: of the lazy rescale, in log2
    units. first_offset, last_offset: the band, see `bounds.kv_range`. Lengths are not specialised: one build serves
    them all.

    The heads of a batch element run side by side, tile by tile: heads of a group share their keys in L2, and under a
    causal mask the longest tiles start first. Plain program ids, not divisions of one, keep head and batch in uniform
    registers; a few registers fewer is what lets two programs of 256 threads share an SM of sm_90.
    """
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    head = tl.program_id(0)
    tile = tl.program_id(1)
    batch = tl.program_id(2)
    if config.HAS_LAST:
        tile = tl.num_programs(1) - 1 - tile
    kv_head = head // config.GROUP
    head_index = batch * tl.num_programs(0) + head
    first_row = tile * BLOCK_M

    if config.DESCRIPTOR:
        q_tile = memory.load_described(q_tiles, batch, head, first_row, BLOCK_M, config.BLOCK_D)
    else:
        q_tile = memory.load_tile(q, batch, head, first_row, q_len, config.D, BLOCK_M, config.BLOCK_D, True,
                                  config.WIDE)
    m = tl.full([BLOCK_M], softmax.NEVER, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, config.BLOCK_DV], tl.float32)
    start, inner_start, inner_stop, stop = bounds.kv_range(first_row, tl.minimum(first_row + BLOCK_M, q_len) - 1,
                                                           kv_len, first_offset, last_offset, BLOCK_N, config.HAS_FIRST,
                                                           config.HAS_LAST)
    if config.HAS_FIRST:
        m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, batch, kv_head, first_row, start, inner_start, m, l, acc,
                           scale_log2, threshold, kv_len, first_offset, last_offset, config, BLOCK_N, True, False)
    m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, batch, kv_head, first_row, inner_start, inner_stop, m, l, acc,
                       scale_log2, threshold, kv_len, first_offset, last_offset, config, BLOCK_N, False, False)
    m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, batch, kv_head, first_row, inner_stop, stop, m, l, acc,
                       scale_log2, threshold, kv_len, first_offset, last_offset, config, BLOCK_N, True, False)
    _store(out, lse, batch, head, head_index, first_row, q_len, m, l, acc, scale_log2, config)
    # Two things the loops above do not care about, because caring costs: scores so large that the fused exponent is
    # off, and 0 * NaN, a value outside a row's band but inside its tile that poisoned the row. Both show at the end.
    suspect = tl.maximum(tl.max(softmax.needs_exact(m, l, scale_log2)), tl.max((acc != acc).to(tl.int32)))
    if suspect > 0:
        _rewrite_guarded(q, k, v, out, lse, batch, head, kv_head, head_index, first_row, start, stop, scale_log2,
                         threshold, q_len, kv_len, first_offset, last_offset, config)
