"""Which tile comes next. Every role follows the same tiles.

Snake: the CTAs take tiles in turn, every other round backwards, so that who had the longest of one round has the
shortest of the next. Counter: the load role draws from a counter in memory, one tile ahead, and hands what it drew to
the others through two slots of shared memory. That balances unequal tiles in any order, so that heads may go in groups.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier

from ...sm_90.kernels.assembly import here
from . import bounds, layouts

ROLES = gl.constexpr(6)  # that read a slot


@gluon.jit
def first():
    """The first tile of this CTA."""
    return here(gl.program_id(0))


@gluon.jit
def draw(count, memory, bars, call, config):
    """The load role, before its `count`-th tile: the one after it."""
    if config.COUNTER:
        slot = count & 1
        mbarrier.wait(bars.next_empty.index(slot), ((count >> 1) & 1) ^ 1)
        drawn = gl.atomic_add(call.counter, 1) + gl.num_programs(0)
        L: gl.constexpr = layouts.one(config.ROWS, gl.num_warps())
        memory.next.index(slot).store(gl.full([1], 0, gl.int32, L) + drawn)
        mbarrier.arrive(bars.next_full.index(slot), count=1)


@gluon.jit
def following(count, memory, bars, call, config):
    """The tile after the `count`-th of this CTA; `bounds.tiles` or more: none."""
    if config.COUNTER:
        slot = count & 1
        mbarrier.wait(bars.next_full.index(slot), (count >> 1) & 1)
        drawn = gl.max(memory.next.index(slot).load(layouts.one(config.ROWS, gl.num_warps())), 0)
        mbarrier.arrive(bars.next_empty.index(slot), count=1)
        return drawn
    else:
        ctas = here(gl.num_programs(0))
        own = here(gl.program_id(0))
        full = (count + 2) * ctas <= bounds.tiles(call, config)  # the last round, if it has gaps, stays as it is
        return (count + 1) * ctas + gl.where(((count & 1) == 0) & full, ctas - 1 - own, own)
