"""plan(): which kernel takes a problem on a GPU, and why every other candidate was refused. Pure Python.

Candidates, in order: each backend that lists the arch, the `portable` backend, the reference.
"""

from dataclasses import dataclass

from .arch import Arch
from .backends import LARGEST_HEAD_DIM, Backend, Tile, registry
from .compat import tritons
from .problem import Problem

KERNEL_DTYPES = ("float16", "bfloat16", "float32")
MAX_HEAD_DIM, MAX_V_HEAD_DIM = LARGEST_HEAD_DIM, 512  # the latent form of MLA
MAX_BATCH = 65535  # of one launch, on CUDA and HIP


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
    listed: bool = False  # the key blocks to visit are listed before the forward, see kernels/blocks.py
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
    for name, dim, limit in (
        ("q and k", problem.head_dim, MAX_HEAD_DIM), ("v", problem.v_head_dim, MAX_V_HEAD_DIM),
    ):  # fmt: skip
        if not 1 <= dim <= limit:
            return f"head dim of {name}: the kernel takes 1 to {limit}, got {dim}"
    by_position = problem.dropout_p or problem.score_mod or problem.mask_mod
    if problem.batch > MAX_BATCH and not problem.packed and by_position:
        return f"dropout and mods count batch elements to {MAX_BATCH}, got {problem.batch}"
    return None


def lists_blocks(problem: Problem, tile: Tile) -> str | None:
    """Why the key blocks are listed before the forward, or None. Worth it where the list costs little beside the
    forward: it looks at every pair of positions once for all heads that share it."""
    if problem.kv_len <= 2 * tile.block_n:
        return None  # nothing to skip
    if problem.mask_mod:
        return "mask_mod is known by position"
    _, heads, rows, _ = problem.mask_varies
    if problem.mask == "bool" and not heads and (problem.q_heads >= 4 or not rows):
        return "the bool mask is the same for all heads"
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
        elif not backend.serves(arch):
            rejected.append(Refused(name, f"for {', '.join(backend.archs)}, this is {arch.id}"))
        elif impl == "auto" and not backend.automatic:
            rejected.append(Refused(name, f"only when asked for, impl={name!r}"))
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
    listed = lists_blocks(problem, tile)
    if listed:
        notes.append(f"key blocks that no pair needs are skipped: listed first, for {listed}")
    rejected.append(Refused("reference", f"{name} takes the problem"))
    return Plan(
        route="triton", backend=name, tile=tile, rescale=rescale, level=tile.level or backend.level_on(arch),
        reason=tile.reason, rejected=tuple(rejected), notes=tuple(notes), listed=listed is not None,
        least_columns=tritons.least_columns(arch.matrix_unit),
    )  # fmt: skip


def _notes(problem: Problem, arch: Arch) -> list[str]:
    notes = []
    if arch.interpreted:
        notes.append("Triton's interpreter runs the kernel on the CPU (TRITON_INTERPRET is set)")
    for name in problem.copied:
        notes.append(f"{name} is copied first: its head dimension is not contiguous")
    if problem.dtype == "float32" and problem.fp32_precision == "tf32":
        notes.append("fp32 products in tf32, as torch.backends.cuda.matmul allows; the default is full fp32")
    return notes
