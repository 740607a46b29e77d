"""Rows for Strix Halo (gfx1151, Radeon 8060S): wmma of 16x16x16, 64 KB of LDS, 256 vector registers a wave.

Price: 36.15 * wmma + 4 * transcendental + 1.31 * other vector instructions, cycles of a SIMD for 64x64 scores at head
dim 128, all waves together, in the unmasked loop. The products alone are 9254; latency and caches are not in it.
"""

from .. import HALF, Backend, Tile, When

SEARCHED = "compiled only, not run; searched 2026-11-29 with Triton 3.6.0 and 3.9.0: 0 spills"
COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"
FP32 = "compiled only, not run; 2026-11-29, Triton 3.6.0"

# Every wave takes 16 rows, the fewest: at head dim 128, Q (doubled over the half-waves) and O are 128 of 256 registers.
# num_stages stays at 1: 2 spills 23 registers, and above 2 Triton's pipeliner is wrong on RDNA (triton#9815).
BACKEND = Backend(
    archs=("gfx1151",),
    level="compiled only, not run",
    forward=(
        Tile(
            block_m=64, block_n=64, num_warps=4, num_stages=1, tuned=True,
            when=When(max_head_dim=64, dtypes=HALF, plain=True, window=False),
            reason="bf16 price 14440 on Triton 3.6 and 14534 on 3.9; 64x32 costs 1 to 2% more",
            provenance=f"{SEARCHED}, 248 and 256 registers",
        ),
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=1, tuned=True,
            when=When(max_head_dim=64, dtypes=HALF, plain=True),
            reason="windows, where 64x64 spills 27 registers", provenance=f"{SEARCHED}, 248 registers",
        ),
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=1, when=When(max_head_dim=64, dtypes=HALF),
            reason="masks, mods and the like, where 64x64 spills 11 to 58 registers: none here, 2 with all features at "
            "once, so not called tuned", provenance=COMPILED,
        ),
        Tile(
            block_m=128, block_n=16, num_warps=8, num_stages=1, tuned=True,
            when=When(max_head_dim=128, dtypes=HALF, plain=True),
            reason="bf16 price 13310 and 13855. 128x32 and 64x32 (12471 to 13372) spill 172 registers and more on 3.9",
            provenance=f"{SEARCHED}, 248 and 252 registers",
        ),
        Tile(
            block_m=128, block_n=16, num_warps=8, num_stages=1, when=When(max_head_dim=128, dtypes=HALF),
            reason="masks, mods and the like: no spills with one of them; not called tuned, for not every mixture was "
            "compiled", provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="head dim 256: pairs of waves share O by columns, but repeat S. 28 spills on Triton 3.6, 453 on "
            "3.9; 128x16 on 8 waves spills 246 on 3.6 and fills all 64 KB of LDS",
            provenance=COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=128),
            reason="fp32 runs on the vector unit: 314 spills on Triton 3.6, not searched further",
            provenance=FP32,
        ),
        Tile(
            block_m=16, block_n=16, num_warps=4, num_stages=1,
            reason="fp32 at head dim 256: 585 spills on Triton 3.6, not searched further", provenance=FP32,
        ),
    ),
)  # fmt: skip
