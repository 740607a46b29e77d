"""Rows for RDNA3 (gfx1100 to gfx1103) and gfx1150: wmma of 16x16x16, 64 KB of LDS, 256 vector registers a wave.

The kernel and rows of gfx1151, then rows of the portable kernel. The instruction costs of gfx1151 were measured by
others; theirs were not, and the emulator is of gfx1151, so no row here is called tuned.
"""

from dataclasses import replace

from .. import HALF, Backend, Tile, When
from ..gfx1151.tiles import BACKWARD, WMMA

COMPILED_BACKWARD = "compiled for gfx1151 only, not run; 2026-11-30"
COMPILED = "compiled only, not run; on gfx1151, 2026-11-29"
WMMA_REASON = (
    "the same as gfx1151 because the instruction, its register layout and LDS are; its price here is not known"
)
WMMA_PROVENANCE = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

FEWER = ("gfx1102", "gfx1103", "gfx1150")

SHORT_HEADS, LONG_HEADS, FP32 = (replace(row, provenance=COMPILED_BACKWARD) for row in BACKWARD)
FEW_REGISTERS_SHORT = replace(
    SHORT_HEADS, queries=replace(SHORT_HEADS.queries, licm=False),
    when=When(archs=FEWER, max_head_dim=64, dtypes=HALF),
    reason="a smaller register file than gfx1151's: with licm dQ spills 1 to 6 on Triton 3.9",
    provenance="compiled only for gfx1150 and gfx1102, not run; 2026-12-01, Triton 3.6.0 and 3.9.0",
)  # fmt: skip
MIDDLE_HEADS = replace(LONG_HEADS, when=When(max_head_dim=128, dtypes=HALF))
FEW_REGISTERS = replace(
    LONG_HEADS, queries=replace(LONG_HEADS.queries, columns=16),
    when=When(archs=FEWER, dtypes=HALF),
    reason="a smaller register file than gfx1151's, for which LLVM orders dQ otherwise: 16 to 19 spilled in pieces of "
    "32 columns at head dims 192 and 256, none in pieces of 16; its price is not known",
    provenance="compiled only for gfx1150 and gfx1103, not run; 2026-12-01, Triton 3.6.0 and 3.9.0",
)  # fmt: skip

# num_stages stays at 1: Triton's pipeliner is wrong above 2 on RDNA (triton#9815), and 2 costs registers.
BACKEND = Backend(
    archs=("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150"),
    level="compiled only, not run",
    forward=(
        *(replace(r, tuned=False, reason=WMMA_REASON, provenance=WMMA_PROVENANCE) for r in WMMA),
        Tile(
            block_m=64, block_n=64, num_warps=4, num_stages=1, when=When(max_head_dim=64, dtypes=HALF),
            reason="the same as gfx1151 because the instruction and its register layout are", provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=16, num_warps=8, num_stages=1, when=When(max_head_dim=128, dtypes=HALF),
            reason="the same as gfx1151 because the instruction and its register layout are", provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="the same as gfx1151 because the instruction and its register layout are (28 and 453 spills)",
            provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=128),
            reason="the same as gfx1151 because the vector unit and its 256 registers are", provenance=COMPILED,
        ),
        Tile(
            block_m=16, block_n=16, num_warps=4, num_stages=1,
            reason="the same as gfx1151 because the vector unit and its 256 registers are", provenance=COMPILED,
        ),
    ),
    backward=(FEW_REGISTERS_SHORT, SHORT_HEADS, MIDDLE_HEADS, FEW_REGISTERS, LONG_HEADS, FP32),
)  # fmt: skip
