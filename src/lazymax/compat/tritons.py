"""What differs between Triton versions and builds, each with its version range and the upstream report.

Pure Python: reads Triton's version without importing it, so that dispatch and `explain` work where nothing is loaded.
"""

import functools
import importlib.util
import os
import re
from pathlib import Path


@functools.cache
def triton_version() -> str | None:
    """Version of the `triton` module that `import triton` would load, or None. ROCm wheels ship the same module under
    other distribution names, so the module's own file is read, not the package metadata."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", Path(spec.origin).read_text(), re.MULTILINE)
    return found.group(1) if found else None


def release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "3.6.0+git1" -> (3, 6, 0)."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version).group().split("."))  # type: ignore[union-attr]


FLOOR = "3.6.0"


def unsupported_triton(version: str | None) -> str | None:
    """Why this Triton cannot run the kernels, or None. 3.6 is the oldest that is tested."""
    if version is None:
        return "no module named triton (pip install 'lazymax[triton]' on a machine without a GPU build of torch)"
    if release(version) < release(FLOOR):
        return f"Triton {version} is older than {FLOOR}"
    return None


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (its own variable, read the way it reads it)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def branch_rescale_fault(version: str, matrix_unit: str) -> str | None:
    """Why the branch form of the lazy rescale cannot be compiled, or None.

    Triton below 3.9 aborts in TritonNvidiaGPUOptimizeTMemLayoutsPass ("parent layout must have at least rank >= 2")
    when a kernel whose accumulator lives in tensor memory reduces a row vector to a scalar. Seen on 3.6.0 and 3.7.1,
    gone in 3.9.0; `tests/test_tritons.py` compiles both sides.
    """
    if matrix_unit == "tcgen05" and release(version) < (3, 9):
        return f"Triton {version} aborts on the branch form with tensor memory; fixed in 3.9"
    return None


def has_clc(version: str) -> bool:
    """Whether Gluon has cluster launch control (Blackwell): 3.9.0 has, 3.6.0 has not, 3.7 and 3.8 were not tried."""
    return release(version) >= (3, 9)


def least_columns(matrix_unit: str) -> int:
    """Columns that a tile of q, k or v must have at least; a tail behind such a tile may be narrower.

    Triton 3.6.0 miscompiles a product on wgmma whose operand is 32 columns wide and not loaded by the pipeliner: seen
    on an H200 as wrong values and as illegal addresses, for a V tile of 64 x 32 (2026-11-29; no upstream report known).
    64 columns are right, and tails of 16 and 32 columns behind 64 or more were right in 9 rows and 12 head dims.
    tcgen05 reads shared memory by like descriptors and cannot be tried here: it keeps clear.
    """
    return 64 if matrix_unit in ("wgmma", "tcgen05") else 16


def interpreter_needs_upcast(dtype: str) -> bool:
    """Triton's interpreter (3.6 to 3.9) keeps bf16 as raw 16-bit integers and multiplies those in `tl.dot`."""
    return interpreting() and dtype == "bfloat16"
