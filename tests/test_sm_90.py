"""The kernel of sm_90 against float64: every row on a Hopper GPU, if there is one, and in the Gluon simulator, under
adversarial schedules; what ptxas says of every row."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import EDITS, laid_out
from simulators.gluon_sim import Worker

from lazymax import arch as arches
from lazymax.backends import registry
from lazymax.backends.sm_90.rows import HopperTile
from lazymax.dispatch import plan
from lazymax.problem import Problem
from lazymax.testing import check_attention, make_qkv

TABLE = registry()["sm_90"]
ROWS = [row for row in (*TABLE.forward, *TABLE.alternatives) if isinstance(row, HopperTile)]
CAUSAL = {"causal": "bottom_right"}
Call = tuple[tuple[int, ...], dict[str, Any], str, str]
# (batch, query heads, key heads, queries, keys), rules, what the inputs hold, layout
CALLS: tuple[Call, ...] = (
    ((1, 4, 1, 70, 150), CAUSAL, "normal", "bhsd"),
    ((2, 8, 2, 1000, 1000), {"causal": "top_left"}, "normal", "bshd"),
    ((1, 2, 2, 33, 64), {}, "normal", "padded"),
    ((4, 40, 8, 517, 517), {}, "normal", "bhsd"),  # several tiles for every CTA
    ((4, 40, 8, 517, 901), CAUSAL, "rising", "bhsd"),
    ((1, 6, 2, 450, 777), {"window": (60, 5), "window_align": "bottom_right", "scale": -0.2}, "rising", "bshd"),
    ((1, 4, 1, 500, 900), CAUSAL | {"window": (300, None)}, "large", "bhsd"),
    ((1, 4, 1, 900, 500), CAUSAL, "normal", "bhsd"),  # rows and tiles without keys
    ((2, 4, 2, 1, 65), CAUSAL, "normal", "bhsd"),
    ((1, 4, 1, 1, 1), CAUSAL, "normal", "bhsd"),
    ((1, 7, 1, 300, 300), {"causal": "top_left"}, "large", "bhsd"),
    ((1, 2, 1, 400, 400), {"window": (None, 40), "scale": 0.0}, "normal", "bhsd"),
    ((1, 4, 1, 200, 370), CAUSAL, "huge", "bhsd"),
    ((1, 4, 1, 237, 297), CAUSAL, "hidden", "bhsd"),
    ((1, 4, 1, 237, 297), CAUSAL, "visible", "bhsd"),
    ((3, 2, 1, 265, 257), CAUSAL | {"rescale_threshold": 0.0}, "rising", "bhsd"),
)


def run(row: HopperTile, call: Call, dim: int, dtype: torch.dtype, device: str) -> tuple[bool, str]:
    shape, rules, data, layout = call
    rules = dict(rules)
    threshold = rules.pop("rescale_threshold", None)
    q, k, v = make_qkv(*shape, dim, dtype=dtype, seed=sum(shape))
    EDITS[data](q, k, v)
    q, k, v = (laid_out(t, layout, 8).to(device) for t in (q, k, v))
    problem = Problem.from_call(q, k, v, return_lse=True, rescale_threshold=threshold, **rules)
    arch = arches.of(q.device)
    if row.refusal(problem, arch):
        row = replace(row, when=type(row.when)(head_dims=row.when.head_dims))  # size is a matter of speed
    assert row.refusal(problem, arch) is None, row.refusal(problem, arch)
    out = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:3], torch.nan, device=device)
    launch = row.prepare(problem, replace(plan(problem, arch), tile=row))
    for _ in range(2):  # the second call launches the binary directly
        launch(q, k, v, out, lse)
    first = out.clone()
    launch(q, k, v, out, lse)
    if not torch.equal(first.view(torch.int16), out.view(torch.int16)):
        return False, "not the same bits again"
    budgets = check_attention(out, lse, q, k, v, problem)
    return all(b.ok for b in budgets), "; ".join(map(str, budgets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_on_the_gpu(row: HopperTile, dtype: torch.dtype, device: str) -> None:
    if device != "cuda" or arches.of(torch.device(device)).id != "sm_90":
        pytest.skip(f"needs an H100 or H200: this is {arches.of(torch.device(device)).id}")
    wrong = []
    for call in CALLS:
        for dim in row.when.head_dims or ():
            ok, why = run(row, call, dim, dtype, device)
            if not ok:
                wrong.append(f"{call} {dim}: {why}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="session")
def sim() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


BANDS: tuple[dict[str, Any], ...] = ({}, {"causal": "top_left"}, {"causal": "top_left", "window": (512, None)})


INDICES = [
    pytest.param(i, id=row.name, marks=() if row in TABLE.forward else pytest.mark.slow) for i, row in enumerate(ROWS)
]  # those that dispatch takes, by default


@pytest.mark.parametrize("index", INDICES)
def test_rows_in_the_simulator(index: int, sim: Worker) -> None:
    dim = (ROWS[index].when.head_dims or (64,))[0]
    of = list(range(10))
    wrong = sim.call("simulated:seeds", index, dim, "bf16", of[::2])
    wrong += sim.call("simulated:seeds", index, dim, "fp16", of[1::2])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("index", INDICES)
def test_ptxas_has_nothing_to_say(index: int, sim: Worker) -> None:
    """One advisory C75xx serialises every product of the kernel, and the time doubles."""
    row = ROWS[index]
    for rules in BANDS if row.tuned else BANDS[1:2]:
        report = sim.call("simulated:assembled", index, (row.when.head_dims or (64,))[0], "bf16", rules)
        assert not report["advisories"] and report["wgmma"] > 0, f"{rules}: {report}"
        assert not (row.tuned and report["spills"]), f"{rules}: {report}"


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_many_schedules(index: int, sim: Worker) -> None:
    dim = (ROWS[index].when.head_dims or (64,))[0]
    for dtype in ("bf16", "fp16"):
        wrong = sim.call("simulated:seeds", index, dim, dtype, list(range(25)))
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("index", [i for i, row in enumerate(ROWS) if row in TABLE.forward])
def test_a_dropped_synchronisation_is_found(index: int, sim: Worker) -> None:
    count, survived = sim.call("simulated:mutants", index, (ROWS[index].when.head_dims or (64,))[0], list(range(4)))
    assert count > 40 and len(survived) <= 0.05 * count, f"{len(survived)} of {count}: {survived}"


def test_descriptors_follow_the_tensors_of_a_call() -> None:
    problem = Problem.from_shape((1, 4, 2, 256, 256, 128), "bf16")
    launch = next(row for row in ROWS if row.when.head_dims == (128,)).prepare(problem, None)  # type: ignore[arg-type]
    calls = []
    for _ in range(2):
        q, k, v = make_qkv(1, 4, 2, 256, 256, 128, dtype=torch.bfloat16)
        out, lse = torch.empty_like(q), torch.empty(0)
        arguments = launch.arguments(q, k, v, out, lse)
        assert [view.ptr is t for view, t in zip(arguments[:4], (q, k, v, out), strict=True)] == [True] * 4
        assert [tile.base is t for tile, t in zip(arguments[5:9], (q, k, v, out), strict=True)] == [True] * 4
        calls.append(arguments)
    for first, second in zip(calls[0][5:9], calls[1][5:9], strict=True):
        assert first is not second and first.base is not second.base
        assert (first.shape, first.strides, first.block_shape) == (second.shape, second.strides, second.block_shape)
