"""What ptxas says of a kernel when Triton calls it."""

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import triton


def assembled(build: Callable[[], Any]) -> tuple[Any, int, list[str]]:
    """(what `build` compiles; bytes of spills, stores and loads of all functions; lines of the report)."""
    printed = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        triton.knobs.nvidia.dump_ptxas_log = True
        kernel = build()
    text = printed.getvalue()
    spills = [int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)]
    assert spills, text
    return kernel, sum(spills), text.splitlines()
