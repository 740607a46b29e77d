"""Where a role is in a ring of buffers, and which buffer holds the scores of a Q tile. Indices and phases are carried:
a division costs more."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def advance(slot, phase, N: gl.constexpr):
    """The next slot of a ring of N, and the parity of its barriers."""
    wrap = slot + 1 == N
    return gl.where(wrap, 0, slot + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def next_scores(buffer, phase, config):
    """Of the same Q tile in the next block. The scores of both are numbered 2 * block + Q tile; with two buffers each
    Q tile keeps its own, with three they go round."""
    if config.S_BUFFERS == 2:
        return buffer, phase ^ 1
    else:
        wrap = buffer + 2 >= 3
        return gl.where(wrap, buffer - 1, buffer + 2), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def of_scores(x, Q: gl.constexpr, buffer, config):
    """The buffer, or barrier, of the scores of Q tile Q."""
    if config.S_BUFFERS == 2:
        return x.index(Q)
    else:
        return x.index(buffer)
