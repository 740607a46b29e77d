"""Rows for MI350X, MI355X (gfx950): mfma of twice the depth of gfx942, waves of 64, 512 registers a lane, 160 KB of LDS."""

from .. import HALF, Backend, Tile, When

COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

# 32 rows a wave: below 128 rows on 4 waves Triton repeats half of Q K^T (48 mfma for 64x64x128 instead of 32).
BACKEND = Backend(
    archs=("gfx950",),
    level="compiled only, not run",
    forward=(
        Tile(
            block_m=128, block_n=64, num_warps=4, num_stages=1, when=When(max_head_dim=64, dtypes=HALF),
            reason="240 registers: two waves a SIMD hide each other's softmax; two stages take 300", provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=64, num_warps=4, num_stages=1, when=When(max_head_dim=128, dtypes=HALF),
            reason="64 keys share the cost of a rescale: 702 instructions against 876 of twice 32 keys; LDS 32 KB of 64",
            provenance=COMPILED,
        ),
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="head dim 256 with 32 KB of LDS; 128x32 on 8 waves fills all 64 KB (aiter#4329, aiter#3257)",
            provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, reason="fp32 runs on the vector unit",
            provenance=COMPILED,
        ),
    ),
)  # fmt: skip
