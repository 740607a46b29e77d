"""What Gluon, Triton's language of explicit layouts, spells differently from version to version.

Imports Triton: for kernels and their launchers only.
"""

import triton
from triton.experimental.gluon.language.amd import AMDWMMALayout

from .tritons import release


def wmma_layout(waves: int) -> AMDWMMALayout:
    """Accumulator layout of RDNA 3's WMMA (version 1), `waves` side by side along the columns. The argument for the
    waves is `warps_per_cta` below Triton 3.7 and `warp_bases` from there on."""
    if release(triton.__version__) < (3, 7):
        return AMDWMMALayout(version=1, transposed=False, warps_per_cta=[1, waves])
    bases = [[0, 1 << bit] for bit in range(waves.bit_length() - 1)]
    return AMDWMMALayout(version=1, transposed=False, warp_bases=bases)
