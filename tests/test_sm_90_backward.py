"""The backward of sm_90 against float64: every row on a Hopper GPU, if there is one, and in the Gluon simulator, under
adversarial schedules; what ptxas says of every row; the kernels around it in Triton's interpreter."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper import CAUSAL, Call
from hopper_backward import (
    ARCH,
    SIMULATED,
    WINDOW,
    forward,
    head_dims,
    one_by_one,
    prepare,
    prepared,
    rows,
    rows_of,
    sum_of,
    upstream,
)
from simulators.gluon_sim import Worker
from test_fuzz_backward import Made, budgets
from turns import my_turn

import lazymax
from lazymax import arch as arches
from lazymax.backends.sm_90 import backward_launch
from lazymax.backends.sm_90.backward_launch import HopperBackwardLaunch
from lazymax.backends.sm_90.backward_rows import HopperBackwardTile
from lazymax.backends.sm_90.kernels.backward import attention_backward
from lazymax.dispatch import plan
from lazymax.dispatch_backward import plan_backward
from lazymax.kernels import gradients
from lazymax.kernels.launch import LOG2E
from lazymax.ops_backward import Saved
from lazymax.problem import Problem
from lazymax.testing import check_gradients, moat, poisoned

ROWS = rows()
NAMES = [row.name for row in ROWS]
NO_EXTRAS = [torch.empty(0)] * 3  # mask, slopes and sinks
CALLS = (
    *SIMULATED,
    Call((2, 8, 2, 1000, 1000), {"causal": "top_left"}, layout="bshd", sinks=True),
    Call((4, 20, 4, 517, 901), CAUSAL, "rising"),
    Call((3, 12, 12, 1024, 2048), {}),
    Call((1, 6, 2, 1450, 777), WINDOW | {"scale": -0.2}, "rising", "bshd"),
    Call((1, 4, 1, 500, 2900), CAUSAL | {"window": (300, None)}, "large"),
    Call((1, 4, 1, 900, 500), CAUSAL, sinks=True),  # rows and tiles without keys
    Call((2, 4, 1, 400, 400), {"window": (None, 40), "scale": 0.0}),
    Call((1, 4, 2, 300, 1000), CAUSAL, "step"),
    Call((1, 4, 2, 300, 1000), {"window": (400, None), "window_align": "bottom_right"}, "cliff"),
    # What the kernel leaves to the portable ones.
    Call((1, 2, 1, 200, 370), CAUSAL, "huge"),
    Call((1, 2, 1, 237, 297), CAUSAL, "hidden"),
    Call((2, 4, 1, 137, 197), {"causal": "top_left"}, "visible"),
)


def needs_hopper(device: str) -> None:
    if device != "cuda" or arches.of(torch.device(device)).id != "sm_90":
        pytest.skip(f"needs an H100 or H200: this is {arches.of(torch.device(device)).id}")


def judge(grads: Any, d_out: Any, d_lse: Any, qkv: Any, problem: Problem, extras: Any, out: Any) -> None:
    found = check_gradients([*grads, *NO_EXTRAS], d_out, d_lse, *qkv, problem, extras, out=out)
    assert all(budget.ok for budget in found), "; ".join(map(str, found))


# ---- on the card


@pytest.mark.parametrize("which", range(len(CALLS)))
@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_rows_on_the_gpu(index: int, which: int, device: str) -> None:
    needs_hopper(device)
    call = CALLS[which]
    for dims in head_dims(ROWS[index]) if which % 4 == index % 4 else head_dims(ROWS[index])[:1]:
        for dtype in (torch.bfloat16, torch.float16) if which % 2 == index % 2 else (torch.bfloat16,):
            (q, k, v), extras, problem = call.inputs(dims, dtype, which, device)
            d_out, d_lse = upstream(call, q, v)
            out, lse = forward(q, k, v, problem, extras)
            launches = prepared(ROWS[index], problem), one_by_one(ROWS[index], problem)
            made = []
            for launch in (*launches, *launches):  # the second call of each launches the binaries directly
                grads = tuple(poisoned(*t.shape, dtype=t.dtype, device=device) for t in (q, k, v))
                launch((q, k, v, d_out), out, lse, d_lse, grads, extras)
                judge(grads, d_out, d_lse, (q, k, v), problem, extras, out)
                made.append(grads)
            for other in made[1:]:  # dK and dV are summed in registers
                for x, y in zip(made[0][1:], other[1:], strict=True):
                    assert torch.equal(x.view(torch.int16), y.view(torch.int16)), "not the same bits again"


BANDS = ("full", "causal", "window", "left")
RANDOM = 60  # calls of each build
FINITE = ("large", "rising", "step", "cliff")


def random_call(band: str, chance: random.Random) -> Call:
    """Any lengths, heads, scale, layout and data that the kernel takes. Huge scores and what is not finite with the
    usual scale alone: with 0.5 gradients leave fp16's range, and P falls below it beside an infinite value. The latter
    without a band alone: a row of NaN reaches all keys in the reference, those of the blocks that it sees here."""
    q_len, kv_len = (chance.choice([chance.randint(1, 300), chance.randint(1, 2500)]) for _ in "qk")
    near, far = sorted(chance.randint(-50, 400) for _ in range(2))
    align = {"window_align": chance.choice(["top_left", "bottom_right"])}
    rules: dict[str, Any] = {
        "full": {},
        "causal": {"causal": chance.choice(["top_left", "bottom_right"])},
        "window": {"window": (max(near, 0), max(far, 0)), **align},
        "left": {"window": (max(far, 0), None), **align},
    }[band]
    data = ["normal"] * 5 + [*FINITE]
    if chance.random() < 0.3:
        rules = rules | {"scale": chance.choice([-0.2, 0.0, 0.03, 0.5])}
    else:
        data += ["huge"] if rules else ["huge", "hidden", "visible"]
    kv_heads = chance.randint(1, 5)
    return Call(
        (chance.randint(1, 3), kv_heads * chance.randint(1, 4), kv_heads, q_len, kv_len), rules,
        chance.choice(data), chance.choice(["bhsd", "bshd", "padded"]),
        sinks=chance.random() < 0.3,
    )  # fmt: skip


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_random_calls_on_the_gpu(index: int, band: str, device: str) -> None:
    """As launched, or with any number of heads side by side, and so many CTAs between a sum and who finishes it."""
    needs_hopper(device)
    row, turn = ROWS[index], BANDS.index(band) + index
    dims, dtype = head_dims(row)[turn % 3], (torch.bfloat16, torch.float16)[turn // 2 % 2]
    for seed in range(RANDOM):
        chance = random.Random(f"{row.name}/{band}/{seed}")
        call = random_call(band, chance)
        (q, k, v), extras, problem = call.inputs(dims, dtype, seed, device)
        d_out, d_lse = upstream(call, q, v)
        out, lse = forward(q, k, v, problem, extras)
        launch = prepared(row, problem)
        if chance.random() < 0.7:
            launch.arrange(chance.randint(1, call.shape[0] * call.shape[2]), 0, row.finishes)
        grads = [poisoned(*t.shape, dtype=t.dtype, device=device) for t in (q, k, v)]
        launch((q, k, v, d_out), out, lse, d_lse, tuple(grads), extras)
        needs = (False, True, True, False)
        made = Made(grads, Saved(out, lse), d_out, d_lse, (q, k, v), problem, extras, needs)
        if not all(budget.ok for budget in budgets(made, sampled_well=False)):
            wrong = [str(budget) for budget in budgets(made, sampled_well=True) if not budget.ok]
            assert not wrong, f"seed {seed}, {call}: {wrong}"


@pytest.mark.parametrize("dim", [64, 128])
def test_through_the_operator(dim: int, device: str) -> None:
    needs_hopper(device)
    q, k, v = (torch.randn(4, heads, 1000, dim, device=device, dtype=torch.bfloat16) for heads in (16, 4, 4))
    for t in (q, k, v):
        t.requires_grad_()
    problem = Problem.from_call(q, k, v, causal="top_left", return_lse=True)
    assert isinstance(plan_backward(problem, ARCH, plan(problem, ARCH)).tile, HopperBackwardTile)
    out, lse = lazymax.attention(q, k, v, causal="top_left", return_lse=True)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse))
    judge(grads, d_out, d_lse, (q.detach(), k.detach(), v.detach()), problem, lazymax.extras.NO_EXTRAS, out.detach())


# ---- simulated


@pytest.fixture(scope="module")
def sim() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


SEEDS = [(index, seed) for index in range(len(ROWS)) for seed in range(len(SIMULATED))]


@pytest.mark.parametrize(
    "index, seed",
    [pytest.param(i, s, id=f"{ROWS[i].name}-{s}", marks=my_turn(n) if i else ()) for n, (i, s) in enumerate(SEEDS)],
)
def test_schedules(index: int, seed: int, sim: Worker) -> None:
    dims = head_dims(ROWS[index])
    wrong = sim.call("simulated_backward:seeds", index, dims[seed % 3 == 2], "bf16" if seed % 2 else "fp16", [seed])
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_many_schedules(index: int, sim: Worker) -> None:
    wrong = sim.call("simulated_backward:seeds", index, head_dims(ROWS[index])[0], "bf16", list(range(10, 40)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_a_dropped_synchronisation_is_found(index: int, sim: Worker) -> None:
    count, survived = sim.call("simulated_backward:mutants", index, head_dims(ROWS[index])[0], list(range(4)))
    assert count > 40 and len(survived) <= 0.05 * count, f"{len(survived)} of {count}: {survived}"


# ---- compiled


@pytest.mark.parametrize("rules", [{}, CAUSAL, WINDOW], ids=["full", "causal", "window"])
@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_ptxas_has_nothing_to_say(index: int, rules: dict[str, Any], sim: Worker) -> None:
    """One advisory C75xx serialises every product of the kernel, and the time doubles."""
    report = sim.call("simulated_backward:assembled", index, head_dims(ROWS[index])[0], "bf16", rules)
    assert not report["advisories"] and report["wgmma"] >= 2 * 5 * 4, report
    assert not (ROWS[index].tuned and report["spills"]), report


@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_the_kernels_around_compile(index: int, sim: Worker) -> None:
    shared = sim.call("simulated_backward:built_around", index, head_dims(ROWS[index])[0])
    assert len(shared) == 2 and max(shared) < 64 << 10


# ---- the kernels around it


def squared(launch: HopperBackwardLaunch, inputs: Any, grads: Any, work: Any) -> None:
    """What `attention_backward` does, in torch, with the numbers that it gets."""
    p, cols = launch.problem, launch.width
    q, k, v, g = (t.float() for t in inputs)
    k, v = (t.repeat_interleave(p.group, 1) for t in (k, v))
    row, col = torch.arange(p.q_len, device=q.device)[:, None], torch.arange(p.kv_len, device=q.device)
    seen = torch.ones(p.q_len, p.kv_len, dtype=torch.bool, device=q.device)
    if p.first_offset is not None:
        seen &= col >= row + p.first_offset
    if p.last_offset is not None:
        seen &= col <= row + p.last_offset
    rest, delta = (plane[..., : p.q_len, None] for plane in work.stats[:2])
    weight = torch.where(seen, torch.exp2(q @ k.mT * (p.scale * LOG2E) - rest), 0.0)
    ds = weight * (g @ v.mT - delta)
    dq = torch.nn.functional.pad(ds @ k, (0, cols - p.head_dim, 0, launch.rows - p.q_len))
    heads, done = p.batch * p.kv_heads, launch.finished * launch.together
    dq = dq.reshape(heads, p.group, *dq.shape[2:])
    for index in range(done * p.group):
        at, part = divmod(index, p.q_heads), dq.flatten(0, 1)[index, : p.q_len, : p.head_dim]
        grads[0][at] = part * p.scale
        work.odd[at] = torch.nn.functional.pad(~part.isfinite().all(-1), (0, launch.rows - p.q_len)).view(-1, 64).any(1)
    left = torch.arange(done, heads)
    work.sums[left % launch.sums] = sum_of(dq)[left]
    found = torch.zeros(p.batch, p.kv_heads, launch.blocks * work.found.shape[-1], device=q.device)
    for grad, own in ((grads[1], ds.mT @ q * p.scale), (grads[2], weight.mT @ g)):
        own = own.unflatten(1, (p.kv_heads, p.group)).sum(2)
        grad.copy_(own)
        found[..., : p.kv_len] += ~own.isfinite().all(-1)
    work.found.copy_((found > 0).view_as(work.found))


AROUND = (
    Call((1, 2, 1, 70, 140), CAUSAL),
    Call((2, 4, 2, 65, 33), {}, "normal", "bshd"),
    Call((1, 2, 2, 130, 70), {"causal": "bottom_right", "scale": -0.3}, sinks=True),
    Call((1, 2, 1, 20, 37), CAUSAL, "huge"),
    Call((1, 2, 1, 23, 29), {"causal": "top_left"}, "hidden"),
    Call((1, 2, 1, 37, 140), CAUSAL, "visible", sinks=True),
    Call((1, 1, 1, 70, 33), {"window": (9, 3), "scale": 0.0}, "hidden"),
    Call((2, 4, 2, 20, 37), CAUSAL, "huge"),
    Call((1, 6, 3, 23, 150), {"causal": "top_left"}, "visible"),
)


@pytest.mark.parametrize("which", range(len(AROUND)))
@pytest.mark.parametrize("index", range(len(ROWS)), ids=NAMES)
def test_the_kernels_around(index: int, which: int, device: str) -> None:
    """Statistics, dQ from its sum, and what the fast path leaves as NaN or inf, with that path in torch."""
    call = AROUND[which]
    dims = head_dims(ROWS[index])[which % 3]
    (q, k, v), extras, problem = call.inputs(dims, torch.float16, which, device)
    d_out, d_lse = upstream(call, q, v)
    out, lse = forward(q, k, v, problem, extras)
    launch = one_by_one(ROWS[index], problem)
    grads = [moat(poisoned(*t.shape, dtype=t.dtype, device=device), 0, 0, 1, 8) for t in (q, k, v)]
    inputs, work = (q, k, v, d_out), launch.work(q.device)
    to_clear = [t for t in (work.sums, work.settled, work.counts, work.odd) if t is not None]
    for t in to_clear:
        t.fill_(7)
    twin = launch.work(q.device)
    prepare(launch, twin, out, d_out, lse, d_lse)
    for kernel, grid, arguments, options in launch.launches(inputs, out, lse, d_lse, grads, work, extras):
        if kernel is attention_backward:
            coarse = work.stats[0].isnan()  # scores too large for the fused exponent, or NaN
            assert coarse.any() or call.data != "huge"
            same = torch.where(coarse, 0.0, work.stats[:2] - twin.stats[:2]).nan_to_num(0.0)
            assert same.abs().max() <= 1e-4
            assert not any(t.any() for t in to_clear)
            squared(launch, inputs, grads, work)
        else:
            kernel[grid](*arguments, **options)
    assert (work.settled == 1).all()  # the programs of keys wait for that
    judge(grads, d_out, d_lse, (q, k, v), problem, extras, out)


def test_a_sum_lies_as_an_accumulator_does() -> None:
    dq = torch.randn(2, 1, 128, 128)
    assert torch.equal(rows_of(sum_of(dq)), dq)
    # PTX ISA, wgmma: thread t of warp w has in its first four registers rows 16 w + t // 4 and 8 more, columns
    # 2 (t % 4) and one more.
    first = sum_of(dq)[0, 0].flatten()[4 * (32 * 2 + 9) :][:4].view(2, 2)
    assert torch.equal(first, dq[0, 0, [34, 42], 2:4])


# ---- chosen


def of(problem: Problem) -> Any:
    return plan_backward(problem, ARCH, plan(problem, ARCH))


BIG = Problem.from_shape((4, 16, 4, 2048, 2048, 128, 128), "bfloat16", return_lse=True, causal="top_left")


def test_who_gets_a_row() -> None:
    assert of(BIG).describe() == "triton:sm_90:ws-64x128-s2"
    assert of(replace(BIG, head_dim=64, v_head_dim=64)).tile.width == 64
    assert of(replace(BIG, head_dim=96, v_head_dim=96, dtype="float16")).tile.width == 128
    assert "atomics" in of(BIG).tile.describe() and "order in which programs finish" in of(BIG).determinism


@pytest.mark.parametrize(
    "length, group, together", [(512, 1, 16), (1024, 4, 16), (4096, 1, 4), (4096, 4, 4), (16384, 1, 1), (32768, 1, 1)]
)
def test_heads_side_by_side_fill_the_gpu(
    length: int, group: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a band, where CTAs differ; without one a head after the other."""
    monkeypatch.setattr(backward_launch, "multiprocessors", lambda usual: 132)
    shape = (8, 8 * group, 8, length, length, 128, 128)
    for rules, expected in (({"causal": "top_left"}, together), ({"window": (64, 64)}, together), ({}, 1)):
        problem = Problem.from_shape(shape, "bfloat16", return_lse=True, **rules)
        assert prepared(ROWS[-1], problem).together == expected


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(deterministic=True), "the same bits were asked for"),
        (dict(softcap=3.0), "takes no mask, mod, ALiBi, softcap or dropout"),
        (dict(mask="bool"), "takes no mask"),
        (dict(dtype="float32"), "for float16 and bfloat16, got float32"),
        (dict(seqlens_k=True), "takes no lengths in device memory"),
        (dict(head_dim=192), "for head dims from 72 to 128, multiples of 8, got 192 and 128 of v"),
        (dict(head_dim=100), "multiples of 8"),
        (dict(batch=1, q_heads=1, kv_heads=1, q_len=128, kv_len=128), "programs"),
        (dict(q_len=2**21 - 127), "takes 2097024 queries at most, got 2097025"),
        (dict(descriptor_refusal="q: no"), "needs tensor descriptors: q: no"),
    ],
)
def test_who_does_not(change: dict[str, Any], why: str) -> None:
    problem = replace(BIG, **change)
    chosen = of(problem)
    assert not isinstance(chosen.tile, HopperBackwardTile)
    assert any(why in refused.reason for refused in chosen.rejected), chosen.rejected


def test_statistics_have_a_row_of_their_own_each() -> None:
    assert (gradients.REST.value, gradients.DELTA.value) == (0, 1)  # the planes that the kernel reads
