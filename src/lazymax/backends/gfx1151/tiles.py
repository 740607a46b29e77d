"""Rows for Strix Halo (gfx1151, Radeon 8060S): wmma of 16x16x16, 64 KB of LDS, 256 vector registers a wave.

Price: 36.15 * wmma + 4 * transcendental + 1.31 * other vector instructions, cycles of a SIMD for 64x64 scores at head
dim 128, all waves together; nothing but issue is in it. 9254 would be the products alone.
"""

from .. import HALF, Backend, Tile, When

SEARCHED = "compiled only, not run; searched 2026-11-29 with Triton 3.6.0 and 3.9.0"
COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

BACKEND = Backend(
    archs=("gfx1151",),
    level="compiled only, not run",
    forward=(
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=1, when=When(max_head_dim=64, dtypes=HALF), tuned=True,
            reason="16 rows a wave, bf16 price 14639 and 14870 (3.6, 3.9); 64x64 spills 28 registers",
            provenance=SEARCHED,
        ),
        Tile(
            block_m=128, block_n=16, num_warps=8, num_stages=1, when=When(max_head_dim=128, dtypes=HALF),
            reason="16 rows a wave", provenance=SEARCHED,
        ),
        Tile(
            block_m=64, block_n=16, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="head dim 256", provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=128),
            reason="fp32", provenance=COMPILED,
        ),
        Tile(block_m=16, block_n=16, num_warps=4, num_stages=1, reason="fp32 at head dim 256", provenance=COMPILED),
    ),
)  # fmt: skip
