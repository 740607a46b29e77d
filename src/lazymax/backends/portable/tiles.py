"""Rows for any GPU that Triton compiles for: small enough for 48 KB of shared memory (fp32 at D=576 wants 72) and 256
registers a thread."""

from .. import HALF, LARGEST_HEAD_DIM, Backend, BackwardTile, Half, Tile, When

BACKEND = Backend(
    archs=(),
    level="compiled only, not run",
    levels=(("sm_90", "run on H200"), ("cpu", "run in Triton's interpreter")),
    forward=(
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=2, when=When(max_head_dim=64, dtypes=HALF),
            reason="any GPU, half precision, small heads", provenance="untuned default",
        ),
        Tile(
            block_m=64, block_n=32, num_warps=4, num_stages=1, when=When(max_head_dim=128, dtypes=HALF),
            reason="any GPU, half precision", provenance="untuned default",
        ),
        Tile(
            block_m=32, block_n=32, num_warps=4, num_stages=1, when=When(dtypes=HALF),
            reason="any GPU, half precision, large heads", provenance="untuned default",
        ),
        Tile(
            block_m=32, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=256),
            reason="any GPU, fp32: full-precision products run on the vector unit", provenance="untuned default",
        ),
        Tile(
            block_m=16, block_n=16, num_warps=4, num_stages=1, when=When(max_head_dim=LARGEST_HEAD_DIM),
            reason="any GPU, the largest heads (MLA's latent form): 36 KB of shared memory at 576/512, half precision",
            provenance="untuned default",
        ),
    ),
    backward=(
        BackwardTile(
            keys=Half(block_m=32, block_n=64, num_warps=4, num_stages=1),
            queries=Half(block_m=64, block_n=32, num_warps=4, num_stages=1),
            when=When(max_head_dim=128, dtypes=HALF),
            reason="any GPU, half precision", provenance="untuned default",
        ),
        BackwardTile(
            keys=Half(block_m=16, block_n=32, num_warps=4, num_stages=1),
            queries=Half(block_m=32, block_n=16, num_warps=4, num_stages=1),
            reason="any GPU: large heads, and fp32, whose products run on the vector unit",
            provenance="untuned default",
        ),
    ),
)  # fmt: skip
