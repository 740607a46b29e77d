"""Rows for sm_86 (RTX 30, A10, A40) and sm_89 (RTX 40, L4, L40): mma, no TMA, 99 KB of shared memory."""

from .. import HALF, Backend, BackwardTile, Half, Tile, When

COMPILED_BACKWARD = "compiled only, not run; 2026-11-30, Triton 3.6.0"
COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

# Data-centre tiles ask for 105 KB and more (pytorch#133254); every row here stays below 70 KB of the 99.
BACKEND = Backend(
    archs=("sm_86", "sm_89"),
    level="compiled only, not run",
    forward=(
        Tile(
            block_m=64, block_n=64, num_warps=4, num_stages=2, when=When(max_head_dim=64, dtypes=HALF),
            reason="16 rows a warp; two stages, not three as on sm_80, so that two programs share 100 KB",
            provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=32, num_warps=8, num_stages=2, when=When(max_head_dim=128, dtypes=HALF),
            reason="16 rows a warp as on sm_80, half its keys: 64 keys would take two thirds of the shared memory",
            provenance=COMPILED,
        ),
        Tile(
            block_m=64, block_n=32, num_warps=8, num_stages=2, when=When(dtypes=HALF),
            reason="head dim 256: the row of sm_80 needs 105 KB, with half the keys it fits", provenance=COMPILED,
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
            reason="the same as sm_80: 25 and 25 KB",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=64, block_n=64, num_warps=8, num_stages=2),
            queries=Half(block_m=64, block_n=64, num_warps=8, num_stages=2), when=When(max_head_dim=128, dtypes=HALF),
            reason="the same as sm_80: 74 KB of the 99, one program an SM",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=32, block_n=32, num_warps=8, num_stages=1),
            queries=Half(block_m=32, block_n=32, num_warps=8, num_stages=1), when=When(dtypes=HALF),
            reason="head dim 256: the row of sm_80 needs 115 KB, with half the keys it fits",
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
