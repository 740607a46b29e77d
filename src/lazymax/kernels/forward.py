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
GUARD_N = tl.constexpr(32)


class Config(NamedTuple):
    """What one build of the kernel is specialised for; every field a `tl.constexpr`."""

    BLOCK_M: Any  # query rows of a program
    BLOCK_N: Any  # keys of a block
    BLOCK_D: Any  # head dimension of q and k, rounded up to what a tile can hold
    BLOCK_DV: Any  # the same of v and out
    D: Any
    D_V: Any
    HAS_FIRST: Any  # the band has a left bound (window)
    HAS_LAST: Any  # the band has a right bound (causal, window)
    DESCRIPTOR: Any  # k and v come through tensor descriptors, else through pointers
    BRANCH: Any  # form of the lazy rescale, see softmax.step
    PRECISION: Any  # of fp32 products: "ieee" or "tf32"
    UPCAST: Any  # see products.dot
    WIDE: Any  # see memory.tile_pointers
    STORE_LSE: Any


@triton.jit
def _locate(pid, q_tiles, heads, section, LONGEST_FIRST: tl.constexpr):
    """Program id -> (query tile, batch * head). Programs run through `section` heads at a time, tile by tile: the keys
    and values of a section stay in L2 while, under a causal mask, its longest tiles start first."""
    span = q_tiles * section
    first = pid // span * section
    width = tl.minimum(section, heads - first)
    tile = pid % span // width
    if LONGEST_FIRST:
        tile = q_tiles - 1 - tile
    return tile, first + pid % span % width


@triton.jit
def _sweep(q_tile, k, v, k_tiles, v_tiles, batch, kv_head, rows, start, stop, m, l, acc, scale_log2, threshold, kv_len,
           first_offset, last_offset, config, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, GUARDED: tl.constexpr):
    """Take the key blocks [start, stop) into the running state (m, l, acc)."""
    DESCRIPTOR: tl.constexpr = config.DESCRIPTOR and not GUARDED
    for n in tl.range(start, stop, BLOCK_N):
        if DESCRIPTOR:
            k_tile = memory.load_described(k_tiles, batch, kv_head, n, BLOCK_N, config.BLOCK_D)
        else:
            k_tile = memory.load_tile(k, batch, kv_head, n, kv_len, config.D, BLOCK_N, config.BLOCK_D, MASKED,
                                      config.WIDE)
        s = products.dot(q_tile, k_tile.T, None, config.PRECISION, config.UPCAST)
        s2 = softmax.fold_scale(s, scale_log2)
        if MASKED:
            inside = masking.keep(rows, n + tl.arange(0, BLOCK_N), kv_len, first_offset, last_offset, config.HAS_FIRST,
                                  config.HAS_LAST)
            s2 = tl.where(inside, s2, float("-inf"))
        p, m, l, acc = softmax.step(s2, m, l, acc, threshold, config.BRANCH and not GUARDED)
        if DESCRIPTOR:
            v_tile = memory.load_described(v_tiles, batch, kv_head, n, BLOCK_N, config.BLOCK_DV)
        else:
            v_tile = memory.load_tile(v, batch, kv_head, n, kv_len, config.D_V, BLOCK_N, config.BLOCK_DV, MASKED,
                                      config.WIDE)
        p_tile = products.narrow(p, v_tile.dtype, config.UPCAST)
        if GUARDED:
            acc = products.guarded_pv(p_tile, v_tile, acc, config.PRECISION, config.UPCAST)
        else:
            acc = products.dot(p_tile, v_tile, acc, config.PRECISION, config.UPCAST)
    return m, l, acc


