"""Inline assembly of the gfx1151 forward: work that most blocks can jump over, decided per wave.

To the compiler each is an elementwise function, so no register is copied for a branch, nothing is reduced over the
workgroup and nothing waits at a barrier. What it cannot see it cannot protect: hazards of instructions inside are ours.
All here are plain vector instructions on operands that plain vector or WMMA instructions wrote (never transcendental
ones, whose results need care on gfx1100), and branches on vcc, which is written by a vector compare. `Config.ASM` False
builds the kernel without any of it, the checked twin.
"""

import triton


@triton.constexpr_function
def rescale(count: int) -> str:
    """Multiply `count` registers, $0 and on, by as many factors; jump over it where the first and the last factor are 1
    in the whole wave. (Registers of a lane share one factor, or two where a wave holds two tiles of rows.)"""
    factors = 2 * count  # outputs, the same registers as inputs, factors
    lines = [
        f"v_cmp_neq_f32 vcc_lo, 1.0, ${factors}",
        "s_cbranch_vccnz .Lscale${:uid}",
        f"v_cmp_neq_f32 vcc_lo, 1.0, ${factors + count - 1}",
        "s_cbranch_vccz .Lkeep${:uid}",
        ".Lscale${:uid}:",
        *(f"v_mul_f32 ${i}, ${factors + i}, ${i}" for i in range(count)),
        ".Lkeep${:uid}:",
    ]
    return "\n".join(lines)


@triton.constexpr_function
def rescale_constraints(count: int) -> str:
    return ",".join(["=v"] * count + [str(i) for i in range(count)] + ["v"] * count + ["~{vcc}"])


@triton.constexpr_function
def mask(start: int, low: bool) -> str:
    """8 scores of adjacent keys in a lane, the first of them `start` keys into the block, become -inf after (low:
    before) the lane's bound; jumped over where no lane of the wave has one to hide."""
    test, keeps = (f"lt_i32 vcc_lo, {start}", "ge") if low else (f"gt_i32 vcc_lo, {start + 7}", "le")
    lines = [f"v_cmp_{test}, $16", "s_cbranch_vccz .Lkeep${:uid}", ".Lscale${:uid}:"]
    for i in range(8):
        lines.append(f"v_cmp_{keeps}_i32 vcc_lo, {start + i}, $16")
        lines.append(f"v_cndmask_b32 ${i}, 0xff800000, ${i}, vcc_lo")
    return "\n".join([*lines, ".Lkeep${:uid}:"])


@triton.constexpr_function
def mask_constraints() -> str:
    return ",".join(["=v"] * 8 + [str(i) for i in range(8)] + ["v"] * 8 + ["~{vcc}"])
