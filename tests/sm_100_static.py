"""What every row of sm_100 costs by its machine code: the table benchmarks/results/sm_100-static.csv.

    PYTHONPATH=src:tests python tests/sm_100_static.py [--write]

compiles each row with the Triton that is installed, counts the instructions of its loops over blocks of keys, and
prices them (`simulators/sm_100`). Table `rows`: what runs, on sm_100. `ladder`: rung after rung, each with those before
it. `portable`: what would run without the backend's own kernel, of few tiles by roles. Priced, not run on hardware.
`--write` replaces the rows of this Triton in the file.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import price_table
import triton
from simulators import sm_100

from lazymax import arch as arches
from lazymax.backends import Tile, registry
from lazymax.compat import tritons
from lazymax.compiling import compile_plan
from lazymax.dispatch import plan
from lazymax.problem import Problem

FILE = Path(__file__).parent.parent / "benchmarks" / "results" / "sm_100-static.csv"
ARCH = arches.by_name("sm_100")
LEVEL = "priced, not run on hardware"
BANDS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": "bottom_right"}}
BASE = {
    "software": 0, "branch": False, "early": 128, "chunk": 64, "order": 0, "max3": False, "s_buffers": 2,
    "scheduler": "snake", "split": False,
}  # fmt: skip
# In the seed's order. What a rescale costs where it is jumped over is in rescale_fma_cycles and rescale_tmem_cycles.
RUNGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("exact rescale, MUFU alone, P at once", BASE),
    ("maxima of three", {"max3": True}),
    ("software exp2, 4 of 16", {"software": 4}),
    ("lazy rescale", {"branch": True}),
    ("split correction", {"split": True}),
    ("early PV, 96 of 128", {"early": 96, "chunk": 32}),
    ("chunks in order", {"order": 2}),
    ("software exp2, 6 of 16", {"software": 6}),
    ("three S buffers", {"s_buffers": 3}),
    ("P at once", {"early": 128}),
)
OF_64 = {"three S buffers", "P at once", "software exp2, 6 of 16"}


@dataclass(frozen=True)
class Entry:
    table: str
    name: str
    tile: Tile
    head_dim: int
    band: str
    lse: str = "no"  # "yes": it is stored, for which a row may compute more exactly

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """Of a line in the table, beside the Triton version."""
        return self.table, self.name, str(self.head_dim), self.band, self.lse

    @property
    def problem(self) -> Problem:
        exact = self.table == "ladder" and not getattr(self.tile, "branch", True)
        shape = (4, 32, 32, 4096, 4096, self.head_dim)
        threshold, lse = 0.0 if exact else None, self.lse == "yes"
        return Problem.from_shape(shape, "bf16", rescale_threshold=threshold, return_lse=lse, **BANDS[self.band])


def ladder(row: Any) -> dict[str, Any]:
    """The rows of the rungs, each with the changes of those before it; the last is `row`, but for its scheduler."""
    rungs = [rung for rung in RUNGS if row.head_dim == 64 or rung[0] not in OF_64]
    found, at = {}, row
    for number, (name, changes) in enumerate(rungs):
        at = replace(at, **changes)
        found[f"{number} {'+ ' if number else ''}{name}"] = at
    return found


def entries() -> list[Entry]:
    found = []
    table = registry()["sm_100"]
    own: list[Any] = [row for row in table.forward if type(row) is not Tile]
    for row in own:
        if row.outdated(ARCH) or ARCH.id not in (row.when.archs or (ARCH.id,)):
            continue
        bands = ("full",) if row.pair else BANDS
        found += [Entry("rows", row.name, row, row.head_dim, band, lse) for lse in ("no", "yes") for band in bands]
        if not row.pair:
            found += [Entry("ladder", name, rung, row.head_dim, "full") for name, rung in ladder(row).items()]
    for head_dim in (64, 128):
        large = Problem.from_shape((1, 1, 1, 4096, 4096, head_dim), "bf16")
        for roles in (False, True):
            fitting = (row for row in table.forward if type(row) is Tile and row.warp_specialize is roles)
            tile = next(row for row in fitting if row.when.refusal(large, ARCH, row.block_m) is None)
            bands = ("full",) if roles else BANDS  # with a band one Triton has none
            found += [Entry("portable", tile.name, tile, head_dim, band) for band in bands]
    return found


def compiled(entry: Entry) -> Any:
    tile = entry.tile
    faulty = tile.rescale == "branch" and tritons.branch_rescale_fault(ARCH.triton or "", ARCH.matrix_unit)
    chosen = replace(plan(entry.problem, ARCH, "sm_100"), tile=tile, rescale="select" if faulty else tile.rescale)
    return compile_plan(entry.problem, chosen, ARCH)


def texts(key: tuple[str, ...]) -> tuple[str, str]:
    """(PTX, SASS) of an entry."""
    kernel = compiled(next(entry for entry in entries() if entry.key == key))
    return kernel.asm["ptx"], sm_100.disassemble(kernel.asm["cubin"])


def estimates(entry: Entry, kernel: sm_100.Kernel, work: sm_100.Products) -> dict[str, Any]:
    """Of issue.py; empty for the portable rows, whose roles, if they have some, it does not know."""
    names = ("period", "period_low", "period_high", "answer", "period_full_rate", "share", "fitted_share")
    if entry.table == "portable":
        return dict.fromkeys(names, "")
    row: Any = entry.tile
    schedule = sm_100.Schedule(entry.head_dim, row.early, row.s_buffers, rescale=not row.branch)
    usual = sm_100.estimate(kernel, schedule)
    full = sm_100.estimate(kernel, schedule, [replace(of, tensor_share=1.0) for of in sm_100.VARIED])
    assert usual and full
    share = sm_100.share(usual.period, work)
    periods = map(round, (usual.period, usual.low, usual.high, usual.answer, full.period))
    return dict(zip(names, (*periods, round(share, 3), round(share * sm_100.CLOCK_SHARE, 3)), strict=True))


def price(entry: Entry) -> dict[str, Any]:
    """A line."""
    tile, built = entry.tile, compiled(entry)
    code = sm_100.disassemble(built.asm["cubin"])
    misread = sm_100.differences(built.asm["ptx"], sm_100.read(code))
    assert not misread, f"{entry.key}: instructions in PTX and read from the machine code: {misread}"
    ctas = getattr(tile, "ctas", 1)
    work = sm_100.Products(entry.head_dim, tile.block_m // ctas, tile.block_n, ctas)
    if tile.warp_specialize:  # without a mask and with one; a warp rescales 32 rows of 64 columns
        kernel = sm_100.kernel(code, correcting=entry.head_dim // 64, stretches=2)
    else:
        kernel = sm_100.kernel(code, split=getattr(tile, "split", True))
    cost = sm_100.price(kernel, work)
    numbers = {name: round(value, 1) for name, value in asdict(cost).items()}
    return {
        "table": entry.table, "row": entry.name, "head_dim": entry.head_dim, "band": entry.band, "lse": entry.lse,
        "dtype": "bf16",
        "triton": triton.__version__, **numbers, "shared_bytes": built.metadata.shared,
        "tmem_columns": built.metadata.tmem_size, "binds": cost.binds,
        "share_at_most": round(sm_100.share(cost.floor, work), 3), **estimates(entry, kernel, work),
        "arch": ARCH.id, "level": LEVEL,
    }  # fmt: skip


def prices(keys: list[tuple[str, ...]]) -> list[dict[str, Any]]:
    return [price(entry) for entry in entries() if entry.key in keys]


SHOWN = ("triton", "table", "row", "head_dim", "band", "lse", "instructions", "mufu", "packed", "spills",
         "tensor_cycles", "mufu_cycles", "issue_cycles", "binds", "period", "fitted_share")  # fmt: skip


if __name__ == "__main__":
    price_table.command(FILE, entries(), price, SHOWN)
