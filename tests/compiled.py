"""Rows compiled for GPUs that are not there; runs in a `gluon_sim.Worker`, where Triton compiles."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from ptxas import assembled
from triton.runtime.driver import driver

from lazymax import arch as arches
from lazymax import compiling, compiling_backward
from lazymax.backends import Tile, registry
from lazymax.dispatch import Plan, plan
from lazymax.kernels.launch import ForwardLaunch
from lazymax.problem import Problem
from lazymax.testing import check_attention, make_qkv, poisoned

# Backends whose own kernels are compiled, and executed or simulated, by test_gfx1151.py, test_sm_90.py, test_sm_100.py.
OWN_TESTS = ("gfx1151", "sm_90", "sm_100")


def rows(name: str, archs: tuple[str, ...], everything: bool, turn: int | None = None) -> list[dict[str, Any]]:
    """A report of every row of a table for every GPU, and for each a line with the rows that no problem reached.

    Not everything: each row once, causal if possible; 16 bits at D=128 before 64 before 256, fp32 at the least D. Of
    those that are not called tuned, with a turn (0 or 1), every second one.
    """
    backend, lines = registry()[name], []
    for arch in map(arches.by_name, archs):
        found: dict[Any, Any] = {}
        executed: set[Tile] = set()
        for problem in compiling.problems(backend, compiling.dtypes_of(backend)):
            tile = compiling.select_tile(backend, problem, arch)[0]
            if tile is None:
                continue  # head dims for which the portable rows serve
            if not everything and name in OWN_TESTS and type(tile) is not Tile:
                executed.add(tile)
                continue
            chosen = plan(problem, arch, name)
            band = (problem.first_offset is not None, problem.last_offset is not None)
            found.setdefault((chosen.tile, problem.dtype, problem.head_dim, band), (problem, chosen))
        todo = list(found.items())
        if not everything:
            best: dict[Any, Any] = {}
            for key, item in todo:
                half = key[1] != "float32"
                rank = (half, key[3] == (False, True), half and key[2] <= 128, key[2] if half else -key[2])
                if key[0] not in best or rank > best[key[0]][0]:
                    best[key[0]] = (rank, key, item)
            todo = [(key, item) for _, key, item in best.values()]
        for (tile, *_), (problem, chosen) in todo:
            if turn is not None and not tile.tuned and backend.forward.index(tile) % 2 != turn:
                continue
            report = compiling.report(problem, chosen, arch)
            lines.append(report.as_dict() | {"half": problem.dtype != "float32"})
        own = [tile for tile in backend.forward if tile.when.archs is None or arch.id in tile.when.archs]
        own = [tile for tile in own if tile.outdated(arch) is None]
        missed = [tile.name for tile in own if tile not in {key[0] for key in found} | executed]
        lines.append({"arch": arch.id, "missed": missed})
    return lines


def features(arch: str, names: list[str] | None, head_dims: list[tuple[int, int]]) -> list[dict[str, Any]]:
    return [report.as_dict() for report in compiling.compile_features(arches.by_name(arch), names, head_dims)]


def good_poor_and_bad() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], bool]:
    """A report, one of too little shared memory, one of a tile that does not compile; whether the driver is back."""
    before = driver._active
    problem = Problem.from_shape((1, 2, 2, 256, 256, 64), "bf16", causal="top_left")
    arch = arches.by_name("sm_80")
    chosen = plan(problem, arch, "portable")
    assert chosen.tile is not None
    good = compiling.report(problem, chosen, arch)
    poor = compiling.report(problem, chosen, replace(arch, shared_memory=1024))
    bad = compiling.report(problem, replace(chosen, tile=replace(chosen.tile, block_n=24)), arch)
    return good.as_dict(), poor.as_dict(), bad.as_dict(), driver._active is before


def form(rescale: Any, name: str, roles: str = "") -> dict[str, Any]:
    """A tile of that form of the rescaling, for the GPU of that name. roles: warp specialisation, or not if empty."""
    tile = Tile(
        block_m=128, block_n=64, num_warps=8, num_stages=2, rescale=rescale, descriptors=bool(roles),
        warp_specialize=bool(roles), reason="test", provenance="test",
    )  # fmt: skip
    made = Plan(
        route="triton", backend="test", tile=tile, rescale=rescale, level="test", reason="test", rejected=()
    )  # fmt: skip
    problem = Problem.from_shape((1, 2, 2, 256, 256, 64), "bf16")
    return compiling.report(problem, made, arches.by_name(name)).as_dict()


def run_forward(shape: tuple[int, ...], dtype: str, rules: dict[str, Any], infinite: bool) -> dict[str, Any]:
    """The portable forward compiled for gfx1151, executed in the emulator; infinite: a row of V is."""
    from simulators.gfx1151 import aligned, launch, static_resources

    problem = Problem.from_shape(shape, dtype, return_lse=True, **rules)
    arch = arches.by_name("gfx1151")
    chosen = plan(problem, arch, "portable")
    kernel = compiling.compile_plan(problem, chosen, arch)
    q, k, v = (aligned(t) for t in make_qkv(*shape, dtype=getattr(torch, problem.dtype)))
    if infinite:
        v[..., 5, :] = torch.inf
    out = aligned(poisoned(*q.shape, dtype=q.dtype, device="cpu"))
    lse = aligned(poisoned(*q.shape[:3], dtype=torch.float32, device="cpu"))
    prepared = ForwardLaunch.prepare(problem, chosen)
    result = launch(kernel, prepared.grid, prepared.arguments(q, k, v, out, lse))
    budgets = check_attention(out, lse, q, k, v, problem)
    return {
        "faults": [str(budget) for budget in budgets if not budget.ok],
        "classes": result.by_class,
        "calls": result.by_mnemonic["s_swappc_b64"],
        "mismatches": result.wmma_mismatches,
        "waves": static_resources(kernel).waves_per_simd,
        "spilled": static_resources(kernel).spilled_vgprs,
        "assembly": kernel.asm["amdgcn"][-400000:],
    }


def backward(
    archs: list[str], head_dims: list[int] | None, dtypes: list[str], causal: bool | None, most: int | None = None
) -> list[Any]:
    """A report of the two kernels of every row for the backward of those GPUs, for every problem that selects it; of
    these head dims and of causal problems (or of the others) alone, if they are given. most: rows of each GPU."""
    lines = []
    for arch in map(arches.by_name, archs):
        name = next(n for n, b in registry().items() if b.backward and b.serves(arch))
        asked = []
        for tile, problem in compiling_backward.rows(arch, registry()[name], tuple(dtypes)).values():
            band = problem.last_offset is not None and problem.first_offset is None
            if (not head_dims or problem.head_dim in head_dims) and (causal is None or band is causal):
                asked.append((tile, problem))
        for tile, problem in asked[:most]:
            for report in compiling_backward.row_reports(name, tile, problem, arch):
                lines.append(report.as_dict() | {"half": problem.dtype != "float32"})
    return lines


WINDOW = {"window": (100, 50), "window_align": "bottom_right"}


def _backward_builds(
    arch: arches.Arch, dims: tuple[int, int], dtype: str, band: dict[str, Any], group: int, descriptors: bool | None
) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(kernel, row, what compiles it) of every main kernel of one problem. descriptors: whether these must serve it,
    or must not; None: either."""
    backend = next(n for n, b in registry().items() if b.backward and b.serves(arch))
    problem = Problem.from_shape((2, 8 * group, 8, 4096, 4096, *dims), dtype, return_lse=True, **band)
    if descriptors is False:
        problem = replace(problem, descriptor_refusal="compiled for strides that descriptors cannot take")
    tile = next(row for row in registry()[backend].backward if row.refusal(problem, arch) is None)
    assert descriptors in (None, tile.descriptors)
    chosen = compiling_backward.plan_of(backend, tile, arch)
    for kernel, (row, build) in compiling_backward.builds(problem, chosen, arch).items():
        yield kernel, row, build


