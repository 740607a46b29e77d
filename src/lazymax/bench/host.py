"""Where and with what a benchmark ran: every result file says it in each row."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from .. import arch as arches
from ..compat import tritons
from .clock import Clock, calls_for

MATMUL_GPU, MATMUL_CPU = 8192, 256  # sizes of the square product that gives the ceiling


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """One run of the benchmark. Ceilings: by dtype, TFLOP/s; of a device copy, GB/s read and written."""

    device: str
    arch: str
    date: str
    commit: str
    command: str
    torch: str
    triton: str
    cudnn: str
    smi: str  # driver, SM clock, its maximum, power, its limit, as nvidia-smi gives them under a matmul's load
    rounds: int
    window_ms: float
    matmul_tflops: dict[str, float]
    copy_gbs: float


def about(
    clock: Clock,
    dtypes: Sequence[torch.dtype],
    arguments: Sequence[str],
    rounds: int,
    window_ms: float,
    commit: str | None,
) -> About:
    """Measure the ceilings of the device and note everything a reader needs to repeat the run."""
    matmul = {}
    smi = ""
    for dtype in dtypes:
        matmul[str(dtype).removeprefix("torch.")], smi = _matmul(clock, dtype, window_ms)
    return About(
        **origin(clock.device, commit),
        command=shlex.join(["lazymax", "bench", *arguments]),
        smi=smi,
        rounds=rounds,
        window_ms=window_ms,
        matmul_tflops=matmul,
        copy_gbs=_copy(clock, window_ms),
    )


def origin(device: torch.device, commit: str | None) -> dict[str, str]:
    """Where, when and with which versions, by the names of `About`."""
    on_gpu = device.type == "cuda"
    return dict(
        arch=arches.of(device).id,
        device=torch.cuda.get_device_name(device) if on_gpu else "CPU",
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=commit or git_commit(),
        torch=torch.__version__,
        triton=tritons.triton_version() or "",
        cudnn=str(torch.backends.cudnn.version() or "") if on_gpu else "",  # type: ignore[no-untyped-call]
    )


def _matmul(clock: Clock, dtype: torch.dtype, window_ms: float) -> tuple[float, str]:
    """(TFLOP/s, nvidia-smi's line under that load) of a large square product of random numbers."""
    size = MATMUL_GPU if clock.device.type == "cuda" else MATMUL_CPU
    a, b = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))

    def run() -> torch.Tensor:
        return a @ b

    calls = calls_for(run, clock, window_ms)
    clock.milliseconds(run, calls)  # warm-up window
    ms = min(clock.milliseconds(run, calls) for _ in range(3))
    for _ in range(min(800, 1 + int(800 / ms))):  # queued, so that the card works while it is asked
        run()
    smi = _smi(clock.device)
    clock.synchronize()
    return 2.0 * size**3 / ms / 1e9, smi


def _copy(clock: Clock, window_ms: float) -> float:
    count = (1 << 30 if clock.device.type == "cuda" else 1 << 20) // 4
    source = torch.zeros(count, device=clock.device)
    target = torch.empty_like(source)

    def run() -> torch.Tensor:
        return target.copy_(source)

    return 8.0 * count / clock.milliseconds(run, calls_for(run, clock, window_ms)) / 1e6


def _smi(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip or shutil.which("nvidia-smi") is None:
        return ""
    fields = "driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    # by UUID: torch's index is another one than nvidia-smi's under CUDA_VISIBLE_DEVICES
    identity = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", identity]
    result = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    return result.stdout.strip() if result.returncode == 0 else f"nvidia-smi: {result.stdout.strip()[:100]}"


def git_commit() -> str:
    """Short hash of the checkout that holds this package, with + if it has changes; empty outside of one."""
    folder = Path(__file__).parent
    if shutil.which("git") is None:
        return ""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30)

    # --error-unmatch: a package installed inside some other project's checkout is not that project's
    if git("ls-files", "--error-unmatch", Path(__file__).name).returncode:
        return ""
    head, changes = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--", str(folder.parent))
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
