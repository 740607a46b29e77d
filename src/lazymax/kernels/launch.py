"""From a problem and a tile row to the arguments of the portable kernel, for a launch or a compile without a GPU."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import mods
from ..compat import tritons
from ..dispatch import Plan
from ..extras import NO_EXTRAS, Extras
from ..problem import Problem
from . import blocks
from .forward import Config, attention_forward
from .memory import View
from .scores import Modifiers
from .sequences import Lengths

MAX_GRID = 65535  # of the second and third dimension of a grid, on CUDA and HIP
LOG2E = 1.4426950408889634
# Above, 6e-8 of the softcap, the error of the short tanh, would show beside the rounding of a probability.
LARGE_CAP = {"float32": 0.0, "float16": 1024.0, "bfloat16": 4096.0}
LARGE_CAP_LSE = 16.0  # ... beside the rounding of an fp32 LSE
LEAST_TAIL = 16  # columns, of any matrix instruction
NO_SOFTCAP = 2.0**100  # from here on a softcap changes no bit of an fp32 score
TINY_SCALE = 2.0**-126  # for a scale of 0: its products with scores vanish, but -inf (masked) stays -inf


def pieces(dim: int, least: int, least_tail: int = LEAST_TAIL) -> tuple[tuple[int, int], ...]:
    """(first column, columns) of the tiles that hold `dim` columns. Tile shapes are powers of two, the first of at
    least `least`; two where that multiplies less than one would: 96 = 64 + 32, 80 = 64 + 16, 192 = 128 + 64."""
    whole = max(least, triton.next_power_of_2(dim))
    main = whole // 2
    tail = max(least_tail, triton.next_power_of_2(max(1, dim - main)))
    return ((0, whole),) if main < least or main + tail >= whole else ((0, main), (main, tail))


def narrowed(whole: tuple[tuple[int, int], ...], columns: int | None) -> tuple[tuple[int, int], ...]:
    """The pieces in ones of so many columns at most, a power of two."""
    if columns is None:
        return whole
    return tuple((at, min(n, columns)) for first, n in whole for at in range(first, first + n, columns))


def view_strides(t: torch.Tensor, dims: int = 3) -> tuple[int, ...]:
    """Strides of the first dimensions, for a `View`. Those of size 1 are free; 0 keeps them from making another
    build."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(t.shape[:dims], t.stride()[:dims], strict=True))


