"""What ptxas says of a kernel, called as Triton calls it."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

from lazymax.compat.tritons import release


def assemble(ptx: str, arch: str) -> tuple[int, list[str]]:
    """(bytes of spills, stores and loads of all functions; lines of the report)."""
    knobs, old = triton.knobs.nvidia, release(triton.__version__) < (3, 8)
    tool = knobs.ptxas if old and arch == "sm_90" else knobs.ptxas_blackwell
    level = [] if old else ["--regAllocOptLevel=2"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [tool.path, *level, "-lineinfo", "-v", f"--gpu-name={arch}a", str(source), "-o", f"{source}.o"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    text = said.stdout + said.stderr
    spills = [int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)]
    assert spills, text
    return sum(spills), text.splitlines()
