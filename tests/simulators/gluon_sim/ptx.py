"""A small interpreter for the inline PTX that attention kernels contain, vectorised over all threads.

Registers are unsigned-integer arrays of raw bits, one entry per execution of the assembly block. Forward branches
become masks. Named barriers and accesses to global memory are handed to the caller, which owns scheduling and memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import dtype
from .errors import BarrierError, Unsupported
from .ptx_math import COMPARE, FLOAT_OPS, Bits, as_f32, bits_of, float_op, integer_op


@dataclass(frozen=True)
class Instr:
    """An instruction; `pred` as written, with its "!"."""

    op: str
    mods: tuple[str, ...]
    args: tuple[str, ...]
    pred: str | None
    label: str | None = None


EFFECTS = ("bar", "barrier", "fence", "red", "ld", "st")


@dataclass(frozen=True)
class Asm:
    """A block. Operand `$k` is an output below `n_outputs`."""

    instrs: tuple[Instr, ...]
    n_outputs: int
    constraints: tuple[str, ...]

    def has(self, *ops: str) -> bool:
        return any(i.op in ops for i in self.instrs)

    @property
    def effects(self) -> bool:
        """Whether it does more than compute."""
        return self.has(*EFFECTS)


@dataclass(frozen=True)
class Barrier:
    """bar.sync or bar.arrive, of all threads."""

    sync: bool
    ident: int
    count: int


@dataclass(frozen=True)
class ProxyFence:
    """fence.proxy.async of global memory: what the asynchronous proxy does there from now on comes after it."""


@dataclass(frozen=True)
class Access:
    """red.add of fp32, st or ld: each thread adds or writes a row of `values` from its address on, or the caller fills
    the row. An ld with `sem` is an atomic one."""

    op: str
    name: str
    addresses: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    sem: str | None = None


def _split_args(text: str) -> tuple[str, ...]:
    out, depth, cur = [], 0, ""
    for ch in text:
        if ch == "," and depth == 0:
            out.append(cur.strip())
            cur = ""
            continue
        depth += (ch == "{") - (ch == "}")
        cur += ch
    if cur.strip():
        out.append(cur.strip())
    return tuple(out)


def parse(text: str, constraints: str) -> Asm:
    """The text and constraints of an inline assembly block, as MLIR escapes them."""
    text = re.sub(r"//[^\n]*", "", text).replace("\\0A", "\n").replace("\\09", " ").replace("\\22", '"')
    instrs: list[Instr] = []
    for stmt in re.split(r";", text):
        stmt = stmt.strip()
        while stmt.startswith("{") and not re.match(r"\{[^}]*\}\s*,", stmt):
            stmt = stmt[1:].strip()
        while stmt.startswith("}"):
            stmt = stmt[1:].strip()
        m = re.match(r"(\w+)\s*:\s*", stmt)
        while m:
            instrs.append(Instr("label", (), (), None, m.group(1)))
            stmt = stmt[m.end() :].strip()
            while stmt.startswith("}"):
                stmt = stmt[1:].strip()
            m = re.match(r"(\w+)\s*:\s*", stmt)
        if not stmt or stmt.startswith(".reg"):
            continue
        m = re.match(r"(?:@(!?\w+)\s+)?([\w.:]+)\s*(.*)$", stmt, re.S)
        if not m:
            raise Unsupported(f"inline assembly statement {stmt!r}")
        head = m.group(2).split(".")
        args = m.group(3).strip()
        if args.endswith("}") and args.count("}") > args.count("{"):
            args = args[:-1]
        instrs.append(Instr(head[0], tuple(head[1:]), _split_args(args), m.group(1)))
    cons = tuple(c.strip() for c in constraints.split(",") if c.strip() and not c.strip().startswith("~"))
    return Asm(tuple(instrs), sum(c.startswith("=") for c in cons), cons)


_WIDTHS = {
    "b64": 64,
    "u64": 64,
    "s64": 64,
    "f64": 64,
    "f32x2": 64,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "bf16": 16,
}
ACCESSES = {
    "red": r"red\.(?:relaxed\.)?(?:(?:gpu|sys)\.)?global\.add\.(?:v[24]\.)?f32$",
    "ld": r"ld\.(?:weak\.|(?P<sem>relaxed|acquire)\.gpu\.)?global\.(?:c[ags]\.)?(?:L1::\w+\.)?(?:v[24]\.)?[fbsu]32$",
    "st": r"st\.(?:weak\.)?global\.(?:(?:wb|cg|cs)\.)?(?:L1::\w+\.)?(?:v[24]\.)?[fbsu]32$",
}  # by name; of loads and stores those that are plain ones
_ROUND = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


class Machine:
    """Runs one :class:`Asm` over register arrays of a common shape `[warps, lanes, groups]`."""

    def __init__(self, asm: Asm, operands: list[Bits], shape: tuple[int, ...]) -> None:
        self.asm, self.shape = asm, shape
        self.regs: dict[str, Bits] = {f"${k}": v for k, v in enumerate(operands)}
        self.mask: npt.NDArray[np.bool_] = np.ones(shape, np.bool_)
        self.joins: dict[str, list[npt.NDArray[np.bool_]]] = {}

    def get(self, name: str, width: int = 32) -> Bits:
        dt: Any = {64: np.uint64, 16: np.uint16}.get(width, np.uint32)
        if name.startswith("{"):
            lo, hi = (self.get(n.strip(), width // 2) for n in name[1:-1].split(","))
            both: Bits = hi.astype(np.uint64) << np.uint64(width // 2) | lo.astype(np.uint64)
            return both.astype(dt)
        if name in self.regs:
            return self.regs[name]
        constant: Bits = np.broadcast_to(np.array(immediate(name), np.uint64).astype(dt), self.shape)
        return constant

    def put(self, name: str, value: Bits, active: npt.NDArray[np.bool_]) -> None:
        if name == "_":
            return
        if name.startswith("{"):
            names = [n.strip() for n in name[1:-1].split(",")]
            w = value.dtype.itemsize * 8 // len(names)
            for k, n in enumerate(names):
                part = (value >> value.dtype.type(k * w)) & value.dtype.type((1 << w) - 1)
                self.put(n, part.astype(np.uint32 if w == 32 else np.uint16), active)
            return
        old = self.regs.get(name)
        if old is None or active.all():
            self.regs[name] = value if value.shape == self.shape else np.broadcast_to(value, self.shape)
        else:
            self.regs[name] = np.where(active, value, old)

    def run(self) -> list[Bits]:
        """The outputs of a block that only computes."""
        assert not self.asm.effects
        for _ in self.steps():
            pass
        return self.outputs()

    def outputs(self) -> list[Bits]:
        return [self.regs[f"${k}"] for k in range(self.asm.n_outputs)]

    def steps(self) -> Iterator[Barrier | ProxyFence | Access]:
        """Runs the block and stops where the caller has to do something."""
        for ins in self.asm.instrs:
            if ins.op == "label":
                for m in self.joins.pop(ins.label or "", []):
                    self.mask = self.mask | m
                continue
            active = self.mask
            if ins.pred:
                p = self.regs[ins.pred.lstrip("!")].astype(np.bool_)
                active = active & (~p if ins.pred.startswith("!") else p)
            if ins.op == "bra":
                self.joins.setdefault(ins.args[0], []).append(active)
                self.mask = self.mask & ~active
                continue
            if ins.op == "griddepcontrol":  # one kernel runs at a time here
                continue
            if ins.op not in EFFECTS:
                self.execute(ins, active)
            elif active.any() and ins.op in ("bar", "barrier"):
                yield self.barrier(ins, active)
            elif active.any() and ins.op == "fence":
                if ins.mods not in (("proxy", "async"), ("proxy", "async", "global")) or not active.all():
                    raise Unsupported(f"inline assembly {'.'.join((ins.op, *ins.mods))}")
                yield ProxyFence()
            elif active.any():
                yield from self.access(ins, active)

    def barrier(self, ins: Instr, active: npt.NDArray[np.bool_]) -> Barrier:
        name = ".".join((ins.op, *ins.mods))
        if not {"sync", "arrive"} & {*ins.mods} or len(ins.args) != 2:
            raise Unsupported(f"inline assembly {name} {', '.join(ins.args)}")
        if not active.all():
            raise Unsupported(f"inline assembly {name} in some of the threads")
        ident, count = (np.unique(self.get(a)) for a in ins.args)
        if len(ident) > 1 or len(count) > 1:
            raise BarrierError(f"{name} {', '.join(ins.args)}: not the same in all threads")
        return Barrier("sync" in ins.mods, int(ident[0]), int(count[0]))

    def access(self, ins: Instr, active: npt.NDArray[np.bool_]) -> Iterator[Access]:
        name = ".".join((ins.op, *ins.mods))
        known = re.match(ACCESSES[ins.op], name)
        where, what = ins.args[:2] if ins.op != "ld" else reversed(ins.args[:2])
        place = re.match(r"\[\s*([$\w]+)\s*(?:\+\s*(\w+)\s*)?\]$", where)
        names = [n.strip() for n in what.strip("{}").split(",")]
        if not known or not place or len(names) != {"v2": 2, "v4": 4}.get(ins.mods[-2], 1) or len(ins.args) != 2:
            raise Unsupported(f"inline assembly {name} {', '.join(ins.args)}")
        at = self.get(place.group(1), 64) + np.uint64(immediate(place.group(2) or "0"))
        if ins.op == "ld":
            found = np.zeros((*self.shape, len(names)), np.float32)
            rows = found[active]
            yield Access(ins.op, name, at[active].astype(np.int64), rows, known["sem"])
            found[active] = rows
            for k, n in enumerate(names):
                self.put(n, bits_of(np.ascontiguousarray(found[..., k])), active)
        else:
            values = np.stack([as_f32(self.get(n)) for n in names], -1)
            yield Access(ins.op, name, at[active].astype(np.int64), values[active])

    def execute(self, ins: Instr, active: npt.NDArray[np.bool_]) -> None:
        op, mods, args = ins.op, ins.mods, ins.args
        ty = mods[-1] if mods else "b32"
        width = _WIDTHS.get(ty, 32)
        if op == "mov":
            self.put(args[0], self.get(args[1], width), active)
        elif op == "setp":
            self.setp(ins, active)
        elif op == "selp":
            p = self.regs[args[3]].astype(np.bool_)
            self.put(args[0], np.where(p, self.get(args[1], width), self.get(args[2], width)), active)
        elif op == "vote":
            self.vote(ins, active)
        elif op == "cvt":
            self.convert(ins, active)
        elif ty == "f32x2" and op in FLOAT_OPS:
            srcs = [self.get(a, 64) for a in args[1:]]
            halves = []
            for sh in (0, 32):
                parts = [as_f32((s >> np.uint64(sh)) & np.uint64(0xFFFFFFFF)) for s in srcs]
                halves.append(bits_of(float_op(op, mods, parts)).astype(np.uint64))
            self.put(args[0], halves[0] | halves[1] << np.uint64(32), active)
        elif ty == "f32" and op in FLOAT_OPS:
            self.put(args[0], bits_of(float_op(op, mods, [as_f32(self.get(a)) for a in args[1:]])), active)
        elif ty in ("f16x2", "bf16x2") and op in FLOAT_OPS:
            self.half2(ins, ty, active)
        else:
            ut: Any = {64: np.uint64, 32: np.uint32, 16: np.uint16}[width]
            xs = [self.get(a, width).astype(ut) for a in args[1:]]
            last = immediate(args[4]) if op == "lop3" else None
            self.put(args[0], integer_op(op, mods, ty.startswith("s"), xs, last).astype(ut), active)

    def half2(self, ins: Instr, ty: str, active: npt.NDArray[np.bool_]) -> None:
        dt = dtype(ty[:-2])
        srcs = [self.get(a) for a in ins.args[1:]]
        out = np.zeros(self.shape, np.uint32)
        for sh in (0, 16):
            parts = []
            for s in srcs:
                raw = ((s >> np.uint32(sh)) & np.uint32(0xFFFF)).astype(np.uint16)
                parts.append(np.asarray(dt.decode(raw.view(dt.store)), np.float32))
            r = float_op(ins.op, ins.mods, parts)
            out |= dt.encode(r).view(np.uint16).astype(np.uint32) << np.uint32(sh)
        self.put(ins.args[0], out, active)

    def setp(self, ins: Instr, active: npt.NDArray[np.bool_]) -> None:
        ty = ins.mods[-1]
        cmp = ins.mods[0]
        a, b = (self.get(x, 64 if ty.endswith("64") else 32) for x in ins.args[1:3])
        if ty == "f32":
            x, y = as_f32(a), as_f32(b)
            unordered = len(cmp) == 3 and cmp.endswith("u")
            r = COMPARE[cmp[:2]](x, y)
            nan = np.isnan(x) | np.isnan(y)
            r = (r | nan) if unordered else (r & ~nan)
        elif ty.startswith("s"):
            st: Any = np.int64 if ty == "s64" else np.int32
            r = COMPARE[cmp](a.view(st), b.view(st))
        else:
            r = COMPARE[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(cmp, cmp)](a, b)
        if len(ins.mods) > 2 and ins.mods[1] in ("and", "or", "xor"):
            other = ins.args[3]
            c = self.regs[other.lstrip("!")].astype(np.bool_)
            c = ~c if other.startswith("!") else c
            r = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[ins.mods[1]](r, c)
        p, _, q = ins.args[0].partition("|")
        self.put(p, r, active)
        if q:
            self.put(q, ~r, active)

    def vote(self, ins: Instr, active: npt.NDArray[np.bool_]) -> None:
        src = ins.args[1]
        p = self.regs[src.lstrip("!")].astype(np.bool_)
        p = ~p if src.startswith("!") else p
        if len(self.shape) != 3:
            raise Unsupported("vote.sync on a tensor whose register layout the simulator does not know")
        any_mode = "any" in ins.mods
        r = p.any(axis=1, keepdims=True) if any_mode else p.all(axis=1, keepdims=True)
        if "ballot" in ins.mods:
            raise Unsupported("vote.ballot")
        self.put(ins.args[0], np.broadcast_to(r, self.shape), active)

    def convert(self, ins: Instr, active: npt.NDArray[np.bool_]) -> None:
        types = [m for m in ins.mods if re.match(r"(b?f16(x2)?|f32|f64|[su]\d+|e4m3x2|e5m2x2)$", m)]
        dst, src = types[0], types[-1]
        if src == "f32" and dst in ("f16x2", "bf16x2"):
            dt = dtype(dst[:-2])
            hi, lo = (dt.encode(as_f32(self.get(a))).view(np.uint16).astype(np.uint32) for a in ins.args[1:3])
            self.put(ins.args[0], hi << np.uint32(16) | lo, active)
        elif src == "f32" and dst in ("e4m3x2", "e5m2x2"):
            dt = dtype("f8E4M3FN" if dst == "e4m3x2" else "f8E5M2")
            hi8, lo8 = (dt.encode(as_f32(self.get(a))).astype(np.uint16) for a in ins.args[1:3])
            self.put(ins.args[0], hi8 << np.uint16(8) | lo8, active)
        elif src == "f32" and dst in ("f16", "bf16"):
            self.put(ins.args[0], dtype(dst).encode(as_f32(self.get(ins.args[1]))).view(np.uint16), active)
        elif dst == "f32" and src in ("f16", "bf16"):
            raw = self.get(ins.args[1], 16).astype(np.uint16)
            dt = dtype(src)
            self.put(ins.args[0], bits_of(np.asarray(dt.decode(raw.view(dt.store)), np.float32)), active)
        elif src == "f32" and dst in ("s32", "u32"):
            x = as_f32(self.get(ins.args[1]))
            f = next((_ROUND[m] for m in ins.mods if m in _ROUND), np.trunc)
            self.put(ins.args[0], np.nan_to_num(f(x)).astype(np.int64).astype(np.uint32), active)
        elif dst == "f32" and src in ("s32", "u32"):
            x32 = self.get(ins.args[1]).astype(np.uint32)
            self.put(ins.args[0], bits_of((x32.view(np.int32) if src == "s32" else x32).astype(np.float32)), active)
        elif dst == src == "f32":
            x = as_f32(self.get(ins.args[1]))
            f = next((_ROUND[m] for m in ins.mods if m in _ROUND), np.rint)
            self.put(ins.args[0], bits_of(f(x)), active)
        else:
            raise Unsupported(f"inline assembly cvt.{'.'.join(ins.mods)}")


def immediate(text: str) -> int:
    text = text.strip()
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return int(text[2:], 16)
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return int(text[2:], 16)
    try:
        return int(text.rstrip("U"), 0) & 0xFFFFFFFFFFFFFFFF
    except ValueError:
        raise Unsupported(f"inline assembly operand {text!r}") from None
