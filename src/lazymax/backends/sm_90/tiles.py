"""Hopper (H100, H200): the portable kernel's rows, chosen on an H200. The ledger is docs/notes/sm_90.md."""

from typing import Any

from .. import HALF, LARGEST_HEAD_DIM, Backend, BackwardTile, Half, Tile, When
from .backward_rows import HopperBackwardTile
from .rows import HopperTile

MEASURED = "H200, 2026-11-29, torch 2.11.0, Triton 3.6.0"
OF_FEATURES = "H200, 2026-12-01, Triton 3.6.0, S=4096, sweep in docs/notes/backward.md"
NEXT_DAY = MEASURED.replace("29", "30")

ALTERNATIVES = (
    HopperTile(
        width=128, block_m=128, block_n=128, num_stages=2, query_registers=True, keys_first=True, turns=False,
        block_time=1.3, reason="consumers without turns",
        provenance=f"{NEXT_DAY}: 6% behind at B=1 H=16 S=1024, the same to 1% behind at 16K tokens",
    ),
    HopperTile(
        width=128, block_m=128, block_n=128, num_stages=2, block_time=1.3, reason="Q in shared memory, in turns",
        provenance=f"{MEASURED}: 2 to 5% behind, with an earlier softmax",
    ),
    HopperTile(
        width=64, block_m=192, block_n=128, num_stages=2, max_registers=160, skip=True, block_time=1.24,
        reason="two slots, one tile of Q for each consumer",
        provenance=f"{MEASURED}: 2 to 5% behind to S=4096, 2% ahead at 16384 full",
    ),
    HopperTile(
        width=256, block_m=128, block_n=64, num_stages=2, turns=False, skip=True, pack_gqa=True, split=True,
        block_time=1.3, reason="a consumer leaves out the block that is past its part of the diagonal",
        provenance=f"{NEXT_DAY}: causal 1% ahead, full 1% behind",
    ),
)  # fmt: skip

NARROW = HopperTile(
    width=64, block_m=128, block_n=128, num_stages=4, query_registers=True, pack_gqa=True, split=True, block_time=0.88,
    tuned=True, when=When(min_programs=0.7, min_keys=256),
    reason="two consumers in turns: tiles of 192 rows waste more of short sequences, windows and few tiles",
    provenance=f"{NEXT_DAY}: best of 22 at S=1024; in turns 1.02 to 1.26 times as fast as without from S=1024 to 2048, "
    "B=1 H=16; 1.1 to 1.3 times as fast as the portable row, 0.88 times in a window of 128 keys",
)  # fmt: skip

