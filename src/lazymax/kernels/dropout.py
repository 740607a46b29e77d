"""Dropout: which probabilities are kept, as a function of the seed and the position alone.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). One counter serves four neighbouring
keys. The torch twin is `lazymax.testing.dropout_keep`.
"""

import triton
import triton.language as tl

from . import masking


@triton.jit
def keep(seed, batch, head, first_row, first_col, dropout_p, ROWS: tl.constexpr, COLS: tl.constexpr,
         TURNED: tl.constexpr = False):
    """Boolean (ROWS, COLS) tile, TURNED (COLS, ROWS), for the queries from first_row and the keys from first_col, a
    multiple of 4. seed: pointer, int64."""
    groups = masking.of_cols(first_col // 4 + tl.arange(0, COLS // 4), TURNED)
    rows = masking.of_rows(first_row + tl.arange(0, ROWS), TURNED)
    zero = 0 * (groups + rows)
    a, b, c, d = tl.philox(tl.load(seed), zero + groups, zero + rows, zero + head, zero + batch)
    bits = tl.join(tl.join(a, c), tl.join(b, d))  # the last two dimensions in the order a, b, c, d
    if TURNED:
        bits = tl.permute(tl.reshape(bits, [COLS // 4, ROWS, 4]), 0, 2, 1)
        bits = tl.reshape(bits, [COLS, ROWS]).to(tl.uint32)
    else:
        bits = tl.reshape(bits, [ROWS, COLS]).to(tl.uint32)
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08 >= dropout_p  # 2**-24
