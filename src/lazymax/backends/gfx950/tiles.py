"""Rows for MI350X, MI355X (gfx950): mfma of twice the depth of gfx942, waves of 64, 160 KB of LDS."""

from .. import HALF, Backend, BackwardTile, Half, Tile, When

COMPILED_BACKWARD = "compiled for gfx942 only, not run; 2026-11-30"
COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

# 32 rows a wave, as on gfx942; the larger LDS pays for a second stage of K and V.
BACKEND = Backend(
    archs=("gfx950",),
    level="compiled only, not run",
    forward=(
        Tile(
            block_m=128, block_n=64, num_warps=4, num_stages=2, when=When(max_head_dim=64, dtypes=HALF),
            reason="the tile of gfx942 with a second stage, for which there is LDS here", provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=64, num_warps=4, num_stages=2, when=When(max_head_dim=128, dtypes=HALF),
            reason="the tile of gfx942 with a second stage, for which there is LDS here", provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=32, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="head dim 256: the Q of 128 rows takes 64 KB of LDS, all that gfx942 has", provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1,
            reason="the same as gfx942: fp32 runs on the vector unit, with as many registers", provenance=COMPILED,
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
