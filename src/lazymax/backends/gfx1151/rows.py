"""What a row of this backend says, for kernels on RDNA 3's WMMA (gfx11). Pure Python."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...arch import Arch
from ...problem import Problem
from .. import MAX_Q_TILES, Tile

if TYPE_CHECKING:
    from ...dispatch import Plan

MAX_BATCH = 65535  # the third dimension of a grid
MAX_ROWS = 2**31 - 512  # positions times query heads of a key head: they are counted in 32 bits


def refusal(problem: Problem) -> str | None:
    """Why no kernel of this backend takes the problem, or None."""
    if not problem.plain or problem.ragged:
        return "for a band and a length alone: no mask, softcap, ALiBi, sinks, mods, dropout or lengths per sequence"
    if problem.wide:
        return "for rows less than 2**23 elements apart"
    if problem.batch > MAX_BATCH:
        return f"for batches to {MAX_BATCH}, got {problem.batch}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WmmaTile(Tile):
    """A row of `forward.py`. block_m counts rows of a key head: positions times its query heads. num_warps are waves,
    each with block_m / waves rows. num_stages is not used."""

    num_stages: int = 1
    lazy: bool = True  # the rescale is jumped over where no row needs it
    query_lds: bool = False  # Q stays in LDS, not in registers
    prefetch: bool = False  # the next block of keys is under way while this one is used
    priority: bool = False  # waves in the softmax yield to those in their products
    fragments: bool = False  # V comes in fragment order, see fragments.py
    value_lds: bool = True  # V goes through LDS; without, every wave reads its fragments (fragments only)
    assembly: bool = True  # with inline assembly, see assembly.py

    @property
    def name(self) -> str:
        words = {
            "q": self.query_lds, "prefetch": self.prefetch, "prio": self.priority, "vf": self.fragments,
            "vmem": not self.value_lds, "always": not self.lazy and self.assembly, "noasm": not self.assembly,
        }  # fmt: skip
        said = [f"{self.block_m}x{self.block_n}", f"w{self.num_warps}", *(word for word, on in words.items() if on)]
        return "-".join(said)

    def describe(self, rescale: str) -> str:
        return (
            f"{self.block_m} rows (positions times query heads of a key head) x {self.block_n} keys, {self.num_warps} "
            f"waves, Q in {'LDS' if self.query_lds else 'registers'}, V "
            f"{'in fragment order' if self.fragments else 'by rows'} "
            f"{'through LDS' if self.value_lds else 'from memory'}, "
            f"rescale {'only where a row needs it' if self.lazy else 'always'}"
            + ("" if self.assembly else ", no inline assembly")
        )

    def programs(self, problem: Problem) -> int:
        """Workgroups side by side."""
        return -(-problem.q_len * problem.group // self.block_m)

    def refusal(self, problem: Problem, arch: Arch) -> str | None:
        refused = refusal(problem)
        if refused:
            return refused
        if self.programs(problem) > MAX_Q_TILES or problem.q_len * problem.group > MAX_ROWS:
            return f"takes {min(MAX_Q_TILES * self.block_m, MAX_ROWS)} rows of a key head at most"
        return self.when.refusal(problem, arch, self.block_m)

    def prepare(self, problem: Problem, plan: "Plan") -> Any:
        from .launch import WmmaLaunch

        return WmmaLaunch.of_forward(problem, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinglewaveTile(Tile):
    """A row of `singlewave.py`: one wave, 16 queries of one head, 16 keys."""

    block_m: int = 16
    block_n: int = 16
    num_warps: int = 1
    num_stages: int = 1
    pipelined: bool = False  # the product of the next keys is under way during the softmax

    @property
    def name(self) -> str:
        return "16x16-w1" + ("-pipelined" if self.pipelined else "")

    def describe(self, rescale: str) -> str:
        return "16 queries x 16 keys, 1 wave, V gathered" + (", pipelined" if self.pipelined else "")

    def refusal(self, problem: Problem, arch: Arch) -> str | None:
        refused = refusal(problem)
        if refused:
            return refused
        if -(-problem.q_len // 16) > MAX_Q_TILES:
            return f"takes {MAX_Q_TILES * 16} queries at most, got {problem.q_len}"
        return self.when.refusal(problem, arch, self.block_m)

    def prepare(self, problem: Problem, plan: "Plan") -> Any:
        from .launch import WmmaLaunch

        return WmmaLaunch.of_singlewave(problem, self.pipelined)
