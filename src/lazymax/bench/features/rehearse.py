"""The first call of every case in processes of their own, before anything is timed.

That builds the kernels side by side, into Triton's cache on disk, where the run finds them; and a kernel that faults or
hangs costs its own case, not the whole run: a CUDA context does not survive a fault.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

READY = "ready"
LOST = 3  # exit code: a case that was reported left the device unusable
START_SECONDS, CASE_SECONDS = 60, 12  # before a process is stopped


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a process needs to know beside the names of its cases."""

    device: str
    dtype: str
    impl: str


def rehearse(names: Sequence[str], what: Rehearsal, jobs: int) -> dict[str, str]:
    """Why cases failed, by name; the others are built."""
    lanes = [list(names[lane::jobs]) for lane in range(min(jobs, len(names)))]
    faults: dict[str, str] = {}
    with ThreadPoolExecutor(max(1, len(lanes))) as pool:
        for found in pool.map(lambda lane: _lane(lane, what), lanes):
            faults |= found
    return faults


def _lane(names: list[str], what: Rehearsal) -> dict[str, str]:
    """One process after the other, a new one behind each fault, until every case was tried."""
    faults: dict[str, str] = {}
    while names:
        text, code, why = _process(names, what)
        lines = text.splitlines()
        if READY not in lines:  # the process, not a case, is at fault: the run will tell
            print(f"bench: no rehearsal: {why}", file=sys.stderr)
            break
        for name, fault in (json.loads(line) for line in lines if line.startswith('["')):
            names.remove(name)
            if fault:
                faults[name] = fault
        if code not in (0, LOST) and names:
            faults[names.pop(0)] = why
        elif code == 0:
            break
    return faults


def _process(names: Sequence[str], what: Rehearsal) -> tuple[str, int | None, str]:
    """(standard output of one process, its exit code or None if it was stopped, why it ended early)"""
    here = str(Path(__file__).parents[3])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "lazymax.bench.features.rehearse"]
    command += [json.dumps(asdict(what)), json.dumps(list(names))]
    seconds = START_SECONDS + CASE_SECONDS * len(names)
    try:
        result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        written = late.stdout or b""  # bytes also with text=True
        return written.decode() if isinstance(written, bytes) else written, None, f"not back within {seconds} s"
    last = (result.stderr.strip().splitlines() or [""])[-1]
    return result.stdout, result.returncode, f"the process ended with {result.returncode}: {last[:300]}"


def main(arguments: Sequence[str]) -> None:
    """One process: a JSON pair (name, fault or "") per case. It ends at a fault that leaves the device unusable."""
    from . import mods
    from .calls import build
    from .cases import ON_CPU, ON_GPU, SUITES

    what, names = Rehearsal(**json.loads(arguments[0])), json.loads(arguments[1])
    device, dtype = torch.device(what.device), getattr(torch, what.dtype)
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    known = {feature.name: feature for features in SUITES.values() for feature in features(sizes)}
    mods.register()
    torch.zeros(1, device=device)
    print(READY, flush=True)
    for name in names:
        feature, fault = known[name], ""
        batch, q_heads, kv_heads, q_len, kv_len, dim = feature.shape[:6]
        try:
            q, k, v = (
                torch.randn(batch, heads, length, width, device=device, dtype=dtype)
                for heads, length, width in (
                    (q_heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, feature.shape[-1]),
                )
            )  # fmt: skip
            build(feature, (q, k, v), what.impl).run()
            _synchronize(device)
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            fault = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
        print(json.dumps([name, fault]), flush=True)
        if fault:
            try:
                _synchronize(device)
            except Exception:
                sys.exit(LOST)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1:])
