"""TMA: loads that land in pieces and any order, stores that read later and write later still.

Not modelled: multicast, im2col, and what orders the writes of TMA stores before later loads of the same addresses (a
`store_wait` waits until the stores have read shared memory, whatever `read_only` says).
"""

from __future__ import annotations

import numpy as np

from ..descriptors import TensorDesc
from ..errors import Unsupported
from ..interpreter import Env, Executable, steps, sync
from ..machine import AsyncOp, Steps, Thread
from ..mlir import Op
from ..pairs import home
from ..views import View
from .asynchronous import complete, issue, wait_groups
from .common import Fn, scalar_int, slots
from .global_memory import atomic


def _coords(env: Env, coords: list[int]) -> tuple[int, ...]:
    return tuple(scalar_int(env[s]) for s in coords)


def _pieces(th: Thread, n: int) -> list[slice]:
    """A copy lands in one, two or four pieces, in random order."""
    k = th.cta.rng.choice([1, 1, 2, 4])
    k = k if n % k == 0 else 1
    parts = [slice(i * n // k, (i + 1) * n // k) for i in range(k)]
    th.cta.rng.shuffle(parts)
    return parts


@sync("ttng.async_tma_copy_global_to_local")
def _tma_load(op: Op, exe: Executable) -> Fn:
    s = slots(op.operands)
    if "operandSegmentSizes" in op.attrs and op.segments()[2]:  # from Triton 3.9 on
        raise Unsupported("TMA load with im2col offsets")
    if op.operands[-1].type.kind == "memdesc":
        raise Unsupported("TMA load without a predicate operand")
    d, coords, bar_s, res, pred = s[0], s[1:-3], s[-3], s[-2], s[-1]
    bar_type = op.operands[-3].type
    if op.int_attr("multicast", 0):
        raise Unsupported("TMA load to several CTAs")

    def run(env: Env, th: Thread) -> None:
        if not env[pred]:
            return
        desc: TensorDesc = env[d]
        view: View = env[res]
        at = desc.of(th, _coords(env, coords))
        bar = home(th, bar_type).barrier(env[bar_s])
        nbytes = int(np.prod(desc.box)) * desc.dt.nbytes
        where = op.loc
        what = f"TMA load of {desc.name}{list(at)}"
        bar.used_by(what, where)
        parts = _pieces(th, view.offsets.size)

        def land() -> bool:
            part = parts.pop()
            value = desc.load(th, at, what).reshape(view.offsets.shape)
            view.space.write(view, value, part)
            if not parts:
                complete(aop, bar.pend_bit)
                th.cta.loaded(bar.pend_bit)
            bar.add_tx(-nbytes * (part.stop - part.start) // view.offsets.size)
            return not parts

        aop = AsyncOp(what, land, th, where)
        issue(th.cta.loads, aop, ("w", view))
        view.space.poison(view)

    return run


@sync("ttng.async_tma_gather")
def _tma_gather(op: Op, exe: Executable) -> Fn:
    d, xs, y, bar_s, res, pred = slots(op.operands)

    def run(env: Env, th: Thread) -> None:
        if not env[pred]:
            return
        desc: TensorDesc = env[d]
        view: View = env[res]
        rows, col = [int(r) for r in env[xs]], scalar_int(env[y])
        bar = th.cta.barrier(env[bar_s])
        what = f"TMA gather of {desc.name}"
        bar.used_by(what, op.loc)
        one = TensorDesc(
            desc.address, desc.shape, desc.strides, (1, view.offsets.shape[1]), desc.dt, desc.fill, desc.name
        )

        def land() -> bool:
            data = np.concatenate([one.load(th, (r, col), what) for r in rows])
            view.space.write(view, data)
            complete(aop, bar.pend_bit)
            th.cta.loaded(bar.pend_bit)
            bar.add_tx(-view.offsets.size * desc.dt.nbytes)
            return True

        aop = AsyncOp(what, land, th, op.loc)
        issue(th.cta.loads, aop, ("w", view))
        view.space.poison(view)

    return run


def _tma_out(op: Op, combine: int | None) -> Fn:
    s = slots(op.operands)
    d, coords, src = s[0], s[1:-1], s[-1]

    def run(env: Env, th: Thread) -> None:
        desc: TensorDesc = env[d]
        view: View = env[src]
        at = desc.of(th, _coords(env, coords))
        what = f"TMA {'store' if combine is None else 'reduce'} to {desc.name}{list(at)}"
        where = op.loc

        def read() -> bool:
            data = view.space.read(view, what).reshape(desc.box)

            def write() -> bool:
                if combine is None:
                    desc.store(th, at, data, what)
                else:
                    addr, mask = desc.addresses(at)
                    if mask.any():
                        atomic(th.cta.gmem, th.cta.asynchronous, combine, addr[mask], data[mask], None, desc.dt)
                return True

            th.cta.writes.issue(AsyncOp(what, write, th, where))
            return True

        issue(th.bulk, AsyncOp(what, read, th, where), ("r", view))
        th.bulk.groups.append(th.bulk.issued)

    return run


@sync("ttng.async_tma_copy_local_to_global")
def _tma_store(op: Op, exe: Executable) -> Fn:
    return _tma_out(op, None)


@sync("ttng.async_tma_reduce")
def _tma_reduce(op: Op, exe: Executable) -> Fn:
    # DescriptorReduceKind: none, add, min, max, inc, dec, and, or, xor
    kind = {1: 4, 2: 7, 3: 6, 6: 1, 7: 2, 8: 3}.get(op.int_attr("kind"))
    if kind is None:
        raise Unsupported(f"TMA reduce kind {op.attrs.get('kind')}")
    return _tma_out(op, kind)


@sync("ttng.async_tma_scatter")
def _tma_scatter(op: Op, exe: Executable) -> Fn:
    d, xs, y, src = slots(op.operands)

    def run(env: Env, th: Thread) -> None:
        desc: TensorDesc = env[d]
        view: View = env[src]
        rows, col = [int(r) for r in env[xs]], scalar_int(env[y])
        what = f"TMA scatter to {desc.name}"
        one = TensorDesc(
            desc.address, desc.shape, desc.strides, (1, view.offsets.shape[1]), desc.dt, desc.fill, desc.name
        )

        def read() -> bool:
            data = view.space.read(view, what)

            def write() -> bool:
                for k, r in enumerate(rows):
                    one.store(th, (r, col), data[k : k + 1], what)
                return True

            th.cta.writes.issue(AsyncOp(what, write, th, op.loc))
            return True

        issue(th.bulk, AsyncOp(what, read, th, op.loc), ("r", view))
        th.bulk.groups.append(th.bulk.issued)

    return run


@steps("ttng.async_tma_store_wait")
def _store_wait(op: Op, exe: Executable) -> Fn:
    n = op.int_attr("pendings")

    def run(env: Env, th: Thread) -> Steps:
        yield None
        yield from wait_groups(th.bulk, th, n)

    return run


@sync("ttg.global_scratch_alloc")
def _scratch(op: Op, exe: Executable) -> Fn:
    dst, n = op.results[0].slot, op.int_attr("nbytes")

    def run(env: Env, th: Thread) -> None:
        buf = th.cta.gmem.add_bytes(np.zeros(max(n, 128), np.uint8), "global scratch")
        env[dst] = np.int64(buf.base)

    return run


@sync("ttng.tensormap_create")
def _tensormap_create(op: Op, exe: Executable) -> Fn:
    seg = op.segments()
    desc_ptr, base = seg[0][0].slot, seg[1][0].slot
    dims, strides = slots(seg[3]), slots(seg[4])
    nan = bool(op.int_attr("fill_mode", 0))

    def run(env: Env, th: Thread) -> None:
        th.cta.gmem.descriptors[int(env[desc_ptr])] = (
            int(env[base]),
            [scalar_int(env[s]) for s in dims],
            [scalar_int(env[s]) for s in strides],
            nan,
        )

    return run


@sync("ttng.reinterpret_tensor_descriptor")
def _reinterpret_desc(op: Op, exe: Executable) -> Fn:
    a, dst, ty = op.operands[0].slot, op.results[0].slot, op.results[0].type

    def run(env: Env, th: Thread) -> None:
        base, dims, strides, nan = th.cta.gmem.descriptors[int(env[a])]
        dt = ty.dtype
        # tensormap_create lists dimensions fastest first and strides in bytes, without the unit one
        shape = tuple(reversed(dims))
        elem = tuple(reversed([1] + [s // dt.nbytes for s in strides]))
        rank = len(ty.shape)
        env[dst] = TensorDesc(
            base, shape[-rank:], elem[-rank:], ty.shape, dt, np.nan if nan else 0.0, "device descriptor"
        )

    return run
