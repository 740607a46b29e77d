"""Backends: one folder per GPU family, and the folder name is the registry.

`backends/<name>/tiles.py` holds a `BACKEND`: which archs it is for, at which level it was proved, and its table of
tiles. To add a GPU, add a folder (docs/adding-an-arch.md). Rows are tried from the top, the first that fits wins, and
the last row has no condition. A row is for the portable kernel, or, as a subclass of `Tile`, for the folder's own.
`VARIANTS` beside `BACKEND` holds more tables by name, which run when asked for by name: impl="<folder>-<name>".
"""

import functools
import importlib
import pkgutil
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..arch import Arch
from ..compat.tritons import release
from ..problem import Problem

if TYPE_CHECKING:
    from ..dispatch import Plan
    from ..dispatch_backward import BackwardPlan

HALF = ("float16", "bfloat16")
USUAL_HEAD_DIM = 256  # larger ones are for rows that say so: the tiles of the others would not fit
LARGEST_HEAD_DIM = 576  # that any row takes
MAX_Q_TILES = 65535  # the second dimension of a grid, on CUDA and HIP


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """The condition of a row; None is no condition."""

    max_head_dim: int | None = None  # of the larger of D and D_v, in elements; None: USUAL_HEAD_DIM
    max_v_head_dim: int | None = None
    head_dims: tuple[int, ...] | None = None  # D, which is D_v too: one of these
    dtypes: tuple[str, ...] | None = None
    causal: bool | None = None  # the band has a right bound
    window: bool | None = None  # the band has a left bound
    plain: bool | None = None  # see `Problem.plain`: nothing but a band and a length
    ragged: bool | None = None  # lengths are in device memory: seqlens_k or packed sequences
    mask_rows: bool | None = None  # attn_mask differs from query to query
    min_programs: float | None = None  # programs of this row's size per multiprocessor
    min_keys: int | None = None  # that a query can see, see `Problem.reach`
    archs: tuple[str, ...] | None = None  # some of the table's

    def refusal(self, problem: Problem, arch: Arch, block_m: int, programs: int | None = None) -> str | None:
        """Why the problem does not meet the condition, or None. programs: of a row that divides problems its own way;
        None: one for each query tile of every head."""
        if self.archs is not None and arch.id not in self.archs:
            return f"for {' and '.join(self.archs)}, this is {arch.id}"
        head_dim = max(problem.head_dim, problem.v_head_dim)
        limit = self.max_head_dim or USUAL_HEAD_DIM
        if head_dim > limit:
            return f"for head dims to {limit}, got {head_dim}"
        if self.max_v_head_dim is not None and problem.v_head_dim > self.max_v_head_dim:
            return f"for head dims of v to {self.max_v_head_dim}, got {problem.v_head_dim}"
        if self.head_dims is not None and (problem.head_dim not in self.head_dims or head_dim != problem.v_head_dim):
            given = f"{problem.head_dim}" + (f", {problem.v_head_dim} of v" if head_dim != problem.v_head_dim else "")
            return f"for head dims {', '.join(map(str, self.head_dims))}, got {given}"
        if self.dtypes is not None and problem.dtype not in self.dtypes:
            return f"for {' and '.join(self.dtypes)}, got {problem.dtype}"
        if self.causal is not None and self.causal != (problem.last_offset is not None):
            return "for causal problems" if self.causal else "for problems without a right bound"
        if self.window is not None and self.window != (problem.first_offset is not None):
            return "for windows" if self.window else "for problems without a left bound"
        if self.plain is not None and self.plain != problem.plain:
            return "for problems without masks, mods and the like" if self.plain else "for masks, mods and the like"
        if self.mask_rows is not None and self.mask_rows != problem.mask_rows:
            return f"for masks that {'differ over' if self.mask_rows else 'are the same for all'} queries"
        if self.ragged is not None and self.ragged != problem.ragged:
            return "for lengths that differ over the batch" if self.ragged else "for one length of all of the batch"
        if self.min_keys is not None and problem.reach < self.min_keys:
            return f"for {self.min_keys} keys of a query and more, got {problem.reach}"
        if programs is None:
            programs = problem.q_tiles(block_m) * problem.q_heads
        if self.min_programs is not None and programs < self.min_programs * arch.multiprocessors:
            return f"for {self.min_programs:g} programs per multiprocessor and more, got {programs} in all"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One row of a tile table: how the kernel is built, and where the numbers come from. The portable kernel; a backend
    with a kernel of its own derives from it."""

    block_m: int  # query rows of a program
    block_n: int  # keys of a block
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread, so that more programs share a multiprocessor (NVIDIA only)
    descriptors: bool = False  # q, k and v through tensor descriptors (TMA)
    rescale: str = "select"  # form of the lazy rescale: "select" or "branch", see kernels/softmax.py
    warp_specialize: bool = False  # Triton gives loads, products, softmax and rescale of a loop warps of their own
    since: tuple[int, ...] = ()  # the first Triton that can build it, of those that are supported
    before: tuple[int, ...] = ()  # the first that builds it worse, or was not tried
    when: When = field(default_factory=When)
    tuned: bool = False  # chosen by measurement or search on this GPU: may not spill
    reason: str  # why these numbers
    provenance: str  # device, date and Triton version of the measurement, or "compiled only, not run"
    level: str | None = None  # how far it was proved, where that is less than its table's level

    @property
    def name(self) -> str:
        loads = "tma" if self.descriptors else "ptr"
        registers = f"-r{self.max_registers}" if self.max_registers else ""
        roles = "-ws" if self.warp_specialize else ""
        warps = f"w{self.num_warps}-s{self.num_stages}{registers}{roles}"
        return f"{self.block_m}x{self.block_n}-{warps}-{loads}-{self.rescale}"

    def describe(self, rescale: str) -> str:
        """One line for `explain`. rescale: the form in use."""
        warps = f"{self.num_warps} warps"
        if self.warp_specialize:
            warps += " and those of other roles, parted by Triton (warp_specialize)"
        return (
            f"{self.block_m} queries x {self.block_n} keys, {warps}, {self.num_stages} stages, "
            f"loads by {'descriptor' if self.descriptors else 'pointer'}, rescale by {rescale}"
        )

    def describe_for(self, problem: Problem, arch: Arch) -> str | None:
        """A second line, where the row does something of its own with this problem."""
        return None

    def prepare(self, problem: Problem, plan: "Plan") -> Any:
        """The kernel of this row, ready to be called: see `kernels.launch.ForwardLaunch`. Imports Triton."""
        from ..kernels.launch import ForwardLaunch

        return ForwardLaunch.prepare(problem, plan)

    def outdated(self, arch: Arch) -> str | None:
        """Why the row is not for the Triton at hand, or None."""
        return outdated_on(self.since, arch, self.before)

    def refusal(self, problem: Problem, arch: Arch) -> str | None:
        """Why this row cannot take the problem on this GPU, or None."""
        if outdated := self.outdated(arch):
            return outdated
        if problem.slots(self.block_m) > MAX_Q_TILES:
            rows = problem.packed[0] if problem.packed else problem.q_len
            return f"takes {MAX_Q_TILES * self.block_m} queries at most, got {rows}"
        if self.descriptors and not arch.descriptors:
            return f"needs tensor descriptors, {arch.id} has none"
        if self.descriptors and problem.descriptor_refusal:
            return f"needs tensor descriptors: {problem.descriptor_refusal}"
        return self.when.refusal(problem, arch, self.block_m)


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """How one of the two main kernels of the backward is built."""

    block_m: int  # query rows of a tile
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    # K and V (for dQ: Q and dO) come anew for each tile that a program walks instead of staying in registers, and every
    # operand comes piece by piece when its product is due. Not with descriptors.
    reload: bool = False
    columns: int | None = None  # of a piece of the head dimension at most. Not with descriptors
    one_loop: bool = False  # of dK and dV: the tiles of all heads of a group in one loop, as with `reload`
    licm: bool = True  # False: loop-invariant code stays in the loops over tiles, and takes no registers through them
    separate: bool = False  # dK and dV in a launch each: five products for four, but half of the sums in registers

    @property
    def name(self) -> str:
        more = f"-r{self.max_registers}" if self.max_registers else ""
        more += "-reload" if self.reload else ""
        more += f"-c{self.columns}" if self.columns else ""
        more += "-oneloop" if self.one_loop else ""
        more += "" if self.licm else "-nolicm"
        more += "-separate" if self.separate else ""
        return f"{self.block_m}x{self.block_n}-w{self.num_warps}-s{self.num_stages}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTile:
    """One row of a table for the backward. The portable kernels; a backend with kernels of its own derives from it."""

    keys: Half  # of dK and dV: block_n keys of a program
    queries: Half  # of dQ: block_m queries of a program
    mask: Half | None = None  # of a float mask's gradient, loads by pointers; None: the tiles of dQ, one stage
    descriptors: bool = False  # q, k, v and the gradient of the output through tensor descriptors (TMA)
    deterministic: bool = True  # the same bits from run to run
    since: tuple[int, ...] = ()
    when: When = field(default_factory=When)
    tuned: bool = False
    reason: str
    provenance: str

    @property
    def name(self) -> str:
        return f"dkdv-{self.keys.name}-dq-{self.queries.name}-{'tma' if self.descriptors else 'ptr'}"

    def describe(self) -> str:
        """One line for `explain`."""
        of_keys = "dK and dV, in a launch each," if self.keys.separate else "dK and dV"
        halves = (
            f"{what} {half.block_m} queries x {half.block_n} keys, {half.num_warps} warps, {half.num_stages} stages"
            for what, half in ((of_keys, self.keys), ("dQ", self.queries))
        )
        return f"{'; '.join(halves)}; loads by {'descriptor' if self.descriptors else 'pointer'}"

    def prepare(self, problem: Problem, plan: "BackwardPlan") -> Any:
        """The kernels of this row, ready to be called: see `kernels.backward_launch`. Imports Triton."""
        from ..kernels.backward_launch import BackwardLaunch

        return BackwardLaunch.prepare(problem, plan)

    def refusal(self, problem: Problem, arch: Arch) -> str | None:
        """Why this row cannot take the problem on this GPU, or None."""
        if outdated := outdated_on(self.since, arch):
            return outdated
        if problem.deterministic and not self.deterministic:
            return "adds up in the order in which programs finish, and the same bits were asked for"
        if self.descriptors and not arch.descriptors:
            return f"needs tensor descriptors, {arch.id} has none"
        if self.descriptors and problem.descriptor_refusal:
            return f"needs tensor descriptors: {problem.descriptor_refusal}"
        programs = problem.slots(self.keys.block_n, of_keys=True) * problem.kv_heads
        programs *= 1 if problem.packed else problem.batch
        return self.when.refusal(problem, arch, self.queries.block_m, programs)


def outdated_on(since: tuple[int, ...], arch: Arch, before: tuple[int, ...] = ()) -> str | None:
    """Why a row is not for the Triton at hand, or None."""
    version = release(arch.triton or "0")
    if since and version < since:
        return f"for Triton {'.'.join(map(str, since))} and newer, this is {arch.triton or 'none'}"
    if before and version >= before:
        return f"for Triton older than {'.'.join(map(str, before))}, this is {arch.triton}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A GPU family's table. `archs` empty: any GPU."""

    archs: tuple[str, ...]
    level: str  # the strongest proof so far: "run on H200", "emulated, not run on hardware", "compiled only, not run"
    forward: tuple[Tile, ...]
    levels: tuple[tuple[str, str], ...] = ()  # of archs on which it was proved further: (id, level)
    alternatives: tuple[Tile, ...] = ()  # rows that only a sweep on the GPU can judge: `lazymax bench --rows all`
    backward: tuple[BackwardTile, ...] = ()  # empty: the portable backend's rows serve
    backward_level: str = "interpreted and compiled, not run on a GPU"
    backward_alternatives: tuple[BackwardTile, ...] = ()
    automatic: bool = True  # taken by impl="auto"; else only by name

    def serves(self, arch: Arch) -> bool:
        """Whether the table is for this GPU."""
        return not self.archs or arch.id in self.archs

    def level_on(self, arch: Arch) -> str:
        """The level of the claim on one arch."""
        return dict(self.levels).get(arch.id, self.level)


@functools.cache
def registry() -> dict[str, Backend]:
    """All backends by folder name, each followed by its variants, `portable` last. A broken folder is left out with one
    warning: its GPU then runs on the portable rows instead of not at all."""
    found: dict[str, Backend] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: (m.name == "portable", m.name)):
        try:
            tiles = importlib.import_module(f"{__name__}.{module.name}.tiles")
            variants = getattr(tiles, "VARIANTS", {})
            tables = {module.name: tiles.BACKEND} | {f"{module.name}-{name}": table for name, table in variants.items()}
            for backend in tables.values():
                if not isinstance(backend, Backend):
                    raise TypeError(f"BACKEND: got {type(backend).__name__}, expected a Backend")
                if not backend.forward:
                    raise ValueError("BACKEND: got no rows, expected one without a condition at least")
            found |= tables
        except Exception as error:
            warnings.warn(f"lazymax: backend {module.name} left out: {type(error).__name__}: {error}", stacklevel=2)
    return found
