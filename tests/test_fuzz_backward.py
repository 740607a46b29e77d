"""Random problems' gradients against float64: what test_fuzz.py draws, made small, through the operator's own rows or
through small tiles.

How many: 300 examples by default, `--fuzz-examples N` for N. On a GPU examples keep their size and shards their build,
as in test_fuzz.py. The same ones in every run, others with `--hypothesis-seed`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest
import rounding
import test_fuzz
import torch
from hypothesis import HealthCheck, Phase, given, settings
from test_backward import FLAT, LARGE, SMALL, by_row
from test_fuzz import Call, Shard, farther, nudge, nudged_extras

from lazymax import arch as arches
from lazymax import ops_backward, reference, testing
from lazymax.dispatch import plan
from lazymax.dispatch_backward import plan_backward
from lazymax.extras import Extras
from lazymax.ops import Options, run_forward
from lazymax.options import parse_options
from lazymax.problem import Problem

no_near_copies = test_fuzz.no_near_copies
BACKWARD = torch.ops.lazymax.attention_backward
DEFAULT, SLOW = 300, 1500
PER_SHARD = 100 if test_fuzz.GPU else 50
EPS = testing.EPS
WITH_LSE = Options("auto", return_lse=True)
FACTORS = (0.99, 1.003, 1.02)
ROWS = (SMALL, FLAT, LARGE, FLAT, LARGE, FLAT, LARGE, None)


def small(call: Call) -> Call:
    """As much of the call as the interpreter computes in a fraction of a second."""
    rare = call.seed % 16 == 0  # a large head dim, or a score_mod that the reference differentiates
    return replace(
        call,
        dtype=torch.float32 if call.dtype == torch.float64 else call.dtype,
        batch=min(call.batch, 1 + (call.seed % 4 == 1)),
        kv_heads=1,
        group=min(call.group, 1 + (call.seed % 4 == 2)),
        q_len=min(call.q_len, 19),
        kv_len=min(call.kv_len, 21),
        lengths=None if call.lengths is None else tuple((min(q, 9), min(k, 17)) for q, k in call.lengths[:2]),
        behind=tuple(min(n, 3) for n in call.behind),
        head_dim=call.head_dim if call.head_dim <= 40 or (rare and call.head_dim <= 256) else 16,
        v_head_dim=call.v_head_dim if call.v_head_dim <= 40 or (rare and call.v_head_dim <= 256) else 24,
        score_mod=call.score_mod if rare or call.score_mod == "fuzz.lean" else None,
    )


@dataclass(frozen=True)
class Made:
    """Gradients, and what they are of. saved: the output and LSE that kernels had, none where the reference ran."""

    grads: list[torch.Tensor]
    saved: ops_backward.Saved
    d_out: torch.Tensor
    d_lse: torch.Tensor | None
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    problem: Problem
    extras: Extras
    needs: tuple[bool, ...]


def gradients(call: Call, device: str) -> Made:
    *qkv, options = call.build(device)
    q, k, v = qkv
    extras, rules = parse_options(q, **options)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    generator = torch.Generator().manual_seed(call.seed + 2)
    d_out = torch.randn(*q.shape[:3], v.shape[3], generator=generator).to(q.dtype).to(device)
    d_lse = torch.randn(q.shape[:3], generator=generator).to(device) if call.return_lse else None
    needs = (problem.mask not in (None, "bool"), True, True, False)
    # The LSE of rows of the lowest number has no room for a derivative.
    d_lse = None if needs[0] else d_lse
    arch, row = arches.of(q.device), ROWS[call.seed % len(ROWS)]
    beside = ops_backward.beside(problem, d_out)
    by_kernels = plan_backward(beside, arch, plan(beside, arch)).route == "triton"
    saved = ops_backward.Saved()
    if by_kernels:
        saved = saved._replace(**dict(zip(("out", "lse"), run_forward(q, k, v, extras, rules, WITH_LSE), strict=True)))
    if by_kernels and row is not None and not problem.copied and row.refusal(beside, arch) is None:
        grads = by_row(row, d_out, d_lse, (q, k, v), problem, extras, rules, saved)
    else:
        grads = BACKWARD(d_out, d_lse, q, k, v, *extras, *rules, list(needs), *saved)
    return Made(grads, saved, d_out, d_lse, (q, k, v), problem, extras, needs)


def check(call: Call, device: str) -> None:
    made = gradients(call, device)
    if made.saved.out is not None:  # before it may excuse anything
        for budget in test_fuzz.budgets(*made.saved[:2], *made.qkv, made.problem, made.extras):
            assert budget.ok, budget
    if all(budget.ok for budget in budgets(made, sampled_well=False)):
        return
    for budget in budgets(made, sampled_well=True):
        assert budget.ok, budget


def budgets(made: Made, sampled_well: bool) -> Iterator[testing.Budget]:
    """As `testing.check_gradients`, which one run in low precision is too little for: sampled_well allows more, what
    other runs show and what rounding alone may do, at three times the work."""
    q, k, v = made.qkv
    problem, extras, needs = made.problem, made.extras, made.needs
    incoming = made.d_out, made.d_lse
    wide, double = [t.double() for t in made.qkv], testing.widened(extras)
    exact = reference.backward(*incoming, *wide, problem, double, needs)
    given = reference.backward(*incoming, *wide, problem, double, needs, out=made.saved.out)
    low = reference.backward(*incoming, q, k, v, problem, extras, needs, q.dtype, made.saved.out)
    rounded = [torch.zeros_like(x) for x in exact]
    more = []
    if sampled_well:
        rounded = rounding.allowances(*incoming, q, k, v, problem, double, needs)
        near = testing.widened(nudged_extras(extras))
        nudged = reference.backward(*incoming, nudge(q), nudge(k), nudge(v), problem, near, needs)
        more = [[x - x64 for x, x64 in zip(nudged, exact, strict=True)]]
        more += [_differences(*incoming, q, k, v, problem, extras, needs, by) for by in FACTORS]
    names = ("dq", "dk", "dv", "dmask", "dslopes", "dsinks")
    for what, x, *of in zip(names, made.grads, exact, given, rounded, low, *more, strict=False):
        if of[0].numel():
            x, x64, from_out, alone, lowered, *differences = (t[None] if t.dim() == 1 else t for t in (x, *of))
            x64, off = x64.double(), from_out - x64
            cost, excused = lowered.double() - off, off.abs() + alone
            for difference in differences:
                cost = farther(cost, x64 + difference, x64)
            eps = max(EPS[x.dtype], EPS[q.dtype])
            yield testing.within_budget(x, x64, cost, eps=eps, what=what, excused=excused)


def _differences(
    d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, problem: Any, extras: Any, needs: Any, by: float
) -> list[torch.Tensor]:
    """What rounding costs inputs that differ a little: few rows sample it badly, several times sample it better."""
    q, k, v = ((t.double() * by).to(t.dtype) for t in (q, k, v))
    wide = (q.double(), k.double(), v.double())
    exact = reference.backward(d_out, d_lse, *wide, problem, testing.widened(extras), needs)
    low = reference.backward(d_out, d_lse, q, k, v, problem, extras, needs, p_dtype=q.dtype)
    return [x.double() - x64.double() for x, x64 in zip(low, exact, strict=True)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shard" in metafunc.fixturenames:
        total = metafunc.config.getoption("--fuzz-examples")
        total = total or (SLOW if metafunc.config.getoption("--slow") else DEFAULT)
        packed = total // 4
        size = metafunc.config.getoption("--fuzz-shard") or PER_SHARD
        of = test_fuzz.shards(packed if metafunc.function is test_packed else total - packed, size)
        metafunc.parametrize("shard", of, ids=[f"{shard.number:03}" for shard in of])


def fuzz(packed: bool, shard: Shard, config: pytest.Config, device: str) -> None:
    run = config.getoption("--hypothesis-seed")
    run = 0 if run is None else run
    seed = f"{run}/backward/{'varlen' if packed else 'padded'}/{shard.number}"

    @hypothesis.seed(seed)
    @settings(
        max_examples=shard.examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(test_fuzz.calls(packed, None if device == "cpu" else seed))
    def gradients_are_exact(call: Call) -> None:
        hypothesis.note(f"again with --hypothesis-seed={run}")
        check(small(call) if device == "cpu" else call, device)

    gradients_are_exact()


def test_padded(shard, pytestconfig, device):
    fuzz(False, shard, pytestconfig, device)


def test_packed(shard, pytestconfig, device):
    fuzz(True, shard, pytestconfig, device)
