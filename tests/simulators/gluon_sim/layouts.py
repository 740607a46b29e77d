"""Where each element of a shared- or tensor-memory tile lives.

Shared and tensor memory are simulated as bytes at their real (swizzled, padded, packed) addresses, so that views,
slices and reinterpretations alias exactly as they would on the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import Unsupported
from .mlir import split_top

Offsets = npt.NDArray[np.int64]

TMEM_LANES = 128
TMEM_CELL = 4  # bytes of one lane in one column
TMEM_COLUMNS = 512
TMEM_COLUMN_BYTES = TMEM_LANES * TMEM_CELL


@cache
def parse_attr(text: str) -> tuple[str, Any]:
    """`#ttg.foo<{a = 1, b = [..]}>` -> ("ttg.foo", {"a": 1, ...})."""
    m = re.match(r"#([\w.]+)<(.*)>$", text, re.S)
    if not m:
        return text.lstrip("#"), {}
    body = m.group(2).strip()
    if body.startswith("{"):
        body = body[1 : body.rindex("}")]
    params: dict[str, Any] = {}
    for part in split_top(body):
        k, eq, v = part.partition("=")
        if eq:
            params[k.strip()] = _value(v.strip())
    params["_body"] = m.group(2)
    return m.group(1), params


def _value(text: str) -> Any:
    if text.startswith("["):
        inner = text[1:-1].strip()
        return [_value(t) for t in split_top(inner)] if inner else []
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return text


def product(xs: Iterable[int]) -> int:
    out = 1
    for x in xs:
        out *= x
    return out


@cache
def shared_offsets(enc: str, shape: tuple[int, ...], bits: int) -> tuple[Offsets, int]:
    """Byte offset of every element of one tile, and the tile's size in bytes."""
    name, p = parse_attr(enc)
    nbytes = max(1, bits // 8)
    if name == "ttg.nvmma_shared":
        return _nvmma_offsets(p, shape, nbytes)
    if name == "ttg.swizzled_shared":
        return _swizzled_offsets(p, shape) * nbytes, product(shape) * nbytes
    if name == "ttg.shared_linear":
        linear = _offsets_of_bases(p["offset"], shape)
        return linear * nbytes, int(linear.max() + 1) * nbytes
    raise Unsupported(f"shared layout {enc}")


def shared_rank(enc: str, rank: int) -> int:
    """How many of the last dimensions of a descriptor are its tile; those before are slots of a ring."""
    name, p = parse_attr(enc)
    if name == "ttg.swizzled_shared":
        return min(len(p["order"]), rank)
    if name == "ttg.nvmma_shared":
        if p.get("CGALayout"):
            return len(p["CGALayout"][0])
        return min(rank, max(int(p.get("rank", 2)), 1))
    if name == "ttg.shared_linear":
        return len(p["offset"][0])
    return rank


def _nvmma_offsets(p: dict[str, Any], shape: tuple[int, ...], nbytes: int) -> tuple[Offsets, int]:
    """What TMA writes and a tensor core reads: slabs of up to 128 bytes, 16-byte chunks swizzled inside."""
    if p.get("fp4Padded"):
        raise Unsupported("shared layout of padded fp4")
    rank, width = len(shape), int(p["swizzlingByteWidth"])
    order = list(range(rank))
    if p.get("transposed"):
        order = [rank - 1, *range(rank - 1)]
    mem_shape = [shape[d] for d in order]
    rows, cols = product(mem_shape[:-1]), mem_shape[-1]
    r, c = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    if width == 0:
        off = (r * cols + c) * nbytes
    else:
        width = min(width, cols * nbytes)
        slab, inner = c * nbytes // width, c * nbytes % width
        per_phase, max_phase = max(1, 128 // width), max(1, width // 16)
        chunk = (inner // 16) ^ ((r // per_phase) % max_phase)
        off = slab * (rows * width) + r * width + chunk * 16 + inner % 16
    off = off.reshape(mem_shape).transpose(np.argsort(order))
    return np.ascontiguousarray(off, np.int64), rows * cols * nbytes


def _swizzled_offsets(p: dict[str, Any], shape: tuple[int, ...]) -> Offsets:
    """In elements."""
    extra = len(shape) - len(p["order"])
    order = [o + extra for o in p["order"]] + list(range(extra - 1, -1, -1))
    idx = list(np.meshgrid(*[np.arange(s) for s in shape], indexing="ij"))
    if len(p["order"]) >= 2 and p["maxPhase"] > 1:
        row, col, vec = idx[order[1]], idx[order[0]], p["vec"]
        phase = (row // p["perPhase"]) % p["maxPhase"]
        idx[order[0]] = ((col // vec) ^ phase) * vec + col % vec
    off = np.zeros(shape, np.int64)
    stride = 1
    for d in order:
        off += idx[d] * stride
        stride *= shape[d]
    return off


def _offsets_of_bases(bases: list[list[int]], shape: tuple[int, ...]) -> Offsets:
    """In elements, from the coordinates that each bit of the offset stands for."""
    n = 1 << len(bases)
    coord = np.zeros((n, len(shape)), np.int64)
    for bit, basis in enumerate(bases):
        on = (np.arange(n) >> bit) & 1 == 1
        coord[on] ^= np.array(basis, np.int64)
    out = np.full(shape, -1, np.int64)
    out[tuple(coord.T)] = np.arange(n)
    return out


@cache
def tmem_offsets(enc: str, shape: tuple[int, ...], bits: int) -> tuple[Offsets, int]:
    """Byte address of every element of a 2-D tensor-memory tile and the number of columns it spans.

    Addresses are column-major over lanes: `(column * 128 + lane) * 4 + byte`.
    """
    name, p = parse_attr(enc)
    if name != "ttng.tensor_memory_encoding":
        raise Unsupported(f"tensor memory layout {enc}")
    bm = int(p["blockM"])
    bn = min(int(p["blockN"]), shape[1])
    step = max(1, bits // 8) * int(p.get("colStride", 1))
    cols_per_block = max(1, -(-bn * step // TMEM_CELL))
    r, c = np.meshgrid(np.arange(shape[0]), np.arange(shape[1]), indexing="ij")
    block_m, block_n = r // bm, c // bn
    byte = (c % bn) * step
    n_m, n_n = -(-shape[0] // bm), -(-shape[1] // bn)
    index = block_m * n_n + block_n
    if bm == 128:
        lane, block_col = r % bm, index
        n_cols = n_m * n_n * cols_per_block
    elif bm == 64:
        # 64-row tiles use 16 of every 32 lanes; the next tile takes the other 16
        rr = r % bm
        lane = (rr // 16) * 32 + rr % 16 + 16 * (index % 2)
        block_col = index // 2
        n_cols = -(-n_m * n_n // 2) * cols_per_block
    else:
        raise Unsupported(f"tensor memory blockM = {bm}")
    col = block_col * cols_per_block + byte // TMEM_CELL
    return (col * TMEM_LANES + lane) * TMEM_CELL + byte % TMEM_CELL, n_cols
