"""What happens to a score between the product and the softmax: softcap, ALiBi, mask, modifications. Natural units.

Each feature that a problem lacks is absent from its build. The torch twin is `lazymax.reference_scores`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import masking

LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(-(2**30))  # a row before every key, in any band


class Modifiers(NamedTuple):
    """Arguments of the features that change scores, None or empty where the problem lacks one."""

    scale: Any = None  # natural units, signed; None: scores stay raw products, see softmax.exponent
    softcap_inverse: Any = None
    softcap: Any = None
    slopes: Any = None  # of ALiBi
    slopes_batch_stride: Any = 0
    mask: Any = None  # dense, (batch, head, query, key); stride 0 where it is the same for all
    mask_batch_stride: Any = 0
    mask_head_stride: Any = 0
    mask_row_stride: Any = 0
    mask_col_stride: Any = 0
    score_args: Any = ()
    mask_args: Any = ()
    sinks: Any = None
    sinks_batch_stride: Any = 0
    seed: Any = None  # of the dropout
    dropout_p: Any = None
    growth: Any = None  # 1 / (1 - dropout_p)


@triton.jit
def tanh(x, RELATIVE: tl.constexpr):
    """To 6e-8; RELATIVE: to 1e-6 of its value, also near 0. No overflow for any x."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    t = tl.where(x < 0, -t, t)
    if RELATIVE:
        y = x * x
        taylor = x * (1.0 + y * (-0.3333333333 + y * (0.1333333333 - 0.05396825397 * y)))  # 1 - e would cancel
        t = tl.where(tl.abs(x) < 0.25, taylor, t)
    return t


class Place(NamedTuple):
    """A tile of scores: whose, and which queries and keys of the span (clamped to its inside)."""

    head: Any
    first_row: Any
    first_col: Any
    rows: Any
    cols: Any


@triton.jit
def mask_tile(modifiers, span, place, config, TURNED: tl.constexpr = False):
    """The mask at a tile's positions, (rows, cols), (rows, 1) or (1, cols): dimensions of stride 0 are read once.
    TURNED, here and below: the other way round, see masking.py."""
    pointers = modifiers.mask + tl.cast(span.slab, tl.int64) * modifiers.mask_batch_stride
    pointers += tl.cast(place.head, tl.int64) * modifiers.mask_head_stride
    # From the tile's first row and column, so that 32 bits do for the offsets inside it, unless WIDE.
    if config.MASK_ROWS:
        row = place.rows - place.first_row
        if config.WIDE:
            row = row.to(tl.int64)
        pointers += tl.cast(place.first_row, tl.int64) * modifiers.mask_row_stride
        pointers = pointers + masking.of_rows(row * modifiers.mask_row_stride, TURNED)
    if config.MASK_COLS:
        col = place.cols - place.first_col
        if config.WIDE:
            col = col.to(tl.int64)
        pointers = pointers + tl.cast(place.first_col, tl.int64) * modifiers.mask_col_stride
        pointers = pointers + masking.of_cols(col * modifiers.mask_col_stride, TURNED)
    if not config.MASK_ROWS and not config.MASK_COLS:
        pointers = pointers + tl.zeros([1, 1], tl.int32)
    return tl.load(pointers)


@triton.jit
def distance(span, place, TURNED: tl.constexpr):
    """From the diagonal, in keys, fp32."""
    return tl.abs(masking.of_rows(place.rows + span.shift, TURNED) - masking.of_cols(place.cols, TURNED)).to(tl.float32)


@triton.jit
def biased(s, modifiers, span, place, config, TURNED: tl.constexpr = False):
    """Raw products -> scores in natural units, as a score_mod gets them."""
    s = s * modifiers.scale
    if modifiers.softcap_inverse is not None:
        s = tanh(s * modifiers.softcap_inverse, config.LARGE_CAP) * modifiers.softcap
    if modifiers.slopes is not None:
        slope = tl.load(modifiers.slopes + span.batch * modifiers.slopes_batch_stride + place.head).to(tl.float32)
        s -= slope * distance(span, place, TURNED)
    if config.FLOAT_MASK:
        s += mask_tile(modifiers, span, place, config, TURNED).to(tl.float32)
    return s


@triton.jit
def modify(s, modifiers, span, place, config, TURNED: tl.constexpr = False):
    """Raw products -> final scores in natural units."""
    s = biased(s, modifiers, span, place, config, TURNED)
    if config.SCORE_MOD is not None:
        s = config.SCORE_MOD(s, span.batch, place.head, masking.of_rows(place.rows, TURNED),
                             masking.of_cols(place.cols, TURNED), *modifiers.score_args).to(tl.float32)
    return s


@triton.jit
def allowed(modifiers, span, place, config, TURNED: tl.constexpr = False):
    """Which pairs bool mask and mask_mod keep, a tile that broadcasts to (rows, cols); only called if there is one."""
    if config.MASK_MOD is not None:
        keep = config.MASK_MOD(span.batch, place.head, masking.of_rows(place.rows, TURNED),
                               masking.of_cols(place.cols, TURNED), *modifiers.mask_args)
        if config.BOOL_MASK:
            keep = keep & (mask_tile(modifiers, span, place, config, TURNED) != 0)
    else:
        keep = mask_tile(modifiers, span, place, config, TURNED) != 0
    return keep


@triton.jit
def place_at(span, head, first_row, first_col, ROWS: tl.constexpr, COLS: tl.constexpr, EDGE: tl.constexpr):
    """The place of a tile; EDGE: its columns may lie outside the span (its rows always may)."""
    rows = tl.minimum(first_row + tl.arange(0, ROWS), span.q_len - 1)
    cols = first_col + tl.arange(0, COLS)
    if EDGE:
        cols = tl.minimum(cols, span.kv_len - 1)
    return Place(head, first_row, first_col, rows, cols)


@triton.jit
def settle(s, modifiers, span, head, first_row, first_col, config, EDGE: tl.constexpr, CHOOSE: tl.constexpr,
           TURNED: tl.constexpr = False):
    """Raw products of a tile -> the scores that the softmax takes, -inf where a key does not count. EDGE: the band or
    the length may cut through the tile; CHOOSE: bool mask and mask_mod may."""
    ROWS: tl.constexpr = s.shape[1] if TURNED else s.shape[0]
    COLS: tl.constexpr = s.shape[0] if TURNED else s.shape[1]
    if config.NEGATE:
        s = -s
    if config.MODIFIED or (config.CHOOSES and CHOOSE):
        place = place_at(span, head, first_row, first_col, ROWS, COLS, EDGE)
        if config.MODIFIED:
            s = modify(s, modifiers, span, place, config, TURNED)
        if config.CHOOSES and CHOOSE:
            s = tl.where(allowed(modifiers, span, place, config, TURNED), s, float("-inf"))
    if EDGE:
        rows = first_row + tl.arange(0, ROWS)
        if TURNED:  # rows outside have keys of their own here: a NaN there would reach the sums of a key
            rows = tl.where(rows < span.q_len, rows, FAR)
        inside = masking.keep(rows, first_col + tl.arange(0, COLS), span.kv_len,
                              span.first_offset, span.last_offset, config.HAS_FIRST, config.HAS_LAST, TURNED)
        s = tl.where(inside, s, float("-inf"))
    return s
