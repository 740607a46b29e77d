"""plan(): which kernel takes a problem on a GPU, and why every other candidate was refused. Pure Python.

Candidates, in order: each backend that lists the arch, the `portable` backend, the reference.
"""

import json
from dataclasses import asdict, dataclass

from .arch import Arch
from .backends import Backend, Tile, registry
from .compat import tritons
from .problem import Problem

KERNEL_DTYPES = ("float16", "bfloat16", "float32")
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Refused:
    """A candidate that does not take the problem."""

    candidate: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run. `tile` is None on the reference route."""

    route: str  # "triton" or "reference"
    backend: str
    tile: Tile | None
    rescale: str  # form of the lazy rescale in use: the row's, unless this Triton cannot compile it
    level: str  # how far this backend was proved
    reason: str
    rejected: tuple[Refused, ...]
    least_columns: int = 64  # of a tile, see tritons.least_columns; 64 is right everywhere
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line: what runs."""
        return f"{self.route}:{self.backend}" + (f":{self.tile.name}" if self.tile else "")


def impls() -> tuple[str, ...]:
    """Valid values of the `impl` argument."""
    return ("auto", *registry(), "reference")


def kernel_refusal(problem: Problem, arch: Arch) -> str | None:
    """Why no Triton kernel can take the problem, or None."""
    if arch.vendor == "cpu" and not arch.interpreted:
        return f"device {arch.id}: no GPU (TRITON_INTERPRET=1 runs the kernel on CPU tensors, slowly, for testing)"
    fault = tritons.unsupported_triton(arch.triton)
    if fault:
        return fault
    if arch.matrix_unit == "none":
        return f"{arch.id} has no matrix unit that Triton uses; torch's own kernels are the better ones there"
    if problem.dtype not in KERNEL_DTYPES:
        return f"the kernel computes in float32; {problem.dtype} goes to the reference"
    for name, dim in (("head dim of q and k", problem.head_dim), ("head dim of v", problem.v_head_dim)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            return f"{name} is {dim}, the kernel takes 1 to {MAX_HEAD_DIM}"
    if problem.mask:
        return "a dense mask is not in the Triton kernel yet"
    if problem.dropout_p:
        return "dropout is not in the Triton kernel yet"
    return None


def select_tile(backend: Backend, problem: Problem, arch: Arch) -> tuple[Tile | None, list[tuple[Tile, str]]]:
    """First row that takes the problem, and the rows before it with their reasons."""
    skipped: list[tuple[Tile, str]] = []
    for tile in backend.forward:
        refusal = tile.refusal(problem, arch)
        if refusal is None:
            return tile, skipped
        skipped.append((tile, refusal))
    return None, skipped


def plan(problem: Problem, arch: Arch, impl: str = "auto") -> Plan:
    """Choose. impl "auto" falls back, with the reasons in the plan; a named impl is taken or raises.

    Raises ValueError for an unknown impl, NotImplementedError when a named one cannot take the problem.
    """
    if impl not in impls():
        raise ValueError(f"impl: got {impl!r}, expected one of {', '.join(impls())}")
    rejected: list[Refused] = []
    taken: tuple[str, Backend, Tile] | None = None
    refusal = kernel_refusal(problem, arch)
    for name, backend in registry().items():
        if impl not in ("auto", name):
            rejected.append(Refused(name, f"impl={impl!r} was asked for"))
        elif backend.archs and arch.id not in backend.archs:
            rejected.append(Refused(name, f"for {', '.join(backend.archs)}, this is {arch.id}"))
        elif refusal:
            rejected.append(Refused(name, refusal))
        elif taken:
            rejected.append(Refused(name, f"{taken[0]} comes first"))
        else:
            tile, skipped = select_tile(backend, problem, arch)
            rejected += [Refused(f"{name} row {row.name}", why) for row, why in skipped]
            if tile is None:
                rejected.append(Refused(name, "no row takes the problem"))
            else:
                taken = name, backend, tile
    if taken:
        return _triton_plan(*taken, problem, arch, rejected)
    if impl not in ("auto", "reference"):
        raise NotImplementedError(
            f"impl: {impl!r} cannot take this problem on {arch.id}: "
            f"{next(r.reason for r in reversed(rejected) if r.candidate == impl)}; impl='auto' would choose"
        )
    reason = "asked for" if impl == "reference" else refusal or "no backend takes it"
    return Plan(
        route="reference", backend="reference", tile=None, rescale="none", level="torch operations", reason=reason,
        rejected=tuple(rejected), notes=tuple(_notes(problem, arch)),
    )  # fmt: skip


def _triton_plan(
    name: str, backend: Backend, tile: Tile, problem: Problem, arch: Arch, rejected: list[Refused]
) -> Plan:
    notes = list(_notes(problem, arch))
    rescale = tile.rescale
    fault = tritons.branch_rescale_fault(arch.triton or "", arch.matrix_unit) if rescale == "branch" else None
    if fault:
        rescale = "select"
        notes.append(f"rescale by select instead of branch: {fault}")
    rejected.append(Refused("reference", f"{name} takes the problem"))
    return Plan(
        route="triton", backend=name, tile=tile, rescale=rescale, level=backend.level_on(arch), reason=tile.reason,
        rejected=tuple(rejected), notes=tuple(notes), least_columns=tritons.least_columns(arch.matrix_unit),
    )  # fmt: skip


def _notes(problem: Problem, arch: Arch) -> list[str]:
    notes = []
    if arch.interpreted:
        notes.append("Triton's interpreter runs the kernel on the CPU (TRITON_INTERPRET is set)")
    for name in problem.copied:
        notes.append(f"{name} is copied first: its head dimension is not contiguous")
    if problem.dtype == "float32" and problem.fp32_precision == "tf32":
        notes.append("fp32 products in tf32, as torch.backends.cuda.matmul allows; the default is full fp32")
    if problem.requires_grad and not problem.mask and not problem.dropout_p:
        notes.append("backward: recomputed by the reference in float32 (there is no Triton backward yet)")
    return notes


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan with what it was made from; `str()` is the text that `explain` prints."""

    problem: Problem
    arch: Arch
    plan: Plan

    def to_json(self) -> str:
        return json.dumps(
            {"problem": asdict(self.problem), "arch": asdict(self.arch), "plan": asdict(self.plan)}, indent=2
        )

    def __str__(self) -> str:
        p, plan = self.problem, self.plan
        band = [f"causal {p.align}"] if p.causal else []
        band += [f"window {p.window}"] if p.window != (None, None) else []
        lines = [
            f"problem   {p.dtype} B={p.batch} Hq={p.q_heads} Hkv={p.kv_heads} Sq={p.q_len} Sk={p.kv_len} D={p.head_dim}"
            + (f" Dv={p.v_head_dim}" if p.v_head_dim != p.head_dim else "")
            + (f", {', '.join(band)}" if band else ""),
            f"arch      {self.arch}, Triton {self.arch.triton or 'not installed'}",
            f"route     {plan.describe()}",
            f"because   {plan.reason}",
            f"level     {plan.level}",
        ]
        if plan.tile:
            t = plan.tile
            lines.append(
                f"tile      {t.block_m} queries x {t.block_n} keys, {t.num_warps} warps, {t.num_stages} stages, "
                f"loads by {'descriptor' if t.descriptors else 'pointer'}, rescale by {plan.rescale}"
            )
            lines.append(f"          {'tuned' if t.tuned else 'not tuned'}: {t.provenance}")
        lines += [f"note      {note}" for note in plan.notes]
        lines += [f"refused   {r.candidate}: {r.reason}" for r in plan.rejected]
        return "\n".join(lines)
