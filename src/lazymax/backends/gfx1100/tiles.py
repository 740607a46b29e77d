"""Rows for RDNA3 (gfx1100 to gfx1103) and gfx1150: wmma of 16x16x16, 64 KB of LDS, 256 vector registers a wave.

Apart from gfx1151, which has 1536 rows of registers a SIMD as gfx1100 and gfx1101 do, but 40 CUs on system memory and
a table chosen by price.
"""

from .. import HALF, Backend, Tile, When

COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

# num_stages stays at 1: Triton's pipeliner is wrong above 2 on RDNA (triton#9815), and 2 costs registers.
BACKEND = Backend(
    archs=("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150"),
    level="compiled only, not run",
    forward=(
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=1, when=When(max_head_dim=64, dtypes=HALF),
            reason="the same as gfx1151 because the instruction and its register layout are", provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=16, num_warps=8, num_stages=1, when=When(max_head_dim=128, dtypes=HALF),
            reason="the same as gfx1151 because the instruction and its register layout are", provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="the same as gfx1151 because the instruction and its register layout are", provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=128),
            reason="fp32 runs on the vector unit: operands and O in 256 registers a lane", provenance=COMPILED,
        ),
        Tile(
            block_m=16, block_n=16, num_warps=4, num_stages=1,
            reason="fp32 at head dim 256: half the rows, for the registers of twice the columns", provenance=COMPILED,
        ),
    ),
)  # fmt: skip
