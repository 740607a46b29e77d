"""Reads SASS, as `nvdisasm -c` prints it: instructions, labels, and which registers an instruction touches."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

STARTS = re.compile(r"\s*/\*[0-9a-f]{4,}\*/")
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"\s*([A-Za-z_.$][\w.$]*):")
REGISTER = re.compile(r"(?<!\w)R(\d+)")  # not RZ, nor a uniform one
WRITE_NOTHING = {"STS", "STL", "STTM", "STG", "STSM", "BAR", "BRA", "SYNCS", "RED", "UTCHMMA"}
PAIRS = {"FFMA2", "FADD2", "FMUL2"}


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    predicate: str | None
    name: str  # with its modifiers: MUFU.EX2
    operands: str

    @property
    def mnemonic(self) -> str:
        return self.name.split(".")[0]

    @property
    def columns(self) -> int:
        """Of tensor memory that an LDTM or STTM moves, a register of every thread each."""
        found = re.search(r"\.x(\d+)$", self.name)
        return int(found[1]) if found else 1

    def registers(self) -> tuple[list[int], list[int]]:
        """(read, written)."""
        first, *others = (_registers(part) for part in self.operands.split(","))
        if self.mnemonic in WRITE_NOTHING:
            read, written = [*first, *(of for part in others for of in part)], []
        else:
            read, written = [of for part in others for of in part], first
        if self.mnemonic in PAIRS or "64" in self.name.split("."):
            return read + [of + 1 for of in read], written + [of + 1 for of in written]
        if self.mnemonic == "STTM":
            read += [of + at for of in (others or [first])[-1] for at in range(self.columns)]
        if self.mnemonic == "LDTM":
            written = [of + at for of in written for at in range(self.columns)]
        return read, written


@dataclass(frozen=True, slots=True)
class Program:
    instructions: list[Instruction]
    labels: dict[str, int]  # index of the instruction that follows


def _registers(operand: str) -> list[int]:
    return [int(found) for found in REGISTER.findall(operand)]


def registers_used(instructions: list[Instruction]) -> int:
    """One more than the highest."""
    highest = -1
    for instruction in instructions:
        read, written = instruction.registers()
        highest = max([highest, *read, *written])
    return highest + 1


def read(text: str) -> Program:
    """A line that begins with an address and is no instruction is refused."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if found := INSTRUCTION.match(line):
            address, predicate, name, operands = found.groups()
            instructions.append(Instruction(int(address, 16), predicate, name, operands))
        elif STARTS.match(line):
            raise ValueError(f"sass: line {number} is no instruction: {line.strip()}")
        elif found := LABEL.match(line):
            labels[found[1]] = len(instructions)
    if not instructions:
        raise ValueError("sass: got no instructions, expected the output of nvdisasm -c")
    return Program(instructions, {name: at for name, at in labels.items() if at < len(instructions)})


def disassemble(cubin: bytes) -> str:
    """By the nvdisasm that Triton brings."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