COMPILED = "interpreted and compiled, not run; 2026-11-30, Triton 3.6.0 and 3.9.0"
# 128 keys or queries of a program: 64 rows a warpgroup, so that P^T and dS^T (dS) stay in registers as operands.
NARROW_BACKWARD: dict[str, Any] = dict(
    keys=Half(block_m=64, block_n=64, num_warps=4, num_stages=2),
    queries=Half(block_m=64, block_n=64, num_warps=4, num_stages=2),
)
OF_8 = f"{NEXT_DAY}: of 8 tiles at S=1024 to 16384, causal and full, one key head for each query head, dQ the best"
BACKWARD = (
    # The kernel of this folder.
    HopperBackwardTile(
        width=64,
        keys=Half(block_m=128, block_n=128, num_warps=4, num_stages=2),
        finishes=True,
        when=When(causal=False, window=False, min_programs=0.5),
        reason="tiles of 128 queries, so that each consumer has 64 rows of dQ; sums finished by later CTAs; not called "
        "tuned, for Triton 3.6.0 spills 396 bytes, eight loads of them in the loop",
        provenance=f"{NEXT_DAY}: as fast, within 1%, as scores ahead and dS of rounded P; 1.9 to 4.4% ahead of the row "
        "below",
    ),
    HopperBackwardTile(
        width=64,
        keys=Half(block_m=128, block_n=128, num_warps=4, num_stages=2),
        pipelined=True,
        finishes=True,
        when=When(min_programs=0.5),
        reason="as above; under a band the scores of the next tile while dQ is added; not called tuned, for Triton "
        "3.6.0 spills 656 bytes, 17 to 19 loads of them in the loop",
        provenance=f"{NEXT_DAY}: causal, 15% ahead of the row above at S=16384",
    ),
    HopperBackwardTile(
        width=128,
        keys=Half(block_m=64, block_n=128, num_warps=4, num_stages=2),
        finishes=True,
        most_queries=2048,
        when=When(causal=False, window=False, min_keys=1024, min_programs=0.5),
        reason="as below; short heads without a mask, whose sums later CTAs finish while the L2 has them",
        provenance=f"{NEXT_DAY}: 4 and 3% ahead of the row below at S=1024 (one query head a key head, and four), 1 "
        "and 0% at 2048; elsewhere, causal too, -10 to 1%",
    ),
    HopperBackwardTile(
        width=128,
        keys=Half(block_m=64, block_n=128, num_warps=4, num_stages=2),
        when=When(min_programs=0.5),
        reason="dK and dV of 64 keys take 128 registers a thread: tiles of 64 queries, one after the other; not called "
        "tuned, for Triton 3.6.0 spills 480 bytes of the causal build, 12 to 16 loads of them in its loop",
        provenance=f"{NEXT_DAY}: best of 10 orders and rings; 2026-12-01: 1.06 to 1.25 of cuDNN",
    ),
    # The portable kernels.
    BackwardTile(
        keys=Half(block_m=64, block_n=64, num_warps=4, num_stages=3),
        queries=Half(block_m=128, block_n=64, num_warps=4, num_stages=3),
        descriptors=True,
        when=When(max_head_dim=64, dtypes=HALF, plain=True, min_programs=0.7),
        reason="small heads: programs of 4 warps share an SM, one multiplies while others exponentiate",
        provenance=f"{OF_8}, dK and dV 1 to 10% behind 32x128, which spills 500 bytes with grouped heads",
    ),
    BackwardTile(
        keys=Half(block_m=64, block_n=64, num_warps=4, num_stages=3),
        queries=Half(block_m=64, block_n=64, num_warps=4, num_stages=3),
        mask=Half(block_m=64, block_n=128, num_warps=4, num_stages=1),
        descriptors=True,
        when=When(max_head_dim=64, dtypes=HALF, min_programs=0.7),
        reason="masks, mods and the like: dQ of 128 queries spills up to 408 bytes",
        provenance=f"{OF_FEATURES}: dQ 2 to 28% ahead of the row above",
    ),
    BackwardTile(
        keys=Half(block_m=64, block_n=64, num_warps=4, num_stages=2, licm=False),
        queries=Half(block_m=64, block_n=64, num_warps=4, num_stages=2),
        mask=Half(block_m=64, block_n=128, num_warps=4, num_stages=1),
        descriptors=True,
        when=When(max_head_dim=96, dtypes=HALF, min_programs=0.7),
        reason="dQ of 64 queries on 4 warps is faster here; why was not looked into",
        provenance=f"{OF_FEATURES}: dQ 4 to 36% ahead of the row below",
    ),
    BackwardTile(
        keys=Half(block_m=64, block_n=64, num_warps=4, num_stages=2, licm=False),
        queries=Half(block_m=128, block_n=64, num_warps=8, num_stages=3),
        mask=Half(block_m=64, block_n=128, num_warps=4, num_stages=1),
        descriptors=True,
        when=When(max_head_dim=128, dtypes=HALF, min_programs=0.7),
        reason="dK and dV of 64 keys on 4 warps, two programs an SM; dQ of 128 queries, two tiles under way beside the "
        "one at hand",
        provenance=f"{OF_8}, dK and dV too; {OF_FEATURES}: dK and dV without licm 2 to 31% ahead",
    ),
    BackwardTile(
        **NARROW_BACKWARD,
        descriptors=True,
        when=When(max_head_dim=128, dtypes=HALF),
        reason="too few key tiles of 128 to fill the GPU",
        provenance=COMPILED,
    ),
    BackwardTile(
        keys=Half(block_m=64, block_n=64, num_warps=8, num_stages=2),
        queries=Half(block_m=64, block_n=64, num_warps=8, num_stages=2),
        when=When(max_head_dim=128, dtypes=HALF),
        reason="strides that descriptors cannot take; on 4 warps the addresses spill 64 and 200 bytes",
        provenance=COMPILED,
    ),
    BackwardTile(
        keys=Half(block_m=32, block_n=128, num_warps=8, num_stages=2, separate=True, licm=False),
        queries=Half(block_m=64, block_n=32, num_warps=4, num_stages=3, licm=False),
        descriptors=True,
        when=When(dtypes=HALF, plain=True),
        reason="head dim 256: dK and dV in a launch each, so that a warpgroup has 64 keys",
        provenance=f"{NEXT_DAY}: the best of 9 halves for dK and dV, at S=1024 and 4096; {OF_FEATURES}: dQ 15 and 20% "
        "ahead of the row below",
    ),
    BackwardTile(
        keys=Half(block_m=32, block_n=128, num_warps=8, num_stages=2, separate=True, licm=False),
        queries=Half(block_m=64, block_n=64, num_warps=4, num_stages=2),
        mask=Half(block_m=64, block_n=64, num_warps=8, num_stages=1),
        descriptors=True,
        when=When(dtypes=HALF),
        reason="the same with masks, mods and the like: with a bool mask dQ of 32 keys is 42% behind; not called "
        "tuned, dQ spills up to 504 bytes",
        provenance=f"{OF_FEATURES}: dK without licm 3 to 37% ahead",
    ),
    BackwardTile(
        keys=Half(block_m=32, block_n=64, num_warps=8, num_stages=1),
        queries=Half(block_m=64, block_n=32, num_warps=8, num_stages=1),
        when=When(dtypes=HALF),
        reason="large heads without descriptors",
        provenance=COMPILED,
    ),
    BackwardTile(
        keys=Half(block_m=16, block_n=32, num_warps=4, num_stages=1),
        queries=Half(block_m=32, block_n=16, num_warps=4, num_stages=1),
        when=When(max_head_dim=64),
        reason="fp32: full-precision products run on the vector unit, registers limit the tile",
        provenance=COMPILED,
    ),
    BackwardTile(
        keys=Half(block_m=16, block_n=16, num_warps=4, num_stages=1),
        queries=Half(block_m=32, block_n=16, num_warps=8, num_stages=1),
        when=When(max_head_dim=128),
        reason="fp32, as above: no spills",
        provenance=COMPILED,
    ),
    BackwardTile(
        keys=Half(block_m=16, block_n=16, num_warps=8, num_stages=1),
        queries=Half(block_m=16, block_n=16, num_warps=8, num_stages=1),
        reason="fp32, as above: dQ spills 280 bytes",
        provenance=COMPILED,
    ),
)
BACKWARD_ALTERNATIVES = (
    BackwardTile(
        keys=Half(block_m=64, block_n=128, num_warps=8, num_stages=3),
        queries=Half(block_m=128, block_n=64, num_warps=8, num_stages=3), descriptors=True,
        when=When(max_head_dim=128, dtypes=HALF), reason="dK and dV of 128 keys in registers",
        provenance=f"{NEXT_DAY}: dK and dV at D=128 as fast full from S=4096 on, 9 to 24% slower else",
    ),
    BackwardTile(
        keys=Half(block_m=64, block_n=128, num_warps=8, num_stages=2),
        queries=Half(block_m=128, block_n=64, num_warps=8, num_stages=2), descriptors=True,
        when=When(max_head_dim=128, dtypes=HALF), reason="one tile under way", provenance=COMPILED,
    ),
    BackwardTile(
        keys=Half(block_m=64, block_n=64, num_warps=4, num_stages=3),
        queries=Half(block_m=64, block_n=64, num_warps=4, num_stages=3), descriptors=True,
        when=When(max_head_dim=64, dtypes=HALF), reason="small heads: three programs of 4 warps an SM",
        provenance=COMPILED,
    ),
)  # fmt: skip

