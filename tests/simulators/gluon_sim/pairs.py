"""Pairs of CTAs (num_ctas=2): what of a tensor or a buffer each of them has.

A program is then two CTAs that run the same code, each with threads, memories and barriers of its own. A module is read
as what one of them executes: types have the shape that a CTA has, so that nearly all operations stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from .errors import Unsupported
from .layouts import parse_attr
from .mlir import Type

if TYPE_CHECKING:
    from .machine import Cta, Thread


def _basis(enc: str) -> list[int] | None:
    """Where the second CTA's part begins, in elements (linear layouts) or in parts; None: the layout names no CTAs."""
    name, p = parse_attr(enc)
    if name == "ttg.slice":
        parent = _basis(p["parent"])
        return None if parent is None else parent[: p["dim"]] + parent[p["dim"] + 1 :]
    if name == "ttg.dot_op":
        parent = _basis(p["parent"])
        contracted = 1 - p["opIdx"]
        return None if parent is None else [0 if dim == contracted else b for dim, b in enumerate(parent)]
    bases = p.get("block" if name in ("ttg.linear", "ttg.shared_linear") else "CGALayout")
    if not bases:
        return None
    if len(bases) > 1:
        raise Unsupported(f"clusters of more than two CTAs: {enc}")
    return list(bases[0])


@cache
def local(ty: Type) -> Type:
    """What one CTA of a pair has of it. `halved` is the dimension of which each has half; None: each has all."""
    if ty.kind not in ("tensor", "memdesc", "tensordesc") or not ty.enc:
        return ty
    basis = _basis(ty.enc) or []
    first = len(ty.shape) - len(basis)  # the dimensions before are slots of a ring
    split = [first + dim for dim, value in enumerate(basis) if value and ty.shape[first + dim] > 1]
    if not split:
        return ty
    (dim,) = split
    if basis[dim - first] not in (1, ty.shape[dim] // 2):
        raise Unsupported(f"a pair of CTAs whose parts are not halves: {ty.text}")
    return replace(ty, shape=(*ty.shape[:dim], ty.shape[dim] // 2, *ty.shape[dim + 1 :]), halved=dim)


def home(th: Thread, ty: Type) -> Cta:
    """Whose the barriers of a type are: each CTA's own, or, where the pair has them once, the first's."""
    return th.cta.ctas[0] if ty.halved is None else th.cta


def same_part(where: str, *types: Type) -> None:
    """Refuse what would move data from one CTA to the other."""
    if len({ty.halved if ty.shape else None for ty in types}) > 1:
        raise Unsupported(f"{where} moves data between CTAs: {', '.join(ty.text for ty in types)}")
