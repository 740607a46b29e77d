"""From parsed instructions to what the interpreter executes. Memory and LDS instructions: encoding_memory.py."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any

from .build import CODE_BASE, Dpp, Ins, operations
from .encoding_memory import encode_lds, encode_memory
from .errors import EmulationError
from .operands import ABS32, HI, IMMEDIATE, NEG32, Builder
from .parser import Instruction, Listing
from .permutations import DPP_KEYS, dpp_table

# Waits, hints and modes, which change no result here.
IGNORED = re.compile(
    r"s_(waitcnt\w*|delay_alu|nop|clause|sendmsg|set_inst_prefetch_distance|setprio|sleep|code_end|inst_prefetch|"
    r"dcache_inv|icache_inv|gl1_inv|round_mode|denorm_mode|ttracedata\w*|setreg\w*)$|v_nop$|buffer_gl[01]_inv$"
)
BRANCHES = ("scc0", "scc1", "vccz", "vccnz", "execz", "execnz")
COMPARISONS = {  # truth table: less 1, equal 2, greater 4, unordered 8
    "f": 0, "lt": 1, "eq": 2, "le": 3, "gt": 4, "lg": 5, "ne": 5, "ge": 6, "o": 7, "u": 8, "nge": 9, "nlg": 10,
    "ngt": 11, "nle": 12, "neq": 13, "nlt": 14, "t": 15, "tru": 15,
}  # fmt: skip
COMPARED = ("f32", "f16", "f64", "i32", "u32", "i16", "u16", "i64", "u64")
SIGNED_16BIT_IMMEDIATE = ("s_movk_i32", "s_cmovk_i32", "s_addk_i32", "s_mulk_i32")
WIDE_SOURCES = {  # bit k: source k has 64 bits
    "v_lshlrev_b64": 2, "v_lshrrev_b64": 2, "v_ashrrev_i64": 2, "v_ldexp_f64": 1, "v_cvt_f64_f32": 0,
    "v_cvt_f64_i32": 0, "v_cvt_f64_u32": 0, "v_mad_u64_u32": 4, "v_mad_i64_i32": 4,
}  # fmt: skip
OUTPUT_SCALES = {"mul:2": 1, "mul:4": 2, "div:2": 3}
CLAMP = 128


@dataclass(frozen=True)
class Program:
    """A text, ready to run."""

    instructions: Any  # array of Ins
    dpp: Any  # array of Dpp
    source: list[Instruction]
    labels: dict[str, int]


# ---- scalar


def _signed16(token: str) -> str:
    value = int(token, 0) & 0xFFFF
    return str(value - 65536 if value & 0x8000 else value)


def _encode_scalar_load(b: Builder) -> Ins:
    to, base, offset = b.operands
    b.put("d", to)
    b.put("a", base)
    if re.match(r"-?(0x)?\d", offset):
        b.ins.offset = int(offset, 0)
    elif offset != "null":
        b.put("b", offset)
    b.ins.offset += int(b.modifiers.get("offset", "0"), 0)
    b.ins.aux = int(b.mnemonic.removeprefix("s_load_b")) // 8
    return b.operation("s_load")


def _encode_branch(b: Builder, labels: Mapping[str, int]) -> Ins:
    if b.operands[0] not in labels:
        raise EmulationError(f"unknown label {b.operands[0]}")
    b.ins.target = labels[b.operands[0]]
    if b.mnemonic == "s_branch":
        return b.operation("s_branch")
    b.ins.aux = BRANCHES.index(b.mnemonic.removeprefix("s_cbranch_"))
    return b.operation("s_cbranch")


def encode_scalar(b: Builder) -> Ins:
    name, operands = b.mnemonic, b.operands
    if name.startswith("s_load_"):
        return _encode_scalar_load(b)
    if name.startswith("s_getreg"):
        b.put("d", operands[0])
        return b.operation("s_getreg")
    if name in SIGNED_16BIT_IMMEDIATE or name.startswith("s_cmpk_"):
        unsigned = name.startswith("s_cmpk_") and name.endswith("u32")
        operands[1] = str(int(operands[1], 0) & 0xFFFF) if unsigned else _signed16(operands[1])
        name = name.replace("cmpk", "cmp")
    group = b.group(name)
    kind = "i64" if name.endswith("64") or group == "sop64" else "f32"
    if name.endswith("_f16") and "cvt" not in name:
        kind = "f16"
    compare = group == "scmp" or name.startswith("s_cmp_") or name == "s_setpc_b64"
    b.put_all("ab" if compare else "dabc", kind)
    if group == "sop64":
        narrow = name in ("s_bfm_b64", "s_sext_i64_i32")
        b.ins.aux = 0 if narrow else 1 if re.search(r"lsh|ashr|bfe", name) else 3
    return b.operation(name)


# ---- vector


def _encode_wmma(b: Builder) -> Ins:
    b.put_all("dabc")
    if b.ins.c.mods & NEG32:
        b.ins.neg_lo |= 4
    return b.operation(b.mnemonic.replace("_16x16x16", ""))


def _encode_compare(b: Builder) -> Ins:
    prefix, comparison, kind = re.fullmatch(r"v_(cmpx?)_(\w+)_(\w+)", b.mnemonic).groups()  # type: ignore[union-attr]
    to_exec = prefix == "cmpx"
    if not to_exec or b.operands[0] in ("exec", "exec_lo"):
        to = b.operands.pop(0)
        if not to_exec:
            b.put("d", to)
    b.ins.flags = int(to_exec)
    if comparison == "class":
        b.put_all("ab")
        return b.operation(f"v_cmp_class_{kind}")
    b.put_all("ab", {"f16": "f16", "f64": "f64", "i64": "i64", "u64": "i64"}.get(kind, "f32"))
    for k, name in enumerate("ab"):
        if kind.endswith("16") and b.ins.opsel >> k & 1:
            b.field(name).mods |= HI
    b.ins.aux = COMPARED.index(kind) << 4 | COMPARISONS[comparison]
    return b.operation("v_cmp")


def _encode_select(b: Builder) -> Ins:
    if len(b.operands) == 3:
        b.operands.append("vcc_lo")
    b.put_all("dabc")
    return b.operation(b.mnemonic)


def _encode_mixed(b: Builder) -> Ins:
    """The sources' signs are written on the operands, but mean what neg_lo and neg_hi mean. A constant is of f16 where
    its source is: LLVM writes x - x as -x * 1.0 + x, all three of f16."""
    b.put_all("dabc")
    for k, (name, token) in enumerate(zip("abc", b.operands[1:], strict=True)):
        if b.ins.opsel_hi >> k & 1 and b.field(name).code == IMMEDIATE:
            b.put(name, token, "f16")
        operand = b.field(name)
        b.ins.neg_lo |= bool(operand.mods & NEG32) << k
        b.ins.neg_hi |= bool(operand.mods & ABS32) << k
        operand.mods &= ~(NEG32 | ABS32)
    return b.operation(b.mnemonic)


def _source_kind(name: str, group: str) -> str:
    """What float constants and signs of sources mean."""
    if group in ("lane64", "lane32from64"):
        return "f32" if name.startswith("v_cvt_f64") else "f64" if name.endswith("f64") else "i64"
    if name in ("v_cvt_f32_f16", "v_cvt_u16_f16", "v_cvt_i16_f16", "v_pack_b32_f16"):
        return "f16"
    half = name.endswith("_f16") and not name.startswith(("v_dot", "v_cvt"))
    return "f16" if half else "f32"


def _takes_output_modifier(name: str, group: str) -> bool:
    if name.startswith(("v_fma_mix_f32", "v_wmma_i32", "v_cvt_f32_")):
        return True
    return group == "lane" and name.endswith("_f32") and not re.search(r"cvt_[iup]|exp_i32|[iu]32_f32", name)


def _apply_op_sel(b: Builder, halves: list[int]) -> None:
    """VOP3: halves of 16-bit sources, the last of the destination."""
    for k, name in enumerate("abc"):
        if k < min(len(halves), len(b.operands) - 1) and halves[k]:
            b.field(name).mods |= HI
    if len(halves) == len(b.operands) and halves[-1]:
        b.ins.d.mods |= HI


def _encode_plain(b: Builder) -> Ins:
    name = b.mnemonic
    if name.startswith("v_cvt_pkrtz"):
        name = "v_cvt_pk_rtz_f16_f32"
    if b.ins.omod == CLAMP and re.fullmatch(r"v_(add|sub|subrev)_nc_[iu](16|32)", name):
        name, b.ins.omod = name + "_clamp", 0  # integers saturate
    group = b.group(name)
    carries = group == "carry" or name in ("v_div_scale_f32", "v_mad_u64_u32", "v_mad_i64_i32")
    b.put_all(("d", "d2", "a", "b", "c") if carries else "dabc", _source_kind(name, group))
    if group == "lane64":
        b.ins.aux = WIDE_SOURCES.get(name, 7)
        if name == "v_ldexp_f64":
            b.put("b", b.operands[2])
    halves = b.numbers("op_sel")
    if halves and group not in ("pk", "dot") and not name.startswith(("v_dot", "v_permlane")):
        _apply_op_sel(b, halves)
    return b.operation(name)


VECTOR: tuple[tuple[str, Callable[[Builder], Ins]], ...] = (
    ("v_wmma_", _encode_wmma),
    ("v_cmp", _encode_compare),
    ("v_cndmask_", _encode_select),
    ("v_fma_mix", _encode_mixed),
    ("v_", _encode_plain),
)


def encode_vector(b: Builder) -> Ins:
    chosen = [f"{key}:{value}" for key, value in b.modifiers.items() if key in DPP_KEYS]
    if chosen:
        b.ins.dpp = len(b.dpp)
        b.dpp.append(dpp_table(chosen))
    scales = (OUTPUT_SCALES.get(f"{key}:{value}", 0) for key, value in b.modifiers.items())
    b.ins.omod = sum(scales) | (CLAMP if "clamp" in b.modifiers else 0)
    high = "" if "mix" in b.mnemonic else "[1,1,1]"
    b.ins.opsel, b.ins.opsel_hi = b.bits("op_sel"), b.bits("op_sel_hi", high)
    b.ins.neg_lo, b.ins.neg_hi = b.bits("neg_lo"), b.bits("neg_hi")
    ins = next(encode for prefix, encode in VECTOR if b.mnemonic.startswith(prefix))(b)
    if ins.omod and not _takes_output_modifier(b.mnemonic, b.group(b.mnemonic)):
        raise EmulationError("output modifier not modelled here")
    return ins


# ---- a program


def _encode(b: Builder, labels: Mapping[str, int]) -> Ins:
    name = b.mnemonic
    if IGNORED.match(name):
        return b.operation("nop")
    if name == "s_barrier" or name.startswith("s_endpgm"):
        return b.operation(name[:8] if name.startswith("s_endpgm") else name)
    if name == "s_branch" or name.startswith("s_cbranch_"):
        return _encode_branch(b, labels)
    if name.startswith("s_"):
        return encode_scalar(b)
    if name.startswith("ds_"):
        return encode_lds(b)
    if name.startswith("v_"):
        return encode_vector(b)
    return encode_memory(b)


def _resolve(listing: Listing, at: int, symbols: Mapping[str, int]) -> Instruction:
    """A `symbol@rel32@lo+4` operand as a number: the distance from the s_getpc before it to a function or to data."""
    instruction = listing.instructions[at]
    if "@rel32@" not in instruction.text:
        return instruction
    operands = []
    for operand in instruction.operands:
        found = re.fullmatch(r'"?(.*?)"?@rel32@(lo\+4|hi\+12)', operand)
        if found:
            before = range(at, -1, -1)
            getpc = next((k for k in before if listing.instructions[k].mnemonic == "s_getpc_b64"), at)
            code = listing.labels.get(found[1])
            if code is None and found[1] not in symbols:
                raise EmulationError(f"unknown symbol {found[1]}")
            address = CODE_BASE + 4 * code if code is not None else symbols[found[1]]
            distance = address - (CODE_BASE + 4 * (getpc + 1)) & (1 << 64) - 1
            operand = str(distance >> 32 if found[2].startswith("hi") else distance & 0xFFFFFFFF)
        operands.append(operand)
    return replaced(instruction, operands=tuple(operands))


def encode(listing: Listing, symbols: Mapping[str, int] | None = None) -> Program:
    """symbols: addresses of data that the text refers to."""
    operations()  # builds the interpreter, or says that it cannot
    encoded: list[Ins] = []
    dpp: list[Dpp] = []
    for at, instruction in enumerate(listing.instructions):
        try:
            ins = _encode(Builder(_resolve(listing, at, symbols or {}), dpp), listing.labels)
        except (EmulationError, KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
            where = f"{instruction.text!r} ({instruction.location})"
            raise EmulationError(f"cannot encode {where}: {error}") from error
        ins.dual = int(instruction.first_of_pair)
        encoded.append(ins)
    if not encoded:
        raise EmulationError("no instructions in the text")
    arrays = (Ins * len(encoded))(*encoded), (Dpp * max(1, len(dpp)))(*dpp)
    return Program(*arrays, listing.instructions, listing.labels)