BACKEND = Backend(
    archs=("sm_90",),
    level="run on H200",
    alternatives=ALTERNATIVES,
    forward=(
        # The kernel of this folder.
        HopperTile(
            width=128, block_m=128, block_n=128, num_stages=2, query_registers=True, keys_first=True, ascending=True,
            pack_gqa=True, split=True, block_time=1.3, tuned=True, when=When(min_programs=0.7),
            reason="two consumers of 64 rows in turns, with all of Q, S, P and O in registers, and a producer warp to "
            "which K's place is given back before V's; tiles side by side read the same keys at the same time",
            provenance=f"{NEXT_DAY}: best of 4 in 8 of 11 cases, within 1% in the others (S=1024 to 16384); keys in "
            "ascending order up to 6% faster causal, 0.4% slower at B=16 S=1024; before both 1.2 to 1.6 times as fast "
            "as the portable row (D=72, 96, 128, softcap, sinks, windows, packed), 1.2 to 10 times where keys are "
            "split",
        ),
        HopperTile(
            width=64, block_m=192, block_n=128, num_stages=4, max_registers=160, skip=True, query_tiles=2, tuned=True,
            block_time=1.24, rival=NARROW, when=When(min_programs=0.7, min_keys=1536),
            reason="three consumers in turns: with the exponentials of one under the products of another",
            provenance=f"{MEASURED}: best of 22 at S=4096; 1.2 to 1.4 times as fast as the portable row",
        ),
        NARROW,
        HopperTile(
            width=192, v_width=128, block_m=128, block_n=128, num_stages=2, keys_first=True, turns=False, pack_gqa=True,
            split=True, block_time=1.7, when=When(min_programs=0.5),
            reason="blocks of 128 keys beside a V of 128 columns; O leaves in halves of 64; not called tuned, for "
            "Triton 3.9.0 spills to 104 bytes outside the loops (3.6.0 none)",
            provenance=f"{NEXT_DAY}: 192 over 128 at S=4096 1.22 times as fast as the row below, causal 1.18",
        ),
        HopperTile(
            width=256, block_m=128, block_n=64, num_stages=2, turns=False, pack_gqa=True, split=True,
            block_time=1.3, when=When(min_programs=0.5),
            reason="blocks of 64 keys: two slots of K and V beside Q fill the shared memory; not called tuned, for "
            "Triton 3.9.0 spills to 244 bytes outside the loops (3.6.0 none)",
            provenance=f"{MEASURED}: 1.06 to 1.58 times as fast as the portable row (D=160 to 256)",
        ),
        # The portable kernel.
        Tile(
            block_m=128, block_n=128, num_warps=8, num_stages=2, max_registers=128, descriptors=True,
            when=When(max_head_dim=64, dtypes=HALF, window=False, plain=True, min_programs=2.0),
            reason="two programs share an SM, see below; not called tuned, for "
            "Triton 3.9.0 spills 8 bytes of the causal build (3.6.0 none)",
            provenance=f"{MEASURED}: best of 10 at D=64",
        ),
        Tile(
            block_m=128, block_n=64, num_warps=8, num_stages=3, descriptors=True,
            when=When(max_head_dim=64, dtypes=HALF, plain=True, min_programs=2.0), tuned=True,
            reason="with a window the row above spills",
            provenance=f"{MEASURED}: 3% behind the best of 10 at D=64, without a window",
        ),
        Tile(
            block_m=64, block_n=64, num_warps=4, num_stages=3, descriptors=True,
            when=When(max_head_dim=80, dtypes=HALF, min_programs=2.0),
            reason="D=64 with masks and the like, and D=80: three programs of 128 threads share an SM",
            provenance=f"{MEASURED}: best of 4 with a mask and with dropout, of 2 at D=80; 1% behind if packed",
        ),
        Tile(
            block_m=128, block_n=64, num_warps=8, num_stages=2, max_registers=128, descriptors=True,
            when=When(max_head_dim=128, dtypes=HALF, min_programs=2.0),
            reason="two programs share an SM: one computes its softmax while the other multiplies; not called tuned: "
            "builds with a mask, mods or dropout spill 8 to 250 bytes, and are the fastest nevertheless",
            provenance=f"{MEASURED}: plain, best of 19 at D=128, with masks, of 7",
        ),
        Tile(
            block_m=64, block_n=64, num_warps=4, num_stages=3, descriptors=True,
            when=When(max_head_dim=128, dtypes=HALF, min_programs=0.5), tuned=True,
            reason="too few query tiles of 128 for two programs an SM",
            provenance=f"{MEASURED}: best of 10 at B=1 H=16 S=512 and 1024",
        ),
        Tile(
            block_m=64, block_n=64, num_warps=4, num_stages=3, when=When(max_head_dim=128, dtypes=HALF), tuned=True,
            reason="a handful of programs: making descriptors costs the host more than they save; also for strides "
            "that descriptors cannot take",
            provenance=f"{MEASURED}: within 0.1 us of the best of 10 at B=1 H=2 S=64",
        ),
        Tile(
            block_m=64, block_n=64, num_warps=4, num_stages=2, descriptors=True,
            when=When(max_head_dim=160, dtypes=HALF, min_programs=0.5),
            reason="D=160 in tiles of 128 and 32 columns", provenance=f"{MEASURED}: best of 4 at D=160",
        ),
        Tile(
            block_m=128, block_n=64, num_warps=8, num_stages=2, descriptors=True,
            when=When(dtypes=HALF, min_programs=0.5),
            reason="the accumulator of 128 x 256 takes half the registers: one program an SM, the largest that fits",
            provenance="run on H200, not searched",
        ),
        Tile(
            block_m=64, block_n=32, num_warps=8, num_stages=2, descriptors=True,
            when=When(max_head_dim=LARGEST_HEAD_DIM, dtypes=HALF, min_programs=0.25),
            reason="the latent form of MLA: two stages of K and V in 209 KB; 64x16, which spills nothing where this "
            "spills 8 bytes, takes 1.7 times as long", provenance=f"{MEASURED}: better of 2 at 576/512",
        ),
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=2, when=When(dtypes=HALF),
            reason="large heads without descriptors, or a handful of programs", provenance="run on H200, not searched",
        ),
        Tile(
            block_m=32, block_n=32, num_warps=4, num_stages=2, when=When(max_head_dim=64),
            reason="fp32: full-precision products run on the vector unit, registers limit the tile",
            provenance=f"{MEASURED}: best of 9 at D=64",
        ),
        Tile(
            block_m=32, block_n=32, num_warps=4, num_stages=1, when=When(max_head_dim=128),
            reason="fp32, as above; a second stage costs more than it hides",
            provenance=f"{MEASURED}: best of 9 at D=128",
        ),
        Tile(
            block_m=16, block_n=32, num_warps=4, num_stages=1,
            reason="fp32, as above", provenance=f"{MEASURED}: best of 9 at D=256",
        ),
    ),
    backward=BACKWARD,
    backward_level="run on H200",
    backward_alternatives=BACKWARD_ALTERNATIVES,
)  # fmt: skip
