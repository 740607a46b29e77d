"""Which thread holds which element of a register tensor. Only inline assembly needs it, where it packs several elements
or votes across a warp."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .layouts import Offsets, parse_attr, product

Bases = tuple[list[list[int]], list[list[int]], list[list[int]]]  # of register, lane and warp bits


@cache
def register_order(enc: str, shape: tuple[int, ...]) -> Offsets | None:
    """Flat element index held by each (warp, lane, register), shape [warps, lanes, regs]; None if not known."""
    bases = _bases(enc, shape)
    if bases is None:
        return None
    reg, lane, warp = bases
    strides = [product(shape[d + 1 :]) for d in range(len(shape))]

    def expand(bs: list[list[int]]) -> Offsets:
        coord = np.zeros((1 << len(bs), len(shape)), np.int64)
        for bit, basis in enumerate(bs):
            on = (np.arange(1 << len(bs)) >> bit) & 1 == 1
            coord[on] ^= np.array(basis, np.int64)
        return coord

    w, ln, rg = expand(warp), expand(lane), expand(reg)
    coord = w[:, None, None, :] ^ ln[None, :, None, :] ^ rg[None, None, :, :]
    flat: Offsets = (coord * np.array(strides, np.int64)).sum(-1)
    return flat


def _log2(n: int) -> int:
    return int(n).bit_length() - 1


def _bases(enc: str, shape: tuple[int, ...]) -> Bases | None:
    name, p = parse_attr(enc)
    if name == "ttg.linear":
        return p["register"], p["lane"], p["warp"]
    if name == "ttg.slice":
        dim = int(p["dim"])
        parent_shape = shape[:dim] + (1,) + shape[dim:]
        parent = _bases(p["parent"], parent_shape)
        if parent is None:
            return None
        cut = [[b[:dim] + b[dim + 1 :] for b in part] for part in parent]
        return [b for b in cut[0] if any(b)], cut[1], cut[2]
    if name == "ttg.blocked":
        return _blocked_bases(p, shape)
    if name == "ttg.nvidia_mma" and len(shape) == 2 and int(p["versionMajor"]) in (2, 3):
        return _mma_bases(p, shape)
    return None


def _unit(rank: int, dim: int, value: int) -> list[int]:
    return [value if k == dim else 0 for k in range(rank)]


def _blocked_bases(p: dict[str, Any], shape: tuple[int, ...]) -> Bases:
    rank = len(shape)
    reg: list[list[int]] = []
    lane: list[list[int]] = []
    warp: list[list[int]] = []
    used = [1] * rank
    for part, key in ((reg, "sizePerThread"), (lane, "threadsPerWarp"), (warp, "warpsPerCTA")):
        for d in p["order"]:
            for _ in range(_log2(p[key][d])):
                part.append(_unit(rank, d, used[d] if used[d] < shape[d] else 0))
                used[d] *= 2
    for d in p["order"]:
        while used[d] < shape[d]:
            reg.append(_unit(rank, d, used[d]))
            used[d] *= 2
    return reg, lane, warp


def _mma_bases(p: dict[str, Any], shape: tuple[int, ...]) -> Bases:
    """Accumulators of mma.sync (version 2: a warp's tile is 16 by 8) and wgmma (3: 16 by N)."""
    n_instr, version = int(p["instrShape"][1]), int(p["versionMajor"])
    reg = [[0, 1], [8, 0]]
    lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warp: list[list[int]] = []
    column = 8
    while column < n_instr:
        reg.append([0, column])
        column *= 2
    used = [16, n_instr]
    for d in (1, 0) if version == 2 else (0, 1):
        for _ in range(_log2(p["warpsPerCTA"][d])):
            warp.append(_unit(2, d, used[d] if used[d] < shape[d] else 0))
            used[d] *= 2
    for d in (1, 0):
        while used[d] < shape[d]:
            reg.append(_unit(2, d, used[d]))
            used[d] *= 2
    return reg, lane, warp
