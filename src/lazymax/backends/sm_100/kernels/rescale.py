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
def any_row(found, votes, config):
    """1 if it is true of one of 128 rows, else 0. votes: shared memory, a word for each warp. Gluon's own reduction
    over warps keeps addresses and a predicate in registers through all loops, as sm_90's softmax.py says."""
    votes.store(gl.max(found.to(gl.int32).reshape([4, 32]), 1))
    return gl.max(votes.load(layouts.words(config.ROWS)), 0)


@gluon.jit
def rescale(o, alpha, own, opened, votes, config):
    """opened: O holds something of this tile. own: the factors of the rows that this CTA has. votes: see `any_row`."""
    if config.BRANCH:
        needed = any_row(own < 1.0, votes, config)
        if (needed > 0) & opened:
            _multiply(o, alpha, config)
    else:
        if opened:
            _multiply(o, alpha, config)
