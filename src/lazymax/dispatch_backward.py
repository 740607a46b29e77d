"""plan_backward(): which kernels compute the gradients of a problem, and why others were refused. Pure Python.

Candidates, in order: the backends that list the arch and have rows for the backward, the `portable` backend, the
reference. No choice of the forward but the reference binds the backward: all kernels leave the same LSE.
"""

from dataclasses import dataclass

from . import mods
from .arch import Arch
from .backends import BackwardTile, registry
from .compat import tritons
from .dispatch import MAX_BATCH, Plan, Refused, kernel_refusal
from .problem import Problem

MAX_BACKWARD_HEAD_DIM = 256
MAX_ROWS = 65535 * 32  # the second dimension of the grid of gradients.prepare, on CUDA and HIP


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPlan:
    """What will run. `tile` is None on the reference route."""

    route: str  # "triton" or "reference"
    backend: str
    tile: BackwardTile | None
    level: str
    reason: str
    rejected: tuple[Refused, ...]
    least_columns: int = 64  # see Plan

    def describe(self) -> str:
        """One line: what runs."""
        return f"{self.route}:{self.backend}" + (f":{self.tile.name}" if self.tile else "")

    @property
    def determinism(self) -> str:
        """Whether a second run gives the same bits, for `explain`."""
        if self.tile is None:
            return "the same bits from run to run as far as torch's products give them"
        if self.tile.deterministic:
            return "the same bits from run to run, no atomics: dQ has a kernel of its own, dK and dV another"
        return "added up in the order in which programs finish; deterministic=True takes another row"


def backward_refusal(problem: Problem, arch: Arch) -> str | None:
    """Why no Triton kernel can compute the gradients, or None."""
    refusal = kernel_refusal(problem, arch)
    if refusal:
        return refusal
    for name, dim in (("q and k", problem.head_dim), ("v", problem.v_head_dim)):
        if dim > MAX_BACKWARD_HEAD_DIM:
            return f"head dim of {name}: the kernels take 1 to {MAX_BACKWARD_HEAD_DIM}, got {dim}"
    if problem.score_mod and not mods.has_derivative(problem.score_mod):
        return f"score_mod {problem.score_mod!r} is differentiated by torch: it was registered without derivative="
    if problem.batch > MAX_BATCH and not problem.packed:
        return f"takes {MAX_BATCH} batch elements at most, got {problem.batch}"
    rows = problem.packed[0] if problem.packed else problem.q_len
    if rows > MAX_ROWS:
        return f"takes {MAX_ROWS} queries at most, got {rows}"
    if not all((problem.batch, problem.q_heads, *(problem.packed or (problem.q_len, problem.kv_len)))):
        return "nothing to compute: an input is empty"
    return None


def plan_backward(problem: Problem, arch: Arch, forward: Plan, only: str | None = None) -> BackwardPlan:
    """Choose. forward: the plan of the forward. only: a backend or "reference", where others could not be built."""
    rejected: list[Refused] = []
    refusal = backward_refusal(problem, arch)
    if forward.route == "reference":
        refusal = f"the forward is the reference's: {forward.reason}"
    taken: tuple[str, BackwardTile] | None = None
    for name, backend in registry().items():
        if not backend.backward or not backend.serves(arch):
            continue
        if only not in (None, name):
            rejected.append(Refused(name, "cannot be built"))
            continue
        if refusal or taken:
            rejected.append(Refused(name, refusal or f"{taken[0]} comes first"))  # type: ignore[index]
            continue
        for row in backend.backward:
            why = row.refusal(problem, arch)
            if why is None:
                taken = name, row
                break
            rejected.append(Refused(f"{name} row {row.name}", why))
        else:
            rejected.append(Refused(name, "no row takes the problem"))
    if taken is None:
        return BackwardPlan(
            route="reference", backend="reference", tile=None, level="torch operations",
            reason=refusal or "no backend takes it", rejected=tuple(rejected),
        )  # fmt: skip
    name, row = taken
    rejected.append(Refused("reference", f"{name} takes the problem"))
    return BackwardPlan(
        route="triton", backend=name, tile=row, level=registry()[name].backward_level, reason=row.reason,
        rejected=tuple(rejected), least_columns=tritons.least_columns(arch.matrix_unit),
    )  # fmt: skip
