"""A reader for MLIR's generic textual form: one uniform grammar, so no per-operation parsing."""

from __future__ import annotations

import re

from .errors import Unsupported
from .mlir import CLOSE, OPEN, STRUCTURE, Block, Module, Op, Region, Type, Value, parse_type
from .pairs import local

_TYPE_HEAD = re.compile(r"!?[\w.$]+")


class _Reader:
    """A position in the text, and what it has defined so far."""

    def __init__(self, text: str, ctas: int) -> None:
        self.text = text
        self.ctas = ctas
        self.at = 0
        self.aliases: dict[str, str] = dict(re.findall(r"^([#!][\w]+) = (.*)$", text, re.M))
        self.scopes: list[dict[str, list[Value]]] = [{}]
        self.slots = 0
        self.types: dict[str, Type] = {}
        self._locs: dict[str, str] = {}
        self.files: dict[str, str] = {}

    # ---- lexing

    def ws(self) -> None:
        s, i = self.text, self.at
        while i < len(s) and s[i] in " \n\t":
            i += 1
        self.at = i

    def peek(self, tok: str) -> bool:
        self.ws()
        return self.text.startswith(tok, self.at)

    def accept(self, tok: str) -> bool:
        if self.peek(tok):
            self.at += len(tok)
            return True
        return False

    def expect(self, tok: str) -> None:
        if not self.accept(tok):
            raise Unsupported(f"MLIR reader: expected {tok!r} near {self.text[self.at : self.at + 60]!r}")

    def regex(self, pat: str) -> str:
        self.ws()
        m = re.compile(pat).match(self.text, self.at)
        if not m:
            raise Unsupported(f"MLIR reader: expected /{pat}/ near {self.text[self.at : self.at + 60]!r}")
        self.at = m.end()
        return m.group()

    def raw_until(self, stops: str) -> str:
        """Raw text up to (not including) one of `stops` outside any bracket."""
        start, depth = self.at, 0
        for m in STRUCTURE.finditer(self.text, self.at):
            t = m.group()
            if depth == 0 and t in stops:
                self.at = m.start()
                return self.text[start : m.start()].strip()
            if t in OPEN:
                depth += 1
            elif t in CLOSE:
                depth -= 1
        raise Unsupported("MLIR reader: unbalanced text")

    def type(self) -> Type:
        self.ws()
        start = self.at
        m = _TYPE_HEAD.match(self.text, self.at)
        if not m:
            raise Unsupported(f"MLIR reader: expected a type near {self.text[self.at : self.at + 60]!r}")
        self.at = m.end()
        if self.at < len(self.text) and self.text[self.at] == "<":
            self.at += 1
            self.raw_until(">")
            self.at += 1
        text = self.text[start : self.at]
        if text not in self.types:
            whole = parse_type(self.expand(text))
            self.types[text] = local(whole) if self.ctas == 2 else whole
        return self.types[text]

    def expand(self, text: str) -> str:
        def sub(m: re.Match[str]) -> str:
            body = self.aliases.get(m.group())
            return m.group() if body is None else self.expand(body)

        return re.sub(r"[#!][A-Za-z_]\w*(?![\w.])", sub, text)

    def type_list(self) -> list[Type]:
        if not self.accept("("):
            return [self.type()]
        out: list[Type] = []
        while not self.accept(")"):
            out.append(self.type())
            self.accept(",")
        return out

    def attr_dict(self) -> dict[str, str]:
        out: dict[str, str] = {}
        while not self.accept("}"):
            key = self.regex(r'"[^"]*"|[\w.$\-]+').strip('"')
            out[key] = ""
            if self.accept("="):
                self.ws()
                out[key] = self.raw_until(",}")
            self.accept(",")
        return out

    def loc(self) -> str:
        if not self.accept("loc("):
            return ""
        raw = self.raw_until(")")
        self.at += 1
        return self.resolve_loc(raw)

    def resolve_loc(self, raw: str) -> str:
        if raw in self._locs:
            return self._locs[raw]
        text = raw
        if raw.startswith("#") and raw in self.aliases:
            body = self.aliases[raw]
            text = self.resolve_loc(body[4:-1] if body.startswith("loc(") else body)
        elif raw.startswith("callsite("):
            callee, _, caller = raw[9:-1].partition(" at ")
            text = f"{self.resolve_loc(callee)} <- {self.resolve_loc(caller)}"
        else:
            m = re.match(r'"([^"]*)":(\d+):(\d+)', raw)
            named = re.match(r'"([^"]*)"\((.*)\)$', raw, re.S)
            if m:
                base = m.group(1).rsplit("/", 1)[-1]
                self.files[base] = m.group(1)
                text = f"{base}:{m.group(2)}"
            elif named:
                text = self.resolve_loc(named.group(2))
        self._locs[raw] = text
        return text

    # ---- values

    def define(self, name: str, types: list[Type]) -> list[Value]:
        vals = [Value(self.slots + k, t, name) for k, t in enumerate(types)]
        self.slots += len(types)
        self.scopes[-1][name] = vals
        return vals

    def use(self) -> Value:
        name = self.regex(r"%[\w.$\-]+")
        idx = 0
        if self.at < len(self.text) and self.text[self.at] == "#":
            self.at += 1
            idx = int(self.regex(r"\d+"))
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name][idx]
        raise Unsupported(f"MLIR reader: undefined value {name}")

    # ---- structure

    def result_names(self) -> list[tuple[str, int]]:
        """`%a, %b:2 =` as names and counts."""
        names: list[tuple[str, int]] = []
        if self.peek("%"):
            while True:
                name = self.regex(r"%[\w.$\-]+")
                count = int(self.regex(r":\d+")[1:]) if self.peek(":") else 1
                names.append((name, count))
                if not self.accept(","):
                    break
            self.expect("=")
        return names

    def op(self) -> Op:
        names = self.result_names()
        name = self.regex(r'"[^"]+"')[1:-1]
        self.expect("(")
        operands: list[Value] = []
        while not self.accept(")"):
            operands.append(self.use())
            self.accept(",")
        successors: list[str] = []
        if self.accept("["):
            while not self.accept("]"):
                successors.append(self.regex(r"\^\w+"))
                self.accept(",")
        attrs: dict[str, str] = {}
        if self.accept("<{"):
            attrs = self.attr_dict()
            self.expect(">")
        regions: list[Region] = []
        if self.peek("({"):
            self.expect("(")
            while not self.accept(")"):
                regions.append(self.region())
                self.accept(",")
        if self.accept("{"):
            attrs.update(self.attr_dict())
        self.expect(":")
        self.type_list()
        self.expect("->")
        rtypes = self.type_list()
        loc = self.loc()
        results: list[Value] = []
        at = 0
        for rname, count in names:
            results += self.define(rname, rtypes[at : at + count])
            at += count
        return Op(name, operands, results, attrs, regions, successors, loc)

    def region(self) -> Region:
        self.expect("{")
        self.scopes.append({})
        reg = Region()
        if not self.peek("^"):
            reg.blocks.append(Block("", []))
        while not self.accept("}"):
            if self.peek("^"):
                label = self.regex(r"\^\w+")
                args: list[Value] = []
                if self.accept("("):
                    while not self.accept(")"):
                        name = self.regex(r"%[\w.$\-]+")
                        self.expect(":")
                        args += self.define(name, [self.type()])
                        self.loc()
                        self.accept(",")
                self.expect(":")
                reg.blocks.append(Block(label, args))
            else:
                reg.blocks[-1].ops.append(self.op())
        self.scopes.pop()
        return reg


def parse_module(text: str, ctas: int = 1) -> Module:
    """Parse a module printed in generic form. ctas: of a program; types are those of one."""
    p = _Reader(text, ctas)
    p.at = text.index('"builtin.module"')
    mod = p.op()
    funcs = {}
    for op in mod.regions[0].blocks[0].ops:
        if op.name != "tt.func":
            raise Unsupported(f"top-level operation {op.name}")
        funcs[op.attrs["sym_name"].strip('"')] = op
    return Module(funcs, p.slots, p.files, ctas)
