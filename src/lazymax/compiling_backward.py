"""Compile the rows for the backward for a GPU that is not there, as `compiling` does the forward's."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton

from .arch import Arch
from .backends import Backend, BackwardTile, registry
from .compat import tritons
from .compiling import (
    BANDS,
    FEATURE_HEAD_DIMS,
    HEAD_DIMS,
    SAMPLE,
    Report,
    compiling_for,
    features,
    measured,
    meta_tensors,
    title,
)
from .dispatch import plan
from .dispatch_backward import BackwardPlan, plan_backward
from .extras import NO_EXTRAS, Extras
from .kernels.backward_launch import ToCompile
from .options import parse_options
from .problem import Problem

DTYPES = ("bfloat16", "float32")
SHAPES = ((4, 32, 4096), (1, 16, 1024), (1, 2, 256))  # batch, heads, length
SPLIT_HEAD_DIMS = ((96, 96), (192, 128))  # of two pieces


def builds(
    problem: Problem, plan: BackwardPlan, arch: Arch, extras: Extras = NO_EXTRAS
) -> dict[str, tuple[str, Callable[[], Any]]]:
    """By name the row of each kernel that `plan` would launch, and what compiles it: Triton's CompiledKernel. Not on a
    thread."""
    assert plan.tile is not None
    q, k, v = meta_tensors(problem)
    d_out = torch.empty(*q.shape[:3], problem.v_head_dim, dtype=q.dtype, device="meta")

    def compile(of: ToCompile) -> Any:
        with compiling_for(arch, of.kernel):
            return of.kernel.warmup(*of.arguments(), grid=(1,), **of.options)

    found = plan.tile.prepare(problem, plan).to_compile((q, k, v, d_out), extras, plan.tile)
    return {of.name: (of.row, partial(compile, of)) for of in found}


def reports(
    problem: Problem, plan: BackwardPlan, arch: Arch, extras: Extras = NO_EXTRAS, feature: str | None = None
) -> Iterator[Report]:
    """Compile one plan and measure its main kernels."""
    assert plan.tile is not None
    for row, build in builds(problem, plan, arch, extras).values():
        head = (arch.id, plan.backend, row, title(problem, feature), plan.tile.tuned, triton.__version__)
        yield measured(head, arch, build)


def problems(dtypes: tuple[str, ...] = DTYPES) -> Iterator[Problem]:
    """Problems that together select every row of a table."""
    rules = [(dim, dim, band) for dim in HEAD_DIMS for band in BANDS]
    for dtype in dtypes:
        for head_dim, v_head_dim, band in (*rules, *((*dims, BANDS[0]) for dims in SPLIT_HEAD_DIMS)):
            for batch, heads, length in SHAPES:
                shape = (batch, heads, heads, length, length, head_dim, v_head_dim)
                problem = Problem.from_shape(shape, dtype, return_lse=True, **band)
                yield problem
                yield replace(problem, softcap=50.0)
                yield replace(problem, mask="bool", mask_varies=(True,) * 4)
                yield replace(problem, descriptor_refusal="compiled for strides that descriptors cannot take")


def rows(arch: Arch, backend: Backend, dtypes: tuple[str, ...] = DTYPES) -> dict[Any, tuple[BackwardTile, Problem]]:
    """For every row of the table, one problem per dtype, head dim and band that selects it."""
    found: dict[Any, tuple[BackwardTile, Problem]] = {}
    for problem in problems(dtypes):
        tile = next((row for row in backend.backward if row.refusal(problem, arch) is None), None)
        if tile is not None:
            band = (problem.first_offset is not None, problem.last_offset is not None)
            found.setdefault((tile, problem.dtype, problem.head_dim, band), (tile, problem))
    return found


def plan_of(name: str, tile: BackwardTile, arch: Arch) -> BackwardPlan:
    """A plan of that row of the backend of that name."""
    return BackwardPlan(
        route="triton", backend=name, tile=tile, level=registry()[name].backward_level, reason=tile.reason,
        rejected=(), least_columns=tritons.least_columns(arch.matrix_unit),
    )  # fmt: skip


def row_reports(name: str, tile: BackwardTile, problem: Problem, arch: Arch) -> Iterator[Report]:
    """Compile a row of the backend of that name for one of `problems`, with the tensors that the problem takes."""
    extras, feature = NO_EXTRAS, "softcap" if problem.softcap else None
    if problem.mask is not None:
        size = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
        mask = torch.empty(size, dtype=getattr(torch, problem.mask), device="meta")
        extras, feature = Extras(mask=mask), f"{problem.mask} mask"
    yield from reports(problem, plan_of(name, tile, arch), arch, extras, feature)


def compile_arch(arch: Arch, dtypes: tuple[str, ...] | None = None, impl: str = "auto") -> Iterator[Report]:
    """Every row for the backward that `arch` would use, or of the backend named `impl`, if it has any."""
    serving = [n for n, b in registry().items() if b.backward and b.serves(arch) and impl in ("auto", n)]
    for name in serving[:1]:
        yield from _compile_backend(arch, name, dtypes)


def _compile_backend(arch: Arch, name: str, dtypes: tuple[str, ...] | None) -> Iterator[Report]:
    for tile, problem in rows(arch, registry()[name], dtypes or DTYPES).values():
        yield from row_reports(name, tile, problem, arch)


def compile_features(
    arch: Arch, names: Collection[str] | None = None, head_dims: Iterable[tuple[int, int]] = FEATURE_HEAD_DIMS
) -> Iterator[Report]:
    """The builds that features make, see `compiling.features`; without those that the reference differentiates."""
    batch, heads, length = 4, 32, 4096
    for head_dim, v_head_dim in head_dims:
        for name, options in features(batch, heads, length).items():
            if (names is not None and name not in names) or options.get("score_mod") == SAMPLE:
                continue
            of = (1, heads, length * batch) if "cu_seqlens_q" in options else (batch, heads, length)
            q, v = (torch.empty(*of, dim, dtype=torch.bfloat16, device="meta") for dim in (head_dim, v_head_dim))
            extras, rules = parse_options(q, **options)
            problem = Problem.from_tensors(q, q, v, extras, rules, return_lse=True)
            chosen = plan_backward(problem, arch, plan(problem, arch))
            yield from reports(problem, chosen, arch, extras, name)
