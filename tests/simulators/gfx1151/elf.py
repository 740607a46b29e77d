"""What a hsaco says about its kernel: the metadata note (msgpack), the kernel descriptor, symbols."""

import struct
from dataclasses import dataclass
from typing import Any

from .errors import EmulationError

PT_LOAD, PT_NOTE = 1, 4
SHT_SYMTAB, SHT_RELA, SHT_REL, SHT_DYNSYM = 2, 4, 9, 11
AMDGPU_METADATA = 32  # type of the note


@dataclass(frozen=True)
class CodeObject:
    """One kernel of a loaded code object."""

    metadata: dict[str, Any]  # its entry in the note
    lds: int  # bytes that the descriptor asks for
    scratch: int  # bytes per lane
    rsrc2: int
    properties: int
    image: bytes  # loaded segments, from address 0
    symbols: dict[str, int]  # address in the image

    @property
    def user_sgprs(self) -> int:
        return self.rsrc2 >> 1 & 31

    @property
    def workgroup_ids(self) -> int:
        """Bit k: the workgroup's index k comes in an SGPR."""
        return self.rsrc2 >> 7 & 7


class _Msgpack:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "big", signed=signed)

    def pairs(self, count: int) -> dict[Any, Any]:
        return {self.read(): self.read() for _ in range(count)}

    def read(self) -> Any:
        t = self.number(1)
        if t < 0x80 or t >= 0xE0:
            return t if t < 0x80 else t - 256
        if t < 0x90:
            return self.pairs(t & 15)
        if t < 0xA0:
            return [self.read() for _ in range(t & 15)]
        if t < 0xC0:
            return self.take(t & 31).decode()
        if t in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[t]
        if 0xCC <= t <= 0xD3:
            return self.number(1 << (t & 3), signed=t >= 0xD0)
        if 0xD9 <= t <= 0xDB:
            return self.take(self.number(1 << (t - 0xD9))).decode()
        if t in (0xDC, 0xDD):
            return [self.read() for _ in range(self.number(2 << (t - 0xDC)))]
        if t in (0xDE, 0xDF):
            return self.pairs(self.number(2 << (t - 0xDE)))
        raise EmulationError(f"msgpack type {t:#x} in the metadata")


def unpack(data: bytes) -> Any:
    """A msgpack value."""
    return _Msgpack(data).read()


def _c_string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _metadata(segment: bytes) -> Any:
    """The amdhsa metadata among the notes of a segment, or None."""
    at = 0
    while at < len(segment):
        name_size, size, kind = struct.unpack_from("<III", segment, at)
        start = at + 12 + (name_size + 3 & ~3)
        if segment[at + 12 :].startswith(b"AMDGPU") and kind == AMDGPU_METADATA:
            return unpack(segment[start : start + size])
        at = start + (size + 3 & ~3)
    return None


def _symbols(data: bytes, sections: list[Any]) -> dict[str, int]:
    found = {}
    for section in sections:
        if section[1] not in (SHT_SYMTAB, SHT_DYNSYM):
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            found[_c_string(data, names + name)] = value
    return found


def load(hsaco: bytes, kernel: str) -> CodeObject:
    """Read the code object as a loader would."""
    program_headers, section_headers = struct.unpack_from("<QQ", hsaco, 0x20)
    segment_size, segment_count, section_size, section_count = struct.unpack_from("<HHHH", hsaco, 0x36)
    headers = [struct.unpack_from("<IIQQQQQQ", hsaco, program_headers + i * segment_size) for i in range(segment_count)]
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", hsaco, section_headers + i * section_size) for i in range(section_count)
    ]
    if any(section[5] for section in sections if section[1] in (SHT_RELA, SHT_REL)):
        raise EmulationError(f"{kernel}: code objects with relocations are not modelled")
    loaded = [(offset, address, size) for kind, _, offset, address, _, size, _, _ in headers if kind == PT_LOAD]
    image = bytearray(max(header[3] + header[6] for header in headers if header[0] == PT_LOAD))
    for offset, address, size in loaded:
        image[address : address + size] = hsaco[offset : offset + size]
    notes = (_metadata(hsaco[header[2] : header[2] + header[5]]) for header in headers if header[0] == PT_NOTE)
    metadata = next(note for note in notes if note)
    entry = next(entry for entry in metadata["amdhsa.kernels"] if entry[".name"] == kernel)
    symbols = _symbols(hsaco, sections)
    descriptor = symbols[entry[".symbol"]]
    lds, scratch = struct.unpack_from("<II", image, descriptor)
    rsrc2, properties = struct.unpack_from("<IH", image, descriptor + 52)
    if not properties >> 10 & 1:
        raise EmulationError(f"{kernel}: only wave32 is modelled")
    return CodeObject(entry, lds, scratch, rsrc2, properties, bytes(image), symbols)
