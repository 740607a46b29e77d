"""Arch: every known id by name, and what a device says about itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from lazymax import arch as arches
from lazymax.arch import KIB


@pytest.mark.parametrize("name", arches.names())
def test_known_arch_is_complete(name: str) -> None:
    arch = arches.by_name(name)
    assert arch.id == name
    assert arch.vendor == ("nvidia" if name.startswith("sm_") else "amd")
    units = {"nvidia": ("none", "mma", "wgmma", "tcgen05"), "amd": ("wmma", "mfma")}
    assert arch.matrix_unit in units[arch.vendor]
    assert arch.multiprocessors > 0
    assert 48 * KIB <= arch.shared_memory <= 256 * KIB
    assert arch.warp_size == (64 if arch.matrix_unit == "mfma" else 32)
    assert not arch.interpreted
    backend, target, warp_size = arch.target
    assert (backend, warp_size) == ("cuda" if arch.vendor == "nvidia" else "hip", arch.warp_size)
    assert f"sm_{target}" == name if arch.vendor == "nvidia" else target == name
    assert name in str(arch) and f"{arch.shared_memory // KIB} KiB" in str(arch)


@dataclass(frozen=True)
class Fact:
    """Numbers that a copy from a neighbour would get wrong."""

    id: str
    matrix_unit: str
    shared_kib: int
    descriptors: bool


FACTS = (
    Fact("sm_80", "mma", 163, False),
    Fact("sm_86", "mma", 99, False),
    Fact("sm_89", "mma", 99, False),
    Fact("sm_90", "wgmma", 227, True),
    Fact("sm_100", "tcgen05", 227, True),
    Fact("sm_103", "tcgen05", 227, True),
    Fact("sm_120", "mma", 99, True),  # newer than sm_100, without tensor memory
    Fact("gfx942", "mfma", 64, False),
    Fact("gfx950", "mfma", 160, False),
    Fact("gfx1100", "wmma", 64, False),
    Fact("gfx1151", "wmma", 64, False),
    Fact("gfx1201", "wmma", 64, False),
)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.id)
def test_facts(fact: Fact) -> None:
    arch = arches.by_name(fact.id)
    assert (arch.matrix_unit, arch.shared_memory // KIB, arch.descriptors) == (
        fact.matrix_unit, fact.shared_kib, fact.descriptors,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gfx9999", "sm_10", "sm100", "GFX1151", "", "gfx942:sramecc+:xnack-"])
def test_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        arches.by_name(name)
    assert f"arch: got {name!r}, expected one of cpu, " in str(caught.value)
    assert "gfx1151" in str(caught.value) and "sm_100" in str(caught.value)


def test_cpu_is_the_interpreter_exactly_when_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    arch = arches.by_name("cpu")
    assert arch.interpreted and arch == arches.of(torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET")
    arch = arches.by_name("cpu")
    assert not arch.interpreted and arch.matrix_unit == "none"
    with pytest.raises(ValueError, match="arch: cpu is no GPU that Triton compiles for; known: sm_75"):
        arch.target  # noqa: B018


@pytest.mark.parametrize("device", ["meta", "xpu"])
def test_other_devices_have_no_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    arch = arches.of(torch.device(device))
    assert arch.id == device and not arch.interpreted and arch.matrix_unit == "none"


@dataclass(frozen=True)
class Device:
    """What torch.cuda.get_device_properties says, and the arch to make of it."""

    id: str
    hip: bool
    properties: dict[str, object]
    want: tuple[str, str, str, int, int, int]  # id, vendor, matrix unit, multiprocessors, shared memory, warp size


def nvidia(major: int, minor: int, sms: int, **more: int) -> dict[str, object]:
    return dict(major=major, minor=minor, multi_processor_count=sms, warp_size=32, **more)


def amd(name: str, cus: int, warp_size: int = 32) -> dict[str, object]:
    """ROCm builds of torch have no shared_memory_per_block_optin."""
    return dict(gcnArchName=name, major=11, minor=5, multi_processor_count=cus, warp_size=warp_size)


DEVICES = (
    Device("H200", False, nvidia(9, 0, 132, shared_memory_per_block_optin=232448),
           ("sm_90", "nvidia", "wgmma", 132, 232448, 32)),
    Device("B300", False, nvidia(10, 3, 160, shared_memory_per_block_optin=232448),
           ("sm_103", "nvidia", "tcgen05", 160, 232448, 32)),
    Device("RTX 5090", False, nvidia(12, 0, 170, shared_memory_per_block_optin=101376),
           ("sm_120", "nvidia", "mma", 170, 101376, 32)),
    Device("a torch that does not know the opt-in limit", False, nvidia(8, 6, 28),
           ("sm_86", "nvidia", "mma", 28, 99 * KIB, 32)),
    Device("NVIDIA before Ampere", False, nvidia(7, 0, 10), ("sm_70", "nvidia", "none", 10, 48 * KIB, 32)),
    Device("NVIDIA from the future", False, nvidia(13, 7, 10), ("sm_137", "nvidia", "mma", 10, 48 * KIB, 32)),
    Device("MI300X with features in its name", True, amd("gfx942:sramecc+:xnack-", 304, 64),
           ("gfx942", "amd", "mfma", 304, 64 * KIB, 64)),
    Device("Strix Halo", True, amd("gfx1151", 20), ("gfx1151", "amd", "wmma", 20, 64 * KIB, 32)),
    Device("gfx1100 by HSA_OVERRIDE_GFX_VERSION", True, amd("gfx1100", 20),
           ("gfx1100", "amd", "wmma", 20, 64 * KIB, 32)),
    Device("AMD from the future", True, amd("gfx1399:xnack-", 8), ("gfx1399", "amd", "none", 8, 64 * KIB, 32)),
    Device("old AMD, wave64", True, amd("gfx906:sramecc+", 60, 64), ("gfx906", "amd", "none", 60, 64 * KIB, 64)),
)  # fmt: skip


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what devices said, before and after."""
    arches._of_cuda.cache_clear()
    yield
    arches._of_cuda.cache_clear()


@pytest.mark.parametrize("case", DEVICES, ids=lambda case: case.id)
def test_arch_of_a_device(case: Device, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(**case.properties)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", "7.0" if case.hip else None)
    arch = arches.of(torch.device("cuda", 3))
    assert (
        arch.id, arch.vendor, arch.matrix_unit, arch.multiprocessors, arch.shared_memory, arch.warp_size,
    ) == case.want  # fmt: skip
    assert arches.of(torch.device("cuda", 3)) is arch and asked == [3]  # asked once per device
    assert arches.of(torch.device("cuda")).id == arch.id and asked == [3, 1]  # no index: the current one
    assert arch.target[0] == ("hip" if case.hip else "cuda")
