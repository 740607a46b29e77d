"""Random problems' gradients against float64: what test_fuzz.py draws, made small, through the operator's own rows or
through small tiles.

How many: 300 examples by default, `--fuzz-examples N` for N. On a GPU examples keep their size and shards their build,
as in test_fuzz.py, and as there the seed is a new one unless `--hypothesis-seed` gives it. With --slow only, for one in
some 500 examples is over the budget, which knows an output of its own instead of that which the kernels had: see
docs/notes/backward.md.
"""

import random
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import test_fuzz
import torch
from hypothesis import HealthCheck, Phase, given, settings
from test_backward import FLAT, LARGE, SMALL, by_row
from test_fuzz import Call, Shard, farther, nudge, nudged_extras

from lazymax import arch as arches
from lazymax import ops_backward, reference, testing
from lazymax.dispatch import kernel_refusal
from lazymax.options import parse_options
from lazymax.problem import Problem

no_near_copies = test_fuzz.no_near_copies
BACKWARD = torch.ops.lazymax.attention_backward
DEFAULT, SLOW = 300, 1500
PER_SHARD = 100 if test_fuzz.GPU else 50
EPS = testing.EPS
ROWS = (SMALL, FLAT, LARGE, FLAT, LARGE, FLAT, LARGE, None)


def small(call: Call) -> Call:
    """As much of the call as the interpreter computes in a fraction of a second."""
    rare = call.seed % 16 == 0  # a large head dim, or a score_mod, whose derivative is the reference's
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
        score_mod=call.score_mod if rare else None,
    )


def gradients(call: Call, device: str) -> tuple[Any, ...]:
    """Of the kernels, and what they are of."""
    q, k, v, options = call.build(device)
    extras, rules = parse_options(q, **options)
    problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
    generator = torch.Generator().manual_seed(call.seed + 2)
    d_out = torch.randn(*q.shape[:3], v.shape[3], generator=generator).to(q.dtype).to(device)
    d_lse = torch.randn(q.shape[:3], generator=generator).to(device) if call.return_lse else None
    needs = (problem.mask not in (None, "bool"), True, True, False)
    row = ROWS[call.seed % len(ROWS)]
    # The LSE of rows of the lowest number has no room for a derivative.
    d_lse = None if needs[0] else d_lse
    made = (d_out, d_lse, q, k, v, problem, extras, needs)
    usual = q.numel() and k.numel() and v.numel() and not problem.score_mod and not problem.copied
    if row is not None and usual and not kernel_refusal(problem, arches.of(q.device)):
        if (
            row.refusal(ops_backward.beside(problem, d_out), arches.of(q.device)) is None
            and max(q.shape[3], v.shape[3]) <= 256
        ):
            return by_row(row, d_out, d_lse, (q, k, v), problem, extras, rules), *made
    return BACKWARD(d_out, d_lse, q, k, v, *extras, *rules, list(needs)), *made


def check(call: Call, device: str) -> None:
    grads, d_out, d_lse, q, k, v, problem, extras, needs = gradients(call, device)
    wide = (q.double(), k.double(), v.double())
    exact = reference.backward(d_out, d_lse, *wide, problem, testing.widened(extras), needs)
    low = reference.backward(d_out, d_lse, q, k, v, problem, extras, needs, p_dtype=q.dtype)
    near = testing.widened(nudged_extras(extras))
    nudged = reference.backward(d_out, d_lse, nudge(q), nudge(k), nudge(v), problem, near, needs)
    more = [_differences(d_out, d_lse, q, k, v, problem, extras, needs, by) for by in (0.99, 1.003, 1.02)]
    names = ("dq", "dk", "dv", "dmask", "dslopes", "dsinks")
    for what, x, x64, lowered, other, *differences in zip(names, grads, exact, low, nudged, *more, strict=False):
        if x64.numel():
            x, x64, *costs = (t[None] if t.dim() == 1 else t for t in (x, x64, lowered, other, *differences))
            x64, cost = x64.double(), costs[0]
            for another in (costs[1], *(x64 + difference for difference in costs[2:])):
                cost = farther(cost, another, x64)
            budget = testing.within_budget(x, x64, cost, eps=max(EPS[x.dtype], EPS[q.dtype]), what=what)
            assert budget.ok, budget


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
    run = run if run is not None else random.SystemRandom().randrange(2**32)
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


@pytest.mark.slow
def test_padded(shard, pytestconfig, device):
    fuzz(False, shard, pytestconfig, device)


@pytest.mark.slow
def test_packed(shard, pytestconfig, device):
    fuzz(True, shard, pytestconfig, device)
