"""The reference's gradients: against torch.autograd through the oracle, and against differences of the oracle."""

from typing import Any

import pytest
import torch
from by_hand import ALL, FEATURES, INF, LOWEST, PACKED, PLAIN, SIZES, Case, build, tensors_of

from lazymax import reference
from lazymax.extras import Extras
from lazymax.problem import Problem
from lazymax.testing import EPS, make_qkv, within_budget

NAMES = ("q", "k", "v", "mask", "slopes", "sinks", "arg0", "arg1")


def assert_within(actual: torch.Tensor, exact: torch.Tensor, low: torch.Tensor, what: str) -> None:
    budget = within_budget(actual, exact.double(), low.clone(), eps=EPS[actual.dtype], what=what)
    assert budget.ok, str(budget)


def with_tensors(extras: Extras, named: dict[str, torch.Tensor]) -> Extras:
    """The same call with other tensors in the places of `tensors_of`."""
    args = tuple(named.get(f"arg{i}", t) for i, t in enumerate(extras.score_args))
    return extras._replace(
        mask=named.get("mask", extras.mask), alibi_slopes=named.get("slopes", extras.alibi_slopes),
        sinks=named.get("sinks", extras.sinks), score_args=args,
    )  # fmt: skip


def by_name(grads: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(NAMES, grads, strict=False))


def autograd(call: list[Any], extras: Extras, grad: torch.Tensor, grad_lse: torch.Tensor) -> dict[str, torch.Tensor]:
    q, k, v, problem = call
    named = {name: t.clone().requires_grad_() for name, t in tensors_of(extras).items()}
    leaf = {"q": q.clone().requires_grad_(), "k": k.clone().requires_grad_(), "v": v.clone().requires_grad_()}
    out, lse = reference.attention(*leaf.values(), problem, extras=with_tensors(extras, named))
    if out.requires_grad:  # not without queries
        ((out * grad).sum() + (torch.where(lse == -INF, 0.0, lse) * grad_lse).sum()).backward()
    return {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in {**leaf, **named}.items()}


def upstream(call: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    q, _, v, _ = call
    generator = torch.Generator().manual_seed(3)
    sizes = ((*q.shape[:3], v.shape[3]), q.shape[:3])
    grad, grad_lse = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return grad, grad_lse


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_backward_is_autograd_of_the_oracle(case: Case) -> None:
    *call, extras = case.build()
    grad, grad_lse = upstream(call)
    got = by_name(reference.backward(grad, grad_lse, *call, extras, (True,) * 4))
    want = autograd(call, extras, grad, grad_lse)
    for name, x in got.items():
        if name in want:
            assert_within(x, want[name], want[name], f"d{name}")
        else:
            assert x.numel() == 0
    assert set(want) <= set(got)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, extras: Extras, names: tuple[str, ...], q, k, v, *tensors):  # type: ignore
        ctx.call = problem, with_tensors(extras, dict(zip(names, tensors, strict=True)))
        ctx.names = names
        ctx.save_for_backward(q, k, v)
        return reference.attention(q, k, v, *ctx.call[:1], extras=ctx.call[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor) -> Any:
        problem, extras = ctx.call
        grads = by_name(reference.backward(grad, grad_lse, *ctx.saved_tensors, problem, extras, (True,) * 4))
        return None, None, None, *(grads[name] for name in ("q", "k", "v", *ctx.names))


# Differences of 1e-6 drown in the lowest float and in half precision; scores of 1e5 are not straight over them.
ROUGH = ("rows of the lowest float", "softcap of huge scores", "score_mod of half-precision arguments")


@pytest.mark.parametrize(
    "case",
    [case for case in (PLAIN[3], PLAIN[7], *FEATURES, *PACKED) if case.id not in ROUGH],
    ids=lambda case: case.id,
)
def test_gradcheck(case: Case) -> None:
    q, k, v, problem, extras = case.build()
    named = tensors_of(extras)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *named.values())]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = Attention.apply(problem, extras, tuple(named), *tensors)  # type: ignore[no-untyped-call]
        return out, torch.where(lse == -INF, 0.0, lse)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=case.id != "all at once")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [PLAIN[0], *FEATURES, *PACKED], ids=lambda case: case.id)
def test_gradients_have_the_dtypes_and_shapes_of_the_inputs(case: Case, dtype: torch.dtype) -> None:
    """And are those of float64, but for rounding the inputs' own precision."""
    *call, extras = case.build(dtype)
    extras = with_tensors(extras, {name: t.to(torch.float32) for name, t in tensors_of(extras).items()})
    grad, grad_lse = upstream(call)
    got = by_name(reference.backward(grad.to(dtype), grad_lse.float(), *call, extras))
    double = with_tensors(extras, {name: t.double() for name, t in tensors_of(extras).items()})
    exact = by_name(
        reference.backward(grad.to(dtype).double(), grad_lse.float(), *(t.double() for t in call[:3]), call[3], double)
    )
    for name, t in {**dict(zip("qkv", call, strict=False)), **tensors_of(extras)}.items():
        assert (got[name].dtype, got[name].shape) == (t.dtype, t.shape)
        if case.id not in ROUGH:
            size = exact[name].abs().amax() if t.numel() else 1.0
            rounding = max(torch.finfo(t.dtype).eps, 1e-4)
            assert ((got[name].double() - exact[name]).abs() <= rounding * size).all(), name


