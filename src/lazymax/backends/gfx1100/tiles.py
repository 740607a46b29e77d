"""Rows for RDNA3 (gfx1100 to gfx1103) and gfx1150: wmma of 16x16x16, 64 KB of LDS, 256 vector registers a wave.

The compiler emits for them what it emits for gfx1151, whose instruction costs were measured; theirs were not, so no row
here is called tuned.
"""

from .. import HALF, Backend, Tile, When

COMPILED = "compiled only, not run; on gfx1151, 2026-11-29"

# num_stages stays at 1: Triton's pipeliner is wrong above 2 on RDNA (triton#9815), and 2 costs registers.
BACKEND = Backend(
    archs=("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150"),
    level="compiled only, not run",
    forward=(
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
)  # fmt: skip
