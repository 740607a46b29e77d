"""What PTX says of a kernel: too little for a price (no registers, no spills, no packed pairs of moves), enough to tell
whether its machine code was read completely."""

import re

from .sass import Program

# Instructions that ptxas translates one to one, by the machine's name; and those of which it makes one of two.
SAME = {"MUFU.EX2": r"\bex2\.approx", "UTCHMMA": r"\btcgen05\.mma\.", "F2FP": r"\bcvt\.rn\.\w*16x2"}
HALF = {"F2FP": r"\bcvt\.rn\.\w*16\.f32"}


def differences(ptx: str, program: Program) -> dict[str, tuple[int, int]]:
    """Name: (in PTX, in the machine code), where the two differ."""
    found = {}
    for name, pattern in SAME.items():
        asked = len(re.findall(pattern, ptx))
        if name in HALF:
            asked += len(re.findall(HALF[name], ptx)) // 2
        read = sum(instruction.name.startswith(name) for instruction in program.instructions)
        if asked != read:
            found[name] = asked, read
    return found
