"""The kernels of gfx1151, executed instruction by instruction in the emulator and compared with float64.

What is compiled here is what would be launched there (`Tile.prepare`). The emulator catches accesses outside of the
tensors, what was never written is NaN, and so are outputs before and what lies between padded rows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import Job, as_json, rows_of
from simulators.gfx1151 import EmulatorUnavailable
from simulators.gfx1151.build import interpreter
from turns import FLOOR, my_turn

from lazymax.backends import Tile
from lazymax.problem import Problem

TESTS = Path(__file__).parent


class Worker:
    """`emulated.py` in a process of its own, where Triton compiles."""

    def __init__(self, builds: Path) -> None:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        env["PYTHONPATH"] = os.pathsep.join((str(TESTS.parent / "src"), str(TESTS)))
        env["TRITON_CACHE_DIR"] = str(builds)
        command = [sys.executable, "-W", "ignore", str(TESTS / "emulated.py")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def ask(self, job: Job) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(as_json(job) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise RuntimeError(f"the worker ended with {self.process.wait()} on {job}")


@pytest.fixture(scope="session")
def worker(builds: Path) -> Iterator[Worker]:
    try:
        interpreter()
    except EmulatorUnavailable as missing:
        pytest.skip(str(missing))
    started = Worker(builds)
    yield started
    assert started.process.stdin
    started.process.stdin.close()
    started.process.wait()


CAUSAL = {"causal": "bottom_right"}
# (batch, query heads, key heads, queries, keys), rules, what the inputs hold, layout. One build serves all that differ
# in lengths and values only.
SMALL: tuple[tuple[tuple[int, ...], dict[str, Any], str, str], ...] = (
    ((1, 4, 1, 70, 150), CAUSAL, "normal", "bhsd"),  # several blocks of keys and workgroups, tails on both sides
    ((1, 2, 2, 33, 64), {}, "normal", "padded"),
    ((1, 6, 2, 45, 197), {"window": (60, 5), "window_align": "bottom_right", "scale": -0.2}, "rising", "bshd"),
)
MORE: tuple[tuple[tuple[int, ...], dict[str, Any], str, str], ...] = (
    ((1, 4, 1, 150, 70), CAUSAL, "normal", "bhsd"),  # rows without keys
    ((2, 4, 2, 1, 65), CAUSAL, "normal", "bhsd"),
    ((1, 4, 2, 3, 17), CAUSAL, "normal", "bhsd"),
    ((1, 4, 1, 1, 1), CAUSAL, "normal", "bhsd"),
    ((1, 4, 1, 40, 170), CAUSAL, "large", "bhsd"),
    ((1, 4, 1, 40, 170), CAUSAL, "rising", "bhsd"),
    ((1, 4, 1, 40, 70), CAUSAL, "huge", "bhsd"),
    ((1, 4, 1, 37, 97), CAUSAL, "hidden", "bhsd"),
    ((1, 4, 1, 37, 97), CAUSAL, "visible", "bhsd"),
)
# Everything asked of every row, in two builds: causal with tails and groups; a window, other strides, a negative scale;
# rows without keys; huge scores.
EVERY = (SMALL[0], SMALL[2], MORE[0], MORE[6])
assert EVERY[3][2] == "huge"
SWEEP: tuple[tuple[tuple[int, ...], dict[str, Any], str, str], ...] = (
    ((1, 4, 1, 5, 0), {}, "normal", "bhsd"),
    ((1, 7, 1, 40, 100), {"causal": "top_left"}, "normal", "bshd"),  # 7 heads: rows of a position in two workgroups
    ((1, 4, 1, 100, 300), CAUSAL | {"window": (70, None)}, "normal", "bhsd"),
    ((1, 4, 1, 100, 300), CAUSAL | {"window": (0, None)}, "large", "bhsd"),
    ((1, 2, 1, 90, 200), {"window": (None, 40), "scale": 0.0}, "normal", "padded"),
    ((1, 4, 4, 200, 31), {"causal": "top_left"}, "normal", "bhsd"),
    ((3, 2, 1, 65, 257), CAUSAL | {"rescale_threshold": 0.0}, "rising", "bhsd"),
    ((1, 2, 1, 300, 300), {"causal": "top_left"}, "hidden", "bhsd"),
)
Call = tuple[tuple[int, ...], dict[str, Any], str, str]


def jobs(table: str, index: int, calls: tuple[Call, ...], dim: int, dtype: str) -> list[Job]:
    return [Job(table, index, (*shape, dim), dtype, rules, data, layout) for shape, rules, data, layout in calls]


def check(worker: Worker, todo: list[Job]) -> None:
    wrong, executed = [], 0
    for job in todo:
        answer = worker.ask(job)
        executed += answer.get("executed", 0)
        if not answer.get("ok"):
            wrong.append(f"{job.row.name} {job.shape} {job.dtype} {job.rules} {job.data} {job.layout}: {answer}")
    assert not wrong, "\n".join(wrong)
    assert executed > 1000 * len(todo)


def dtypes_of(row: Tile) -> list[str]:
    names = row.when.dtypes or ("float16", "bfloat16")
    return [{"float16": "fp16", "bfloat16": "bf16"}[name] for name in names if name != "float32"]


def rows(*tables: str, in_turns: bool = False) -> list[Any]:
    return [
        pytest.param(table, index, id=f"{table}-{index}-{row.name}", marks=my_turn(index) if in_turns else ())
        for table in tables
        for index, row in enumerate(rows_of(table))
    ]


@pytest.mark.parametrize("table, index", rows("WMMA"))
def test_rows_that_are_chosen(table: str, index: int, worker: Worker) -> None:
    row = rows_of(table)[index]
    (dtype,), dims = dtypes_of(row), row.when.head_dims or ()
    everything = SMALL + MORE if dims[0] in (64, 128) and FLOOR else EVERY
    check(worker, jobs(table, index, everything, dims[0], dtype))
    for dim in dims[1::2] if FLOOR else dims[2::2]:
        check(worker, jobs(table, index, SMALL[:1], dim, dtype))


@pytest.mark.parametrize("table, index", rows("ALTERNATIVES", "FRAGMENTS", "noasm", in_turns=True))
def test_rows_for_a_sweep_fragments_and_the_twin(table: str, index: int, worker: Worker) -> None:
    row = rows_of(table)[index]
    (dtype,), dims = dtypes_of(row), row.when.head_dims or ()
    check(worker, jobs(table, index, EVERY, dims[0], dtype))


FEATURES = ("softcap, ALiBi, sinks", "float mask", "bool mask", "seqlens_k", "packed", "dropout")
IN_TURNS = [pytest.param(name, id=name, marks=my_turn(index)) for index, name in enumerate(FEATURES)]


@pytest.mark.parametrize("feature", IN_TURNS)
def test_the_portable_kernel_does_the_rest(feature: str, worker: Worker) -> None:
    """On this GPU too: the row that serves features at head dim 64 (the fewest registers)."""
    shape = (1 if feature == "packed" else 2, 4, 2, 70, 90, 64)
    check(worker, [replace(job_of_portable(shape, "bf16"), rules=CAUSAL, feature=feature)])


OTHERS = ((104, "fp16"), (136, "bf16"), (136, "fp32"), (24, "fp32"))


@pytest.mark.parametrize("dim, dtype", [pytest.param(*of, marks=my_turn(i)) for i, of in enumerate(OTHERS)])
def test_the_portable_kernel_takes_what_no_other_row_does(dim: int, dtype: str, worker: Worker) -> None:
    check(worker, [job_of_portable((1, 2, 1, 40, 90, dim), dtype)])


def job_of_portable(shape: tuple[int, ...], dtype: str) -> Job:
    """The first row for the portable kernel that takes the shape."""
    from emulated import ARCH

    problem = Problem.from_shape(shape, dtype)
    index = next(i for i, row in enumerate(rows_of("portable")) if row.refusal(problem, ARCH) is None)
    return Job("portable", index, shape, dtype)


# ---- the backward: every kernel of a call, the portable ones

# By default, in one build, which test_gfx1151_price.py prices too: tiles with and without a mask, tails of keys and of
# dQ's queries; rows without keys.
OF_BACKWARD: tuple[Call, ...] = (
    ((1, 2, 1, 80, 100), CAUSAL, "normal", "bhsd"),
    ((1, 2, 1, 80, 48), CAUSAL, "normal", "bhsd"),
)
MORE_OF_BACKWARD: tuple[Call, ...] = (
    ((1, 2, 1, 70, 100), CAUSAL, "normal", "bhsd"),
    ((1, 2, 1, 70, 100), {}, "normal", "padded"),
    ((2, 4, 2, 45, 90), {"window": (20, 5), "window_align": "bottom_right", "scale": -0.2}, "rising", "bshd"),
    ((1, 3, 1, 70, 33), {"causal": "top_left"}, "large", "bhsd"),
    ((1, 2, 2, 1, 1), CAUSAL, "normal", "bhsd"),
    # Computed again, carefully:
    ((1, 2, 1, 37, 60), CAUSAL, "huge", "bhsd"),
    ((1, 2, 1, 37, 60), CAUSAL, "hidden", "bhsd"),
    ((1, 2, 1, 37, 60), CAUSAL, "visible", "bhsd"),
)
HALF_OF_BACKWARD = [(0, (64, 40)), (1, (128, 96)), (1, (256, 192))]


@pytest.mark.parametrize("index, dim", [(0, 64), (1, 128)])
def test_the_backward(index: int, dim: int, worker: Worker) -> None:
    check(worker, jobs("BACKWARD", index, OF_BACKWARD, dim, "bf16" if FLOOR else "fp16"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("index, dims", HALF_OF_BACKWARD)
def test_sweep_of_the_backward(index: int, dims: tuple[int, ...], dtype: str, worker: Worker) -> None:
    """Full tiles, then columns to spare or a second piece."""
    check(worker, jobs("BACKWARD", index, OF_BACKWARD + MORE_OF_BACKWARD, dims[0], dtype))
    check(worker, jobs("BACKWARD", index, MORE_OF_BACKWARD[:3], dims[1], dtype))


@pytest.mark.slow
def test_the_backward_of_others(worker: Worker) -> None:
    """fp32; D_v other than D, either way."""
    check(worker, jobs("BACKWARD", 2, MORE_OF_BACKWARD[:2], 64, "fp32"))
    for dims in ((96, 64), (40, 120)):
        check(worker, [Job("BACKWARD", 1, (1, 2, 1, 70, 100, *dims), "bf16", CAUSAL)])


@pytest.mark.slow
@pytest.mark.parametrize("index, dim", [(0, 64), (1, 80)])
@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_the_backward(feature: str, index: int, dim: int, worker: Worker) -> None:
    shape = (1 if feature == "packed" else 2, 4, 2, 70, 90, dim)
    check(worker, [Job("BACKWARD", index, shape, "bf16", CAUSAL, feature=feature)])


# ---- the seed


@pytest.mark.parametrize("dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("table, index", [("singlewave", 0), pytest.param("pipelined", 1, marks=my_turn(1))])
def test_the_seed(table: str, index: int, dtype: str, worker: Worker) -> None:
    check(worker, jobs(table, 0, EVERY, 128, dtype))
    check(worker, jobs(table, 0, SMALL[:1], 80, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("table, index", rows("WMMA", "ALTERNATIVES", "FRAGMENTS", "singlewave", "pipelined", "noasm"))
def test_sweep(table: str, index: int, worker: Worker) -> None:
    row = rows_of(table)[index]
    for dtype in dtypes_of(row):
        for dim in row.when.head_dims or ():
            check(worker, jobs(table, index, SMALL + MORE + SWEEP, dim, dtype))


def test_the_harness_can_fail(worker: Worker) -> None:
    """Scores of this size without the cold path are the reason for it: a row whose P could overflow is judged wrong."""
    good = Job("WMMA", 0, (1, 4, 1, 40, 70, 128), "fp16", CAUSAL)
    assert worker.ask(good)["ok"]
    assert "for head dims 128, got 64" in worker.ask(replace(good, shape=(1, 4, 1, 40, 70, 64)))["refused"]
    broken = worker.ask(replace(good, rules=CAUSAL | {"window": (1, 2, 3)}))
    assert not broken["ok"] and "window" in broken["why"]


def test_what_the_rows_refuse() -> None:
    from emulated import ARCH

    row = rows_of("WMMA")[0]
    taken = Problem.from_shape((1, 4, 2, 300, 300, 128), "fp16", causal="top_left", window=(9, None))
    assert row.refusal(taken, ARCH) is None
    for change, words in (
        ({"softcap": 1.0}, "for a band and a length alone"), ({"seqlens_k": True}, "for a band and a length alone"),
        ({"wide": True}, "2\\*\\*23"), ({"batch": 65536}, "65535, got 65536"), ({"q_len": 2**25}, "rows of a key head"),
        ({"dtype": "bfloat16"}, "for float16, got bfloat16"), ({"v_head_dim": 64}, "got 128, 64 of v"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=words):
            refused = row.refusal(replace(taken, **change), ARCH)
            raise AssertionError(refused)


def test_low_level_arguments() -> None:
    from lazymax.backends.gfx1151.fragments import to_fragments
    from lazymax.backends.gfx1151.lowlevel import prepare
    from lazymax.backends.gfx1151.tiles import FRAGMENTS, WMMA

    q, k, v = torch.zeros(1, 4, 5, 128).half(), *torch.zeros(2, 1, 2, 7, 128).half()
    fragments = torch.zeros(1, 2, 4, 16, 128).half()
    assert prepare(q, k, v).config.FRAGMENTS.value is False
    assert prepare(q, k, fragments, "fragments").config.FRAGMENTS.value is True
    assert prepare(q, k, v, row=WMMA[0], causal="top_left").grid == (2, 1, 1)
    for error, message, arguments in (
        (ValueError, "v_order: got 'columns'", (q, k, v, "columns")),
        (ValueError, "v: got shape", (q, k, v, "fragments")),
        (ValueError, "v: got torch.float32", (q, k, v.float())),
        (ValueError, "row: got .*vf.*, expected one for v_order='rows'", (q, k, v, "rows", FRAGMENTS[0])),
        (ValueError, "head dimension must be contiguous", (q, k, v.mT.contiguous().mT)),
        (NotImplementedError, "no row takes the problem; 128x32-w8: for head dims 128, got 24",
         (q[..., :24], k[..., :24], v[..., :24])),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            prepare(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"v: got torch\.float32"):
        to_fragments(v.float())
