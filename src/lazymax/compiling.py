"""Compile a tile row for a GPU that is not there, and read what came out: the second rung of the proof ladder.

The arguments come from the same object that launches on a device (`Tile.prepare`), on meta tensors, so what is compiled
here is what would run there. Nothing is executed.
"""

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from .arch import Arch
from .backends import Backend, Tile, registry
from .dispatch import Plan, plan, select_tile
from .extras import NO_EXTRAS, Extras
from .mods import register_mask_mod, register_score_mod
from .options import parse_options
from .problem import Problem, parse_dtype

# Mnemonic of the matrix instruction per unit, as it stands in PTX or AMD assembly.
MATRIX_INSTRUCTIONS = {
    "mma": r"mma\.sync", "wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "wmma": r"v_wmma", "mfma": r"v_mfma",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """One compiled row. `spills`: bytes of stack per thread (NVIDIA) or spilled vector registers (AMD)."""

    arch: str
    backend: str
    row: str
    problem: str
    tuned: bool
    triton: str
    instruction: str  # matrix instruction of the target
    in_loop: int  # how often it stands in the hot loop: the innermost loop that has most of them
    in_all: int
    registers: int
    spills: int
    shared: int  # bytes
    seconds: float
    error: str | None = None

    @property
    def ok(self) -> bool:
        """It compiled, uses the matrix unit in half precision, and a row called tuned does not spill."""
        unused = self.in_all == 0 and not self.problem.startswith("float32")
        return self.error is None and not unused and not (self.tuned and self.spills)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


class _AbsentGpu:
    """What Triton asks of a driver while it only compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(arch: Arch, kernel: Any) -> Iterator[None]:
    """Inside, Triton compiles `kernel` for `arch`, from scratch (no disk cache, so that times are compile times)."""
    backend, name, warp_size = arch.target
    kernel.device_caches.clear()
    previous = driver._active  # `driver.active` would look for a GPU
    driver.set_active(_AbsentGpu(GPUTarget(backend, name, warp_size)))
    try:
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            yield
    finally:
        kernel.device_caches.clear()
        driver.set_active(previous)


def meta_tensors(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of the problem's shapes, contiguous, without data."""
    p, dtype = problem, getattr(torch, problem.dtype)
    batch, (q_len, kv_len) = (1, p.packed) if p.packed else (p.batch, (p.q_len, p.kv_len))
    q = torch.empty(batch, p.q_heads, q_len, p.head_dim, dtype=dtype, device="meta")
    k = torch.empty(batch, p.kv_heads, kv_len, p.head_dim, dtype=dtype, device="meta")
    return q, k, torch.empty(*k.shape[:3], p.v_head_dim, dtype=dtype, device="meta")


def compile_plan(problem: Problem, plan: Plan, arch: Arch, extras: Extras = NO_EXTRAS) -> Any:
    """Compile what `plan` would launch; Triton's CompiledKernel (`.asm`, `.metadata`). Not on a thread."""
    q, k, v = meta_tensors(problem)
    out = torch.empty(*q.shape[:3], problem.v_head_dim, dtype=q.dtype, device="meta")
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
    assert plan.tile is not None
    launch = plan.tile.prepare(problem, plan)
    with compiling_for(arch, launch.kernel):
        return launch.kernel.warmup(*launch.arguments(q, k, v, out, lse, extras), grid=(1,), **launch.options)


def loop_counts(assembly: str, pattern: str) -> tuple[int, int]:
    """(matches in the innermost loop that has most of them, matches in all), in PTX or AMD assembly. A loop is the
    stretch from a label to the last branch back to it, for a round may end early; innermost if no other with a match
    lies inside, for there may be one that waits for a barrier."""
    lines = [line for line in assembly.splitlines() if not line.lstrip().startswith(("//", ";"))]
    hits = [bool(re.search(pattern, line)) for line in lines]
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"\s*([$.\w]+):", line))}
    ends: dict[int, int] = {}
    for i, line in enumerate(lines):
        branch = re.search(r"\b(?:bra(?:\.uni)?|s_c?branch\w*)\s+([$.\w]+)", line)
        if branch and labels.get(branch.group(1), i + 1) <= i:
            ends[labels[branch.group(1)]] = i
    loops = [(a, b) for a, b in ends.items() if any(hits[a : b + 1])]
    inner = [(a, b) for a, b in loops if not any(a < c and d <= b for c, d in loops)]
    return max((sum(hits[a : b + 1]) for a, b in inner), default=0), sum(hits)


def _nvidia_resources(kernel: Any) -> tuple[int, int]:
    """(registers, bytes of stack) per thread, from the binary."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"Function \w+:\s+REG:(\d+) STACK:(\d+)", text)
    registers, stack = found.groups()  # type: ignore[union-attr]
    return int(registers), int(stack)


def _amd_resources(kernel: Any) -> tuple[int, int]:
    """(vector registers, spilled vector registers), from the assembly's metadata."""
    text = kernel.asm["amdgcn"]

    def value(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))  # type: ignore[union-attr]

    return value("vgpr_count"), value("vgpr_spill_count")


