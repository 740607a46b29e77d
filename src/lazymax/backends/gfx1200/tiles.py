"""Rows for RDNA4 (gfx1200, gfx1201): wmma whose operands are not duplicated over the half-waves, 64 KB of LDS.

Q, K and V take half the registers that they take on RDNA3, so blocks are twice as wide.
"""

from .. import HALF, Backend, BackwardTile, Half, Tile, When

COMPILED_BACKWARD = "compiled only, not run; 2026-11-30, Triton 3.6.0 and 3.9.0"
COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

# num_stages stays at 1: Triton's pipeliner is wrong above 2 on RDNA (triton#9815), and 2 costs registers.
BACKEND = Backend(
    archs=("gfx1200", "gfx1201"),
    level="compiled only, not run",
    forward=(
        Tile(
            block_m=64, block_n=64, num_warps=4, num_stages=1, when=When(max_head_dim=64, dtypes=HALF),
            reason="the same as gfx1151: WMMA on 256 registers, of which 185 are used", provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=32, num_warps=8, num_stages=1, when=When(max_head_dim=128, dtypes=HALF),
            reason="211 to 215 registers, 64x32 on 4 warps takes 235; 64 keys spill", provenance=COMPILED,
        ),
        Tile(
            block_m=64, block_n=16, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="head dim 256: 32 KB of LDS, 85 and 3 spills; 128 rows fill all 64 KB", provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=128),
            reason="the same as gfx1100 because the vector unit and its 256 registers are", provenance=COMPILED,
        ),
        Tile(
            block_m=16, block_n=16, num_warps=4, num_stages=1,
            reason="the same as gfx1100 because the vector unit and its 256 registers are", provenance=COMPILED,
        ),
    ),
    backward=(
        BackwardTile(
            keys=Half(block_m=16, block_n=64, num_warps=8, num_stages=1, reload=True),
            queries=Half(block_m=64, block_n=16, num_warps=4, num_stages=1), when=When(max_head_dim=64, dtypes=HALF),
            reason="no spills, causal; the tiles of gfx1151, whose registers these are",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=16, block_n=32, num_warps=8, num_stages=1, reload=True),
            queries=Half(block_m=32, block_n=16, num_warps=8, num_stages=1), when=When(max_head_dim=128, dtypes=HALF),
            reason="no spills, causal; the tiles of gfx1151",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=16, block_n=16, num_warps=8, num_stages=1, reload=True),
            queries=Half(block_m=32, block_n=16, num_warps=8, num_stages=1), when=When(dtypes=HALF),
            reason="head dim 256: no spills, causal; other tiles were not tried again",
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
