"""Operands of instructions, and the builder that the encoders share."""

import re
import struct
from collections.abc import Iterable

from .build import Dpp, Ins, Operand, operations
from .errors import EmulationError
from .parser import Instruction

NEG32, ABS32, HI, NEG16, ABS16, NEG64, ABS64, HALF = 1, 2, 4, 8, 16, 32, 64, 128  # as machine.h has them
SIGNS = {"f16": (NEG16, ABS16), "f64": (NEG64, ABS64)}  # negate, absolute value; else of 32 bits
VGPR, TTMP, IMMEDIATE = 256, 108, 128
SPECIAL = {
    "vcc_lo": 106, "vcc": 106, "vcc_hi": 107, "null": 124, "m0": 125, "exec_lo": 126, "exec": 126, "exec_hi": 127,
    "scc": 253, "src_scc": 253, "flat_scratch_lo": 102, "flat_scratch_hi": 103,
}  # fmt: skip
REGISTER = re.compile(r"([vs]|ttmp)(?:(\d+)|\[(\d+)(?::\d+)?\])(\.[lh])?")
INTEGER = re.compile(r"-?(0x[0-9a-f]+|\d+)")


def immediate(token: str, kind: str) -> int:
    """Bits of a constant. kind: what an f64 operand makes of integers, and which format a float takes."""
    text = token.lower()
    if INTEGER.fullmatch(text):
        value = int(text, 0)
        if kind == "f64" and "0x" in text:  # the literal is the upper half
            return (value & 0xFFFFFFFF) << 32
        return value & (1 << 64) - 1
    pack, unpack = {"f16": ("<e", "<H"), "f64": ("<d", "<Q"), "i64": ("<d", "<Q")}.get(kind, ("<f", "<I"))
    return int(struct.unpack(unpack, struct.pack(pack, float(text)))[0])


def operand(token: str, kind: str = "f32") -> Operand:
    """One operand; kind says what float constants and signs mean."""
    text, mods = token.strip(), 0
    negate, absolute = SIGNS.get(kind, (NEG32, ABS32))
    if re.match(r"-([|vs(]|ttmp)", text):
        mods, text = mods | negate, text[1:]
    if found := re.fullmatch(r"neg\((.*)\)", text):
        mods, text = mods | negate, found[1]
    if found := re.fullmatch(r"\|(.*)\|", text) or re.fullmatch(r"abs\((.*)\)", text):
        mods, text = mods | absolute, found[1]
    if found := REGISTER.fullmatch(text):
        if found[4]:
            mods |= HALF | (HI if found[4] == ".h" else 0)
        return Operand({"v": VGPR, "s": 0, "ttmp": TTMP}[found[1]] + int(found[2] or found[3]), mods)
    if text in SPECIAL:
        return Operand(SPECIAL[text], mods)
    return Operand(-1) if text == "off" else Operand(IMMEDIATE, mods, immediate(text, kind))


class Builder:
    """An instruction on its way to its encoding. Encoders may change `operands`."""

    def __init__(self, source: Instruction, dpp: list[Dpp]) -> None:
        self.mnemonic, self.operands, self.modifiers = source.mnemonic, list(source.operands), source.modifiers
        self.dpp = dpp  # table of the program
        absent = (Operand(-1) for _ in range(5))
        self.ins = Ins(0, 0, *absent, -1, -1)

    def field(self, name: str) -> Operand:
        found: Operand = getattr(self.ins, name)
        return found

    def put(self, field: str, token: str, kind: str = "f32") -> None:
        setattr(self.ins, field, operand(token, kind))

    def put_all(self, fields: Iterable[str], kind: str = "f32") -> None:
        """The operands in their order, as many as there are."""
        for field, token in zip(fields, self.operands, strict=False):
            self.put(field, token, kind)

    def numbers(self, modifier: str, default: str = "") -> list[int]:
        """[1, 0] of "op_sel:[1,0]"."""
        text = self.modifiers.get(modifier, default).strip("[]")
        return [int(item, 0) for item in text.split(",")] if text else []

    def bits(self, modifier: str, default: str = "") -> int:
        return sum(bit << k for k, bit in enumerate(self.numbers(modifier, default)))

    def group(self, name: str) -> str:
        """Of operations; "" if the interpreter has none of this name."""
        return operations().get(name, (0, ""))[1]

    def operation(self, name: str) -> Ins:
        if name not in operations():
            raise EmulationError(f"unsupported instruction {self.mnemonic}")
        self.ins.op = operations()[name][0]
        return self.ins
