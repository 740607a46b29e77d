"""Rows for B200, GB200 (sm_100) and B300, GB300 (sm_103): tcgen05, TMA, 227 KB of shared memory. docs/notes/sm_100.md
has the rungs and what each does."""

from .. import HALF, Backend, BackwardTile, Half, Tile, When
from .rows import BlackwellTile

COMPILED_BACKWARD = "compiled only, not run; 2026-12-01, Triton 3.6.0, 3.9.0; spills: docs/notes/backward.md"
ONLY_COMPILED = "compiled only, not run"
SEARCHED = "compiled only, not run; searched 2026-11-29 with Triton 3.6.0 and 3.9.0: 0 spills"
COMPILED = "compiled only, not run; 2026-11-29, Triton 3.6.0 and 3.9.0"

SIMULATED = "simulated and compiled, not run; 2026-11-30, Triton 3.6.0 and 3.9.0"
# With fewer programs the portable rows have tiles for twice as many multiprocessors.
B200, B300 = (When(archs=(arch,), min_programs=0.5) for arch in ("sm_100", "sm_103"))
PAIRS = (3, 9)  # the first Triton whose products of two CTAs were tried: 3.6 has none, 3.7 and 3.8 were not tried
PAIR = (
    "each key and value is in the shared memory of one of two CTAs: its port takes 62% of the tensor time, where one "
    "CTA for itself takes 100%; not called tuned: no GPU has run it"
)
SIMULATED_PAIR = "simulated and compiled, not run; 2026-11-30, Triton 3.9.0"
FASTER_EXP2 = "as on sm_100, but sm_103 has twice the MUFU: no exponential on the FMA pipe"

OWN = (
    BlackwellTile(
        block_m=512, head_dim=128, num_stages=6, software=4, early=96, since=PAIRS, when=B200, reason=PAIR,
        provenance=SIMULATED_PAIR,
    ),
    BlackwellTile(
        block_m=512, head_dim=128, num_stages=6, software=0, early=96, since=PAIRS, when=B300, reason=PAIR,
        provenance=SIMULATED_PAIR,
    ),
    BlackwellTile(
        head_dim=128, num_stages=3, software=4, early=96, when=B200,
        reason="a quarter of the exponentials by polynomial takes the MUFU below the tensor cores; three slots are "
        "what fits; not called tuned: no GPU has run it", provenance=SIMULATED,
    ),
    BlackwellTile(
        head_dim=64, num_stages=6, s_buffers=3, software=6, when=B200,
        reason="a third S buffer fills the tensor memory: 9 to 11% by the model; with it P is published at once; not "
        "called tuned: no GPU has run it", provenance=SIMULATED,
    ),
    BlackwellTile(
        head_dim=128, num_stages=3, software=0, early=96, when=B300,
        reason=FASTER_EXP2, provenance=SIMULATED,
    ),
    BlackwellTile(
        head_dim=64, num_stages=6, s_buffers=3, software=0, when=B300,
        reason=FASTER_EXP2, provenance=SIMULATED,
    ),
)  # fmt: skip

# The portable kernel in roles that Triton makes (warp_specialize): a warp for products, two for loads, 8 for softmax
# and 4 or 8 for rescale. Its pass fails on the branch form; with masks, mods and pointers it was not tried.
ROLES = (
    "few programs leave one for a multiprocessor, whose loads, products and softmax take turns unless each has a role "
    "(warp_specialize); not called tuned: no GPU has run it"
)
ROLES_FULL = f"{SIMULATED}: 0 spills"
ROLES_BAND = (
    "simulated and compiled, not run; 2026-11-30, Triton 3.6.0: 0 spills; with a band or seqlens_k 3.9.0 spills 24 to "
    "156 bytes, 3.7 and 3.8 were not tried"
)
UNTRIED = (3, 7)
BY_ROLES = (
    Tile(
        block_m=128, block_n=128, num_warps=8, num_stages=3, descriptors=True, warp_specialize=True,
        when=When(head_dims=(64,), dtypes=HALF, plain=True, causal=False, window=False, ragged=False, min_keys=1024),
        reason=ROLES, provenance=ROLES_FULL,
    ),
    Tile(
        block_m=128, block_n=128, num_warps=8, num_stages=3, descriptors=True, warp_specialize=True, before=UNTRIED,
        when=When(head_dims=(64,), dtypes=HALF, plain=True, min_keys=1024), reason=ROLES, provenance=ROLES_BAND,
    ),
    Tile(
        block_m=128, block_n=128, num_warps=8, num_stages=2, descriptors=True, warp_specialize=True,
        when=When(head_dims=(128,), dtypes=HALF, plain=True, causal=False, window=False, ragged=False, min_keys=1024),
        reason=ROLES, provenance=ROLES_FULL,
    ),
    Tile(
        block_m=128, block_n=128, num_warps=8, num_stages=2, descriptors=True, warp_specialize=True, before=UNTRIED,
        when=When(head_dims=(128,), dtypes=HALF, plain=True, min_keys=1024), reason=ROLES, provenance=ROLES_BAND,
    ),
)  # fmt: skip

