"""What a kernel is called with, as the values that its entry function takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .descriptors import TensorDesc
from .errors import Unsupported
from .global_memory import GlobalMemory
from .mlir import Type


def marshal(args: Sequence[tuple[str, Any, Any]], types: Sequence[Type], gmem: GlobalMemory) -> list[Any]:
    """The values of the entry function's parameters; tensors are registered in `gmem`."""
    flat = [x for argument in args for x in _flatten(*argument)]
    if len(flat) != len(types):
        raise Unsupported(f"kernel takes {len(types)} run-time values, {len(flat)} given")
    return [_value(name, x, ty, gmem) for (name, x), ty in zip(flat, types, strict=True)]


def _flatten(name: str, value: Any, ty: Any) -> list[tuple[str, Any]]:
    """Tuples and descriptors in their parts; what is constant at compile time is left out."""
    if ty == "constexpr":
        return []
    if isinstance(value, (tuple, list)):
        parts = enumerate(zip(value, ty, strict=True))
        return [x for k, (v, t) in parts for x in _flatten(f"{name}[{k}]", v, t)]
    if hasattr(value, "base") and hasattr(value, "block_shape"):
        return [(name, v) for v in (value, *value.shape, *value.strides)]
    return [(name, value)]


def _value(name: str, x: Any, ty: Type, gmem: GlobalMemory) -> Any:
    if ty.kind == "tensordesc":
        desc = TensorDesc(
            address=gmem.address_of(x.base, name),
            shape=tuple(int(s) for s in x.shape),
            strides=tuple(int(s) for s in x.strides),
            box=tuple(int(b) for b in x.block_shape) if ty.halved is None else ty.shape,
            dt=ty.dtype,
            fill=float("nan") if x.padding == "nan" else 0.0,
            name=name,
            halved=ty.halved,
        )
        desc.check()
        return desc
    if ty.dtype.kind == "p":
        return np.int64(0 if x is None else gmem.address_of(x, name))
    return ty.dtype.cast(np.float64(x)) if ty.dtype.kind == "f" else ty.dtype.compute.type(int(x))
