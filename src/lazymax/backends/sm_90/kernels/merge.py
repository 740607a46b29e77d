"""What the splits of a tile's keys found, joined: see `work.py` and, for the formula, `lazymax/merging.py`."""

import triton
import triton.language as tl

from ....kernels.scores import LOG2E
from ....kernels.softmax import LN2

ROWS = tl.constexpr(4)  # of a program: one for each warp


@triton.jit(do_not_specialize=["rows", "heads", "q_len", "tile_queries"])
def merge(parts, parts_lse, counts, out, lse, sinks, sinks_batch_stride, rows, heads, q_len, tile_queries,
          D_V: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr, STORE_LSE: tl.constexpr):
    """out = sum of the parts, each times exp of its LSE over the sum of these. Grid: (rows / ROWS,).

    parts: (SPLITS, B, heads, q_len, D_V) fp32, parts_lse: without the last dimension, both contiguous. counts: for each
    block of tile_queries queries how many of the splits there are. out: a `memory.View` of (B, heads, q_len, D_V). lse:
    (B, heads, q_len). rows: B * heads * q_len. sinks: (heads,) or (B, heads), in natural units.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    query = row % q_len
    head = row // q_len % heads
    batch = row // q_len // heads
    count = tl.load(counts + query // tile_queries, mask=inside, other=0)
    col = tl.arange(0, WIDTH)
    # 64-bit: the parts of all splits together may have more than 2**31 elements.
    part = tl.arange(0, SPLITS)[None, :].to(tl.int64) * rows + row[:, None]
    lses = tl.load(parts_lse + part, mask=tl.arange(0, SPLITS)[None, :] < count[:, None], other=float("-inf"))
    top = tl.max(lses, 1)
    if SINKS:
        sink = tl.load(sinks + batch * sinks_batch_stride + head, mask=inside, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((lses - base[:, None]) * LOG2E), 1)
    if SINKS:
        total += tl.exp2((sink - base) * LOG2E)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in tl.static_range(SPLITS):  # unrolled: all loads under way at once
        place = i * tl.cast(rows, tl.int64) + row
        there = i < count
        weight = tl.exp2((tl.load(parts_lse + place, mask=there, other=float("-inf")) - base) * LOG2E)
        o = tl.load(parts + place[:, None] * D_V + col[None, :], mask=there[:, None] & (col < D_V)[None, :], other=0.0)
        acc += tl.where((weight == 0.0)[:, None], 0.0, o * weight[:, None])
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    base_out = out.ptr + batch.to(tl.int64) * out.batch_stride + head.to(tl.int64) * out.head_stride
    places = base_out + query.to(tl.int64) * out.row_stride
    o = (acc / total[:, None]).to(out.ptr.dtype.element_ty)
    tl.store(places[:, None] + col[None, :], o, mask=inside[:, None] & (col < D_V)[None, :])
    if STORE_LSE:
        tl.store(lse + row, tl.where(empty, float("-inf"), base + tl.log2(total) * LN2), mask=inside)
