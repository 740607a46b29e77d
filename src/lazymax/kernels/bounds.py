"""Which key blocks a query tile visits (causal early exit, windows), and the other way round, and which of them need no
mask.

A problem's causal rule and window are one band: query `i` sees the keys from `i + first_offset` to
`i + last_offset`, both inclusive (`Problem.first_offset`, `Problem.last_offset`).
`tests/test_bounds.py` checks these functions against brute force over all small shapes.
"""

import triton
import triton.language as tl


@triton.jit
def kv_range(first_row, last_row, kv_len, first_offset, last_offset, BLOCK_N: tl.constexpr, HAS_FIRST: tl.constexpr,
             HAS_LAST: tl.constexpr):
    """Key range [start, stop) that the query rows first_row..last_row (inclusive) can see, and the part
    [inner_start, inner_stop) of it in which every row sees every key.

    `start`, `inner_start` and `inner_stop` are multiples of BLOCK_N, `start <= inner_start <= inner_stop`, and blocks
    of BLOCK_N from `start`, from `inner_start` and from `inner_stop` cover the range exactly once. Divisions see
    non-negative numbers only: Triton rounds towards zero.
    """
    start = 0 * kv_len
    inner_start = 0 * kv_len
    stop = kv_len
    inner_stop = kv_len
    if HAS_LAST:
        stop = tl.minimum(stop, tl.maximum(last_row + last_offset + 1, 0))
        inner_stop = tl.minimum(inner_stop, tl.maximum(first_row + last_offset + 1, 0))
    if HAS_FIRST:
        start = tl.minimum(tl.maximum(first_row + first_offset, 0), stop) // BLOCK_N * BLOCK_N
        inner_start = tl.minimum(tl.maximum(last_row + first_offset, 0), stop)
        inner_start = (inner_start + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    inner_stop = tl.maximum(inner_stop // BLOCK_N * BLOCK_N, inner_start)
    return start, inner_start, inner_stop, stop


@triton.jit
def q_range(first_key, last_key, q_len, first_offset, last_offset, BLOCK_M: tl.constexpr, HAS_FIRST: tl.constexpr,
            HAS_LAST: tl.constexpr):
    """Query range [start, stop) of the rows that see any of the keys first_key..last_key (inclusive), and the part
    [inner_start, inner_stop) of it in which every row sees every key; multiples and order as in `kv_range`.

    Key `j` is seen by the queries from `j - last_offset` to `j - first_offset`: the same band with the sides changed.
    """
    return kv_range(first_key, last_key, q_len, -last_offset, -first_offset, BLOCK_M, HAS_LAST, HAS_FIRST)
