"""Inline assembly: ptx.py runs it; here its operands are put into registers in the order of the real layout.

A named barrier in a block counts once per thread, however many elements the block is applied to. Reductions to global
memory are those of all threads: what several hold of a tensor, several add. So are plain loads and stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import ptx
from ..barriers import NAMED_BARRIERS, WARP
from ..dtypes import DType, dtype
from ..errors import BarrierError, SimError, Unsupported
from ..interpreter import Env, Executable, pure
from ..machine import Steps, Thread
from ..mlir import Op, Type, walk
from ..ordering import Order, join
from ..registers import register_order
from .common import Fn, slots
from .global_memory import atomic, polling

FADD = 5  # of tt.atomic_rmw


@pure("tt.elementwise_inline_asm")
def _inline_asm(op: Op, exe: Executable) -> Fn:
    block = _Block(op)
    if not block.asm.effects:
        return block.compute
    if block.asm.has("red") and exe.module.ctas == 2:
        raise Unsupported("atomics of a pair of CTAs")
    if block.asm.has("ld", "st", "red") and op.attrs.get("pure", "false").startswith("true"):
        raise SimError("inline assembly that uses memory is called pure: the compiler may move or drop it", op.loc)

    free = _first_free(exe)

    def with_effects(env: Env, th: Thread) -> Steps:
        call = block.prepare(env)
        for effect in call.machine.steps():
            if isinstance(effect, ptx.Barrier):
                yield from _named_barrier(effect, th, free)
            elif isinstance(effect, ptx.ProxyFence):
                for actor in (th.cta.asynchronous, th.cta.loading):
                    join(actor.clock, th.actor.clock)
            elif effect.sem:
                yield from _polled(effect, op, th)
            else:
                yield None
                _access(effect, th)
        block.finish(call, env)

    with_effects.style = "steps"  # type: ignore[attr-defined]
    return with_effects


def _first_free(exe: Executable) -> int:
    """The first named barrier that is not Triton's: 0 is, and where warps specialise 1 and one for each partition but
    the first."""
    ops = [ops[at] for ops, at in walk(f.regions[0] for f in exe.module.funcs.values())]
    workers = [len(op.list_attr("partitionNumWarps")) for op in ops if op.name == "ttg.warp_specialize"]
    return 2 + max(workers) if workers else 1


def _named_barrier(given: ptx.Barrier, th: Thread, free: int) -> Steps:
    yield None
    if not free <= given.ident < NAMED_BARRIERS:
        raise BarrierError(f"named barrier {given.ident}: those that Triton leaves are {free} to {NAMED_BARRIERS - 1}")
    if given.count % WARP or not given.count:
        raise BarrierError(f"named barrier {given.ident}: {given.count} threads are no whole warps")
    bar = th.cta.named_barrier(given.ident)
    generation = bar.generation
    bar.arrive(th, given.count)
    if given.sync:
        while bar.generation == generation:
            th.waiting_for = f"{bar.label} ({bar.arrived} of {given.count} threads arrived)"
            yield lambda: bar.generation != generation
        th.cta.share(bar.done_bit, th.bit)


def _access(given: ptx.Access, th: Thread) -> None:
    """One for each element; aligned is the vector."""
    f32, width, gmem = dtype("f32"), given.values.shape[1], th.cta.gmem
    gmem.find(given.addresses, width * f32.nbytes, given.name)
    addresses = given.addresses[:, None] + np.arange(width) * f32.nbytes
    if given.op == "red":
        atomic(gmem, th.actor, FADD, addresses, given.values, None, f32)
    elif given.op == "st":
        gmem.store(addresses, given.values, f32, th.actor)
    else:
        given.values[:] = gmem.load(addresses, f32, th.actor)


def _polled(given: ptx.Access, op: Op, th: Thread) -> Steps:
    """An atomic load, of all threads from the same place."""
    i32, gmem = dtype("i32"), th.cta.gmem
    address = np.unique(given.addresses)
    if address.size > 1 or given.values.shape[1] > 1:
        raise Unsupported(f"{given.name} from several places")

    def load() -> None:
        order = Order(acquire=given.sem == "acquire")
        found = gmem.update(address, i32, th.actor, lambda old: None, order, given.name)
        given.values[:] = found.astype(np.int32).view(np.float32)

    yield from polling(op, th, address, i32, load)


@dataclass(frozen=True)
class _Call:
    """One execution of a block. `full`: the shape of its operands, `idx`: the elements of each thread."""

    machine: ptx.Machine
    full: tuple[int, ...]
    idx: Any


class _Block:
    """A parsed block and where its operands come from."""

    def __init__(self, op: Op) -> None:
        self.asm = ptx.parse(op.attrs["asm_string"][1:-1], op.attrs["constraints"].strip('"'))
        self.pack = op.int_attr("packed_element", 1)
        self.src, self.dst = slots(op.operands), slots(op.results)
        self.in_types = [v.type for v in op.operands]
        self.out_types = [v.type for v in op.results]
        expected = sum(self._registers(t) for t in self.out_types)
        if expected != self.asm.n_outputs:
            raise Unsupported(f"inline assembly has {self.asm.n_outputs} outputs, {expected} registers expected")

    def _registers(self, ty: Type) -> int:
        bits = ty.dtype.bits
        return max(1, bits * self.pack // (64 if bits == 64 else 32))

    def _arrange(self, shape: tuple[int, ...], enc: str) -> Any:
        """Flat element indices as [warps, lanes, calls, pack] (layout order), or row-major if unknown."""
        pack, n = self.pack, int(np.prod(shape)) if shape else 1
        order = register_order(enc, shape) if shape and enc else None
        if order is None or order.shape[2] % pack:
            if n % pack:
                raise Unsupported(f"inline assembly with pack={pack} on {n} elements")
            if pack > 2 or self.asm.has("red", "st") or (shape and self.asm.has("ld")):  # of a scalar all load the same
                raise Unsupported(f"inline assembly with pack={pack} needs the register layout of {enc}")
            return np.arange(n).reshape(-1, pack)
        return order.reshape(order.shape[0], order.shape[1], -1, pack)

    def compute(self, env: Env) -> None:
        call = self.prepare(env)
        call.machine.run()
        self.finish(call, env)

    def prepare(self, env: Env) -> _Call:
        asm = self.asm
        # inside a combine region the types are scalar but the values are whole slices
        full = self.out_types[0].shape or np.broadcast_shapes(*[np.shape(env[s]) for s in self.src])
        idx = self._arrange(full, self.out_types[0].enc)
        shape = idx.shape[:-1]
        operands: list[Any] = []
        for s, t in zip(self.src, self.in_types, strict=True):
            raw = np.ascontiguousarray(np.broadcast_to(t.dtype.encode(env[s]), full)).ravel()[idx]
            operands += _to_regs(raw, t.dtype, self.pack)
        outs: list[Any] = [
            np.zeros(shape, np.uint64 if c == "=l" else np.uint32) for c in asm.constraints[: asm.n_outputs]
        ]
        for c, v in zip(asm.constraints[asm.n_outputs :], operands, strict=False):
            if c.isdigit():
                outs[int(c)] = v
        return _Call(ptx.Machine(asm, outs + operands, shape), full, idx)

    def finish(self, call: _Call, env: Env) -> None:
        outs = call.machine.outputs()
        for d, t in zip(self.dst, self.out_types, strict=True):
            count = self._registers(t)
            flat = np.zeros(int(np.prod(call.full)), t.dtype.store)
            flat[call.idx] = _from_regs(outs[:count], t.dtype, self.pack)
            outs = outs[count:]
            value = t.dtype.decode(flat.reshape(call.full))
            env[d] = value if call.full else value[()]


def _to_regs(raw: Any, dt: DType, pack: int) -> list[Any]:
    """[..., pack] storage values -> one array per machine register."""
    if dt.bits == 64:
        return [raw[..., k].view(np.uint64) for k in range(pack)]
    per = max(1, min(pack, 32 // max(dt.bits, 8)))
    u: Any = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dt.store.itemsize]
    bits = raw.view(u).astype(np.uint32)
    out = []
    for k in range(0, pack, per):
        r = np.zeros(raw.shape[:-1], np.uint32)
        for j in range(per):
            r |= bits[..., k + j] << np.uint32(j * dt.store.itemsize * 8)
        out.append(r)
    return out


def _from_regs(regs: list[Any], dt: DType, pack: int) -> Any:
    if dt.bits == 64:
        return np.stack([r.astype(np.uint64).view(dt.store) for r in regs], -1)
    per = max(1, min(pack, 32 // max(dt.bits, 8)))
    u: Any = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dt.store.itemsize]
    cols = []
    for k in range(pack):
        r = regs[k // per].astype(np.uint32) >> np.uint32((k % per) * dt.store.itemsize * 8)
        cols.append(r.astype(u).view(dt.store))
    return np.stack(cols, -1)
