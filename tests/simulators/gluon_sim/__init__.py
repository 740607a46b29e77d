"""A simulator of Triton Gluon kernels for NVIDIA GPUs, on the CPU: numbers and synchronisation, any schedule."""

from .api import Options, Report, Session, activate, simulate
from .errors import (
    BarrierError,
    Deadlock,
    GlobalRace,
    InFlightAtExit,
    KernelAssert,
    Livelock,
    MissingFence,
    OutOfBounds,
    RaceError,
    ResourceError,
    SimError,
    UninitialisedRead,
    Unsupported,
)
from .frontend import TARGETS
from .mutate import Mutant, Outcome, mutants, run_mutants, summary
from .worker import Worker

__all__ = [
    "TARGETS",
    "BarrierError",
    "Deadlock",
    "GlobalRace",
    "InFlightAtExit",
    "KernelAssert",
    "Livelock",
    "MissingFence",
    "Mutant",
    "Options",
    "OutOfBounds",
    "Outcome",
    "RaceError",
    "Report",
    "ResourceError",
    "Session",
    "SimError",
    "UninitialisedRead",
    "Unsupported",
    "Worker",
    "activate",
    "mutants",
    "run_mutants",
    "simulate",
    "summary",
]
