"""The kernels of gfx1151, compiled and executed in the emulator: a worker process for tests, and their prices.

Tests run with TRITON_INTERPRET set, which must not be where Triton compiles: the work is done by `python emulated.py`,
which reads a `Job` a line and answers with a line. It keeps what it has built, and shares it with others in the folder
TRITON_CACHE_DIR, if that is set, by Triton's own keys.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lazymax import arch as arches
from lazymax.backends import BackwardTile, Tile
from lazymax.dispatch import plan
from lazymax.extras import NO_EXTRAS, Extras
from lazymax.options import parse_options
from lazymax.problem import Problem
from lazymax.testing import Budget, check_attention, make_qkv

ARCH = arches.by_name("gfx1151")
TABLES = ("WMMA", "ALTERNATIVES", "FRAGMENTS", "singlewave", "pipelined", "noasm", "portable")


def rows_of(table: str) -> tuple[Any, ...]:
    """A table of `backends/gfx1151/tiles.py` ("BACKWARD" too), the rows of a variant, or those for the portable
    kernel."""
    from lazymax.backends.gfx1151 import tiles

    if table == "portable":
        return tuple(row for row in tiles.BACKEND.forward if type(row) is Tile)
    return tiles.VARIANTS[table].forward if table in tiles.VARIANTS else getattr(tiles, table)


@dataclass(frozen=True)
class Job:
    """One call. The row is `rows_of(table)[index]`."""

    table: str
    index: int
    shape: tuple[int, ...]  # B, Hq, Hkv, Sq, Sk, D; of the backward D_v too, if it differs
    dtype: str
    rules: dict[str, Any] = field(default_factory=dict)
    data: str = "normal"  # see EDITS
    layout: str = "bhsd"  # or "bshd", or "padded": rows of K and V 8 elements longer, those of Q and O 1
    feature: str = ""  # see _features; of the portable kernels

    @property
    def row(self) -> Tile | BackwardTile:
        return rows_of(self.table)[self.index]


# ---- what the inputs hold


def _huge(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Scores near 1e9 (fp16) and 1e15 (bf16), where the fused exponent would overflow."""
    factor = 1e4 if q.dtype == torch.float16 else 1e6
    q *= factor
    k *= factor


