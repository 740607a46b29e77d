"""The online softmax, each piece once. Scores and maxima are raw dot products in fp32 (natural units where a feature
modified them, see scores.py), exponents are in log2 units.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for the running maximum and sum;
Dao et al., FlashAttention (2022), for their use over key blocks; FlashAttention-4 for the lazy rescale: the maximum
that the exponentials are taken against (the pivot) is raised only when a row outgrew it by more than a threshold.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
# A pivot before the first visible key: the lowest finite number, so that no inf - inf arises and no score is below it.
NEVER = tl.constexpr(-3.4028234663852886e38)
FUSED_LIMIT = tl.constexpr(1048576.0)  # 2**20 log2 units, see `exponent`


@triton.jit
def exponent(s, pivot, scale_log2, EXACT: tl.constexpr):
    """The exponent of a probability, log2 units: (s - pivot) * scale * log2(e). scale_log2 > 0.

    Fused: one multiply-add per score. The product of score and scale is not rounded but the pivot's is, so the result
    is off by up to half a unit in the last place of pivot * scale_log2: no more than fp32 scores of that size are off
    themselves, but above 2**31 it overflows exp2 (bf16 inputs near 1e5 gave NaN elsewhere). `needs_exact` tells.
    Exact: the difference first; never positive for the row's maximum, whatever its size.
    """
    if EXACT:
        x = (s - pivot[:, None]) * scale_log2
    else:
        x = s * scale_log2 - tl.maximum(pivot * scale_log2, NEVER)[:, None]  # -inf of a masked score stays -inf
    return x


@triton.jit
def needs_exact(m, l, scale_log2):
    """Rows (0 or 1) whose scores are too large for the fused exponent: the final pivot m is, or an earlier one was and
    its overflow has left the sum l infinite or NaN."""
    return (((m > NEVER) & (tl.abs(m * scale_log2) > FUSED_LIMIT)) | (l - l != 0.0)).to(tl.int32)


@triton.jit
def scaled(pieces, factor):
    """Every tile of the tuple, its rows times the factors."""
    result = ()
    for i in tl.static_range(len(pieces)):
        result = result + (pieces[i] * factor[:, None],)
    return result


@triton.jit
def step(s, m, l, acc, scale_log2, threshold, BRANCH: tl.constexpr, EXACT: tl.constexpr):
    """Take one block of raw scores (-inf where masked) into the running state.

    m: (rows,) pivot, raw, NEVER before the first visible key; l: (rows,) sum of the probabilities against m;
    acc: weighted sum against m, a tuple of (rows, columns) tiles that make up D_v. threshold: log2 units; 0 keeps m at
    the exact running maximum.
    Returns p, m, l, acc with l already including p, acc rescaled but not yet including p @ v.

    BRANCH: skip the multiply of acc by a uniform branch when no row of the tile moved its pivot; otherwise multiply
    always, by exactly 1 in rows that kept theirs. Both give the same values.
    """
    m_block = tl.maximum(m, tl.max(s, 1))
    m_new = tl.where((m_block - m) * scale_log2 > threshold, m_block, m)
    if BRANCH:
        if tl.max((m_new != m).to(tl.int32), 0) > 0:
            alpha = tl.exp2((m - m_new) * scale_log2)
            l = l * alpha
            acc = scaled(acc, alpha)
    else:
        alpha = tl.exp2((m - m_new) * scale_log2)
        l = l * alpha
        acc = scaled(acc, alpha)
    p = tl.exp2(exponent(s, m_new, scale_log2, EXACT))
    l += tl.sum(p, 1)
    return p, m_new, l, acc


@triton.jit
def recompute(s, pivot, rest, scale_log2, EXACT: tl.constexpr):
    """The probabilities of raw scores for the backward, from what is known of their rows (broadcast to the tile).

    Fused: rest is the LSE in log2 units, one multiply-add per score. Exact: also right where the LSE has no room for
    the logarithm of a sum, as beside rows of the lowest number: pivot is the row's largest raw score, rest the log2 of
    the sum against it.
    """
    if EXACT:
        x = (s - pivot) * scale_log2 - rest
    else:
        x = s * scale_log2 - rest
    return tl.exp2(x)


@triton.jit
def rest_of(m, l, scale_log2, sink):
    """log2 of the sum of a row's probabilities against its pivot m, a sink's included (None without); inf for a row
    without keys."""
    rest = tl.log2(tl.where(l == 0.0, 1.0, l))
    if sink is not None:
        more = tl.minimum((sink - natural(m, scale_log2)) / LN2, 1e30)  # finite: inf - inf is NaN
        top = tl.maximum(more, 0.0)
        rest = top + tl.log2(l * tl.exp2(-top) + tl.exp2(more - top))
    return tl.where(l == 0.0, float("inf"), rest)


@triton.jit
def natural(m, scale_log2):
    """The pivot in natural units. In this order a scale of 0 (2**-126) does not underflow, and the lowest number with a
    scale of log2(e) stays finite."""
    return tl.maximum((m * LN2) * scale_log2, NEVER)


@triton.jit
def finish(m, l, acc, scale_log2):
    """Final state -> (out, LSE in natural log). A row that saw no key gives 0 and -inf. One reciprocal per row."""
    empty = l == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), natural(m, scale_log2) + tl.log2(tl.where(empty, 1.0, l)) * LN2)
    return scaled(acc, inverse), lse


@triton.jit
def finish_with_sink(m, l, acc, scale_log2, sink):
    """The same with one more key of logit `sink` (natural units) and value 0. A row that saw no other key gives 0 and
    the sink."""
    own = tl.where(l == 0.0, NEVER, natural(m, scale_log2))
    top = tl.maximum(own, sink)
    weight = tl.exp2((own - top) / LN2)
    total = l * weight + tl.exp2((sink - top) / LN2)
    empty = total == 0.0  # only without any other key, and with a sink of -inf
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), top + tl.log2(total) * LN2)
    return scaled(acc, weight / total), lse