def describe(t: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Descriptor whose blocks are `rows` x `cols` of one head. Dimensions of size 1 get a stride that the hardware
    accepts (it is never used)."""
    strides = [s if n > 1 else 16 for n, s in zip(t.shape[:3], t.stride()[:3], strict=True)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], [1, 1, rows, cols])


def rebased(descriptor: Any, t: torch.Tensor) -> Any:
    """The same of another tensor of that shape, strides and alignment, past the checks of the constructor: 0.4 us
    instead of 3.6. A new object, for calls may come from several threads."""
    copy = object.__new__(type(descriptor))
    copy.__dict__.update(descriptor.__dict__)
    copy.base = t
    return copy


def rebaser(descriptor: Any) -> Callable[[Any], Any]:
    """`rebased` for a launcher, which only reads it: a class that holds all but the base. 0.1 us for 0.3."""
    of = type(descriptor)

    def begin(self: Any, base: Any) -> None:
        self.base = base

    own = {name: value for name, value in vars(descriptor).items() if name != "base"}
    return type(of.__name__, (of,), {**own, "__init__": begin})


class Address(int):
    """Of device memory, where a descriptor wants a tensor."""

    def data_ptr(self) -> int:
        return self


def leaves(*values: Any) -> tuple[Any, ...]:
    """In the place of a NamedTuple, for a launcher."""
    return values


def views(tensors: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]]) -> list[View]:
    """strides: as `view_strides` gives them."""
    return [View(t, *steps) for t, steps in zip(tensors, strides, strict=True)]


def plain_views(tensors: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For a launcher."""
    return [(t.data_ptr(), *steps) for t, steps in zip(tensors, strides, strict=True)]


def plain(value: Any) -> Any:
    """Without the names of NamedTuples, which a launcher does not need: that of Triton 3.6 takes their elements one by
    one through Python's `__getitem__`. 3.4 of the 5.3 us of a kernel with 120."""
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def is_build_failure(error: Exception) -> bool:
    """Whether the kernel could not be built for this GPU, as opposed to a fault while it ran."""
    return isinstance(error, OutOfResources | PTXASError | CompilationError) or "PassManager" in str(error)


def positive_scale(problem: Problem) -> float:
    """|scale| * log2(e), which the kernels multiply raw scores with; never 0."""
    return max(abs(problem.scale) * LOG2E, TINY_SCALE)


def launcher(built: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """What `built[grid]` is, 1.4 of 3.4 us shorter: it asks for the stream alone, and calls no hooks where there are
    none. Takes tuples for NamedTuples and addresses for tensors, which saves more. Inductor launches like it."""
    usual = built[grid]  # loads the binary, too
    launch, function, metadata = built.run, built.function, built.packed_metadata
    stream, device, runtime = driver.active.get_current_stream, driver.active.get_current_device(), knobs.runtime

    def run(*arguments: Any) -> None:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains, functions or None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            usual(*arguments)
        else:
            launch(*grid, stream(device), function, metadata, None, None, None, *arguments)

    return run


def run(kernel: Any, grid: tuple[int, int, int], binary: Any, arguments: tuple[Any, ...], **options: Any) -> Any:
    """Launch a kernel: the first time (binary None) through Triton's JIT, then the binary that it made. Returns the
    binary for the next call, None where there is none (the interpreter and the simulators make none)."""
    if binary is not None:
        binary(*arguments)
        return binary
    built = kernel[grid](*arguments, **options)
    return launcher(built, grid) if built is not None else None


def start(launch: Any, arguments: tuple[Any, ...]) -> None:
    """`run` with what a launch object keeps."""
    launch.binary = run(launch.kernel, launch.grid, launch.binary, arguments, **launch.options)


def lengths_of(problem: Problem, extras: Extras) -> Lengths:
    """The lengths that stand in device memory."""
    if extras.cu_seqlens_q is None:
        return Lengths(seqlens_k=extras.seqlens_k)
    count = problem.batch
    return Lengths(None, extras.cu_seqlens_q, extras.cu_seqlens_k, count, count.bit_length())


def constant(value: Any) -> Any:
    """A field of `Config` as the kernel takes it: functions as they are, tuples element by element."""
    if isinstance(value, tuple):
        items = [constant(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value if value is None or callable(value) else tl.constexpr(value)


def per_head(t: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """A (H,) or (B, H) tensor and its batch stride."""
    if t is None:
        return None, 0
    t = t.contiguous()
    return t, t.stride(0) if t.dim() == 2 else 0


def modifiers_of(p: Problem, extras: Extras) -> Modifiers:
    """The arguments of the features that change scores."""
    mask = extras.mask
    steps = (0, 0, 0, 0) if mask is None else view_strides(mask, 4)
    keep = 1.0 - p.dropout_p
    return Modifiers(
        p.scale if p.modified else None,
        1.0 / p.softcap if 0 < p.softcap < NO_SOFTCAP else None,
        p.softcap or None,
        *per_head(extras.alibi_slopes),
        mask,
        *steps,
        tuple(extras.score_args),
        tuple(extras.mask_args),
        *per_head(extras.sinks),
        extras.dropout_seed,
        p.dropout_p if p.dropout_p else None,
        (1.0 / keep if keep else 0.0) if p.dropout_p else None,
    )


def shared_config(p: Problem, least_columns: int) -> dict[str, Any]:
    """The fields of `Config` that the forward and the backward take from a problem alike."""
    return dict(
        D_PIECES=pieces(p.head_dim, least_columns),
        DV_PIECES=pieces(p.v_head_dim, least_columns),
        D=p.head_dim,
        D_V=p.v_head_dim,
        GROUP=p.group,
        HAS_FIRST=p.first_offset is not None,
        HAS_LAST=p.last_offset is not None,
        BOTTOM_RIGHT=p.align == "bottom_right",
        PRECISION=p.fp32_precision,
        UPCAST=tritons.interpreter_needs_upcast(p.dtype),
        WIDE=p.wide,
        NEGATE=p.scale < 0 and not p.modified,
        MODIFIED=p.modified,
        LARGE_CAP=p.softcap > min(LARGE_CAP[p.dtype], LARGE_CAP_LSE if p.return_lse else math.inf),
        CHOOSES=p.mask == "bool" or p.mask_mod is not None,
        BOOL_MASK=p.mask == "bool",
        FLOAT_MASK=p.mask not in (None, "bool"),
        MASK_ROWS=p.mask_varies[2],
        MASK_COLS=p.mask_varies[3],
        SCORE_MOD=mods.get("score_mod", p.score_mod).function if p.score_mod else None,
        MASK_MOD=mods.get("mask_mod", p.mask_mod).function if p.mask_mod else None,
    )


def launch_options(num_warps: int, num_stages: int, max_registers: int | None) -> dict[str, Any]:
    """What a row says to Triton. Its default for fusion flips in 3.10; softmax.exponent wants it."""
    options: dict[str, Any] = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)
    return options if max_registers is None else options | {"maxnreg": max_registers}


def _sliced(extras: Extras, batch: slice) -> Extras:
    """The extras of some batch elements."""

    def part(t: torch.Tensor | None, rank: int) -> torch.Tensor | None:
        return t[batch] if t is not None and t.dim() == rank and t.shape[0] > 1 else t

    return extras._replace(
        mask=part(extras.mask, 4),
        alibi_slopes=part(extras.alibi_slopes, 2),
        sinks=part(extras.sinks, 2),
        seqlens_k=part(extras.seqlens_k, 1),
    )


@dataclass(slots=True)
class ForwardLaunch:
    """The portable kernel, ready for every call with the same problem; made once, called often.

    The first call goes through Triton's JIT, which specialises the arguments and finds or builds the binary. Later
    calls have the same strides, alignments and scalars, hence the same binary, and launch it directly: that saves most
    of the host time of a call.
    """

    kernel: ClassVar[Any] = attention_forward
    problem: Problem
    grid: tuple[int, int, int]
    config: Config
    scalars: tuple[Any, ...]
    options: dict[str, Any]
    descriptors: bool
    list_size: tuple[bool, int, int, int] | None  # of the list of key blocks: per batch element?, heads, slots, blocks
    strides: tuple[tuple[int, ...], ...] | None = None  # of the views of q, k, v, out
    binary: Callable[..., None] | None = None
    plain_config: tuple[Any, ...] | None = None  # for the binary
    list_binaries: tuple[Callable[..., None], Callable[..., None]] | None = None

    @classmethod
    def prepare(cls, problem: Problem, plan: Plan) -> "ForwardLaunch":
        tile = plan.tile
        assert tile is not None
        p = problem
        first, last = p.first_offset, p.last_offset
        config = Config(
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            DESCRIPTOR=tile.descriptors,
            BRANCH=plan.rescale == "branch",
            WARP_SPECIALIZE=tile.warp_specialize,
            STORE_LSE=p.return_lse,
            LISTED=plan.listed,
            **shared_config(p, plan.least_columns),
        )
        scale_log2 = LOG2E if p.modified else positive_scale(p)
        q_len, kv_len = p.packed or (p.q_len, p.kv_len)
        scalars = (scale_log2, p.rescale_threshold, q_len, kv_len, first or 0, last or 0, q_len)
        tiles = p.slots(tile.block_m)
        batches = 1 if p.packed else p.batch
        list_size = None
        if plan.listed:
            mask_mod = mods.get("mask_mod", p.mask_mod) if p.mask_mod else None
            by_batch = p.mask_varies[0] or p.seqlens_k or (mask_mod is not None and mask_mod.uses("b"))
            by_head = p.mask_varies[1] or (mask_mod is not None and mask_mod.uses("h"))
            list_size = by_batch, p.q_heads if by_head else 1, tiles, triton.cdiv(kv_len, tile.block_n)
        return cls(
            problem=p,
            grid=(p.q_heads, tiles, min(batches, MAX_GRID)),
            config=constant(config),
            scalars=scalars,
            options=launch_options(tile.num_warps, tile.num_stages, tile.max_registers),
            descriptors=tile.descriptors,
            list_size=list_size,
        )

    def arguments(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras = NO_EXTRAS,
    ) -> tuple[Any, ...]:
        """Positional arguments of `attention_forward`; makes the list of key blocks if there is to be one."""
        if self.strides is None:
            self.strides = tuple(view_strides(t) for t in (q, k, v, out))
        described: tuple[Any, ...] = (None,) * 6
        if self.descriptors:
            rows = self.config.BLOCK_N.value
            of_q = self._describe(q, self.config.BLOCK_M.value, self.config.D_PIECES)
            of_k = self._describe(k, rows, self.config.D_PIECES)
            of_v = self._describe(v, rows, self.config.DV_PIECES)
            described = (of_q[0], of_k[0], of_v[0], of_q[1], of_k[1], of_v[1])
        tensors, of_views, config = (q, k, v, out), views, self.config
        lengths, modifiers, listed = NO_LENGTHS, NO_MODIFIERS, None
        if self.binary is not None:
            self.plain_config = self.plain_config or plain(self.config)
            of_views, lengths, modifiers, config = plain_views, PLAIN_LENGTHS, PLAIN_MODIFIERS, self.plain_config
        if extras is not NO_EXTRAS or self.config.MODIFIED.value or self.list_size:
            lengths, modifiers = lengths_of(self.problem, extras), modifiers_of(self.problem, extras)
            listed = self._list(lengths, modifiers, q.shape[0], q.device) if self.list_size else None
        return (*of_views(tensors, self.strides), lse, *described, *self.scalars, lengths, modifiers, listed, config)

    @staticmethod
    def _describe(t: torch.Tensor, rows: int, of: Any) -> list[TensorDescriptor | None]:
        found: list[TensorDescriptor | None] = [describe(t, rows, cols.value) for _, cols in of]
        return [*found, None][:2]

    def _list(self, lengths: Lengths, modifiers: Modifiers, batch: int, device: torch.device) -> blocks.List:
        """Run the two kernels that list the key blocks of every query tile. batch: of the tensors."""
        assert self.list_size is not None
        by_batch, heads, slots, n_blocks = self.list_size
        batches = batch if by_batch else 1
        kinds = torch.empty(batches, heads, slots, n_blocks, dtype=torch.int8, device=device)
        rows = torch.empty(batches, heads, slots, n_blocks + blocks.HEADER.value, dtype=torch.int32, device=device)
        of_kinds, of_rows = (blocks.List(t, *view_strides(t, 2), t.stride(2)) for t in (kinds, rows))
        if device.type != "meta":
            _, _, q_len, kv_len, first, last, _ = self.scalars
            grid = (heads * n_blocks, slots, batches)
            to_classify = (of_kinds, n_blocks, q_len, kv_len, first, last, lengths, modifiers, self.config)
            to_compact = (of_kinds, of_rows, n_blocks)
            if self.list_binaries is not None:
                self.list_binaries[0](*to_classify)
                self.list_binaries[1](*to_compact)
                return of_rows
            rows_grid = (slots, heads, batches)
            kernels = blocks.classify[grid](*to_classify), blocks.compact[rows_grid](*to_compact)
            if kernels[0] is not None and batches <= MAX_GRID >= self.problem.batch:  # else the grids differ by slice
                self.list_binaries = kernels[0][grid], kernels[1][rows_grid]
        return of_rows

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        if self.problem.batch > MAX_GRID and not self.problem.packed:
            self._in_slices(q, k, v, out, lse, extras)
        else:
            start(self, self.arguments(q, k, v, out, lse, extras))

    def _in_slices(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, extras: Extras
    ) -> None:
        """A batch that is larger than the third dimension of a grid may be."""
        for start in range(0, self.problem.batch, MAX_GRID):
            here = slice(start, start + MAX_GRID)
            part = [t[here] for t in (q, k, v, out)]
            part_lse = lse[here] if lse.numel() else lse
            grid = (*self.grid[:2], part[0].shape[0])
            attention_forward[grid](*self.arguments(*part, part_lse, _sliced(extras, here)), **self.options)


NO_LENGTHS = Lengths()
NO_MODIFIERS = Modifiers()
PLAIN_LENGTHS, PLAIN_MODIFIERS = plain(NO_LENGTHS), plain(NO_MODIFIERS)
