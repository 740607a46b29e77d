"""GPUs: what dispatch may know about one, from a device or by name. The only module besides `backends/` that names any.

Ask for capabilities (`matrix_unit`, `descriptors`, `shared_memory`), never for version numbers: sm_120 is newer than
sm_100 and has less shared memory, no tcgen05 and no tensor memory.
"""

import functools
from dataclasses import dataclass, replace

import torch

from .compat import tritons

KIB = 1024


@dataclass(frozen=True, slots=True)
class Arch:
    """One GPU (or the CPU). Sizes in bytes; `multiprocessors` are SMs or CUs of the card, or of the usual one."""

    id: str
    vendor: str  # "nvidia", "amd", "cpu"
    matrix_unit: str  # "mma", "wgmma", "tcgen05", "wmma", "mfma", "none"
    multiprocessors: int
    shared_memory: int  # that one program may use
    warp_size: int = 32
    descriptors: bool = False  # tensor descriptors are hardware (TMA)
    triton: str | None = None  # version of the Triton that would compile for it

    @property
    def interpreted(self) -> bool:
        """The kernels run on the CPU in Triton's interpreter."""
        return self.vendor == "cpu" and self.matrix_unit == "interpreter"

    @property
    def target(self) -> tuple[str, int | str, int]:
        """Arguments of `triton.backends.compiler.GPUTarget`."""
        if self.vendor == "nvidia":
            return "cuda", int(self.id.removeprefix("sm_")), self.warp_size
        if self.vendor == "amd":
            return "hip", self.id, self.warp_size
        raise ValueError(f"arch: {self.id} is no GPU that Triton compiles for; known: {', '.join(names())}")

    def __str__(self) -> str:
        if self.vendor == "cpu":
            return self.id
        return (
            f"{self.id} ({self.matrix_unit}, {self.multiprocessors} "
            f"{'SMs' if self.vendor == 'nvidia' else 'CUs'}, "
            f"{self.shared_memory // KIB} KiB shared memory)"
        )


def _nvidia(id: str, matrix_unit: str, sms: int, shared: int, descriptors: bool = False) -> Arch:
    return Arch(id, "nvidia", matrix_unit, sms, shared, 32, descriptors)


def _amd(id: str, matrix_unit: str, cus: int, lds_kib: int, warp_size: int = 32) -> Arch:
    return Arch(id, "amd", matrix_unit, cus, lds_kib * KIB, warp_size)


# Shared memory: CUDA programming guide, "technical specifications per compute capability" (per-block opt-in limit), and
# AMD's ISA manuals (LDS per workgroup). Multiprocessors: of the largest card sold under the id.
_KNOWN = {
    arch.id: arch
    for arch in (
        _nvidia("sm_75", "none", 72, 64 * KIB),  # Triton has no use for its matrix unit
        _nvidia("sm_80", "mma", 108, 163 * KIB),
        _nvidia("sm_86", "mma", 84, 99 * KIB),
        _nvidia("sm_87", "mma", 16, 163 * KIB),
        _nvidia("sm_89", "mma", 142, 99 * KIB),
        _nvidia("sm_90", "wgmma", 132, 227 * KIB, descriptors=True),
        _nvidia("sm_100", "tcgen05", 148, 227 * KIB, descriptors=True),
        _nvidia("sm_103", "tcgen05", 148, 227 * KIB, descriptors=True),
        _nvidia("sm_120", "mma", 188, 99 * KIB, descriptors=True),
        _nvidia("sm_121", "mma", 48, 99 * KIB, descriptors=True),
        _amd("gfx90a", "mfma", 104, 64, warp_size=64),
        _amd("gfx942", "mfma", 304, 64, warp_size=64),
        _amd("gfx950", "mfma", 256, 160, warp_size=64),
        _amd("gfx1100", "wmma", 96, 64),
        _amd("gfx1101", "wmma", 60, 64),
        _amd("gfx1102", "wmma", 32, 64),
        _amd("gfx1103", "wmma", 12, 64),
        _amd("gfx1150", "wmma", 16, 64),
        _amd("gfx1151", "wmma", 40, 64),
        _amd("gfx1200", "wmma", 32, 64),
        _amd("gfx1201", "wmma", 64, 64),
    )
}


def names() -> list[str]:
    """Arch ids that `by_name` knows, as the toolchains spell them."""
    return list(_KNOWN)


def by_name(name: str) -> Arch:
    """The usual card of an arch id, with the Triton that is installed here. Raises ValueError for an unknown name."""
    if name == "cpu":
        return of(torch.device("cpu"))
    if name not in _KNOWN:
        raise ValueError(f"arch: got {name!r}, expected one of cpu, {', '.join(names())}")
    return replace(_KNOWN[name], triton=tritons.triton_version())


def of(device: torch.device) -> Arch:
    """The arch of a torch device; queries the driver once per device, at the first call."""
    if device.type == "cuda":
        return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)
    return _of_host(device.type, tritons.interpreting() and device.type == "cpu")


@functools.cache
def _of_host(type: str, interpreting: bool) -> Arch:
    unit = "interpreter" if interpreting else "none"
    return Arch(type, "cpu", unit, 1, 227 * KIB, 32, interpreting, tritons.triton_version())


@functools.cache
def _of_cuda(index: int) -> Arch:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        # "gfx942:sramecc+:xnack-" -> "gfx942". Under HSA_OVERRIDE_GFX_VERSION this is the overriding name, which is
        # also what the kernels must be compiled for; `lazymax doctor` warns about it.
        id = properties.gcnArchName.split(":")[0]
        families = {"gfx11": "wmma", "gfx12": "wmma", "gfx94": "mfma", "gfx95": "mfma"}
        unknown = Arch(id, "amd", families.get(id[:5], "none"), 1, 64 * KIB, properties.warp_size)
    else:
        id = f"sm_{properties.major}{properties.minor}"
        unit = "mma" if properties.major >= 8 else "none"
        unknown = Arch(id, "nvidia", unit, 1, 48 * KIB)
    known = _KNOWN.get(id, unknown)
    return replace(
        known,
        multiprocessors=properties.multi_processor_count,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 0) or known.shared_memory,
        triton=tritons.triton_version(),
    )
