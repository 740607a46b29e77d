"""What the main loops of the backward cost on gfx1151: the table benchmarks/results/gfx1151-backward-static.csv.

    PYTHONPATH=src:tests python tests/gfx1151_backward_static.py [--write]

does with the kernels of every 16-bit row for the backward what gfx1151_static.py does with the forward's: one
workgroup, two numbers of tiles, the difference priced. Causal, two query heads over one key head, lengths in multiples
of 16; what differs are tiles without a mask. Emulated, not run on hardware.

Unlike there, floor_tflops counts the products that the gradient needs (three of dQ, four of dK and dV; in a launch
each, three of dK and two of dV) and not those that waves repeat, and cycles_per_unit is of 64 queries and 64 keys of
one head. `floor_of_all` puts the launches together.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import price_table
import torch
import triton
from emulated import ARCH, Emulated, rows_of
from emulated_backward import prepared, upstream
from simulators.gfx1151 import aligned, main_loop, static_resources
from simulators.gfx1151 import launch as execute
from simulators.gfx1151.price import WMMA_CYCLES, WMMA_TFLOPS

from lazymax import reference
from lazymax.backends import BackwardTile, Half
from lazymax.kernels import gradients
from lazymax.kernels.backward_launch import PLANES, stats_of
from lazymax.kernels.launch import LOG2E, view_strides
from lazymax.kernels.memory import View
from lazymax.problem import Problem
from lazymax.testing import make_qkv

FILE = Path(__file__).parent.parent / "benchmarks" / "results" / "gfx1151-backward-static.csv"
GROUP = 2
TILES = 8, 12  # that a program walks; the diagonal lies in the first or last
UNIT = 64  # queries, and keys
PRODUCTS = {"dq": 3, "dkdv": 4, "dk": 3, "dv": 2}
FUSED = 5  # products that TFLOP/s of a backward count, by whatever kernels
SHOWN = (
    "triton", "table", "row", "head_dim", "dtype", "floor_tflops", "wmma_share", "wmma_per_needed", "instructions",
    "scratch", "vgprs", "spilled_vgprs", "lds_bytes",
)  # fmt: skip
DIMS = (64, 96, 128, 256)  # 96: in two pieces


@dataclass(frozen=True)
class Entry:
    kernel: str
    index: int
    dim: int
    dtype: str

    @property
    def tile(self) -> BackwardTile:
        tile = rows_of("BACKWARD")[self.index]
        assert isinstance(tile, BackwardTile)
        return tile

    @property
    def half(self) -> Half:
        return self.tile.queries if self.kernel == "dq" else self.tile.keys

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Of a line in the table, beside the Triton version."""
        return self.kernel, self.half.name, str(self.dim), self.dtype


def kernels_of(tile: BackwardTile) -> tuple[str, ...]:
    return ("dq", "dv", "dk") if tile.keys.separate else ("dq", "dkdv")


def entries() -> list[Entry]:
    """The kernels of the row that a problem selects."""
    found = []
    for dim in DIMS:
        for dtype in ("fp16", "bf16"):
            problem = Problem.from_shape((1, GROUP, 1, 128, 128, dim), dtype, causal="bottom_right", return_lse=True)
            index = next(i for i, row in enumerate(rows_of("BACKWARD")) if row.refusal(problem, ARCH) is None)
            found += [Entry(kernel, index, dim, dtype) for kernel in kernels_of(rows_of("BACKWARD")[index])]
    return found


def needed(products: int, dim: int) -> float:
    """WMMAs of 16x16x16 in a unit of so many products."""
    return products * (UNIT / 16) ** 2 * dim / 16


def tflops(products: int, dim: int, cycles: float) -> float:
    """If only issue counts. cycles: of a SIMD, for a unit."""
    return WMMA_TFLOPS * WMMA_CYCLES * needed(products, dim) / cycles