@triton.jit
def _rewrite_guarded(q, k, v, out, batch, head, kv_head, first_row, start, stop, scale_log2, threshold, q_len, kv_len,
                     first_offset, last_offset, config):
    """Compute and store the tile's output once more with `products.guarded_pv`, in small pieces: this cold path must
    not cost the hot one its registers."""
    for r in tl.range(0, config.BLOCK_M, GUARD_M):
        chunk = first_row + r
        q_tile = memory.load_tile(q, batch, head, chunk, q_len, config.D, GUARD_M, config.BLOCK_D, True, config.WIDE)
        m = tl.full([GUARD_M], float("-inf"), tl.float32)
        l = tl.zeros([GUARD_M], tl.float32)
        acc = tl.zeros([GUARD_M, config.BLOCK_DV], tl.float32)
        m, l, acc = _sweep(q_tile, k, v, None, None, batch, kv_head, chunk + tl.arange(0, GUARD_M), start, stop, m, l,
                           acc, scale_log2, threshold, kv_len, first_offset, last_offset, config, GUARD_N, True, True)
        out32, _ = softmax.finish(m, l, acc)
        out_tile = products.narrow(out32, q_tile.dtype, config.UPCAST)
        memory.store_tile(out, batch, head, chunk, q_len, out_tile, config.D_V, config.WIDE)


@triton.jit(do_not_specialize=["heads", "q_heads", "group", "q_len", "kv_len", "first_offset", "last_offset",
            "section"])
def attention_forward(q, k, v, out, lse, k_tiles, v_tiles, scale_log2, threshold, heads, q_heads, group, q_len, kv_len,
                      first_offset, last_offset, section, config):
    """One query tile of one head: out = softmax(scale * q @ k^T inside the band) @ v.

    q, k, v, out: `memory.View`. k_tiles, v_tiles: tensor descriptors of k and v, or None. lse: fp32 (batch, q_heads,
    q_len), natural log. scale_log2: the scale times log2(e). threshold: of the lazy rescale, in log2 units. heads:
    batch * q_heads; group: query heads per key head; section: heads that run side by side (`_locate`). first_offset,
    last_offset: the band, see `bounds.kv_range`. Lengths are not specialised: one build serves them all.
    """
    BLOCK_M: tl.constexpr = config.BLOCK_M
    BLOCK_N: tl.constexpr = config.BLOCK_N
    tile, head_index = _locate(tl.program_id(0), tl.cdiv(q_len, BLOCK_M), heads, section, config.HAS_LAST)
    batch = head_index // q_heads
    head = head_index % q_heads
    kv_head = head // group
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)

    q_tile = memory.load_tile(q, batch, head, first_row, q_len, config.D, BLOCK_M, config.BLOCK_D, True, config.WIDE)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, config.BLOCK_DV], tl.float32)
    start, inner_start, inner_stop, stop = bounds.kv_range(first_row, tl.minimum(first_row + BLOCK_M, q_len) - 1,
                                                           kv_len, first_offset, last_offset, BLOCK_N, config.HAS_FIRST,
                                                           config.HAS_LAST)
    if config.HAS_FIRST:
        m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, batch, kv_head, rows, start, inner_start, m, l, acc,
                           scale_log2, threshold, kv_len, first_offset, last_offset, config, BLOCK_N, True, False)
    m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, batch, kv_head, rows, inner_start, inner_stop, m, l, acc,
                       scale_log2, threshold, kv_len, first_offset, last_offset, config, BLOCK_N, False, False)
    m, l, acc = _sweep(q_tile, k, v, k_tiles, v_tiles, batch, kv_head, rows, inner_stop, stop, m, l, acc, scale_log2,
                       threshold, kv_len, first_offset, last_offset, config, BLOCK_N, True, False)
    out32, lse_tile = softmax.finish(m, l, acc)
    out_tile = products.narrow(out32, q_tile.dtype, config.UPCAST)
    memory.store_tile(out, batch, head, first_row, q_len, out_tile, config.D_V, config.WIDE)
    if config.STORE_LSE:
        tl.store(lse + head_index.to(tl.int64) * q_len + rows, lse_tile, mask=rows < q_len)
    if config.HAS_FIRST or config.HAS_LAST:
        # 0 * NaN: a value outside a row's band but inside its tile may have poisoned the row. The loops above pay
        # nothing for that; when it shows, the tile is written once more, with the guarded product.
        if tl.max((acc != acc).to(tl.int32)) > 0:
            _rewrite_guarded(q, k, v, out, batch, head, kv_head, first_row, start, stop, scale_log2, threshold, q_len,
                             kv_len, first_offset, last_offset, config)
