"""Triton's interpreter, less slowly: `faster` leaves out what it does again and again, and all bits stay but those of
products, which `faster` makes in float64 and rounds.

Seen in Triton 3.6 to 3.9; no report upstream is known. Three calls with a mask and three that are causal, 4 heads of 35
queries over 50 keys, took 0.98 s under either and take 0.2 s.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def faster() -> None:
    """To be called once, before the first launch. What was there before is `__wrapped__` of what is there now."""
    interpreter._patch_lang = _patch_once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _look_up_dtypes(interpreter._get_np_dtype)
    core._type_for_tuple_values = _keep_types_of_shapes(core._type_for_tuple_values)
    core._unwrap_if_constexpr = _unwrap_one(core._unwrap_if_constexpr)
    core.block_type.__init__ = _keep_block_types(core.block_type.__init__)
    core.tensor.__init__ = _share_shapes(core.tensor.__init__)
    semantic = interpreter.interpreter_semantic.__class__
    semantic.broadcast_impl_value = _leave_like_shapes(semantic.broadcast_impl_value)
    builder = interpreter.interpreter_builder
    type(builder).create_dot = _round_once(type(builder).create_dot)
    if not builder.options.debug:  # sums and products of integers are made in 64 bits too, for an assertion of debug's
        builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once_a_launch(patch: Any) -> Any:
    """A launch replaces every function of `triton.language`, and each call of a device function inside does it again,
    though all are replaced: half of the time. It may look first."""
    language = interpreter.tl

    @functools.wraps(patch)
    def patch_unless_patched(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is language or value is core]
        if modules and not any(core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()  # nothing to restore: the launch restores it
        return patch(fn)

    return patch_unless_patched


def _look_up_dtypes(dtype_of: Any) -> Any:
    """The numpy dtype of a scalar or of a block of it, from a table that is made anew at each call."""
    known: dict[str, Any] = {}

    @functools.wraps(dtype_of)
    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar
        if isinstance(scalar, core.pointer_type):
            return dtype_of(scalar)
        if scalar.name not in known:
            known[scalar.name] = dtype_of(scalar)
        return known[scalar.name]

    return look_up


def _round_once(dot: Any) -> Any:
    """numpy sums a product in an order that depends on the CPU and on which operand is the left one. A GPU's matrix
    units do not ask which, and the backward of scores of 1e9 counts on that: two of its kernels have them turned."""

    @functools.wraps(dot)
    def multiply(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if d.data.dtype != np.float32 or 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return dot(self, a, b, d, *rest)
        with np.errstate(over="ignore", invalid="ignore"):  # inf - inf and the like are meant
            total = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32) + d.data
        return interpreter.TensorHandle(total, d.dtype.scalar)

    return multiply


def _keep_types_of_shapes(type_of: Any) -> Any:
    """Every tensor has its shape in two tuples, each with a type that spells out the types of its numbers."""
    known: dict[tuple[int, ...], Any] = {}

    @functools.wraps(type_of)
    def look_up(values: Any, fields: Any = None) -> Any:
        numbers = [value.value if type(value) is core.constexpr else value for value in values]
        if fields is not None or any(type(number) is not int for number in numbers):
            return type_of(values, fields)
        shape = tuple(numbers)
        if shape not in known:
            known[shape] = type_of(values)
        return known[shape]

    return look_up


def _unwrap_one(unwrap: Any) -> Any:
    """Most values are no containers: their type says it without four questions."""

    @functools.wraps(unwrap)
    def unwrap_quickly(o: Any) -> Any:
        kind = type(o)
        if kind is core.constexpr:
            return o.value
        return o if kind is core.tensor or kind is int else unwrap(o)

    return unwrap_quickly


def _keep_block_types(init: Any) -> Any:
    """Every result of an operation makes its type anew, checks its shape and spells out its name."""
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    @functools.wraps(init)
    def look_up(block: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[size.value if type(size) is core.constexpr else size for size in shape]
        if key in known:
            block.element_ty = element_ty
            block.shape, block.numel, block.name = known[key]
        else:
            init(block, element_ty, shape)
            known[key] = block.shape, block.numel, block.name

    return look_up


def _share_shapes(init: Any) -> Any:
    """Every tensor makes the constants of its shape anew; none changes them."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    @functools.wraps(init)
    def look_up(tensor: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes in known:
            tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
            tensor.shape, tensor.numel = known[sizes]
        else:
            init(tensor, handle, type)
            known[sizes] = tensor.shape, tensor.numel

    return look_up


def _leave_like_shapes(broadcast: Any) -> Any:
    """Most operands have one shape and need no search for a common one."""

    @functools.wraps(broadcast)
    def leave_or_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        if (blocks == (True, True) and lhs.type.shape.values == rhs.type.shape.values) or blocks == (False, False):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return leave_or_broadcast
