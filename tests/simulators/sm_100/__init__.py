"""Prices kernels for sm_100 (B200) by their machine code, without the GPU; see ../README.md."""

from .issue import CLOCK_SHARE, VARIED, Estimate
from .loops import Loop, loops
from .pipes import Products, UnknownInstruction, clocks
from .price import Kernel, Price, estimate, hot_loops, kernel, price, share
from .ptx import differences
from .sass import Instruction, Program, disassemble, read
from .streams import Latencies, Schedule

__all__ = [
    "CLOCK_SHARE",
    "VARIED",
    "Estimate",
    "Instruction",
    "Kernel",
    "Latencies",
    "Loop",
    "Price",
    "Products",
    "Program",
    "Schedule",
    "UnknownInstruction",
    "clocks",
    "differences",
    "disassemble",
    "estimate",
    "hot_loops",
    "kernel",
    "loops",
    "price",
    "read",
    "share",
]
