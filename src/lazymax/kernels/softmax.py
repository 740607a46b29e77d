"""The online softmax, each piece once. Scores, maxima and sums are fp32 and in log2 units (`exp2` domain).

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for the running maximum and sum;
Dao et al., FlashAttention (2022), for their use over key blocks; FlashAttention-4 for the lazy rescale: the maximum
that the exponentials are taken against (the pivot) is raised only when a row outgrew it by more than a threshold.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def fold_scale(s, scale_log2):
    """Raw scores -> log2 units. The product is rounded here, before any maximum is taken, so `exp2` never sees a
    positive argument by rounding alone (bf16 inputs near 1e5 gave inf - inf elsewhere), and a negative or zero
    scale needs no case of its own."""
    return s * scale_log2


@triton.jit
def step(s2, m, l, acc, threshold, BRANCH: tl.constexpr):
    """Take one block of scores (log2 units, -inf where masked) into the running state.

    m: (rows,) pivot, -inf before the first visible key; l: (rows,) sum of the probabilities against m;
    acc: (rows, D_v) weighted sum against m. threshold: log2 units; 0 keeps m at the exact running maximum.
    Returns p, m, l, acc with l already including p, acc rescaled but not yet including p @ v.

    BRANCH: skip the multiply of acc by a uniform branch when no row of the tile moved its pivot; otherwise multiply
    always, by exactly 1 in rows that kept theirs. Both give the same values.
    """
    m_block = tl.maximum(m, tl.max(s2, 1))
    m_new = tl.where(m_block - m > threshold, m_block, m)  # -inf - -inf is NaN, compares false: the pivot stays -inf
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # finite, so that rows without a key stay at 0, not NaN
    if BRANCH:
        if tl.max((m_new != m).to(tl.int32), 0) > 0:
            alpha = tl.exp2(m - pivot)
            l = l * alpha
            acc = acc * alpha[:, None]
    else:
        alpha = tl.exp2(m - pivot)
        l = l * alpha
        acc = acc * alpha[:, None]
    p = tl.exp2(s2 - pivot[:, None])
    l += tl.sum(p, 1)
    return p, m_new, l, acc


@triton.jit
def finish(m, l, acc):
    """Final state -> (out, LSE in natural log). A row that saw no key gives 0 and -inf. One reciprocal per row."""
    empty = l == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, l))) * LN2)
    return acc * inverse[:, None], lse
