"""Which tile a number stands for, which key blocks it visits, and which of them the band or the length cuts.

A tile is two Q tiles of one head, each of 128 query rows, or of 256 for a pair of CTAs. Blocks of 128 keys are visited
from the last to the first, so that the one cut by the length, and under a causal mask by the diagonal, comes first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...sm_90.kernels.assembly import here
from ...sm_90.kernels.bounds import Span, seen_blocks

KEYS = gl.constexpr(128)


@gluon.jit
def row_blocks(call, config):
    """Of a head. Computed by every role for itself: what they share is prepared before they part, and spilled."""
    return (here(call.q_len) + 2 * config.ROWS - 1) // (2 * config.ROWS)


@gluon.jit
def tiles(call, config):
    """How many there are."""
    return call.heads * row_blocks(call, config)


@gluon.jit
def tile(t, call, config):
    """The t-th tile. Under a causal mask the longest come first in every section of `heads_together` heads, whose K and
    V fit the L2; else a head's tiles follow each other."""
    blocks = row_blocks(call, config)
    if config.HAS_LAST:
        section = t // (call.heads_together * blocks)
        place = t - section * call.heads_together * blocks
        together = gl.minimum(call.heads_together, call.heads - section * call.heads_together)
        block = blocks - 1 - place // together
        index = section * call.heads_together + place % together
    else:
        index = t // blocks
        block = t - index * blocks
    batch = index // call.q_heads
    none = 0 * index
    return Span(index - batch * call.q_heads, batch, batch, batch, block * (2 * config.ROWS), none, none, call.q_len,
                here(call.kv_len), call.first_offset, call.last_offset)


@gluon.jit
def key_blocks(span, config):
    """Those that the tile visits."""
    return seen_blocks(span, span.first_row + 2 * config.ROWS, KEYS, config)


@gluon.jit
def whole(row, first, stop, span, config):
    """Of the visits to blocks stop - 1 down to first: [begin, end), where all rows of the Q tile, which begins at
    `row`, see all keys."""
    inner_stop = span.kv_len
    if config.HAS_LAST:
        inner_stop = gl.minimum(inner_stop, gl.maximum(row + span.last_offset + 1, 0))
    begin = gl.minimum(gl.maximum(stop - inner_stop // KEYS, 0), stop - first)
    end = stop - first
    if config.HAS_FIRST:
        inner_first = (gl.maximum(row + (config.ROWS - 1) + span.first_offset, 0) + KEYS - 1) // KEYS
        end = gl.maximum(begin, gl.minimum(stop - inner_first, end))
    return begin, end
