"""LLVM's AMDGPU assembly, as Triton keeps it (`compiled.asm["amdgcn"]`), taken apart into instructions and labels."""

import re
from dataclasses import dataclass, field
from pathlib import Path

LABEL = re.compile(r'\s*("[^"]*"|[.\w$]+):\s*')
COMMENT = re.compile(r"\s*(;|//).*")
FILE = re.compile(r'\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
SECTION = re.compile(r"\s*(?:\.section\s+|(?=\.text))(\.[\w.]+)")
LOCATION = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
# What belongs together: text without blanks, and brackets, parentheses and quotes with what is in them.
TOKEN = re.compile(r'(?:[^\s\[("]|\[[^\]]*\]|\([^)]*\)|"[^"]*")+')
SUFFIX = re.compile(r"(_e32|_e64)?(_dpp8?)?$")


@dataclass(frozen=True)
class Instruction:
    """One instruction, or one half of a VOPD pair."""

    mnemonic: str  # without the suffix of its encoding, and without `dual_`
    operands: tuple[str, ...]
    modifiers: dict[str, str]  # "offset:16" is {"offset": "16"}, "offen" is {"offen": ""}
    text: str  # of the line
    location: str = ""  # file:line of the source, where the text has .loc
    name: str = ""  # what it is counted as: of a pair both mnemonics joined by "::", "" for the second half
    first_of_pair: bool = False


@dataclass(frozen=True)
class Listing:
    """The instructions of a text and what its labels point at."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def split_operands(text: str) -> list[str]:
    """Split at the commas outside of brackets, parentheses and quotes."""
    found, depth, current, quoted = [], 0, "", False
    for char in text:
        if char == '"':
            quoted = not quoted
        if not quoted:
            depth += (char in "[(") - (char in "])")
        if char == "," and not depth and not quoted:
            found.append(current.strip())
            current = ""
        else:
            current += char
    return [*found, current.strip()] if current.strip() else found


def parse_instruction(text: str) -> Instruction:
    """One instruction (of a VOPD pair: one half)."""
    mnemonic, _, rest = text.strip().partition(" ")
    operands, modifiers = split_operands(rest), {}
    if operands:  # modifiers follow the last operand, separated by blanks
        last, *more = TOKEN.findall(operands[-1])
        operands[-1] = last
        for modifier in more:
            key, _, value = modifier.partition(":")
            modifiers[key] = value
    plain = SUFFIX.sub("", mnemonic)
    return Instruction(plain.replace("v_dual_", "v_"), tuple(operands), modifiers, text.strip(), "", plain)


def parse_line(text: str, location: str = "") -> list[Instruction]:
    """The instruction of a line, or the two of a VOPD pair."""
    halves = [parse_instruction(part) for part in text.split(" :: ")]
    name = "::".join(half.name for half in halves)
    return [
        Instruction(
            half.mnemonic, half.operands, half.modifiers, text, location, "" if k else name, k + 1 < len(halves)
        )
        for k, half in enumerate(halves)
    ]


def parse(text: str) -> Listing:
    """All functions of an assembly text; labels of data are left out."""
    listing, files, location, is_code = Listing(), {}, "", True
    for line in text.splitlines():
        if line.strip() == ".amdgpu_metadata":  # the rest is YAML
            break
        if found := FILE.match(line):
            files[found[1]] = found[2]
        elif found := LOCATION.match(line):
            location = f"{Path(files.get(found[1], found[1])).name}:{found[2]}"
        elif found := SECTION.match(line):
            is_code = found[1].startswith(".text")
        elif is_code:
            code = COMMENT.sub("", line)
            while label := LABEL.match(code):
                listing.labels[label[1].strip('"')] = len(listing.instructions)
                code = code[label.end() :]
            code = code.strip()
            if code and not code.startswith("."):
                listing.instructions.extend(parse_line(code, location))
    return listing
