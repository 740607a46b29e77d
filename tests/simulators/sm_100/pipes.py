"""Which pipe of a multiprocessor's quarter an instruction takes, and for how many clocks.

Exact are the counts: which instructions a build has, and that a warp issues each once. The clocks that an instruction
takes are published rates, or assumed where the comment says so; nobody here has measured one. Latencies and the two
numbers that were fitted are used by issue.py alone.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .sass import Instruction

# Published: NVIDIA, B200 datasheet, 2.25 PFLOP/s dense in 16 bits; FlashAttention-4's paper, 8192 FLOP a clock and
# multiprocessor, 16 exponentials, 128 bytes of shared memory. CUDA programming guide, arithmetic throughput.
TENSOR_FLOP, SHARED_BYTES = 8192.0, 128.0  # a clock, of a multiprocessor
MULTIPROCESSORS, GHZ, PEAK_TFLOPS = 148, 1.85, 2250.0
MUFU_CLOCKS = 8.0  # a warp's instruction on one quarter: 16 results a clock and multiprocessor
FMA_CLOCKS, ALU_CLOCKS = 1.0, 2.0  # 128 and 64 results a clock and multiprocessor
# Assumed: a packed instruction is twice the work of a plain one, integer products go at half of the rate, and tensor
# memory moves 32 lanes of 4 bytes a clock each way.
PACKED_CLOCKS, IMAD_CLOCKS = 2.0, 2.0
TMEM_BYTES = 128.0
SHARED_CLOCKS, SPILL_CLOCKS = 1.0, 4.0  # of a plain access

TMEM_SHAPE = re.compile(r"(LDTM|STTM)(\.16dp32bit_t0_t15|\.16dp32bit_t16_t31)?(\.x\d+)?")  # others move other amounts
PIPES = ("mufu", "fma", "alu", "tmem_load", "tmem_store", "shared", "spill")

_ALU = """FMNMX FMNMX3 FSETP FSEL FSET SEL ISETP IADD3 IADD VIADD VIMNMX VIMNMX3 VIADDMNMX LOP3 PLOP3 SHF SHL LEA F2FP
PRMT MOV R2P P2R VOTE IMNMX IABS BMSK SGXT CS2R FCHK I2FP F2I I2F POPC FLO HADD2 HMUL2 HFMA2 HMNMX2"""
# They take an issue slot and no pipe that is counted: the uniform datapath, control, barriers, what starts
# asynchronous work, and rare ones across lanes and to global memory.
_FREE = """UIADD3 UMOV USHF UISETP ULOP3 ULEA USEL UIMAD USGXT UPLOP3 UFLO UPOPC VOTEU R2UR S2UR S2R ELECT LDC LDCU
BRA BRX BSSY BSYNC BREAK CALL RET EXIT NOP BPT WARPSYNC NANOSLEEP DEPBAR YIELD CREDUX REDUX SHFL
BAR SYNCS FENCE MEMBAR ERRBAR CCTL USETMAXREG UVIRTCOUNT ACQBULK PREEXIT UGETNEXTWORKID
UTCHMMA UTCBAR UTCATOMSWS UTMALDG UTMASTG UTMACMDFLUSH UTMAPF UBLKCP
LDG STG ATOMS ATOMG RED LDGSTS LDGDEPBAR"""
_CLOCKS: dict[str, tuple[str | None, float]] = {
    "MUFU": ("mufu", MUFU_CLOCKS),
    **dict.fromkeys(("FFMA", "FMUL", "FADD", "FSWZADD"), ("fma", FMA_CLOCKS)),
    **dict.fromkeys(("FFMA2", "FMUL2", "FADD2"), ("fma", PACKED_CLOCKS)),
    **dict.fromkeys(("LDS", "STS", "LDSM", "STSM"), ("shared", SHARED_CLOCKS)),
    **dict.fromkeys(("LDL", "STL"), ("spill", SPILL_CLOCKS)),
    **dict.fromkeys(_ALU.split(), ("alu", ALU_CLOCKS)),
    **dict.fromkeys(_FREE.split(), (None, 0.0)),
}


class UnknownInstruction(ValueError):
    """It has no price: say in this file which pipe takes it."""


def price(instruction: Instruction) -> tuple[str | None, float]:
    """(pipe, clocks of it); None: none that is counted."""
    mnemonic = instruction.mnemonic
    if shape := TMEM_SHAPE.fullmatch(instruction.name):
        lanes = 16 if shape[2] else 32
        pipe = "tmem_load" if mnemonic == "LDTM" else "tmem_store"
        return pipe, instruction.columns * lanes * 4 / TMEM_BYTES
    if mnemonic == "IMAD":
        return "fma", FMA_CLOCKS if "MOV" in instruction.name else IMAD_CLOCKS
    if mnemonic not in _CLOCKS:
        raise UnknownInstruction(f"sm_100: no price for {instruction.name} at {instruction.address:#x}")
    return _CLOCKS[mnemonic]


def clocks(instructions: Iterable[Instruction]) -> dict[str, float]:
    """Of every pipe, and of `issue`: one for each instruction."""
    found = dict.fromkeys(("issue", *PIPES), 0.0)
    for instruction in instructions:
        pipe, cycles = price(instruction)
        found["issue"] += 1
        if pipe:
            found[pipe] += cycles
    return found


@dataclass(frozen=True, slots=True)
class Products:
    """Tensor cores and shared memory for one block of keys, by the shapes alone; P lies in tensor memory."""

    head_dim: int
    rows: int  # queries of a CTA
    keys: int
    ctas: int = 1  # that share the keys of a block: each loads and reads its part

    @property
    def count(self) -> int:
        """Instructions of 128 rows and 16 deep."""
        return self.rows // 128 * (self.head_dim // 16 + self.keys // 16)

    @property
    def flop(self) -> float:
        return 4.0 * self.rows * self.keys * self.head_dim

    @property
    def tensor(self) -> float:
        return self.flop / TENSOR_FLOP

    @property
    def operands(self) -> float:
        """Clocks in which tensor cores read shared memory: Q once, K and V for each 128 rows."""
        q, k = self.rows * self.head_dim, self.rows // 128 * self.keys * self.head_dim // self.ctas
        return 2.0 * (q + 2 * k) / SHARED_BYTES

    @property
    def arriving(self) -> float:
        """Clocks in which K and V are written there."""
        return 2.0 * 2 * self.keys * self.head_dim / self.ctas / SHARED_BYTES

    def tflops(self, cycles: float) -> float:
        """Of the whole card, if a block takes so many clocks."""
        return self.flop / cycles * MULTIPROCESSORS * GHZ * 1e-3