def floor_of_all(lines: list[dict[str, Any]], dim: int, dtype: str) -> float:
    """Of dQ, dK and dV together, by the five products that others count too."""
    own = [line for line in lines if (str(line["head_dim"]), line["dtype"]) == (str(dim), dtype)]
    assert sorted(line["table"] for line in own) in (["dkdv", "dq"], ["dk", "dq", "dv"])
    return tflops(FUSED, dim, sum(float(line["cycles_per_unit"]) for line in own))


class Pricing:
    """Prices entries; keeps what the emulator has built."""

    def __init__(self) -> None:
        self.emulated = Emulated()

    def run(self, entry: Entry, tiles: int, kernels: list[Any]) -> Any:
        """Execute one workgroup that walks so many tiles for each query head that it serves."""
        of_keys, half = entry.kernel != "dq", entry.half
        rows = tiles * half.block_m if of_keys else half.block_m
        keys = rows if of_keys else tiles * half.block_n
        shape = (1, GROUP, 1, rows, keys, entry.dim)
        problem = Problem.from_shape(shape, entry.dtype, causal="bottom_right", return_lse=True)
        q, k, v = map(aligned, make_qkv(*shape, dtype=getattr(torch, problem.dtype)))
        out, lse = reference.fallback(q, k, v, problem)
        d_out = aligned(upstream(out, "bhsd")[0])
        planes = aligned(torch.full((PLANES, *lse.shape), torch.nan))
        planes[gradients.REST.value] = lse * LOG2E
        planes[gradients.DELTA.value] = (out.float() * d_out.float()).sum(-1)
        launch = prepared(entry.tile, problem)
        views = [View(t, *view_strides(t)) for t in (q, k, v, d_out)]
        dq, dk, dv = (View(t, *view_strides(t)) for t in map(aligned, (q, k, v)))
        launches = ("dq", launch.queries, (dq, None)), *launch.of_keys(dk, dv)
        main, results = next((main, results) for name, main, results in launches if name == entry.kernel)
        arguments = launch.arguments(main, views, results, stats_of(planes))
        kernels.append(self.emulated.build(main.function, arguments, main.options))
        return execute(kernels[-1], (*main.grid, 1), arguments, workgroups=((0, 0, 0), (1, 1, 1)))

    def price(self, entry: Entry) -> dict[str, Any]:
        half, kernels = entry.half, []  # type: ignore[var-annotated]
        heads = 1 if entry.kernel == "dq" else GROUP  # over which a program loops
        cost = main_loop(lambda tiles: self.run(entry, tiles, kernels), *TILES, waves=half.num_warps * heads)
        resources = static_resources(kernels[-1])
        per_unit = half.num_warps * UNIT**2 / (half.block_m * half.block_n)
        products, numbers = PRODUCTS[entry.kernel], {name: round(value, 2) for name, value in asdict(cost).items()}
        return {
            "table": entry.kernel, "row": half.name, "head_dim": entry.dim, "dtype": entry.dtype,
            "triton": triton.__version__,
            "floor_tflops": round(tflops(products, entry.dim, cost.cycles * per_unit), 2),
            "cycles_per_unit": round(cost.cycles * per_unit, 1),
            "wmma_share": round(WMMA_CYCLES * cost.wmma / cost.cycles, 3),
            "wmma_per_needed": round(cost.wmma * per_unit / needed(products, entry.dim), 2),
            **numbers, **asdict(resources), "waves_per_simd": resources.waves_per_simd, "arch": ARCH.id,
            "level": "emulated, not run on hardware",
        }  # fmt: skip


def show_all(entry: Entry, lines: list[dict[str, Any]]) -> None:
    """Behind the last kernel of a row what all of them give."""
    if entry.kernel == kernels_of(entry.tile)[-1]:
        print(f"  all: {floor_of_all(lines, entry.dim, entry.dtype):.2f} TFLOP/s", flush=True)


if __name__ == "__main__":
    price_table.command(FILE, entries(), Pricing().price, SHOWN, show_all)
