"""Matrix products in registers; the order of accumulation is numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import DType, round_tf32
from ..interpreter import Env, Executable, pure
from ..mlir import Op
from .common import Fn, slots


def matmul(a: Any, adt: DType, b: Any, bdt: DType, precision: int) -> Any:
    """Product in float32 (float64 for fp64, exact integers for int8)."""
    if adt.kind == "i":
        return np.matmul(a.astype(np.int64), b.astype(np.int64)).astype(np.int32)
    wide = np.float64 if adt.bits == 64 else np.float32
    a, b = a.astype(wide), b.astype(wide)
    if adt.name == "f32" and precision == 0:
        a, b = round_tf32(a), round_tf32(b)
    return np.matmul(a, b)


@pure("tt.dot")
def _dot(op: Op, exe: Executable) -> Fn:
    (a, b, c), dst = slots(op.operands), op.results[0].slot
    adt, bdt, cdt = (v.type.dtype for v in op.operands)
    precision = op.int_attr("inputPrecision", 0)

    def run(env: Env) -> None:
        env[dst] = cdt.cast(matmul(env[a], adt, env[b], bdt, precision) + env[c])

    return run
