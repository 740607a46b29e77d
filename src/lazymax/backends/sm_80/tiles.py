"""Rows for A100, A30 (sm_80) and Jetson Orin (sm_87): mma, 163 KB of shared memory, no TMA."""

from .. import HALF, Backend, BackwardTile, Half, Tile, When

COMPILED_BACKWARD = "compiled only, not run; 2026-11-30, Triton 3.6.0"
COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

# block_m is at least the head dim where that fits: Triton spreads the warps of P V along the rows only then, and
# otherwise passes P through shared memory with 9 barriers a block instead of 2.
BACKEND = Backend(
    archs=("sm_80", "sm_87"),
    level="compiled only, not run",
    forward=(
        Tile(
            block_m=64, block_n=64, num_warps=4, num_stages=3, when=When(max_head_dim=64, dtypes=HALF),
            reason="16 rows a warp keep S, P and O in registers; three stages of K and V in 40 KB: two programs fit",
            provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=64, num_warps=8, num_stages=2, when=When(max_head_dim=128, dtypes=HALF),
            reason="16 rows a warp: 16 to 48 bytes spilled, 392 on 4 warps; 64x64 needs 1.6x the instructions",
            provenance=COMPILED,
        ),
        Tile(
            block_m=64, block_n=64, num_warps=8, num_stages=2, when=When(dtypes=HALF),
            reason="head dim 256 in 104 KB: 0 to 16 bytes spilled; 64x32 on 4 warps and 128x32 on 8 spill 368 and 504",
            provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=128),
            reason="fp32 products run on the vector unit, operands in registers: 32x32 already spills 144 bytes",
            provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=8, num_stages=1,
            reason="fp32 at head dim 256: 8 warps for the registers of twice the columns; 16x16 on 4 spills 432 bytes",
            provenance=COMPILED,
        ),
    ),
    backward=(
        BackwardTile(
            keys=Half(block_m=32, block_n=64, num_warps=4, num_stages=2),
            queries=Half(block_m=64, block_n=32, num_warps=4, num_stages=2), when=When(max_head_dim=64, dtypes=HALF),
            reason="K and V, or Q and dO, stay in registers; twice the queries (keys) of a tile spill 8 to 24 bytes",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=64, block_n=64, num_warps=8, num_stages=2),
            queries=Half(block_m=64, block_n=64, num_warps=8, num_stages=2), when=When(max_head_dim=128, dtypes=HALF),
            reason="no spills, 74 KB: two programs share an SM",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=32, block_n=64, num_warps=8, num_stages=1),
            queries=Half(block_m=64, block_n=32, num_warps=8, num_stages=1), when=When(dtypes=HALF),
            reason="head dim 256: no spills, 115 and 98 KB",
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