def _root_cause(error: BaseException) -> str:
    """Type and last telling line of the error at the bottom of the chain; Triton's own end with a caret."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def report(
    problem: Problem, chosen: Plan, arch: Arch, extras: Extras = NO_EXTRAS, feature: str | None = None
) -> Report:
    """Compile one plan and measure it; a failure to compile is a report with `error`. feature: what to call it."""
    assert chosen.tile is not None
    head = (arch.id, chosen.backend, chosen.tile.name, title(problem, feature), chosen.tile.tuned, triton.__version__)
    return measured(head, arch, lambda: compile_plan(problem, chosen, arch, extras))


def launcher_fault(kernel: Any) -> str | None:
    """Why Triton's launcher for NVIDIA could not take the kernel's arguments, or None. It is made at the first launch,
    so a compile alone does not tell: on an H200 descriptors inside of tuples compiled, and failed there (3.6)."""
    from triton.backends.nvidia import driver

    signature, meta = kernel.src.signature, getattr(kernel.metadata, "tensordesc_meta", None)
    try:
        if hasattr(driver, "make_launcher"):  # Triton 3.6
            driver.make_launcher({}, signature, meta)
        elif hasattr(driver, "expand_signature"):  # 3.9
            driver.expand_signature(signature.values(), meta, "nvTmaDesc")
    except Exception as failure:
        return f"the launcher: {_root_cause(failure)}"
    return None


def title(problem: Problem, feature: str | None) -> str:
    """What a report calls a problem."""
    band = "window" if problem.first_offset is not None else "causal" if problem.last_offset is not None else "full"
    return f"{problem.dtype} D={problem.head_dim} {feature or band}"


def measured(head: tuple[str, str, str, str, bool, str], arch: Arch, build: Callable[[], Any]) -> Report:
    """Build a kernel and look at it. head: the first fields of the report."""
    pattern = MATRIX_INSTRUCTIONS.get(arch.matrix_unit, r"\bfma")
    instruction = pattern.replace("\\", "")
    start = time.perf_counter()
    try:
        kernel = build()
    except Exception as failure:
        message = _root_cause(failure)
        return Report(*head, instruction, 0, 0, 0, 0, 0, time.perf_counter() - start, message)
    seconds = time.perf_counter() - start
    nvidia = arch.vendor == "nvidia"
    fault = launcher_fault(kernel) if nvidia else None
    in_loop, in_all = loop_counts(kernel.asm["ptx" if nvidia else "amdgcn"], pattern)
    registers, spills = _nvidia_resources(kernel) if nvidia else _amd_resources(kernel)
    shared = kernel.metadata.shared
    too_much = f"{shared} bytes of shared memory, {arch.id} has {arch.shared_memory}"
    error = fault if shared <= arch.shared_memory else too_much
    return Report(*head, instruction, in_loop, in_all, registers, spills, shared, seconds, error)


HEAD_DIMS = (64, 128, 256)
ODD_HEAD_DIMS = (
    (80, 80),
    (96, 96),
    (104, 104),
    (160, 160),
    (192, 128),
    (576, 512),
)  # split ones, and those with rows of their own
BANDS: tuple[dict[str, Any], ...] = ({}, {"causal": "top_left"}, {"causal": "top_left", "window": (512, None)})


def dtypes_of(backend: Backend) -> tuple[str, ...]:
    """What to compile by default: bf16 for both 16-bit dtypes, unless a row is for fp16 alone."""
    alone = any(row.when.dtypes == ("float16",) for row in backend.forward)
    return (*(("float16",) if alone else ()), "bfloat16", "float32")


def problems(backend: Backend, dtypes: tuple[str, ...]) -> Iterator[Problem]:
    """Problems that together select every row of a table: large and small, every band, each dtype and head dim, with
    strides that descriptors take and with others, plain and not (rows behind other rows serve those)."""
    plain: list[tuple[int, int, dict[str, Any]]] = [(dim, dim, rules) for dim in HEAD_DIMS for rules in BANDS]
    odd: list[tuple[int, int, dict[str, Any]]] = [(dim, v_dim, {}) for dim, v_dim in ODD_HEAD_DIMS]
    odd += [(32, 32, rules) for rules in (BANDS[0], BANDS[2])]
    # So large that only the portable kernel takes it.
    modified: list[tuple[int, int, dict[str, Any]]] = [(dim, dim, {"softcap": 5000.0}) for dim in (*HEAD_DIMS, 160)]
    for dtype in dtypes:
        name = str(parse_dtype(dtype)).removeprefix("torch.")
        conditions = [row.when for row in backend.forward if name in (row.when.dtypes or (name,))]
        named = {dim for when in conditions for dim in when.head_dims or ()} - set(HEAD_DIMS)
        own = [(dim, dim, rules) for dim in sorted(named) for rules in BANDS]
        for head_dim, v_head_dim, rules in (*plain, *odd, *modified, *own):
            for batch, heads, length in ((4, 32, 4096), (16, 32, 1024), (1, 16, 1024), (1, 2, 256)):
                shape = (batch, heads, heads, length, length, head_dim, v_head_dim)
                problem = Problem.from_shape(shape, dtype, return_lse=True, **rules)
                yield problem
                yield replace(problem, descriptor_refusal="compiled for strides that descriptors cannot take")


def rows(arch: Arch, backend: Backend, dtypes: tuple[str, ...]) -> dict[tuple[Tile, str, int, bool, bool], Problem]:
    """For every row of the table, one problem per dtype, head dim and band that selects it."""
    found: dict[tuple[Tile, str, int, bool, bool], Problem] = {}
    for problem in problems(backend, dtypes):
        tile, _ = select_tile(backend, problem, arch)
        if tile is not None:
            band = (problem.first_offset is not None, problem.last_offset is not None)
            found.setdefault((tile, problem.dtype, problem.head_dim, *band), problem)
    return found


def compile_arch(arch: Arch, dtypes: tuple[str, ...] | None = None, impl: str = "auto") -> Iterator[Report]:
    """Every row of the backend that `arch` would use, or of the one named `impl`, compiled for it. dtypes: those that
    reach every row."""
    name = impl
    if impl == "auto":
        name = next(n for n, b in registry().items() if b.automatic and b.serves(arch))
    backend = registry()[name]
    for problem in rows(arch, backend, dtypes or dtypes_of(backend)).values():
        yield report(problem, plan(problem, arch, name), arch)


def features(batch: int, heads: int, length: int) -> dict[str, dict[str, Any]]:
    """One call of `attention` or `attention_varlen` for each build that a feature makes, on meta tensors. Registers the
    modifications that some of them name."""
    register_score_mod(SAMPLE, _bias)
    register_mask_mod(SAMPLE, _same_document)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    offsets = empty(batch + 1, dtype=torch.int32)
    return {
        "bool mask": {"attn_mask": empty(batch, heads, length, length, dtype=torch.bool)},
        "key padding": {"attn_mask": empty(batch, 1, 1, length, dtype=torch.bool)},
        "float mask, causal": {"attn_mask": empty(1, 1, length, length, dtype=torch.bfloat16), "causal": "top_left"},
        "softcap": {"softcap": 50.0},
        "ALiBi": {"alibi_slopes": empty(heads)},
        "sinks, window": {"sinks": empty(heads), "window": (512, 0)},
        "seqlens_k": {"seqlens_k": empty(batch, dtype=torch.int32)},
        "dropout": {"dropout_p": 0.1, "dropout_seed": empty(1, dtype=torch.int64)},
        "packed, causal": {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": "bottom_right"},
        "score_mod": {"score_mod": SAMPLE, "score_mod_args": (empty(heads),)},
        "mask_mod": {"mask_mod": SAMPLE, "mask_mod_args": (empty(length, dtype=torch.int32),)},
        "all at once": {
            "attn_mask": empty(batch, 1, length, length, dtype=torch.bfloat16),
            "causal": "bottom_right",
            "softcap": 50.0,
            "alibi_slopes": empty(batch, heads),
            "sinks": empty(heads),
            "seqlens_k": empty(batch, dtype=torch.int32),
            "dropout_p": 0.1,
            "dropout_seed": empty(1, dtype=torch.int64),
            "score_mod": SAMPLE,
            "score_mod_args": (empty(heads),),
            "mask_mod": SAMPLE,
            "mask_mod_args": (empty(length, dtype=torch.int32),),
        },
    }


SAMPLE = "lazymax.compiling"  # name of the modifications below


@triton.jit
def _bias(score, b, h, q_idx, k_idx, slopes):  # type: ignore[no-untyped-def]
    return score + tl.load(slopes + h) * (k_idx - q_idx)


@triton.jit
def _same_document(b, h, q_idx, k_idx, documents):  # type: ignore[no-untyped-def]
    return tl.load(documents + q_idx) == tl.load(documents + k_idx)


FEATURE_HEAD_DIMS = ((64, 64), (128, 128), (96, 96), (192, 128))


def compile_features(
    arch: Arch, names: Collection[str] | None = None, head_dims: Iterable[tuple[int, int]] = FEATURE_HEAD_DIMS
) -> Iterator[Report]:
    """The builds that features make (see `features`; names: of some), of the rows that `arch` would use."""
    batch, heads, length = 4, 32, 4096
    for head_dim, v_head_dim in head_dims:
        for name, options in features(batch, heads, length).items():
            if names is not None and name not in names:
                continue
            of = (1, heads, length * batch) if "cu_seqlens_q" in options else (batch, heads, length)
            q, v = (torch.empty(*of, dim, dtype=torch.bfloat16, device="meta") for dim in (head_dim, v_head_dim))
            extras, rules = parse_options(q, **options)
            problem = Problem.from_tensors(q, q, v, extras, rules, return_lse=True)
            yield report(problem, plan(problem, arch), arch, extras, name)
