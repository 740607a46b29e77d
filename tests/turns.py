"""What takes turns by default: one half on the oldest Triton, the other on newer ones; `--slow` takes all on each."""

from typing import Any

import pytest

from lazymax.compat import tritons

FLOOR = tritons.triton_version() == tritons.FLOOR


def mine(index: int) -> bool:
    return (index % 2 == 0) == FLOOR


def my_turn(index: int) -> Any:
    """Marks of a parameter."""
    return () if mine(index) else pytest.mark.slow
