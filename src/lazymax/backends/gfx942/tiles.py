"""Rows for MI300X, MI325X (gfx942): mfma, waves of 64, 512 vector registers a lane, 64 KB of LDS."""

from .. import HALF, Backend, BackwardTile, Half, Tile, When

COMPILED_BACKWARD = "compiled only, not run; 2026-11-30, Triton 3.6.0"
COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

# 32 rows a wave where LDS allows: with fewer, Triton repeats part of Q K^T (64x64x128 on 4 waves: 48 mfma, not 32).
# LDS at half of the 64 KB, so that two programs fit: a table that fills it fails or runs alone (aiter#4329, #3257).
BACKEND = Backend(
    archs=("gfx942",),
    level="compiled only, not run",
    forward=(
        Tile(
            block_m=128, block_n=64, num_warps=4, num_stages=1, when=When(max_head_dim=64, dtypes=HALF),
            reason="at most 256 registers, so two waves a SIMD; two stages take 300", provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=64, num_warps=4, num_stages=1, when=When(max_head_dim=128, dtypes=HALF),
            reason="702 instructions for 64 keys against 876 of twice 32 keys; 32 KB of LDS", provenance=COMPILED,
        ),
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="head dim 256: 32 KB of LDS, where the Q of 128 rows would fill all 64", provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1,
            reason="fp32 products run on the vector unit, operands in registers", provenance=COMPILED,
        ),
    ),
    backward=(
        BackwardTile(
            keys=Half(block_m=32, block_n=64, num_warps=4, num_stages=1),
            queries=Half(block_m=64, block_n=32, num_warps=4, num_stages=1), when=When(max_head_dim=64, dtypes=HALF),
            reason="no spills: 284 and 196 of 512 registers",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=16, block_n=64, num_warps=4, num_stages=1),
            queries=Half(block_m=64, block_n=32, num_warps=4, num_stages=1), when=When(max_head_dim=128, dtypes=HALF),
            reason="no spills: 320 and 296 registers; 32 queries a tile take 353",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=16, block_n=32, num_warps=4, num_stages=1),
            queries=Half(block_m=32, block_n=16, num_warps=4, num_stages=1), when=When(dtypes=HALF),
            reason="head dim 256: no spills, 328 and 288 registers",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=16, block_n=16, num_warps=4, num_stages=1),
            queries=Half(block_m=16, block_n=16, num_warps=4, num_stages=1),
            reason="fp32 products run on the vector unit, operands in registers",
            provenance=COMPILED_BACKWARD,
        ),
    ),
)  # fmt: skip
