"""What several files of handlers need."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..dtypes import DType, dtype
from ..errors import Unsupported
from ..mlir import Type, Value

Fn = Callable[..., Any]


def slots(values: Sequence[Value]) -> list[int]:
    return [v.slot for v in values]


def scalar_int(x: Any) -> int:
    return int(x.item() if isinstance(x, np.ndarray) else x)


def pointee(ty: Type) -> DType:
    m = re.match(r"!tt\.ptr<(.*?)(?:, \d+)?>$", ty.elem)
    if not m:
        raise Unsupported(f"pointer type {ty.text}")
    return dtype(m.group(1))
