"""Memory and LDS instructions."""

import re

from .build import Ins
from .errors import EmulationError
from .operands import Builder
from .permutations import swizzle_offset

# Ins.flags, as machine.h has them; the low byte is the bytes per lane.
SIGNED, D16, D16_HIGH, OFFEN, IDXEN, RETURN = 1 << 8, 1 << 9, 1 << 10, 1 << 15, 1 << 16, 1 << 17
SPACES = ("global", "flat", "buffer", "scratch")
WIDTHS = {
    "b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "u32": 4, "f32": 4, "i32": 4, "b64": 8, "u64": 8,
    "i64": 8, "b96": 12, "b128": 16,
}  # fmt: skip
WIDTH = re.compile(r"(b8|u8|i8|b16|u16|i16|b32|b64|b96|b128)$")
ATOMICS = (
    ("add_u32", "add_u64"), ("sub_u32", "sub_u64"), ("min_i32", "min_i64"), ("min_u32", "min_u64"),
    ("max_i32", "max_i64"), ("max_u32", "max_u64"), ("and_b32", "and_b64"), ("or_b32", "or_b64"),
    ("xor_b32", "xor_b64"), ("swap_b32", "swap_b64"), ("cmpswap_b32", "cmpswap_b64"),
    ("add_f32",), ("min_f32",), ("max_f32",),
)  # fmt: skip
LDS_ATOMICS = {"storexchg": "swap", "cmpstore": "cmpswap"}  # where LDS has another word


def _atomic(b: Builder, what: str) -> None:
    kind = next((k for k, names in enumerate(ATOMICS) if what in names), None)
    if kind is None:
        raise EmulationError(f"unsupported instruction {b.mnemonic}")
    b.ins.aux = kind
    b.ins.flags |= WIDTHS[what[-3:]]


def _access_flags(what: str) -> int:
    """Width, sign and half of "u8", "d16_hi_b16" (global) or "u16_d16_hi" (LDS)."""
    found = WIDTH.search(re.sub(r"_d16(_hi)?$", "", what))
    if not found:
        raise EmulationError(f"unsupported width {what}")
    half = D16_HIGH if "d16_hi" in what else D16 if "d16" in what else 0
    return WIDTHS[found[1]] | half | (SIGNED if found[1][0] == "i" else 0)


def encode_memory(b: Builder) -> Ins:
    found = re.fullmatch(r"(global|flat|buffer|scratch)_(load|store|atomic)_(.*)", b.mnemonic)
    if not found:
        raise EmulationError(f"unsupported instruction {b.mnemonic}")
    space, action, what = found.groups()
    b.ins.flags = SPACES.index(space) << 12
    b.ins.flags |= (OFFEN if "offen" in b.modifiers else 0) | (IDXEN if "idxen" in b.modifiers else 0)
    b.ins.offset = int(b.modifiers.get("offset", "0"), 0)
    if action == "atomic":
        _atomic(b, what)
        if "glc" in b.modifiers:
            b.ins.flags |= RETURN
            # A buffer atomic returns into its data register, the others name one.
            b.put("d2", b.operands[0] if space == "buffer" else b.operands.pop(0))
    else:
        b.ins.flags |= _access_flags(what)
    address_first = action != "load" and space != "buffer"
    data = b.operands.pop(1 if address_first else 0)
    for field, token in zip("dabc", (data, *b.operands), strict=False):
        b.put(field, token)
    return b.operation(f"mem_{action}")


def _encode_exchange(b: Builder) -> Ins:
    b.put_all("dab")
    b.ins.offset = swizzle_offset(b.modifiers.get("offset", "0"))
    return b.operation(b.mnemonic)


def _encode_lds_access(b: Builder, action: str, two: str, stride64: str, what: str) -> Ins:
    b.ins.flags = _access_flags(what)
    if two:
        scale = (b.ins.flags & 255) * (64 if stride64 else 1)
        b.ins.offset = int(b.modifiers.get("offset0", "0"), 0) * scale
        b.ins.aux = int(b.modifiers.get("offset1", "0"), 0) * scale
    b.put_all("da" if action == "load" else "adb")
    return b.operation(f"ds_{action}" + ("2" if two else ""))


def encode_lds(b: Builder) -> Ins:
    if b.mnemonic in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
        return _encode_exchange(b)
    b.ins.offset = int(b.modifiers.get("offset", "0"), 0)
    found = re.fullmatch(r"ds_(load|store)_(2addr_)?(stride64_)?(.*)", b.mnemonic)
    if found:
        return _encode_lds_access(b, *found.groups())
    found = re.fullmatch(r"ds_(.*?)(_rtn)?(_[bufi]\d+)", b.mnemonic)
    if not found:
        raise EmulationError(f"unsupported instruction {b.mnemonic}")
    action, returns, kind = found.groups()
    _atomic(b, LDS_ATOMICS.get(action, action) + kind)
    if returns:
        b.ins.flags |= RETURN
        b.put("d2", b.operands.pop(0))
    b.put_all("adb")
    return b.operation("ds_atomic")
