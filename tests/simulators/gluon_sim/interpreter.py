"""Executes parsed TTGIR. Every operation is compiled once to a Python closure; threads are generators.

A handler (`operations/`) is registered for an operation name as one of

* `pure`:  `make(op, exe) -> fn(env)`            no memory, no scheduling point; `env[-1]` is the thread
* `sync`:  `make(op, exe) -> fn(env, thread)`    touches memory or barriers; the scheduler may switch before it
* `steps`: `make(op, exe) -> generator(env, thread)`  may block, or contains regions
* `term`:  `make(op, exe) -> fn(env) -> payload`  ends a block
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .errors import SimError, Unsupported
from .machine import Cta, Steps, Thread
from .mlir import Block, Module, Op, Region

Env = list[Any]
Maker = Callable[[Op, "Executable"], Callable[..., Any]]

HANDLERS: dict[str, tuple[str, Maker]] = {}


def _register(style: str, *names: str) -> Callable[[Maker], Maker]:
    def deco(make: Maker) -> Maker:
        for n in names:
            HANDLERS[n] = (style, make)
        return make

    return deco


def pure(*names: str) -> Callable[[Maker], Maker]:
    return _register("pure", *names)


def sync(*names: str) -> Callable[[Maker], Maker]:
    return _register("sync", *names)


def steps(*names: str) -> Callable[[Maker], Maker]:
    return _register("steps", *names)


def term(*names: str) -> Callable[[Maker], Maker]:
    return _register("term", *names)


class Executable:
    """A compiled module."""

    def __init__(self, module: Module, num_warps: int, handlers: Mapping[str, tuple[str, Maker]]) -> None:
        self.module, self.num_warps, self.handlers = module, num_warps, handlers
        for fn in module.funcs.values():
            for block in fn.regions[0].blocks:
                self.compile_block(block)

    def compile_block(self, block: Block) -> None:
        if block.code is not None:
            return
        code: list[tuple[str, Callable[..., Any], Op]] = []
        for op in block.ops:
            for region in op.regions:
                for inner in region.blocks:
                    self.compile_block(inner)
            entry = self.handlers.get(op.name)
            if entry is None:
                raise Unsupported(f"operation {op.name} is not modelled", op.loc)
            style, make = entry
            try:
                fn = make(op, self)
                code.append((getattr(fn, "style", style), fn, op))
            except SimError as e:
                e.where = e.where or op.loc
                raise
        block.code = code

    def new_env(self) -> Env:
        return [None] * (self.module.n_slots + 1)

    def function_of(self, region: Region) -> str:
        """Name of the Python function a partition was written as, from the locations of its operations."""
        entry = self.module.entry.attrs["sym_name"].strip('"')
        for block in region.blocks:
            for op in block.ops:
                for frame in reversed(op.loc.split(" <- ")):
                    base, _, line = frame.rpartition(":")
                    name = _enclosing(self.module.files.get(base, ""), int(line)) if line.isdigit() else ""
                    if name and name != entry:
                        return name
        return ""

    # ---- execution

    def run_block(self, block: Block, env: Env, th: Thread) -> Steps:
        assert block.code is not None
        op: Op | None = None
        try:
            for style, fn, op in block.code:
                if style == "pure":
                    th.op = op
                    fn(env)
                elif style == "sync":
                    th.op = op
                    op.hits += 1
                    th.executed += 1
                    yield None
                    fn(env, th)
                elif style == "steps":
                    th.op = op
                    op.hits += 1
                    th.executed += 1
                    yield from fn(env, th)
                else:
                    return fn(env)
        except SimError as e:
            if e.where is None and op is not None:
                e.where = op.loc
            raise
        except Exception as e:
            raise SimError(
                f"simulator failure in {op.name if op else '?'}: {type(e).__name__}: {e}", op.loc if op else None
            ) from e
        return ("end", [])

    def run_pure_block(self, block: Block, env: Env, args: list[Any]) -> list[Any]:
        """Run a region that has no side effects (reduce and scan combiners)."""
        assert block.code is not None
        for a, v in zip(block.args, args, strict=True):
            env[a.slot] = v
        for style, fn, op in block.code:
            if style == "pure":
                fn(env)
            elif style == "term":
                return list(fn(env)[1])
            else:
                raise Unsupported(f"{op.name} inside a combine region", op.loc)
        return []

    def run_region(self, region: Region, env: Env, th: Thread, args: list[Any]) -> Steps:
        """Run a region with unstructured control flow; returns the payload of its final terminator."""
        labels = {b.label: b for b in region.blocks}
        block = region.blocks[0]
        while True:
            for a, v in zip(block.args, args, strict=True):
                env[a.slot] = v
            payload = yield from self.run_block(block, env, th)
            if payload[0] != "br":
                return payload
            block, args = labels[payload[2]], payload[1]

    def start(self, cta: Cta, args: list[Any]) -> Thread:
        """Create the main thread of a program instance."""
        th = Thread(cta, "main", self.num_warps, self.new_env())
        th.gen = self.run_region(self.module.entry.regions[0], th.env, th, args)
        cta.threads.append(th)
        return th


@cache
def _functions(path: str) -> list[tuple[int, int, str]]:
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return []
    return [(n.lineno, n.end_lineno or n.lineno, n.name) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]


def _enclosing(path: str, line: int) -> str:
    return next((name for lo, hi, name in _functions(path) if lo <= line <= hi), "")
