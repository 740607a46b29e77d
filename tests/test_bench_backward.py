"""`lazymax bench --backward`: what is run, what is checked, what is written."""

import json
from typing import Any

import pytest
import torch

from lazymax import reference
from lazymax.bench import command
from lazymax.bench.cases import Case
from lazymax.bench.check import FAILED, LEFT_OUT, OK, WRONG
from lazymax.bench.clock import clock_for
from lazymax.bench.gradients import Oracle, backward_of, heads, measure_backward
from lazymax.bench.measure import measure
from lazymax.bench.peers import LAZYMAX, LeftOut, Ready, candidates
from lazymax.cli import main
from lazymax.problem import Problem

SQUARE = Case("square", (2, 4, 2, 40, 40, 16), "top_left")
RAGGED = Case("ragged", (1, 4, 2, 20, 33, 16, 8), "bottom_right")
FAST = ("--device", "cpu", "--rounds", "1", "--window-ms", "1")


def without_gradient(case: Case, problem: Problem, q: Any, k: Any, v: Any) -> Ready:
    return Ready(lambda: torch.empty_like(q))


def scaled(factor: float) -> Any:
    """Right outputs, wrong gradients."""

    def make(case: Case, problem: Problem, q: Any, k: Any, v: Any) -> Ready:
        def run() -> torch.Tensor:
            out: torch.Tensor = reference.TORCH_SDPA(q, k, v, is_causal=True, enable_gqa=True)
            return out.detach() + factor * (out - out.detach())

        return Ready(run)

    return make


def test_right_gradients_are_timed_and_wrong_ones_are_not(device: str) -> None:
    everyone = candidates("sdpa,sdpa-math,lazymax:compiled,lazymax:deterministic")
    everyone |= {"wrong": scaled(1.1), "right": scaled(1.0), "none": without_gradient}
    clock = clock_for(torch.device(device))
    found = measure_backward(SQUARE, torch.bfloat16, everyone, clock, rounds=1, window_ms=1)
    rows = {row.candidate: row for row in found}
    for name in (LAZYMAX, "sdpa", "sdpa-math", "lazymax:compiled", "lazymax:deterministic", "right"):
        row = rows[name]
        assert row.status == OK and row.ms is not None and row.error is not None and row.error < 1e-2, row
    assert rows["wrong"].status == WRONG and rows["wrong"].ms is None
    assert rows["wrong"].reason.startswith("relative error of dq 0.")
    assert rows["none"].status == LEFT_OUT and rows["none"].reason == "its output has no gradient"
    peers = candidates("sdpa")
    forward = {r.candidate: r for r in measure(SQUARE, torch.bfloat16, peers, clock, rounds=1, window_ms=1)}
    for name in (LAZYMAX, "sdpa"):
        ours, base = rows[name], forward[name]
        assert (ours.suite, ours.flops, ours.bytes) == (f"{base.suite} backward", 2.5 * base.flops, 2 * base.bytes)


@pytest.mark.parametrize("case", [SQUARE, RAGGED], ids=lambda case: case.name)
def test_the_oracle_finds_one_wrong_gradient(case: Case) -> None:
    q, k, v = case.tensors(torch.float16, torch.device("cpu"))
    problem = Problem.from_call(q, k, v, causal=case.causal)
    grad_out = torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype)
    oracle = Oracle(problem, q, k, v, grad_out)
    right = reference.backward(grad_out, None, q, k, v, problem)[:3]
    assert oracle.judge(right, budget=True).status == OK
    for which, name in enumerate("qkv"):
        wrong = [t.clone() for t in right]
        wrong[which][-1, -1] *= 1.5
        assert oracle.judge(wrong, budget=False).why.startswith(f"relative error of d{name}")
        wrong[which] = torch.full_like(right[which], torch.nan)
        assert oracle.judge(wrong, budget=False).status == WRONG
        one = [t.clone() for t in right]
        one[which][0, 0, 10] *= 1.08  # too little for the norm of all
        verdict = oracle.judge(one, budget=True)
        assert verdict.status == WRONG and "float64 error budget" in verdict.why and f"d{name}" in verdict.why
    assert "shape" in oracle.judge([right[0], right[2][..., :4], right[1]], budget=False).why


def test_heads_are_sampled() -> None:
    problem = Problem.from_shape((4, 8, 4, 1000, 1000, 64), "bf16")
    assert heads(problem, 1) == [(0, 0)]
    assert heads(problem, 4_000_000) == [(0, 0), (3, 3)]
    assert len(heads(problem, 1 << 40)) == 8 == len(set(heads(problem, 1 << 40)))
    assert heads(Problem.from_shape((1, 2, 1, 8, 8, 64), "bf16"), 1 << 40) == [(0, 0)]


def test_memory_is_of_forward_and_backward() -> None:
    q, k, v = SQUARE.tensors(torch.float32, torch.device("cpu"))
    problem = Problem.from_call(q, k, v, causal=SQUARE.causal)
    ready = backward_of(scaled(1.0), torch.ones_like(q))(SQUARE, problem, q, k, v)
    assert ready.whole is not None
    out, *grads = ready.whole()
    assert out.shape == q.shape and not out.requires_grad
    torch.testing.assert_close(grads, list(ready.run()))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    with pytest.raises(LeftOut, match="no gradient"):
        backward_of(without_gradient, torch.ones_like(q))(SQUARE, problem, q, k, v)


@pytest.mark.gpu
def test_graphs_on_a_gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU: CUDA graphs")
    clock = clock_for(torch.device(device), graphs=True)
    everyone = candidates("sdpa") | {"wrong": scaled(1.1)}
    found = measure_backward(SQUARE, torch.bfloat16, everyone, clock, rounds=2, window_ms=1)
    assert [row.status for row in found] == [OK, OK, WRONG]


@pytest.mark.parametrize(("make", "status"), [(scaled(1.1), WRONG), (without_gradient, FAILED)])
def test_a_fault_of_lazymax_fails_the_command(monkeypatch: Any, capsys: Any, make: Any, status: str) -> None:
    monkeypatch.setattr(command, "candidates", lambda against, impl: {LAZYMAX: make})
    assert main(["bench", "--backward", "--shape", "1,2,2,20,20,16", "--causal", "--json", "-", *FAST]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["status"], row["suite"], row["ms"]) == (status, "shape backward", None)


@pytest.mark.parametrize(
    ("other", "got"),
    [
        (["--rows", "all", "--suite", "short"], "--rows all"), (["--overhead"], "--overhead"),
        (["--suite", "varlen"], "--suite varlen"), (["--suite", "short", "--against", "lazymax:graph"], "--against"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it(capsys: Any, other: list[str], got: str) -> None:
    assert main(["bench", "--backward", *other, *FAST]) == 2
    assert f"--backward: got {got}" in capsys.readouterr().err