def backward_spills(name: str, head_dim: int, dtype: str) -> list[dict[str, Any]]:
    """Vector and scalar registers that the main kernels of an AMD GPU's row spill, in every band, with and without a
    group of heads."""
    lines = []
    for band, group in product(({"causal": "bottom_right"}, {}, WINDOW), (1, 2)):
        of = arches.by_name(name), (head_dim, head_dim), dtype, band, group, None
        for kernel, _, build in _backward_builds(*of):
            text = build().asm["amdgcn"]
            counts = {kind: int(re.search(rf"\.{short}gpr_spill_count:\s+(\d+)", text)[1])  # type: ignore[index]
                      for kind, short in (("vector", "v"), ("scalar", "s"))}  # fmt: skip
            lines.append({"kernel": kernel, "band": band, "group": group, **counts})
    return lines


def backward_assembled(
    name: str, dims: tuple[int, int], dtype: str, descriptors: bool, few: bool
) -> list[dict[str, Any]]:
    """Bytes that ptxas spills in all functions of the main kernels of an NVIDIA GPU's row, in every band, with and
    without a group of heads. few: of causal problems with a group and of full ones without."""
    arch, lines = arches.by_name(name), []
    causal = {"causal": "top_left"}
    for band, group in ((causal, 2), ({}, 1), ({}, 2), (causal, 1), (WINDOW, 2), (WINDOW, 1))[: 2 if few else None]:
        for kernel, row, build in _backward_builds(arch, dims, dtype, band, group, descriptors):
            compiled, spills, _ = assembled(build)
            fits = compiled.metadata.shared <= arch.shared_memory
            lines.append({"kernel": kernel, "row": row, "band": band, "group": group, "spills": spills, "fits": fits})
    return lines


def backward_features(arch: str, names: list[str] | None, head_dims: list[tuple[int, int]]) -> list[dict[str, Any]]:
    found = compiling_backward.compile_features(arches.by_name(arch), names, head_dims)
    return [report.as_dict() for report in found]
