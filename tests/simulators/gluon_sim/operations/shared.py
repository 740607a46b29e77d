"""Buffers in shared and tensor memory: allocation, views, and accesses by ordinary instructions (the generic proxy)."""

from __future__ import annotations

import re
from typing import Any

from ..errors import BarrierError
from ..interpreter import Env, Executable, pure, sync
from ..layouts import TMEM_CELL, TMEM_COLUMN_BYTES
from ..machine import Thread
from ..memory import Access
from ..mlir import Op
from ..pairs import same_part
from ..views import View
from .common import Fn, scalar_int, slots

PARTITION_BARRIERS = ("gpu.barrier", "ttg.barrier", "ttg.local_barrier")


def _label(op: Op) -> str:
    """The variable's name; allocations made in a helper also get the line that called it."""
    name = re.sub(r"_\d+$", "", op.results[0].name.lstrip("%"))
    frames = op.loc.split(" <- ")
    return name + ("@" + frames[-1].rpartition(":")[2] if len(frames) > 1 else "")


def _alloc(op: Op, exe: Executable, tmem: bool) -> Fn:
    dst, ty = op.results[0].slot, op.results[0].type
    src = op.operands[0].slot if op.operands else None
    label = _label(op)
    base: int | None = None
    if tmem and "tensor_memory_col_offset" in op.attrs:
        row = op.int_attr("tensor_memory_row_offset", 0)
        base = op.int_attr("tensor_memory_col_offset") * TMEM_COLUMN_BYTES + row * TMEM_CELL
    elif not tmem and "allocation.offset" in op.attrs:
        base = op.int_attr("allocation.offset")

    def run(env: Env, th: Thread) -> None:
        cta = th.cta
        cta.allocs += 1
        space = cta.tmem if tmem else cta.smem
        view = space.alloc(ty, label, base, cta.allocs)
        env[dst] = view
        if not tmem:
            cta.drop_barriers(view)
        if src is not None:
            space.access(Access("w", view, th, "initialising store", op.loc))
            space.write(view, env[src])

    return run


@sync("ttg.local_alloc")
def _local_alloc(op: Op, exe: Executable) -> Fn:
    return _alloc(op, exe, False)


@sync("ttng.tmem_alloc")
def _tmem_alloc(op: Op, exe: Executable) -> Fn:
    return _alloc(op, exe, True)


@pure("ttg.local_dealloc", "ttg.global_scratch_dealloc", "ttng.tensormap_fenceproxy_acquire")
def _nothing(op: Op, exe: Executable) -> Fn:
    return lambda env: None


@pure(*PARTITION_BARRIERS)
def _partition_barrier(op: Op, exe: Executable) -> Fn:
    """Of the warps of one partition, which are one simulated thread: they differ for what an atomic releases."""
    return lambda env: env[-1].actor.meet()


@pure("ttg.memdesc_index")
def _memdesc_index(op: Op, exe: Executable) -> Fn:
    (a, i), dst = slots(op.operands), op.results[0].slot

    def run(env: Env) -> None:
        env[dst] = env[a].index_view(scalar_int(env[i]))

    return run


@pure("ttg.memdesc_subslice")
def _memdesc_subslice(op: Op, exe: Executable) -> Fn:
    a, dst = op.operands[0].slot, op.results[0].slot
    starts, shape = tuple(op.list_attr("offsets")), op.results[0].type.shape
    return lambda env: env.__setitem__(dst, env[a].subslice(starts, shape))


@pure("ttng.tmem_subslice")
def _tmem_subslice(op: Op, exe: Executable) -> Fn:
    a, dst, shape = op.operands[0].slot, op.results[0].slot, op.results[0].type.shape
    start = [0] * len(shape)
    # Triton 3.6 slices the last dimension only (attribute N); 3.9 names the dimension
    start[op.int_attr("dim", len(shape) - 1)] = op.int_attr("offset") if "offset" in op.attrs else op.int_attr("N")
    return lambda env: env.__setitem__(dst, env[a].subslice(tuple(start), shape))


@pure("ttg.memdesc_trans")
def _memdesc_trans(op: Op, exe: Executable) -> Fn:
    a, dst, order = op.operands[0].slot, op.results[0].slot, tuple(op.list_attr("order"))
    return lambda env: env.__setitem__(dst, env[a].transpose(order))


@pure("ttg.memdesc_reshape")
def _memdesc_reshape(op: Op, exe: Executable) -> Fn:
    a, dst, shape = op.operands[0].slot, op.results[0].slot, op.results[0].type.shape
    return lambda env: env.__setitem__(dst, env[a].reshape(shape))


@pure("ttg.memdesc_reinterpret")
def _memdesc_reinterpret(op: Op, exe: Executable) -> Fn:
    a, dst, ty = op.operands[0].slot, op.results[0].slot, op.results[0].type
    return lambda env: env.__setitem__(dst, env[a].reinterpret(ty))


def _generic_load(th: Thread, view: View, what: str, where: str) -> Any:
    view.space.access(Access("r", view, th, what, where))
    return view.space.read(view, what)


def _generic_store(th: Thread, view: View, value: Any, what: str, where: str) -> None:
    if view.space.name == "shared":
        for bar in th.cta.barriers.values():
            if view.offsets.min() <= bar.address < view.offsets.max() + view.dt.nbytes:
                raise BarrierError(f"{what} to {view.label} overwrites the live mbarrier {bar.label}")
    view.space.access(Access("w", view, th, what, where))
    view.space.write(view, value)


@sync("ttg.local_load", "ttng.tmem_load")
def _local_load(op: Op, exe: Executable) -> Fn:
    a, dst = op.operands[0].slot, op.results[0].slot
    same_part(op.name, op.operands[0].type, op.results[0].type)
    what = "tmem load" if "tmem" in op.name else "shared load"
    token = op.results[1].slot if len(op.results) > 1 else None

    def run(env: Env, th: Thread) -> None:
        env[dst] = _generic_load(th, env[a], what, op.loc)
        if token is not None:
            env[token] = None

    return run


@sync("ttg.local_store")
def _local_store(op: Op, exe: Executable) -> Fn:
    v, a = slots(op.operands)
    same_part(op.name, op.operands[0].type, op.operands[1].type)
    return lambda env, th: _generic_store(th, env[a], env[v], "shared store", op.loc)


@sync("ttng.tmem_store")
def _tmem_store(op: Op, exe: Executable) -> Fn:
    s = slots(op.operands)
    a, v, p = s[0], s[-2], s[-1]
    same_part(op.name, op.operands[0].type, op.operands[-2].type)

    def run(env: Env, th: Thread) -> None:
        if env[p]:
            _generic_store(th, env[a], env[v], "tmem store", op.loc)

    return run
