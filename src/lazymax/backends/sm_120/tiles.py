"""Rows for RTX 50 and RTX PRO Blackwell (sm_120) and DGX Spark (sm_121): mma, TMA, 99 KB of shared memory.

Newer than sm_100 and unlike it: no tcgen05, no tensor memory, less than half of its shared memory.
"""

from .. import HALF, Backend, BackwardTile, Half, Tile, When

COMPILED_BACKWARD = "compiled for sm_89 only, not run; 2026-11-30"
COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

BACKEND = Backend(
    archs=("sm_120", "sm_121"),
    level="compiled only, not run",
    forward=(
        Tile(
            block_m=64, block_n=64, num_warps=4, num_stages=2, when=When(max_head_dim=64, dtypes=HALF),
            reason="the same as sm_89 because the instruction (mma) and the budget (99 KB) are the same",
            provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=32, num_warps=8, num_stages=2, when=When(max_head_dim=128, dtypes=HALF),
            reason="the same as sm_89 because the instruction (mma) and the budget (99 KB) are the same",
            provenance=COMPILED,
        ),
        Tile(
            block_m=64, block_n=32, num_warps=8, num_stages=2, when=When(dtypes=HALF),
            reason="the same as sm_89 because the instruction (mma) and the budget (99 KB) are the same",
            provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=128),
            reason="the same as sm_80: fp32 is bound by registers, which both have 64K of", provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=8, num_stages=1,
            reason="the same as sm_80: fp32 at head dim 256, its 50 KB fit here too", provenance=COMPILED,
        ),
    ),
    backward=(
        BackwardTile(
            keys=Half(block_m=32, block_n=64, num_warps=4, num_stages=2),
            queries=Half(block_m=64, block_n=32, num_warps=4, num_stages=2), when=When(max_head_dim=64, dtypes=HALF),
            reason="the same as sm_89 because the instruction (mma) and the budget (99 KB) are the same",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=64, block_n=64, num_warps=8, num_stages=2),
            queries=Half(block_m=64, block_n=64, num_warps=8, num_stages=2), when=When(max_head_dim=128, dtypes=HALF),
            reason="the same as sm_89 because the instruction (mma) and the budget (99 KB) are the same",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=32, block_n=32, num_warps=8, num_stages=1),
            queries=Half(block_m=32, block_n=32, num_warps=8, num_stages=1), when=When(dtypes=HALF),
            reason="the same as sm_89 because the instruction (mma) and the budget (99 KB) are the same",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=16, block_n=16, num_warps=4, num_stages=1),
            queries=Half(block_m=32, block_n=16, num_warps=8, num_stages=1), when=When(max_head_dim=128),
            reason="fp32 products run on the vector unit, operands in registers",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=16, block_n=16, num_warps=8, num_stages=1),
            queries=Half(block_m=16, block_n=16, num_warps=8, num_stages=1),
            reason="fp32 at head dim 256: dQ spills 280 bytes",
            provenance=COMPILED_BACKWARD,
        ),
    ),
)  # fmt: skip
