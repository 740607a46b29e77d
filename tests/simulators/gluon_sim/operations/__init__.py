"""The operations of TTGIR that are modelled, a handler each. Importing this package registers all of them."""

from ..interpreter import HANDLERS
from . import (
    arithmetic,
    assembly,
    barriers,
    control,
    cp_async,
    global_memory,
    launch_control,
    products,
    shapes,
    shared,
    tensor_cores,
    tma,
)

__all__ = [
    "HANDLERS",
    "arithmetic",
    "assembly",
    "barriers",
    "control",
    "cp_async",
    "global_memory",
    "launch_control",
    "products",
    "shapes",
    "shared",
    "tensor_cores",
    "tma",
]
