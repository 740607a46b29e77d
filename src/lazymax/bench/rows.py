"""`--rows`: other rows of the tile tables that take a problem, each as a candidate beside lazymax."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ..arch import Arch
from ..backends import Tile, When, registry
from ..compat import tritons
from ..dispatch import Plan, lists_blocks, select_tile
from ..extras import NO_EXTRAS
from ..ops import observers
from ..problem import Problem, output_strides
from .cases import Case
from .peers import LAZYMAX, Make, Ready

BEST, ALL, PORTABLE = "best", "all", "portable"


def ran(call: Callable[[], object], planned: Plan) -> Plan:
    """The plan that a call of lazymax carried out: a row that cannot be built gives way to others, see `ops._run`.
    `planned` where nobody says."""
    seen: list[Plan | None] = []
    observer = seen.append
    observers.append(observer)
    try:
        call()
    except Exception:
        return planned  # why it fails is told where results are judged
    finally:
        observers.remove(observer)
    return next((plan for plan in reversed(seen) if plan), planned)


def others(problem: Problem, arch: Arch, planned: Plan, default: Plan) -> dict[str, Plan]:
    """By candidate name, a plan for every row but that of `default`, which is what lazymax ran: the rows and the
    alternatives of the backend that dispatch chose, then the first row of the portable one. One plan for each build."""
    found: dict[str, Plan] = {}
    if planned.route == "reference":
        return found
    builds = {_build(default)}
    for backend, row in _taking(problem, arch, planned.backend):
        plan = _plan(backend, row, problem, arch, planned)
        if _build(plan) not in builds:
            builds.add(_build(plan))
            prefix = "" if backend == planned.backend else f"{backend}:"
            found[f"{LAZYMAX}:{prefix}{row.name}"] = plan
    return found


def portable(problem: Problem, arch: Arch, planned: Plan, default: Plan) -> dict[str, Plan]:
    """The portable kernel, by the first of its rows for this GPU that takes the problem, where lazymax ran another
    kernel; one name for all problems."""
    if default.tile is None or type(default.tile) is Tile:
        return {}
    for backend, row in _taking(problem, arch, planned.backend):
        if type(row) is Tile:
            return {f"{LAZYMAX}:{PORTABLE}": _plan(backend, row, problem, arch, planned)}
    return {}


def _taking(problem: Problem, arch: Arch, chosen: str) -> Iterator[tuple[str, Tile]]:
    own = registry()[chosen]
    for row in (*own.forward, *own.alternatives):
        if row.refusal(problem, arch) is None:
            yield chosen, row
    first, _ = select_tile(registry()[PORTABLE], problem, arch)
    if first:
        yield PORTABLE, first


def _plan(backend: str, row: Tile, problem: Problem, arch: Arch, planned: Plan) -> Plan:
    """As dispatch would make it if this row came first."""
    branch = row.rescale == "branch" and not tritons.branch_rescale_fault(arch.triton or "", arch.matrix_unit)
    return replace(
        planned, backend=backend, tile=row, rescale="branch" if branch else "select", rejected=(), notes=(),
        level=row.level or registry()[backend].level_on(arch), reason=row.reason,
        listed=lists_blocks(problem, row) is not None,
    )  # fmt: skip


def _build(plan: Plan) -> Tile | None:
    """What the kernel is built from: equal for rows that differ in their condition or their words only."""
    if plan.tile is None:
        return None
    silent = replace(plan.tile, when=When(), reason="", provenance="", tuned=False)
    return replace(silent, rescale=plan.rescale)


def row_of(plan: Plan) -> Make:
    """A candidate that launches the plan's row and nothing else: no other row takes over where it fails."""

    def make(case: Case, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ready:
        assert plan.tile is not None
        launch = plan.tile.prepare(problem, plan)
        size, strides = (*q.shape[:3], v.shape[3]), output_strides(q, v.shape[3])
        lse = torch.empty(0, dtype=torch.float32, device=q.device)
        first = True

        def run() -> torch.Tensor:
            nonlocal first
            out = torch.empty_strided(size, strides, dtype=q.dtype, device=q.device)
            if first:  # the one that is judged: memory of an earlier candidate holds the right result
                out.fill_(math.nan)
                first = False
            launch(q, k, v, out, lse, NO_EXTRAS)
            return out

        return Ready(run)

    return make
