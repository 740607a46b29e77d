"""An emulator of AMD's gfx1151 (RDNA3.5) that executes what Triton compiled, and counts what it executes."""

from .arguments import aligned
from .emulator import POISON, Executed, Result, issue_class, launch
from .errors import EmulationError, EmulatorUnavailable
from .price import Price, Resources, main_loop, static_resources
from .registers import Registers, run_text

__all__ = [
    "POISON",
    "EmulationError",
    "EmulatorUnavailable",
    "Executed",
    "Price",
    "Registers",
    "Resources",
    "Result",
    "aligned",
    "issue_class",
    "launch",
    "main_loop",
    "run_text",
    "static_resources",
]
