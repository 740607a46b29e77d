"""Which tile comes next. Every role follows the same tiles.

Snake: the CTAs take tiles in turn, every other round backwards, so that who had the longest of one round has the
shortest of the next. Else the load role draws, one tile ahead, and hands what it drew to the others through two slots
of shared memory. That balances unequal tiles in any order, so that heads may go in groups. CLC: from the CTAs of the
grid, one a tile, that have not started; who draws one cancels it. Counter, where Triton has no CLC: from a number in
memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier

from ...sm_90.kernels.assembly import here
from . import bounds, layouts

ROLES = gl.constexpr(6)  # that read a slot
clc = getattr(blackwell, "clc", None)  # from Triton 3.9 on


@gluon.jit
def slots(config):
    """For what is drawn: a number, or what `clc.try_cancel` answers."""
    if config.CLC:
        return gl.allocate_shared_memory(gl.int64, [2, 2], layouts.numbers(config.ROWS))
    else:
        return gl.allocate_shared_memory(gl.int32, [2, 1], layouts.numbers(config.ROWS))


@gluon.jit
def first():
    """The first tile of this CTA."""
    return here(gl.program_id(0))


@gluon.jit
def draw(count, memory, bars, call, config):
    """The load role, before its `count`-th tile: the one after it."""
    slot = count & 1
    if config.CLC:
        mbarrier.wait(bars.next_empty.index(slot), ((count >> 1) & 1) ^ 1)
        mbarrier.expect(bars.next_full.index(slot), 16)
        clc.try_cancel(memory.next.index(slot), bars.next_full.index(slot))
    elif config.COUNTER:
        mbarrier.wait(bars.next_empty.index(slot), ((count >> 1) & 1) ^ 1)
        drawn = gl.atomic_add(call.counter, 1, sem="relaxed") + gl.num_programs(0)
        L: gl.constexpr = layouts.one(config.ROWS, gl.num_warps())
        memory.next.index(slot).store(gl.full([1], 0, gl.int32, L) + drawn)
        mbarrier.arrive(bars.next_full.index(slot), count=1)


@gluon.jit
def following(count, memory, bars, call, config):
    """The tile after the `count`-th of this CTA; `bounds.tiles` or more: none."""
    slot = count & 1
    if config.CLC:
        mbarrier.wait(bars.next_full.index(slot), (count >> 1) & 1)
        answer = clc.load_result(memory.next.index(slot))
        fence_async_shared()  # the next answer is written asynchronously
        mbarrier.arrive(bars.next_empty.index(slot), count=1)
        drawn = bounds.tiles(call, config)
        if answer.is_canceled():  # else it has no number, and none may be asked for again
            drawn = answer.program_id(0)
        return drawn
    elif config.COUNTER:
        mbarrier.wait(bars.next_full.index(slot), (count >> 1) & 1)
        drawn = gl.max(memory.next.index(slot).load(layouts.one(config.ROWS, gl.num_warps())), 0)
        mbarrier.arrive(bars.next_empty.index(slot), count=1)
        return drawn
    else:
        ctas = here(gl.num_programs(0))
        own = here(gl.program_id(0))
        full = (count + 2) * ctas <= bounds.tiles(call, config)  # the last round, if it has gaps, stays as it is
        return (count + 1) * ctas + gl.where(((count & 1) == 0) & full, ctas - 1 - own, own)