def test_only_what_is_needed_comes() -> None:
    *call, extras = FEATURES[-2].build()
    grad, grad_lse = upstream(call)
    every = reference.backward(grad, grad_lse, *call, extras, (True,) * 4)
    assert all(t.numel() for t in every) and len(every) == 8
    for wanted in range(4):
        needs = tuple(i == wanted for i in range(4))
        grads = reference.backward(grad, grad_lse, *call, extras, needs)
        groups = ((3,), (4,), (5,), (6, 7))
        for number, (x, y) in enumerate(zip(grads, every, strict=True)):
            if number < 3 or number in groups[wanted]:
                assert torch.equal(x, y)
            else:
                assert x.numel() == 0
    assert len({t.data_ptr() for t in every}) == len(every)


@pytest.mark.parametrize("shape", [(7,), (5, 1), (1, 4, 5, 7), (2, 1, 1, 7)], ids=str)
def test_a_masks_gradient_is_summed_over_what_it_broadcasts(shape: tuple[int, ...]) -> None:
    q, k, v = make_qkv(*SIZES, dtype=torch.float64)
    mask = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    *call, extras = build(q, k, v, dict(attn_mask=mask))
    grad, grad_lse = upstream(call)
    narrow = reference.backward(grad, grad_lse, *call, extras)[3]
    *call, extras = build(q, k, v, dict(attn_mask=mask.expand(2, 4, 5, 7)))
    wide = reference.backward(grad, grad_lse, *call, extras)[3]
    assert wide.shape == (2, 4, 5, 7)
    assert_within(narrow.view(shape), wide.sum_to_size(shape), wide.sum_to_size(shape), "dmask")


def test_rows_of_the_lowest_float_have_the_gradients_of_a_mean() -> None:
    q, k, v = make_qkv(1, 1, 1, 2, 4, 3)
    *call, extras = build(q, k, v, dict(attn_mask=torch.full((2, 4), LOWEST)))
    grad = torch.randn(1, 1, 2, 3, generator=torch.Generator().manual_seed(0)).half()
    dv = reference.backward(grad, None, *call, extras)[2]
    want = grad.double().sum(2, keepdim=True).expand(1, 1, 4, 3) / 4
    assert_within(dv, want, want.half(), "dv")


def test_gradients_through_capped_huge_scores_are_zero() -> None:
    q, k, v, problem, extras = FEATURES[1].build(torch.float32)
    dq, dk, dv = reference.backward(torch.ones_like(q[..., :2]), None, q, k, v, problem, extras)[:3]
    assert dq.abs().max() == 0 and dk.abs().max() == 0 and dv.isfinite().all() and dv.abs().max() > 0


@pytest.mark.parametrize("spoiled", ["out", "lse"])
def test_rows_without_keys_pass_no_gradient_on(spoiled: str) -> None:
    """Whatever the gradient of their LSE of -inf came out as."""
    q, k, v, problem, extras = Case("", (1, 2, 2, 6, 4, 3), dict(causal="bottom_right")).build()
    grad, grad_lse = upstream([q, k, v, problem])
    want = reference.backward(grad, grad_lse, q, k, v, problem, extras)
    grad_lse[:, :, :2] = float("nan")
    grads = reference.backward(grad, grad_lse, q, k, v, problem, extras)
    assert all(torch.equal(x, y) for x, y in zip(grads, want, strict=True))
    assert (grads[0][:, :, :2] == 0).all()


def test_gradients_of_any_strides() -> None:
    *call, extras = FEATURES[-2].build()
    q, _, v, _ = call
    one = torch.ones((), dtype=torch.float64)
    expanded = one.expand(*q.shape[:3], v.shape[3]), one.expand(q.shape[:3])
    want = reference.backward(*(t.contiguous() for t in expanded), *call, extras)
    turned = [t.contiguous().transpose(1, 2).contiguous().transpose(1, 2) for t in expanded]
    for grads in (expanded, turned):
        for x, y in zip(reference.backward(*grads, *call, extras), want, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("case", [FEATURES[-2], PACKED[-1]], ids=lambda case: case.id)
def test_below_autograd_nothing_is_lost(case: Case) -> None:
    """An operator's implementation runs where ordinary tensors record no graph, even with gradients enabled."""
    *call, extras = case.build()
    grad, grad_lse = upstream(call)
    want = reference.backward(grad, grad_lse, *call, extras)
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        assert not (2 * x).requires_grad
        below = reference.backward(grad, grad_lse, *call, extras)
    with torch.inference_mode():
        inference = reference.backward(grad, grad_lse, *call, extras)
    for x, y, z in zip(below, inference, want, strict=True):
        assert torch.equal(x, z) and torch.equal(y, z)
        assert not x.requires_grad


def test_the_callers_leaves_are_left_alone() -> None:
    *call, extras = FEATURES[-2].build()
    named = {name: t.clone().requires_grad_() for name, t in tensors_of(extras).items()}
    grad, grad_lse = upstream(call)
    grads = reference.backward(grad, grad_lse, *call, with_tensors(extras, named))
    assert all(t.grad is None for t in named.values()) and not any(t.requires_grad for t in grads)
