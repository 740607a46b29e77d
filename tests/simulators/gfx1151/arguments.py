"""From the arguments of a Triton kernel to its kernarg segment, and to the memory that it may touch."""

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .elf import CodeObject
from .errors import EmulationError

ALIGNMENT = 256  # of allocations on a device
FORMATS = {"fp16": "<e", "f16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d", "f64": "<d"}
DTYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "u1",
}  # fmt: skip
PLAIN = (bool, int, float, str, type(None))

Path = tuple[int, ...]
Range = tuple[int, int]


@dataclass(frozen=True)
class Argument:
    """One argument that takes room in the kernarg segment."""

    name: str
    path: Path
    type: str
    value: Any


def aligned(t: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU tensor, with its strides, that starts at a multiple of 256 bytes, as on a device."""
    item, last = t.element_size(), _last_element(t)
    buffer = torch.empty(last + 1 + ALIGNMENT // item, dtype=t.dtype)
    skip = -buffer.data_ptr() % ALIGNMENT // item
    return buffer[skip:].as_strided(t.shape, t.stride()).copy_(t)


def _last_element(t: torch.Tensor) -> int:
    """Distance from the first element of a view to its last one, in elements."""
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else -1


def memory_of(value: Any) -> Range:
    """Addresses from the first to past the last element that a tensor or array holds."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise TypeError(f"got a tensor on {value.device}, expected one on the CPU")
        return value.data_ptr(), value.data_ptr() + (_last_element(value) + 1) * value.element_size()
    if isinstance(value, np.ndarray):
        spans = [(size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)]
        first = value.ctypes.data + sum(span for span in spans if span < 0)
        end = value.ctypes.data + sum(span for span in spans if span > 0) + value.itemsize
        return (first, end) if value.size else (value.ctypes.data, value.ctypes.data)
    raise TypeError(f"got {type(value).__name__}, expected a CPU tensor or a numpy array")


# ---- matching values with the signature


def _unwrapped(value: Any) -> Any:
    return value.value if type(value).__name__ == "constexpr" else value


def _check_constant(name: str, wanted: Any, got: Any) -> None:
    wanted, got = _unwrapped(wanted), _unwrapped(got)
    comparable = isinstance(wanted, PLAIN) and (wanted is None or isinstance(got, PLAIN))
    if comparable and (got is not None if wanted is None else wanted != got):
        raise ValueError(f"argument {name}: the kernel was compiled with the constant {wanted!r}, got {got!r}")


def _flatten(
    types: Mapping[str, Any] | Sequence[Any],
    values: Any,
    constants: Mapping[Path, Any],
    name: str = "",
    path: Path = (),
) -> Iterator[Argument]:
    """The arguments that are not constants, in the order in which Triton flattens them."""
    names = getattr(types, "_fields", range(len(types)))
    if isinstance(types, Mapping):
        names, types = list(types), list(types.values())
    if not isinstance(values, tuple | list) or len(values) != len(types):
        got = f"{len(values)} values" if isinstance(values, tuple | list) else type(values).__name__
        raise ValueError(f"arguments{f' of {name}' if name else ''}: got {got}, expected {len(types)} values")
    for k, (kind, value) in enumerate(zip(types, values, strict=True)):
        here, full_name = (*path, k), f"{name}.{names[k]}" if name else str(names[k])
        if isinstance(kind, tuple | list):
            yield from _flatten(kind, value, constants, full_name, here)
        elif kind != "constexpr":
            yield Argument(full_name, here, kind, value)
        elif here in constants:
            _check_constant(full_name, constants[here], value)


def flatten(source: Any, arguments: Sequence[Any]) -> list[Argument]:
    """source: `compiled.src`. arguments: all of them, as the kernel is called."""
    return list(_flatten(source.signature, tuple(arguments), source.constants))


# ---- packing


def _address(value: Any) -> int:
    return int(value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data)


def _pointer(argument: Argument, divisor: int) -> Range:
    try:
        first, end = memory_of(argument.value)
    except TypeError as error:
        raise TypeError(f"argument {argument.name}: {error}") from None
    pointee = argument.type.removeprefix("*").removeprefix("k")
    if isinstance(argument.value, torch.Tensor):
        dtype = DTYPES.get(argument.value.dtype)
        if dtype is not None and dtype != pointee:
            raise TypeError(f"argument {argument.name}: got {argument.value.dtype}, compiled for {argument.type}")
    address = _address(argument.value)
    if address % divisor:
        raise ValueError(
            f"argument {argument.name}: got address {address:#x}, but the kernel was compiled for multiples of "
            f"{divisor} bytes; aligned(tensor) makes a copy that is"
        )
    return first, end


def _scalar(argument: Argument, size: int, divisor: int) -> bytes:
    kind, value = argument.type, _unwrapped(argument.value)
    if not isinstance(value, bool | int | float):
        raise TypeError(f"argument {argument.name}: got {type(value).__name__}, expected {kind}")
    if kind in FORMATS:
        return struct.pack(FORMATS[kind], float(value))
    if kind == "bf16":
        return struct.pack("<f", float(value))[2:]
    if isinstance(value, float):
        raise TypeError(f"argument {argument.name}: got a float, expected {kind}")
    if value % divisor:
        raise ValueError(
            f"argument {argument.name}: got {value}, but the kernel was compiled for multiples of {divisor}"
        )
    return int(value).to_bytes(size, "little", signed=value < 0)


def _divisor(source: Any, path: Path) -> int:
    return int(dict(source.attrs.get(path, ())).get("tt.divisibility", 1))


def _hidden(grid: Sequence[int], threads: int) -> dict[str, int]:
    """What the runtime adds to the arguments, by its kind in the metadata: the kernel asks it for num_programs."""
    values = {"hidden_grid_dims": 3}
    for axis, blocks, size in zip("xyz", grid, (threads, 1, 1), strict=True):
        values |= {f"hidden_block_count_{axis}": blocks, f"hidden_group_size_{axis}": size}
    return values


def pack(
    kernel: CodeObject, source: Any, arguments: Sequence[Any], grid: Sequence[int], threads: int
) -> tuple[bytes, list[Range]]:
    """The kernarg segment, and the ranges of memory that the kernel may touch."""
    segment, ranges = bytearray(kernel.metadata[".kernarg_segment_size"]), []
    places, hidden = [], _hidden(grid, threads)
    for place in kernel.metadata.get(".args", []):
        kind, offset, size = place[".value_kind"], place[".offset"], place[".size"]
        if kind in hidden:
            segment[offset : offset + size] = hidden[kind].to_bytes(size, "little")
        elif not kind.startswith("hidden"):
            places.append(place)
    flat = flatten(source, arguments)
    unused = places[len(flat) :]  # Triton appends pointers to scratch memory, which stay null
    if len(flat) > len(places) or any(place[".value_kind"] != "global_buffer" for place in unused):
        raise EmulationError(f"the signature has {len(flat)} arguments, the binary {len(places)}")
    for argument, place in zip(flat, places, strict=False):
        offset, size, divisor = place[".offset"], place[".size"], _divisor(source, argument.path)
        if argument.type.startswith("*"):
            ranges.append(_pointer(argument, divisor))
            packed = struct.pack("<Q", _address(argument.value))
        elif argument.type.startswith("tensordesc"):
            raise NotImplementedError(f"argument {argument.name}: tensor descriptors are not modelled")
        else:
            packed = _scalar(argument, size, divisor)
        segment[offset : offset + len(packed)] = packed
    return bytes(segment), ranges


def buffer_of(data: bytes) -> tuple[Any, Range]:
    """Memory with these contents at a multiple of 64 bytes, which lives as long as the first result."""
    room = ctypes.create_string_buffer(len(data) + 64)
    first = ctypes.addressof(room) + (-ctypes.addressof(room) % 64)
    ctypes.memmove(first, data, len(data))
    return room, (first, first + len(data))
