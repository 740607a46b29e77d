"""What a row for the backward says, for the kernel on Hopper's warpgroup products. Pure Python."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...arch import Arch
from ...problem import Problem
from .. import HALF, BackwardTile, Half

if TYPE_CHECKING:
    from ...dispatch_backward import BackwardPlan

KEYS = 128  # of a CTA
FINISH = Half(block_m=64, block_n=KEYS, num_warps=4, num_stages=1)
MAX_QUERIES = 2**21 - 128  # with whole tiles still within the grid of gradients.prepare
MAX_TILES = 2**31 // 8  # rows of the statistics' descriptor, which has four planes of them


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperBackwardTile(BackwardTile):
    """A row of `kernels/backward.py`. keys: of that kernel, block_m queries of a tile, num_stages slots of Q (a power
    of two). queries: of the kernel that makes dQ of its sum. num_warps: of one warpgroup, not a choice."""

    queries: Half = FINISH
    descriptors: bool = True
    deterministic: bool = False
    width: int  # of the tiles of q, k, v and their gradients: 64 or 128; head dims above half of it up to it
    pipelined: bool = False  # the next tile's scores while dQ is added
    finishes: bool = False  # a warp makes dQ of earlier CTAs' sums, in the place of passes over memory
    most_queries: int = MAX_QUERIES

    @property
    def name(self) -> str:
        words = [word for word, on in (("pipelined", self.pipelined), ("finishes", self.finishes)) if on]
        return "-".join(("ws", f"{self.keys.block_m}x{KEYS}", f"s{self.keys.num_stages}", *words))

    def describe(self) -> str:
        """One line for `explain`."""
        return (
            f"all gradients in one kernel: {self.keys.block_m} queries x {KEYS} keys, two consumer warpgroups and a "
            f"producer warp, {self.keys.num_stages} slots of Q"
            f"{', scores of the next tile while dQ is added' if self.pipelined else ''}; dQ summed in memory by atomics"
            f"{', finished by later CTAs' if self.finishes else ''}"
        )

    def prepare(self, problem: Problem, plan: "BackwardPlan") -> Any:
        from .backward_launch import HopperBackwardLaunch

        return HopperBackwardLaunch.prepare(problem, self, plan)

    def refusal(self, problem: Problem, arch: Arch) -> str | None:
        return self._inability(problem, arch) or BackwardTile.refusal(self, problem, arch)

    def _inability(self, p: Problem, arch: Arch) -> str | None:
        """Why the kernel cannot take it, or None."""
        if p.mask or p.mask_mod or p.score_mod or p.alibi or p.dropout_p or p.softcap:
            return "takes no mask, mod, ALiBi, softcap or dropout"
        if p.ragged:
            return "takes no lengths in device memory"
        if p.dtype not in HALF:
            return f"for {' and '.join(HALF)}, got {p.dtype}"
        widest = max(p.head_dim, p.v_head_dim)
        if not (self.width // 2 < widest <= self.width and p.head_dim % 8 == p.v_head_dim % 8 == 0):
            given = f"{p.head_dim} and {p.v_head_dim} of v"
            return f"for head dims from {self.width // 2 + 8} to {self.width}, multiples of 8, got {given}"
        if arch.matrix_unit != "wgmma" or not arch.descriptors:
            return f"needs warpgroup products and tensor descriptors, {arch.id} has not both"
        if p.q_len > self.most_queries:
            return f"takes {self.most_queries} queries at most, got {p.q_len}"
        tiles = p.q_heads * p.q_tiles(self.keys.block_m)
        if tiles > MAX_TILES:
            return f"takes {MAX_TILES} tiles of {self.keys.block_m} queries at most, got {tiles}"
        return None
