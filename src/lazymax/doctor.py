"""`lazymax doctor`: what is installed, which GPU is there, what will run on it and why."""

import importlib
import importlib.util
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import __version__
from . import arch as arches
from .compat import tritons
from .dispatch import plan
from .explanation import Explanation
from .problem import Problem

TYPICAL = (1, 32, 8, 4096, 4096, 128)


@dataclass(frozen=True, slots=True)
class Device:
    """One device and what a typical problem takes on it."""

    name: str
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`problems` fail the command, `warnings` do not."""

    versions: dict[str, str]
    devices: list[Device]
    cache: dict[str, Any]
    problems: list[str]
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        devices = [
            {"name": d.name, "arch": asdict(d.explanation.arch), "plan": asdict(d.explanation.plan)}
            for d in self.devices
        ]
        return asdict(self) | {"devices": devices, "ok": not self.problems}

    def __str__(self) -> str:
        lines = [f"{name:<9} {value}" for name, value in self.versions.items()]
        lines.append(
            f"cache     {self.cache['path']}: {self.cache['files']} files, {self.cache['bytes'] / 2**20:.1f} MiB"
        )
        for device in self.devices:
            lines += ["", f"device    {device.name}", *str(device.explanation).splitlines()]
        lines += [
            "",
            *(f"warning   {text}" for text in self.warnings),
            *(f"problem   {text}" for text in self.problems),
        ]
        return "\n".join(lines + ["healthy"] if not self.problems else lines)


def diagnose() -> Diagnosis:
    """Look at this process's devices, versions, environment and caches."""
    problems, warnings = _triton_problems(), []
    devices = [_device(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    for device in devices:
        chosen = device.explanation.plan
        if chosen.route == "reference":
            problems.append(f"{device.name}: no kernel takes a typical problem: {chosen.reason}")
    if not devices or tritons.interpreting():
        devices.append(_device(torch.device("cpu")))
    override = os.environ.get("HSA_OVERRIDE_GFX_VERSION")
    if override:
        warnings.append(
            f"HSA_OVERRIDE_GFX_VERSION={override}: the driver claims another GPU than the one that is there, and "
            "kernels are compiled and chosen for the claimed one; unset it if this torch supports your GPU"
        )
    if tritons.interpreting():
        warnings.append("TRITON_INTERPRET is set: kernels run in Triton's interpreter, thousands of times slower")
    return Diagnosis(_versions(), devices, _cache(), problems, warnings)


def _device(device: torch.device) -> Device:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    problem, arch = Problem.from_shape(TYPICAL, "bf16", causal="top_left"), arches.of(device)
    return Device(f"{device}, {name}", Explanation(problem, arch, plan(problem, arch)))


def _versions() -> dict[str, str]:
    build = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    spec = importlib.util.find_spec("triton")
    return {
        "lazymax": f"{__version__}, {Path(__file__).parent}",
        "torch": f"{torch.__version__}, {build if torch.version.hip or torch.version.cuda else 'CPU build'}",
        "triton": f"{tritons.triton_version() or 'not installed'}{f', {spec.origin}' if spec else ''}",
        "interpret": f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET', '')}" if tritons.interpreting() else "off",
    }


def _triton_problems() -> list[str]:
    """An installed Triton that is too old or does not import. A missing one is no problem on a machine without a GPU;
    on one with a GPU the plan says so."""
    version = tritons.triton_version()
    if version is None:
        return []
    found = [fault] if (fault := tritons.unsupported_triton(version)) else []
    try:
        importlib.import_module("triton")
    except ImportError as error:
        found.append(f"triton {version} is installed but does not import: {error}")
    return found


def _cache() -> dict[str, Any]:
    """Triton's cache of compiled kernels (its variables, read the way it reads them, so that it need not import)."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    path = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    return {"path": str(path), "files": len(files), "bytes": sum(file.stat().st_size for file in files)}
