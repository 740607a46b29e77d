"""Rows for Strix Halo (gfx1151, Radeon 8060S): wmma of 16x16x16, 64 KB of LDS, 256 vector registers a wave.

First the rows of the kernel of this folder, chosen by price and by loads (`benchmarks/results/gfx1151-static.csv`, the
ledger is docs/notes/gfx1151.md), then those of the portable kernel for all that it does not take.

Price: 36.15 * wmma + 4 * transcendental + 1.31 * other vector instructions, cycles of a SIMD, executed by a wave in the
main loop. Floor: 43.51 TFLOP/s times the products' share of it. Latency, caches and clocks are not in it.
"""

from dataclasses import replace
from typing import Any

from .. import HALF, Backend, BackwardTile, Half, Tile, When
from .rows import SinglewaveTile, WmmaTile

EMULATED = "emulated, not run on hardware"
PRICED = "emulated and priced 2026-11-29 with Triton 3.6.0 and 3.9.0"
EXECUTED = "executed in the emulator at one shape, 2026-11-29, Triton 3.6.0 and 3.9.0; not searched further"
PRICED_BACKWARD = "emulated and priced 2026-11-30 with Triton 3.6.0 and 3.9.0"
EXECUTED_BACKWARD = "executed in the emulator at one shape, 2026-11-30, Triton 3.6.0; not priced"

FP16, BF16 = ("float16",), ("bfloat16",)
# Head dims between multiples of 16 cost as much as the next one.
BETWEEN = (32, 40, 48, 56, 72, 80, 88, 96)


def wmma(dims: tuple[int, ...], dtypes: tuple[str, ...], rows: int, keys: int, waves: int, reason: str,
         **more: Any) -> WmmaTile:  # fmt: skip
    return WmmaTile(
        block_m=rows, block_n=keys, num_warps=waves, tuned=True, reason=reason, provenance=f"{PRICED}: 0 spills",
        when=When(head_dims=dims, dtypes=dtypes), **more,
    )  # fmt: skip


# In bf16 the rescale is never jumped over: the compiler surrounds the jump with about 60 copies of accumulators, which
# is more than it saves.
WMMA = (
    wmma((128,), FP16, 128, 32, 8, "floor 36.7 and 36.6 TFLOP/s (Triton 3.6, 3.9), 8 loads for 64 products, 3 "
         "workgroups share a WGP"),
    wmma((128,), BF16, 256, 64, 16, "floor 36.3 and 35.7; 128x32 on 8 waves 35.0 and 34.5", lazy=False),
    wmma((64,), FP16, 128, 64, 8, "floor 32.8 and 32.6; two tiles of rows a wave halve the loads, at 32.6 and 30.5"),
    wmma((64,), BF16, 128, 64, 8, "floor 32.1 and 31.4", lazy=False),
    wmma(BETWEEN, FP16, 128, 64, 8, "floor at 80: 34.1 and 33.7, 96: 34.6 and 35.4; 32 keys cost 1 to 2% more"),
    wmma(BETWEEN, BF16, 128, 64, 8, "floor at 80: 33.5 and 32.5, 96: 33.7 and 33.9", lazy=False),
    wmma((112,), FP16, 128, 64, 8, "floor 35.6 and 35.9; 104 and 120 spill in every shape"),
    wmma((112,), BF16, 128, 64, 8, "floor 34.6 and 34.5", lazy=False),
    wmma((160, 192), FP16, 64, 32, 4, "floor at 192: 37.9 and 37.1; Q in LDS leaves registers for O", query_lds=True),
    wmma((160, 192), BF16, 64, 32, 4, "floor at 192: 35.9 and 35.0", query_lds=True, lazy=False),
    wmma((224, 256), FP16, 64, 16, 4, "floor at 256: 38.3 and 37.7; with 32 keys it spills", query_lds=True),
    wmma((224, 256), BF16, 64, 16, 4, "floor at 256: 34.2 and 33.6", query_lds=True, lazy=False),
)  # fmt: skip

# For the sweep of an owner. What the emulator cannot price: latency, barriers, LDS and L0 under load, clocks.
ALTERNATIVES = tuple(replace(row, tuned=False) for row in (
    wmma((128,), FP16, 256, 32, 16, "floor 37.0 and 36.6, 4 loads, but one workgroup a WGP"),
    wmma((128,), FP16, 128, 64, 8, "floor 36.8 and 36.3, half the barriers, 6 waves a SIMD"),
    wmma((128,), FP16, 128, 32, 8, "the row with its loads under way a block ahead", prefetch=True),
    wmma((128,), FP16, 128, 32, 8, "the row with priorities", priority=True),
    wmma((128,), FP16, 64, 32, 4, "half the rows, for short problems: 16 loads"),
    wmma((128,), BF16, 128, 64, 8, "floor 36.0 and 35.3, two workgroups a WGP", lazy=False, priority=True),
    wmma((128,), BF16, 128, 32, 8, "floor 35.0 and 34.5, three workgroups a WGP", lazy=False),
    wmma((64,), FP16, 256, 32, 8, "floor 32.6 and 30.5, 4 loads: two tiles of rows a wave; 8 spills on 3.9"),
    wmma((64,), FP16, 256, 64, 16, "floor 32.8 and 32.7, 4 loads"),
    wmma((64,), BF16, 256, 64, 16, "floor 32.5 and 31.4, 4 loads", lazy=False),
    wmma((256,), FP16, 64, 16, 4, "the row with priorities", query_lds=True, priority=True),
))  # fmt: skip