def _large(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The pivot moves often."""
    q *= 30


def _rising(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Every key block outgrows the one before, by more than the threshold for some rows only."""
    k *= torch.linspace(0.1, 12, k.shape[2])[:, None].to(k.dtype)


def _hidden(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """NaN and inf in keys and values that the last key's column shows to few rows, if to any."""
    v[:, :, -1, 3] = torch.nan
    v[:, :, -2:, 5] = torch.inf
    v[:, :, -1, 5] = -torch.inf
    k[:, :, -1, 0] = torch.nan


def _visible(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """NaN in a query, infinities in values of the first key, which every row sees."""
    q[:, 0, 0, 0] = torch.nan
    v[:, :, 0, 1] = torch.inf
    v[:, :, 0, 2] = -torch.inf


def _step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Keys of the first half score some 50 log2 units above the others (head dim 128)."""
    q[..., 0] = 20
    k[:, :, : k.shape[2] // 2, 0] = 20


def _cliff(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Some 200 log2 units."""
    q[..., 0] = 40
    k[:, :, : k.shape[2] // 2, 0] = 40


def _lone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Huge scores in few rows, which of a pair of CTAs the second has."""
    q[:, :, 150:153] *= 1e4 if q.dtype == torch.float16 else 1e12


EDITS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]] = {
    "normal": lambda q, k, v: None, "huge": _huge, "large": _large, "rising": _rising, "hidden": _hidden,
    "visible": _visible, "step": _step, "cliff": _cliff, "lone": _lone,
}  # fmt: skip


def laid_out(t: torch.Tensor, layout: str, gap: int) -> torch.Tensor:
    """The same values with other strides; what lies between rows is NaN."""
    if layout == "bshd":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":
        wide = torch.full((*t.shape[:3], t.shape[3] + gap), torch.nan, dtype=t.dtype)
        return wide[..., : t.shape[3]].copy_(t)
    return t


# ---- features of the portable kernel


def _features(name: str, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """Options of `attention` (or `attention_varlen`) that make the feature."""
    batch, heads, q_len, kv_len = *q.shape[:3], k.shape[2]
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(batch, heads, q_len, kv_len, generator=generator)
    if name == "softcap, ALiBi, sinks":
        return {"softcap": 5.0, "alibi_slopes": noise[0, :, 0, 0].abs(), "sinks": noise[0, :, 1, 1].contiguous()}
    if name == "float mask":
        return {"attn_mask": noise[:, :1].masked_fill(noise[:, :1] > 1, -torch.inf)}
    if name == "bool mask":
        return {"attn_mask": noise > 0}
    if name == "seqlens_k":
        return {"seqlens_k": torch.arange(batch, dtype=torch.int32) * 7 + 9}
    if name == "packed":
        ends = torch.tensor([0, q_len // 3, q_len // 3, q_len], dtype=torch.int32)
        return {"cu_seqlens_q": ends, "cu_seqlens_k": ends * kv_len // q_len}
    if name == "dropout":
        return {"dropout_p": 0.3, "dropout_seed": torch.tensor([7])}
    assert name == ""
    return {}


# ---- compile, run, judge


class Emulated:
    """Builds what jobs ask for, once each, and runs it."""

    def __init__(self) -> None:
        self.built: dict[Any, Any] = {}

    def prepare(self, problem: Problem, row: Tile) -> Any:
        return row.prepare(problem, replace(plan(problem, ARCH), tile=row, listed=False, rescale=row.rescale))

    def kernel(self, launch: Any, arguments: tuple[Any, ...]) -> Any:
        """The binary of a forward for these arguments."""
        return self.build(launch.kernel, arguments, launch.options)

    def build(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The binary for these arguments. Lengths are not specialised; strides are, by 1 and by multiples of 16."""
        from triton import knobs

        from lazymax.compiling import compiling_for

        key = (kernel.__name__, options["num_warps"], *_specialised(arguments))
        if key not in self.built:
            with compiling_for(ARCH, kernel):
                knobs.compilation.always_compile = "TRITON_CACHE_DIR" not in os.environ
                self.built[key] = kernel.warmup(*_on_meta(arguments), grid=(1,), **options)
        return self.built[key]

    def run(self, launch: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, extras: Extras = NO_EXTRAS) -> Any:
        """Execute in the emulator; its `Result`."""
        from simulators.gfx1151 import launch as execute

        arguments = launch.arguments(q, k, v, out, lse, extras)
        return execute(self.kernel(launch, arguments), launch.grid, arguments)

    def fragments(self, v: torch.Tensor) -> torch.Tensor:
        """`fragments.to_fragments` in the emulator."""
        from simulators.gfx1151 import aligned
        from simulators.gfx1151 import launch as execute

        from lazymax.backends.gfx1151 import fragments
        from lazymax.backends.gfx1151.launch import pieces
        from lazymax.compiling import compiling_for

        made = aligned(fragments.empty_fragments(v).fill_(torch.nan))
        kernel = fragments.value_fragments
        for first, cols in pieces(v.shape[3]):
            arguments = fragments.arguments(v, made, first, cols)
            with compiling_for(ARCH, kernel):  # anew: its numbers are constants of the build
                binary = kernel.warmup(*_on_meta(arguments), grid=(1,), num_warps=4)
            execute(binary, fragments.grid(v), arguments)
        return made

    def judge(self, job: Job) -> dict[str, Any]:
        """Run a job: the error budgets of what it made, as text and verdict."""
        from emulated_backward import run_backward

        inputs, extras, problem = called(job)
        refused = job.row.refusal(problem, ARCH)
        if refused:
            return {"refused": refused}
        run = run_backward if isinstance(job.row, BackwardTile) else Emulated.run_forward
        executed, budgets = run(self, job, inputs, extras, problem)
        return {"ok": all(b.ok for b in budgets), "why": "; ".join(map(str, budgets)), "executed": executed}

    def run_forward(
        self, job: Job, inputs: tuple[torch.Tensor, ...], extras: Extras, problem: Problem
    ) -> tuple[int, list[Budget]]:
        """(instructions, budgets) of output and LSE."""
        from simulators.gfx1151 import aligned

        assert isinstance(job.row, Tile)
        launch = self.prepare(problem, job.row)
        q, k, v = inputs
        out = aligned(laid_out(torch.full(q.shape, torch.nan, dtype=q.dtype), job.layout, 1))
        lse = aligned(torch.full(q.shape[:3], torch.nan))
        given = self.fragments(v) if job.table == "FRAGMENTS" else v
        result = self.run(launch, q, k, given, out, lse, extras)
        return result.executed, check_attention(out, lse, q, k, v, problem, extras)


def called(job: Job) -> tuple[tuple[torch.Tensor, ...], Extras, Problem]:
    """What a job calls with: q, k, v, the extras, and the problem that they make."""
    rules = dict(job.rules)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[job.dtype]
    q, k, v = make_qkv(*job.shape, dtype=dtype, seed=sum(job.shape))
    EDITS[job.data](q, k, v)
    q, k, v = laid_out(q, job.layout, 1), laid_out(k, job.layout, 8), laid_out(v, job.layout, 8)
    threshold = rules.pop("rescale_threshold", None)
    parsed = parse_options(q, **rules, **_features(job.feature, q, k))
    extras = NO_EXTRAS if parsed[0] is NO_EXTRAS else Extras(*(_aligned(t) for t in parsed[0]))
    problem = Problem.from_tensors(q, k, v, extras, parsed[1], rescale_threshold=threshold, return_lse=True)
    return tuple(_aligned(t) for t in (q, k, v)), extras, problem


def _aligned(value: Any) -> Any:
    from simulators.gfx1151 import aligned

    if isinstance(value, tuple):
        return tuple(map(_aligned, value))
    return aligned(value) if isinstance(value, torch.Tensor) else value


def _flat(arguments: Any) -> Iterator[Any]:
    for value in arguments:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _specialised(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for value in _flat(arguments):
        if isinstance(value, torch.Tensor):
            yield value.dtype
        elif isinstance(value, int):
            yield value == 1, value % 16 == 0
        elif not isinstance(value, float):
            yield repr(value)  # of constants


def _on_meta(arguments: Any) -> Any:
    def one(value: Any) -> Any:
        if isinstance(value, tuple):
            items = [one(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    return tuple(one(value) for value in arguments)


def main() -> None:
    emulated = Emulated()
    for line in sys.stdin:
        fields = json.loads(line)
        job = Job(**fields | {"shape": tuple(fields["shape"])})
        job = replace(job, rules={n: tuple(r) if isinstance(r, list) else r for n, r in job.rules.items()})
        try:
            answer = emulated.judge(job)
        except Exception as error:
            answer = {"ok": False, "why": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def as_json(job: Job) -> str:
    return json.dumps(dataclasses.asdict(job))


if __name__ == "__main__":
    main()
