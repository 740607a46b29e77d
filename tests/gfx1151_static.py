"""What every row of gfx1151 costs by its instructions: the table benchmarks/results/gfx1151-static.csv.

    PYTHONPATH=src:tests python tests/gfx1151_static.py [--write]

compiles each row with the Triton that is installed, executes one workgroup with two numbers of key blocks in the
emulator, and prices the difference (`simulators/gfx1151/price.py`): causal, four query heads over one key head, tails
possible, LSE written, keys that never move the pivot. Emulated, not run on hardware. `--write` replaces the rows of
this Triton in the file.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import price_table
import torch
import triton
from emulated import ARCH, Emulated, rows_of
from simulators.gfx1151 import aligned, main_loop, static_resources
from simulators.gfx1151 import launch as execute

from lazymax.backends import Tile
from lazymax.problem import Problem
from lazymax.testing import make_qkv

FILE = Path(__file__).parent.parent / "benchmarks" / "results" / "gfx1151-static.csv"
SHOWN = (
    "triton", "table", "row", "head_dim", "dtype", "floor_tflops", "instructions", "valu", "global_loads_per_64_wmma",
    "vgprs", "spilled_vgprs", "scratch",
)  # fmt: skip
GROUP = 4
BLOCKS = 6, 9  # of keys; the diagonal lies in the last two
WMMA_OF_UNIT = 256  # 64 queries, 64 keys, head dim 128
SHORT = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Entry:
    table: str
    index: int
    dim: int
    dtype: str

    @property
    def row(self) -> Tile:
        return rows_of(self.table)[self.index]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Of a line in the table, beside the Triton version."""
        return self.table, self.row.name, str(self.dim), self.dtype


def entries() -> list[Entry]:
    """Every row at head dims that are multiples of 16; of the portable kernel what would run without the others."""
    found = []
    for table in ("WMMA", "ALTERNATIVES", "FRAGMENTS", "noasm", "singlewave", "pipelined", "portable"):
        for index, row in enumerate(rows_of(table)):
            of_row = row.when.head_dims or (64, 128)
            dims = [dim for dim in of_row if dim % 16 == 0 and (table == "WMMA" or dim in (64, 80, 96, 128, 256))]
            for dtype, name in SHORT.items():
                taken = row.when.dtypes is None or name in row.when.dtypes
                limit = row.when.max_head_dim or 256
                found += [Entry(table, index, dim, dtype) for dim in dims if taken and dim <= limit]
    first: dict[tuple[str, ...], Entry] = {}
    for entry in found:
        first.setdefault(("portable", *entry.key[2:]) if entry.table == "portable" else entry.key, entry)
    return list(first.values())


class Pricing:
    """Prices entries; keeps what the emulator has built."""

    def __init__(self) -> None:
        self.emulated = Emulated()

    def problem(self, entry: Entry, blocks: int) -> Problem:
        row = entry.row
        own = entry.table in ("singlewave", "pipelined", "portable")  # rows are positions of one head
        positions = row.block_m if own else row.block_m // GROUP
        shape = (1, GROUP, 1, positions, blocks * row.block_n, entry.dim)
        return Problem.from_shape(shape, entry.dtype, causal="bottom_right", return_lse=True)

    def price(self, entry: Entry) -> dict[str, Any]:
        row, kernels = entry.row, []

        def run(blocks: int) -> Any:
            problem = self.problem(entry, blocks)
            launch = self.emulated.prepare(problem, row)
            dtype = getattr(torch, problem.dtype)
            q, k, v = make_qkv(1, GROUP, 1, problem.q_len, problem.kv_len, entry.dim, dtype=dtype)
            k[:, :, row.block_n :] = k[:, :, : row.block_n].repeat(1, 1, blocks - 1, 1)
            q, k, v, out = map(aligned, (q, k, v, torch.zeros_like(q)))
            given = self.emulated.fragments(v) if entry.table == "FRAGMENTS" else v
            arguments = launch.arguments(q, k, given, out, aligned(torch.zeros(q.shape[:3])))
            kernel = self.emulated.kernel(launch, arguments)
            kernels.append(kernel)
            return execute(kernel, launch.grid, arguments, workgroups=((0, 0, 0), (1, 1, 1)))

        cost = main_loop(run, *BLOCKS, waves=row.num_warps)
        resources = static_resources(kernels[-1])
        numbers = {name: round(value, 2) for name, value in asdict(cost).items()}
        return {
            "table": entry.table, "row": row.name, "head_dim": entry.dim, "dtype": entry.dtype,
            "triton": triton.__version__, "floor_tflops": round(cost.floor_tflops, 2),
            "cycles_per_unit": round(cost.cycles / cost.wmma * WMMA_OF_UNIT, 1), **numbers, **asdict(resources),
            "waves_per_simd": resources.waves_per_simd, "arch": ARCH.id, "level": "emulated, not run on hardware",
        }  # fmt: skip


if __name__ == "__main__":
    price_table.command(FILE, entries(), Pricing().price, SHOWN)
