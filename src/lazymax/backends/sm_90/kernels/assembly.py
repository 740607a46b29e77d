"""What Gluon has no word for: a multiply that a warp can jump over, turns of two warpgroups, a value in its place."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIRST_BARRIER = gl.constexpr(8)  # of the 16 of a CTA; Triton takes those below


@gluon.constexpr_function
def _rescale_text(n):
    first, second = "$" + str(2 * n), "$" + str(2 * n + 2)
    text = "{ .reg .pred p, q; setp.neu.f32 p, " + first + ", 0f3F800000; "
    text += "setp.neu.or.f32 p, " + second + ", 0f3F800000, p; "
    text += "vote.sync.any.pred q, p, 0xffffffff; @!q bra skip; "
    for e in range(n):
        value = "$" + str(e)
        text += "mul.f32 " + value + ", " + value + ", " + (first if e % 4 < 2 else second) + "; "
    return text + "skip: }"


@gluon.constexpr_function
def _rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescale(acc, alpha):
    """acc * alpha[:, None], jumped over by a warp whose factors are all exactly 1: 3 to 5 points at head dim 128.

    One block of assembly holds all that a thread has of its two rows: in the accumulator layout elements 0 and 1 of
    every four belong to the first, 2 and 3 to the second.
    """
    HELD: gl.constexpr = acc.shape[1] // 2
    TEXT: gl.constexpr = _rescale_text(HELD)
    CONSTRAINTS: gl.constexpr = _rescale_constraints(HELD)
    factor, acc = gl.broadcast(alpha[:, None], acc)
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, [acc, factor], dtype=gl.float32, is_pure=False, pack=HELD)


@gluon.constexpr_function
def _turn_text(sync, barrier):
    return ("bar.sync " if sync else "bar.arrive ") + str(barrier) + ", 256; mov.b32 $0, 0;"


@gluon.jit
def turn(SYNC: gl.constexpr, WARPGROUP: gl.constexpr):
    """SYNC: wait until it is this warpgroup's turn to issue products; else tell it that it is."""
    TEXT: gl.constexpr = _turn_text(SYNC, FIRST_BARRIER + WARPGROUP)
    gl.inline_asm_elementwise(TEXT, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet():
    """Both warpgroups, at a barrier that neither `turn` nor `tell` uses."""
    TEXT: gl.constexpr = _turn_text(True, FIRST_BARRIER + 4)
    gl.inline_asm_elementwise(TEXT, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def tell(WARPGROUP: gl.constexpr, i):
    """The other warpgroup that this one is so far, in round i. Two barriers in turns: it may be there for the next
    round before the other has heard of this one."""
    gl.inline_asm_elementwise("bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [FIRST_BARRIER + WARPGROUP + i % 2 * 2],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hear(WARPGROUP: gl.constexpr, i):
    """Wait until that warpgroup has told so, in round i."""
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [FIRST_BARRIER + WARPGROUP + i % 2 * 2],
                              dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _chain_text(what):
    return "griddepcontrol." + what + "; mov.b32 $0, 0;"


@gluon.jit
def chain(WHAT: gl.constexpr):
    """"wait": until the kernel before this one has ended, where the launch lets this one begin earlier (Triton's
    `launch_pdl`). "launch_dependents": from this CTA's side the one behind may begin."""
    TEXT: gl.constexpr = _chain_text(WHAT)
    gl.inline_asm_elementwise(TEXT, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def reciprocal(x):
    """To one unit in the last place, in one instruction where a division takes four."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def here(x):
    """x (an integer), computed at this place and by itself. Left alone, the compiler prepares the masks before the loop
    over tiles, merges into them what does not change, and keeps it in registers: at 160 registers 16 to 32 bytes of
    spills."""
    x = gl.to_tensor(x)
    if x.dtype.primitive_bitwidth == 64:
        return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=x.dtype, is_pure=False, pack=1)
    else:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
