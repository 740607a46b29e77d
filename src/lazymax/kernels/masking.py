"""Which keys a query may see: one predicate, whose torch twin is `lazymax.reference.keep`.

A tile of scores has its queries along the first dimension; TURNED, as the gradients of keys and values want it, along
the second.
"""

import triton
import triton.language as tl


@triton.jit
def of_rows(x, TURNED: tl.constexpr):
    """What there is one of for each query, to be broadcast over a tile."""
    if TURNED:
        tile = x[None, :]
    else:
        tile = x[:, None]
    return tile


@triton.jit
def of_cols(x, TURNED: tl.constexpr):
    """What there is one of for each key, to be broadcast over a tile."""
    if TURNED:
        tile = x[:, None]
    else:
        tile = x[None, :]
    return tile


@triton.jit
def keep(rows, cols, kv_len, first_offset, last_offset, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
         TURNED: tl.constexpr = False):
    """Boolean (rows, cols) tile: key `j` of query `i` counts when `j < kv_len` and
    `i + first_offset <= j <= i + last_offset` (each bound only if the problem has it)."""
    if TURNED:  # what is computed once for each key takes fewer registers there than once for each query
        first = tl.zeros_like(cols)
        if HAS_LAST:
            first = cols - last_offset
        first = tl.where(cols < kv_len, first, 0x7FFFFFFF)
        inside = rows[None, :] >= first[:, None]
        if HAS_FIRST:
            inside = inside & (rows[None, :] <= (cols - first_offset)[:, None])
    else:
        last = tl.zeros_like(rows) + (kv_len - 1)
        if HAS_LAST:
            last = tl.minimum(rows + last_offset, last)  # one comparison per score instead of two
        inside = cols[None, :] <= last[:, None]
        if HAS_FIRST:
            inside = inside & (cols[None, :] >= (rows + first_offset)[:, None])
    return inside
