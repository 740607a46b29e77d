"""O in tensor memory times a factor for each row: by the correction, or without it by the softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import assembly, layouts

COLS = gl.constexpr(32)  # of O at a time, so that few registers are live


@gluon.jit
def _multiply(o, alpha, config):
    factor = layouts.spread(alpha, COLS)
    for i in gl.static_range(config.D // COLS):
        part = o.slice(i * COLS, COLS)
        part.store(assembly.mul2(part.load(layouts.tile(config.ROWS, COLS)), factor))


@gluon.jit
def rescale(o, alpha, own, opened, config):
    """opened: O holds something of this tile. own: the factors of the rows that this CTA has."""
    if config.BRANCH:
        needed = gl.max(gl.where(own < 1.0, 1, 0), 0)
        if (needed > 0) & opened:
            _multiply(o, alpha, config)
    else:
        if opened:
            _multiply(o, alpha, config)