# For `lowlevel.forward(v_order="fragments")`.
FRAGMENTS = (
    wmma((128,), FP16, 128, 32, 8, "K and V through LDS", fragments=True),
    wmma((128,), BF16, 256, 64, 16, "K and V through LDS", fragments=True, lazy=False),
    wmma((64,), FP16, 128, 64, 8, "K and V through LDS", fragments=True),
    wmma((64,), BF16, 128, 64, 8, "K and V through LDS", fragments=True, lazy=False),
    wmma((128,), FP16, 128, 64, 8, "K through LDS, every wave reads V: if LDS turns out slower than its model",
         fragments=True, value_lds=False),
)  # fmt: skip

BACKWARD = (
    BackwardTile(
        keys=Half(block_m=16, block_n=64, num_warps=4, num_stages=1, reload=True),
        queries=Half(block_m=64, block_n=16, num_warps=4, num_stages=1), when=When(max_head_dim=64, dtypes=HALF),
        reason="floor of both kernels 21.2 and 22.7 TFLOP/s (bf16, Triton 3.6, 3.9), no spills; K and V that stay in "
        "registers 21.1 and 22.6, with 11 to 59 spilled",
        provenance=PRICED_BACKWARD,
    ),
    BackwardTile(
        keys=Half(block_m=16, block_n=64, num_warps=4, num_stages=1, reload=True, columns=32, separate=True),
        queries=Half(block_m=64, block_n=16, num_warps=4, num_stages=1, reload=True, columns=32),
        when=When(dtypes=HALF),
        reason="floor of the three launches 21.3 and 22.4 TFLOP/s at head dim 128 (bf16, Triton 3.6, 3.9), 23.5 and "
        "24.1 at 256: no wave repeats a product, no spills",
        provenance=PRICED_BACKWARD,
    ),
    BackwardTile(
        keys=Half(block_m=16, block_n=16, num_warps=4, num_stages=1),
        queries=Half(block_m=16, block_n=16, num_warps=4, num_stages=1),
        reason="fp32 products run on the vector unit, operands in registers",
        provenance=EXECUTED_BACKWARD,
    ),
)  # fmt: skip
# Not among the above, whose positions tests and notes name.
MODIFIED_SHORT_HEADS = replace(
    BACKWARD[0], queries=replace(BACKWARD[0].queries, licm=False), since=(3, 9),
    when=When(max_head_dim=64, dtypes=HALF, plain=False),
    reason="masks, mods and the like: as below, dQ with dropout spills 2 registers on Triton 3.9; on 3.6 this spills 6 "
    "with a float mask",
    provenance="compiled only, not run; 2026-12-01, Triton 3.9.0",
)  # fmt: skip

BACKEND = Backend(
    archs=("gfx1151",),
    level=EMULATED,
    backward_level=EMULATED,
    alternatives=ALTERNATIVES,
    forward=(
        *WMMA,
        # The portable kernel. Every wave takes 16 rows, the fewest: at head dim 128, Q (doubled over the half-waves)
        # and O are 128 of 256 registers. num_stages stays at 1: 2 spills 23 registers, and above 2 Triton's pipeliner
        # is wrong on RDNA (triton#9815).
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=1, when=When(max_head_dim=64, dtypes=HALF),
            reason="masks, mods and the like, and head dims without a row above; 64x64 spills 11 to 58 registers with "
            "them: none here, 2 with all features at once, so not called tuned", provenance=EXECUTED,
        ),
        Tile(
            block_m=128, block_n=16, num_warps=8, num_stages=1, when=When(max_head_dim=128, dtypes=HALF),
            reason="masks, mods and the like, and head dims without a row above: no spills with one of them, not "
            "called tuned, for not every mixture was compiled", provenance=EXECUTED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="head dim 256: pairs of waves share O by columns, but repeat S. 28 spills on Triton 3.6, 453 on "
            "3.9; 128x16 on 8 waves spills 246 on 3.6 and fills all 64 KB of LDS",
            provenance=EXECUTED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=128),
            reason="fp32 runs on the vector unit: 314 spills on Triton 3.6, not searched further",
            provenance=EXECUTED,
        ),
        Tile(
            block_m=16, block_n=16, num_warps=4, num_stages=1,
            reason="fp32 at head dim 256: 585 spills on Triton 3.6, not searched further", provenance=EXECUTED,
        ),
    ),
    backward=(MODIFIED_SHORT_HEADS, *BACKWARD),
)  # fmt: skip

SEED = When(head_dims=(64, 80, 96, 128), dtypes=HALF)


def seed(pipelined: bool, reason: str) -> Backend:
    row = SinglewaveTile(when=SEED, pipelined=pipelined, reason=reason, provenance=PRICED)
    return Backend(archs=("gfx1151",), level=EMULATED, forward=(row,), automatic=False)


VARIANTS = {
    "singlewave": seed(False, "the seed: one wave, P through LDS, V gathered"),
    "pipelined": seed(True, "the seed with the next product under the softmax"),
    # The checked twin: what inline assembly does, done by the compiler.
    "noasm": Backend(
        archs=("gfx1151",), level=EMULATED, automatic=False,
        forward=tuple(
            replace(row, assembly=False, lazy=False, tuned=False, reason=f"without inline assembly: {row.reason}")
            for row in WMMA
        ),
    ),
}  # fmt: skip
