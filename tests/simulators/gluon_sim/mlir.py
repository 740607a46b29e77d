"""What a read module consists of: types, values, operations; and the parts of its text that are types and constants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from .dtypes import DType, dtype


@dataclass(frozen=True)
class Type:
    """A type, with every alias written out."""

    text: str
    kind: str  # scalar, tensor, memdesc, tensordesc, token, other
    shape: tuple[int, ...] = ()
    elem: str = ""  # element type spelling; for pointers '!tt.ptr<...>'
    enc: str = ""  # encoding with aliases expanded
    space: str = ""  # smem or tmem for memdesc
    halved: int | None = None  # the dimension of which a CTA of a pair has half, see pairs.py; `shape` is what it has

    @property
    def dtype(self) -> DType:
        return dtype(self.elem)


@dataclass
class Value:
    """A result or block argument. `slot` is its place in the environment of a thread."""

    slot: int
    type: Type
    name: str


@dataclass
class Op:
    """An operation in generic form. `attrs` are texts; `loc` is "file.py:line <- file.py:line of the caller"."""

    name: str
    operands: list[Value]
    results: list[Value]
    attrs: dict[str, str]
    regions: list[Region]
    successors: list[str]
    loc: str
    hits: int = 0  # how often the interpreter executed it (memory and synchronisation operations only)

    def int_attr(self, key: str, default: int | None = None) -> int:
        raw = self.attrs.get(key)
        if raw is None:
            if default is None:
                raise KeyError(f"{self.name}: no attribute {key}")
            return default
        head = raw.split(":")[0].strip()
        return int(head == "true") if head in ("true", "false") else int(head, 0)

    def list_attr(self, key: str) -> list[int]:
        """`array<i32: 1, 2>` or `[1 : i32, 2 : i32]`."""
        raw = self.attrs.get(key, "")
        m = re.match(r"array<\w+(?::\s*(.*))?>$", raw, re.S)
        body = (m.group(1) or "") if m else raw.strip("[]")
        return [int(t.split(":")[0]) for t in body.split(",") if t.strip()]

    def segments(self) -> list[list[Value]]:
        """Operands split by `operandSegmentSizes`."""
        out, at = [], 0
        for n in self.list_attr("operandSegmentSizes"):
            out.append(self.operands[at : at + n])
            at += n
        return out


@dataclass
class Block:
    """A straight line of operations. `code`: what they were compiled to, see interpreter.py."""

    label: str
    args: list[Value]
    ops: list[Op] = field(default_factory=list)
    code: list[Any] | None = None


@dataclass
class Region:
    """Blocks with one entry, the first."""

    blocks: list[Block] = field(default_factory=list)


def walk(regions: Iterable[Region]) -> Iterator[tuple[list[Op], int]]:
    """Every operation, as a list and a position in it."""
    for region in regions:
        for block in region.blocks:
            for at, op in enumerate(block.ops):
                yield block.ops, at
                yield from walk(op.regions)


@dataclass
class Module:
    """A read module. `n_slots`: of values in all of it."""

    funcs: dict[str, Op]
    n_slots: int
    files: dict[str, str]  # basename -> path of each source file
    ctas: int = 1  # of a program
    compiled: bool = False  # barriers are Triton's own: it puts no fence between the making of one and its use by TMA

    @property
    def entry(self) -> Op:
        return next(f for f in self.funcs.values() if f.attrs.get("sym_visibility", "") != '"private"')


STRUCTURE = re.compile(r'->|"(?:[^"\\]|\\.)*"|[<>(){}\[\],]')  # "->" and strings hold brackets that do not pair
OPEN, CLOSE = "<({[", ">)}]"


def split_top(text: str) -> list[str]:
    """Split at commas outside brackets."""
    out, depth, start = [], 0, 0
    for m in STRUCTURE.finditer(text):
        t = m.group()
        if t == "," and depth == 0:
            out.append(text[start : m.start()].strip())
            start = m.end()
        elif t in OPEN:
            depth += 1
        elif t in CLOSE:
            depth -= 1
    out.append(text[start:].strip())
    return out


def _dims(text: str) -> tuple[tuple[int, ...], str]:
    m = re.match(r"((?:\d+x)*)(.*)$", text, re.S)
    assert m
    return tuple(int(d) for d in m.group(1).split("x") if d), m.group(2)


@cache
def parse_type(text: str) -> Type:
    """Parse an alias-free type."""
    if text.startswith("tensor<"):
        parts = split_top(text[7:-1])
        shape, elem = _dims(parts[0])
        return Type(text, "tensor", shape, elem, ", ".join(parts[1:]))
    if text.startswith("!ttg.memdesc<"):
        parts = split_top(text[13:-1])
        shape, elem = _dims(parts[0])
        space = "tmem" if "tensor_memory" in parts[2] else "smem"
        return Type(text, "memdesc", shape, elem, parts[1], space)
    if text.startswith("!tt.tensordesc<"):
        body = text[15:-1]  # Triton 3.9 leaves out the inner tensor<>
        inner = parse_type(body if body.startswith("tensor<") else f"tensor<{body}>")
        return Type(text, "tensordesc", inner.shape, inner.elem, inner.enc)
    if text.startswith("!tt.ptr<"):
        return Type(text, "scalar", (), text)
    if text == "!ttg.async.token":
        return Type(text, "token")
    try:
        dtype(text)
    except KeyError:
        return Type(text, "other")
    return Type(text, "scalar", (), text)


def _scalar(text: str, dt: DType) -> Any:
    text = text.strip()
    if text in ("true", "false"):
        return np.bool_(text == "true")
    if dt.kind == "f":
        if text.startswith("0x"):
            raw = np.array([int(text, 16)], {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[dt.bits])
            return dt.decode(raw.view(dt.store))[0]
        return dt.cast(np.float64(float(text)))
    value = int(text, 0)
    return dt.compute.type(value - (1 << dt.bits) if value >= 1 << (dt.bits - 1) and dt.bits > 1 else value)


def parse_constant(raw: str, ty: Type) -> Any:
    """The value of an `arith.constant`."""
    if not raw.startswith("dense<"):
        return _scalar(raw.split(" : ")[0], ty.dtype)
    end = raw.rindex("> :")
    body = raw[6:end]
    dt = ty.dtype
    if body.startswith('"'):
        data = np.frombuffer(bytes.fromhex(body.strip('"')[2:]), dt.store)
        return dt.decode(data.reshape(ty.shape) if data.size > 1 else np.full(ty.shape, data[0]))
    if body.startswith("["):
        flat = [_scalar(t, dt) for t in re.sub(r"[\[\]\s]", "", body).split(",")]
        return np.array(flat, dt.compute).reshape(ty.shape)
    return np.full(ty.shape, _scalar(body, dt), dt.compute)
