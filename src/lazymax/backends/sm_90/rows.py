"""What a row of this backend says, for the kernel on Hopper's warpgroup products. Pure Python."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...arch import Arch
from ...problem import Problem
from .. import HALF, Tile
from .work import WHOLE, Division, divide, duration, programs

if TYPE_CHECKING:
    from ...dispatch import Plan

SOFTCAPS = {"float16": 256.0, "bfloat16": 1024.0}  # above, 1e-7 of it would show beside the rounding of P
LEAST_QUERIES = 16  # in tiles of 128 rows: with 1 the portable rows took 0.83 of the time, with 16 the same
MAX_ROW_BLOCKS = 2**16  # a tile of the schedule is row block + 2**16 * (batch * q_heads + head), in 31 bits
MAX_HEADS = 2**15 - 1
MAX_TILES = 2**20  # the host makes the schedule, once for a problem: half a second for so many


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperTile(Tile):
    """A row of `forward.py`. block_m is 64 rows for each consumer warpgroup. num_stages: slots of the ring of K and V,
    a power of two. num_warps: of one warpgroup, not a choice."""

    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = 240  # of a thread of a consumer; 160 for three consumers
    descriptors: bool = True
    width: int  # of head dims of q and k the largest: 64, which is for 64 alone, 128, 192 or 256
    v_width: int | None = None  # of V and O, None: as wide; for head dims of v up to it
    ascending: bool = False  # under a right bound key blocks from the first to the last, not from the diagonal on
    keys_first: bool = False  # the K of a slot is given back, and loaded, before the V
    turns: bool = True  # consumers take turns in issuing their products
    skip: bool = False  # a consumer leaves out the blocks that none of its rows sees
    query_tiles: int = 1  # of each consumer in shared memory; with 2 the next tile's come early
    query_registers: bool = False  # Q in registers, not in shared memory; below Triton 3.7, see launch.keeps_queries
    pack_gqa: bool = False  # the heads of a group share tiles where queries are few, see work.py
    split: bool = False  # keys are split where tiles are few
    block_time: float  # microseconds that a tile takes for a block of keys; of an H200, sequences of 1K to 2K
    rival: "HopperTile | None" = None  # a row that takes the same problems; the one with the shorter estimate does

    @property
    def warpgroups(self) -> int:
        """Consumers."""
        return self.block_m // 64

    @property
    def name(self) -> str:
        words = {"q": self.query_registers, "k": self.keys_first, "up": self.ascending, "turns": self.turns}
        words |= {"skip": self.skip, "q2": self.query_tiles == 2, "pack": self.pack_gqa, "split": self.split}
        said = [f"{self.block_m}x{self.block_n}", f"s{self.num_stages}", *(word for word, on in words.items() if on)]
        return "-".join(("ws", *said))

    def division(self, problem: Problem, multiprocessors: int) -> Division:
        """How many heads share a tile of the problem, and how many splits its keys have."""
        return divide(problem, self, multiprocessors)

    def describe(self, rescale: str) -> str:
        return (
            f"{self.block_m} queries x {self.block_n} keys, {self.warpgroups} consumer warpgroups"
            f"{' in turns' if self.turns else ''} and a producer warp, {self.num_stages} slots of K and V"
            f"{', K given back first' if self.keys_first else ''}"
            f"{', keys in ascending order under a right bound' if self.ascending else ''}, "
            f"Q in {'registers' if self.query_registers else 'shared memory'}, rescale only where a row needs it, in "
            "bf16 by its sum alone"
        )

    def describe_for(self, problem: Problem, arch: Arch) -> str | None:
        heads, splits = division = self.division(problem, arch.multiprocessors)
        said = [f"the {problem.group} heads of a group in one tile"] if heads > 1 else []
        said += [f"keys in up to {splits} splits, then joined"] if splits > 1 else []
        return f"{', '.join(said)}: {programs(problem, self, division)} programs" if said else None

    def refusal(self, problem: Problem, arch: Arch) -> str | None:
        return self.inability(problem, arch) or self._too_small(problem, arch)

    def inability(self, problem: Problem, arch: Arch) -> str | None:
        """Why the kernel cannot take it, however fast it would be, or None."""
        p = problem
        if p.mask or p.mask_mod or p.score_mod or p.alibi or p.dropout_p:
            return "takes no mask, mod, ALiBi or dropout"
        if p.dtype not in HALF:
            return f"for {' and '.join(HALF)}, got {p.dtype}"
        if p.softcap > SOFTCAPS[p.dtype]:
            return f"takes a softcap of {SOFTCAPS[p.dtype]:g} at most in {p.dtype}, got {p.softcap:g}"
        if not self._fits(p.head_dim, p.v_head_dim):
            return f"for head dims {self._head_dims}, got {p.head_dim} and {p.v_head_dim} of v"
        if arch.matrix_unit != "wgmma" or not arch.descriptors:
            return f"needs warpgroup products and tensor descriptors, {arch.id} has not both"
        if p.descriptor_refusal:
            return f"needs tensor descriptors: {p.descriptor_refusal}"
        return self._too_large(p)

    def _too_small(self, p: Problem, arch: Arch) -> str | None:
        division = self.division(p, arch.multiprocessors)
        if division == WHOLE and p.q_len < LEAST_QUERIES:
            return f"for {LEAST_QUERIES} queries and more, unless heads share tiles or keys are split, got {p.q_len}"
        if self.rival and division == WHOLE:
            own, other = (duration(p, row, arch.multiprocessors) for row in (self, self.rival))
            if own >= other:
                return f"estimated at {own:.3g} us, tiles of {self.rival.block_m} queries at {other:.3g}"
        return self.when.refusal(p, arch, self.block_m, programs(p, self, division))

    def _fits(self, dim: int, v_dim: int) -> bool:
        widest = self.v_width or self.width
        return dim % 8 == v_dim % 8 == 0 and self._least <= dim <= self.width and 64 <= v_dim <= widest

    @property
    def _least(self) -> int:
        """The least head dim: from there on tiles of half the columns are too small."""
        return {64: 64, 128: 72, 192: 136, 256: 136}[self.width]

    @property
    def _head_dims(self) -> str:
        own = "64" if self.width == 64 else f"{self._least} to {self.width}"
        return f"{own} with 64 to {self.v_width or self.width} of v, multiples of 8"

    def _too_large(self, p: Problem) -> str | None:
        row_blocks, heads = p.slots(self.block_m), p.batch * p.q_heads
        if p.ragged:  # the schedule is made on the device, see schedule.py
            row_blocks, heads = p.q_tiles(self.block_m), p.q_heads
        if row_blocks > MAX_ROW_BLOCKS:
            return f"takes {MAX_ROW_BLOCKS * self.block_m} queries at most, got {p.q_len}"
        if heads > MAX_HEADS:
            return f"takes {MAX_HEADS} query heads in a batch at most, got {heads}"
        if row_blocks * heads > MAX_TILES:
            return f"takes {MAX_TILES} tiles of {self.block_m} queries at most, got {row_blocks * heads}"
        return None

    def prepare(self, problem: Problem, plan: "Plan") -> Any:
        from ...kernels.tma import multiprocessors
        from .launch import USUAL, HopperLaunch

        return HopperLaunch.of_forward(problem, self, self.division(problem, multiprocessors(USUAL)))
