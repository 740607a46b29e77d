"""What a row of this backend says, for the kernel on Blackwell's tensor memory. Pure Python."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...arch import Arch
from ...compat.tritons import FLOOR, has_clc
from ...problem import Problem
from .. import HALF, Tile

if TYPE_CHECKING:
    from ...dispatch import Plan

LEAST_QUERIES = 129  # fewer leave one of the two Q tiles empty
MOST_IDLE = 32  # of the tiles of 256 rows of a head, one may lie past its end where pairs take two at a time
MAX_TILES = 2**22  # numbers of tiles, and rounds of CTAs, stay in 31 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class BlackwellTile(Tile):
    """A row of `forward.py`, whose `Config` says what the rungs are. block_m is two Q tiles of 128 rows, of 256 where a
    pair of CTAs has it, block_n 128. num_stages: slots of the ring of K and V. num_warps: of one role, not a choice."""

    block_m: int = 256
    block_n: int = 128
    num_warps: int = 4
    max_registers: int | None = 192  # of a thread of the softmax
    descriptors: bool = True
    head_dim: int  # 64 or 128, of v too
    s_buffers: int = 2
    software: int  # columns of every 16 whose exp2 is on the FMA pipe
    degree: int = 3
    early: int = 128
    chunk: int = 32
    order: int = 2
    max3: bool = True
    reads: int = 1
    branch: bool = True
    split: bool = True
    scheduler: str = "clc"  # of tiles of unequal length: "clc", which below Triton 3.9 is "counter", or "snake"

    @property
    def pair(self) -> bool:
        """Two CTAs work on a tile, each with half of K and V in its shared memory."""
        return self.block_m == 512

    @property
    def ctas(self) -> int:
        """Of a program."""
        return 2 if self.pair else 1

    @property
    def name(self) -> str:
        words = {f"early{self.early}": self.early < 128, f"exp{self.software}": True, f"d{self.degree}": self.software}
        words |= {f"o{self.order}": True, f"r{self.reads}": self.reads > 1}
        words |= {"max2": not self.max3, "always": not self.branch, "unsplit": not self.split}
        words |= {self.scheduler: self.scheduler != "clc"}
        said = [f"{self.block_m}x{self.head_dim}", f"s{self.num_stages}", f"b{self.s_buffers}"]
        return "-".join(("tmem", *said, *(word for word, on in words.items() if on)))

    def describe(self, rescale: str) -> str:
        share = f"{self.software} of 16 exponentials on the FMA pipe" if self.software else "exponentials on the MUFU"
        pair = "two CTAs for a tile, " if self.pair else ""
        return (
            f"{self.block_m} queries x {self.block_n} keys, {pair}a role for every group of warps, "
            f"{self.s_buffers} buffers of scores, {self.num_stages} slots of K and V, {share}, "
            "rescale only where a row needs it"
        )

    def draws(self, problem: Problem, version: str) -> str:
        """Who deals the tiles, under a Triton of this version. Equal ones need nobody."""
        if (problem.first_offset, problem.last_offset) == (None, None):
            return "snake"
        return "counter" if self.scheduler == "clc" and not has_clc(version) else self.scheduler

    def describe_for(self, problem: Problem, arch: Arch) -> str | None:
        return {
            "snake": None,
            "counter": "tiles of unequal length are drawn from a counter in memory",
            "clc": "tiles of unequal length are drawn from the grid, by cluster launch control",
        }[self.draws(problem, arch.triton or FLOOR)]

    def refusal(self, problem: Problem, arch: Arch) -> str | None:
        return self.inability(problem, arch) or self._too_small(problem, arch)

    def inability(self, problem: Problem, arch: Arch) -> str | None:
        """Why the kernel cannot take it, however fast it would be, or None."""
        p = problem
        if arch.matrix_unit != "tcgen05" or not arch.descriptors:
            return f"needs tensor memory and tensor descriptors, {arch.id} has not both"
        if outdated := self.outdated(arch):
            return outdated
        if self.pair and (p.first_offset, p.last_offset) != (None, None):
            return "for full bands"
        if p.mask or p.mask_mod or p.score_mod or p.alibi or p.dropout_p:
            return "takes no mask, mod, ALiBi or dropout"
        if p.softcap or p.sinks:
            return "takes no softcap and no sinks"
        if p.ragged:
            return "takes no lengths that differ over the batch"
        if p.dtype not in HALF:
            return f"for {' and '.join(HALF)}, got {p.dtype}"
        if (p.head_dim, p.v_head_dim) != (self.head_dim, self.head_dim):
            return f"for head dim {self.head_dim}, of v too, got {p.head_dim} and {p.v_head_dim} of v"
        if p.descriptor_refusal:
            return f"needs tensor descriptors: {p.descriptor_refusal}"
        tiles = p.q_tiles(self.block_m) * p.q_heads
        if tiles > MAX_TILES:
            return f"takes {MAX_TILES} tiles of {self.block_m} queries at most, got {tiles}"
        return None

    def _too_small(self, p: Problem, arch: Arch) -> str | None:
        if p.q_len < LEAST_QUERIES:
            return f"for {LEAST_QUERIES} queries and more, got {p.q_len}"
        tiles = -(-p.q_len // 256)
        if self.pair and tiles % 2 and tiles < MOST_IDLE:
            return f"takes 512 queries at a time, {p.q_len} would leave half of the last idle"
        return self.when.refusal(p, arch, self.block_m)

    def prepare(self, problem: Problem, plan: "Plan") -> Any:
        from .launch import BlackwellLaunch

        return BlackwellLaunch.of_forward(problem, self)
