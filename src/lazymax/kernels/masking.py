"""Which keys a query may see: one predicate, whose torch twin is `lazymax.reference.keep`."""

import triton
import triton.language as tl


@triton.jit
def keep(rows, cols, kv_len, first_offset, last_offset, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr):
    """Boolean (rows, cols) tile: key `j` of query `i` counts when `j < kv_len` and
    `i + first_offset <= j <= i + last_offset` (each bound only if the problem has it)."""
    last = tl.zeros_like(rows) + (kv_len - 1)
    if HAS_LAST:
        last = tl.minimum(rows + last_offset, last)  # one comparison per score instead of two
    inside = cols[None, :] <= last[:, None]
    if HAS_FIRST:
        inside = inside & (cols[None, :] >= (rows + first_offset)[:, None])
    return inside