# The portable kernel: S and O lie in tensor memory, so the registers hold one block of P and what passes through them.
# The branch form of the rescale saves the round trip of O through registers; below Triton 3.9 it degrades to select.
BACKEND = Backend(
    archs=("sm_100", "sm_103"),
    level="simulated and compiled, not run on hardware",
    forward=(
        *OWN,
        *BY_ROLES,
        Tile(
            block_m=128, block_n=128, num_warps=8, num_stages=3, descriptors=True, rescale="branch", tuned=True,
            when=When(max_head_dim=64, dtypes=HALF, plain=True),
            reason="one M=128 instruction a product; three stages of K and V in 113 KB",
            provenance=f"{SEARCHED}, 165 and 160 registers", level=ONLY_COMPILED,
        ),
        Tile(
            block_m=128, block_n=128, num_warps=8, num_stages=2, descriptors=True, rescale="branch", tuned=True,
            when=When(max_head_dim=128, dtypes=HALF, plain=True),
            reason="260 instructions for 64 keys against 432 of 128x64; two stages in 161 KB",
            provenance=f"{SEARCHED}, 189 and 184 registers", level=ONLY_COMPILED,
        ),
        Tile(
            block_m=128, block_n=128, num_warps=8, num_stages=2, descriptors=True, rescale="branch",
            when=When(max_head_dim=128, dtypes=HALF),
            reason="masks, mods and the like: no spills with one of them, 1120 bytes with all at once on 3.6.0, so not "
            "called tuned", provenance=COMPILED, level=ONLY_COMPILED,
        ),
        Tile(
            block_m=128, block_n=64, num_warps=8, num_stages=2, descriptors=True, rescale="branch",
            when=When(dtypes=HALF),
            reason="head dim 256: two stages in 193 KB of 227; 128 keys would need 258 KB for K and V alone",
            provenance=COMPILED, level=ONLY_COMPILED,
        ),
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="strides that no tensor descriptor can express: by pointers, the row of any GPU",
            provenance=COMPILED, level=ONLY_COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=128),
            reason="the same as sm_80: fp32 runs on the vector unit, with as many registers", provenance=COMPILED,
            level=ONLY_COMPILED,
        ),
        Tile(
            block_m=32, block_n=16, num_warps=8, num_stages=1,
            reason="the same as sm_80: fp32 at head dim 256, its 50 KB fit here too", provenance=COMPILED,
            level=ONLY_COMPILED,
        ),
    ),
    backward=(
        BackwardTile(
            keys=Half(block_m=64, block_n=64, num_warps=8, num_stages=2, max_registers=255, one_loop=True),
            queries=Half(block_m=128, block_n=64, num_warps=8, num_stages=2, max_registers=255),
            mask=Half(block_m=64, block_n=64, num_warps=8, num_stages=1, max_registers=255), descriptors=True,
            when=When(max_head_dim=128, dtypes=HALF, mask_rows=True),
            reason="a tile of the mask is in registers with P and dS: as below, dK and dV spill 8 to 704 bytes on "
            "Triton 3.6, the mask's gradient in tiles of 128 queries 92 at head dim 72 on 3.9",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=64, block_n=128, num_warps=8, num_stages=2, max_registers=255, one_loop=True),
            queries=Half(block_m=128, block_n=64, num_warps=8, num_stages=2, max_registers=255), descriptors=True,
            when=When(max_head_dim=128, dtypes=HALF),
            reason="the sums lie in tensor memory, two stages in 165 and 149 KB; a loop of heads around those of tiles "
            "spills 280 to 1336 bytes, ptxas left to choose takes 128 registers and spills 32 and 40",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=64, block_n=64, num_warps=8, num_stages=1),
            queries=Half(block_m=64, block_n=64, num_warps=4, num_stages=1, max_registers=255),
            when=When(max_head_dim=128, dtypes=HALF),
            reason="strides that descriptors cannot take; dK and dV on 4 warps spill up to 216 bytes, dQ whose "
            "registers ptxas chooses 12 to 44",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=32, block_n=64, num_warps=8, num_stages=2, max_registers=255, one_loop=True),
            queries=Half(block_m=64, block_n=64, num_warps=8, num_stages=1), descriptors=True,
            when=When(dtypes=HALF, plain=False),
            reason="head dim 256 with masks, mods and the like: 168 KB; twice the queries spill up to 488 bytes of dK "
            "and dV",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=64, block_n=64, num_warps=8, num_stages=1, one_loop=True),
            queries=Half(block_m=64, block_n=64, num_warps=8, num_stages=1), descriptors=True, when=When(dtypes=HALF),
            reason="head dim 256: 131 KB; a loop of heads around those of tiles spills 44 to 72 bytes on Triton 3.9",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=16, block_n=64, num_warps=8, num_stages=1, max_registers=255, one_loop=True),
            queries=Half(block_m=64, block_n=32, num_warps=8, num_stages=1, max_registers=255),
            when=When(dtypes=HALF),
            reason="head dim 256 by pointers: twice the queries (dK and dV) and keys (dQ) spill 8 bytes on Triton 3.6, "
            "36 to 304 on 3.9",
            provenance=COMPILED_BACKWARD,
        ),
        BackwardTile(
            keys=Half(block_m=16, block_n=16, num_warps=8, num_stages=1, max_registers=255, one_loop=True),
            queries=Half(block_m=32, block_n=16, num_warps=8, num_stages=1, max_registers=255, columns=32),
            reason="fp32 products run on the vector unit, operands in registers: dQ of whole rows spills 844 to 2364 "
            "bytes, of pieces of 32 columns none",
            provenance=COMPILED_BACKWARD,
        ),
    ),
)  # fmt: skip
