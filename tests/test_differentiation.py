"""Gradients, torch.func transforms and vmap of the operators."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import calls
import pytest
import torch
from calls import SIEVE, TILT, assert_within, attend, bools, floats, leaves, moved, normal, stored, with_floats
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import lazymax
from lazymax import mods, reference
from lazymax.options import parse_options
from lazymax.problem import Problem
from lazymax.testing import EPS, make_qkv, within_budget


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE by the textbook formula, for autograd; written apart from `lazymax.reference`. Rows without keys
    have out 0 and are left out of the LSE (0 there, so that a sum of it stays finite)."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    shift = k.shape[2] - q.shape[2] if problem.align == "bottom_right" else 0
    left, right = problem.window
    keep = torch.tensor(
        [
            [
                not (problem.causal and j > i + shift)
                and (left is None or j >= i + shift - left)
                and (right is None or j <= i + shift + right)
                for j in range(k.shape[2])
            ]
            for i in range(q.shape[2])
        ],
        dtype=torch.bool,
        device=q.device,
    ).reshape(q.shape[2], k.shape[2])
    weights = torch.exp(q @ k.mT * problem.scale) * keep
    total = weights.sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    return weights / total @ v, total.log().squeeze(-1)


# ---- torch.func


@dataclass(frozen=True)
class Mapped:
    id: str
    in_dims: tuple[int | None, int | None, int | None]
    rules: dict[str, Any] = field(default_factory=dict)


MAPPED = (
    Mapped("all in front", (0, 0, 0)),
    Mapped("q at 1, k at 0, v unbatched", (1, 0, None)),
    Mapped("q alone", (2, None, None), dict(causal="top_left")),
    Mapped("v alone, last", (None, None, 4)),
    Mapped("negative", (-1, -3, 0), dict(window=(5, 1))),
)


def batched(case: Mapped, device: str) -> list[torch.Tensor]:
    parts = [make_qkv(1, 2, 1, 9, 17, 16, dtype=torch.float32, device=device, seed=seed) for seed in range(3)]
    return [
        parts[0][i] if dim is None else torch.stack([part[i] for part in parts], dim)
        for i, dim in enumerate(case.in_dims)
    ]


def item(tensors: list[torch.Tensor], case: Mapped, index: int) -> list[torch.Tensor]:
    return [t if dim is None else t.select(dim, index) for t, dim in zip(tensors, case.in_dims, strict=True)]


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("case", MAPPED, ids=lambda case: case.id)
def test_vmap_is_a_loop(case: Mapped, return_lse: bool, device: str) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        got = lazymax.attention(q, k, v, return_lse=return_lse, **case.rules)
        return got if return_lse else (got,)

    tensors = batched(case, device)
    got = torch.func.vmap(call, case.in_dims)(*tensors)
    want = [torch.stack(parts) for parts in zip(*(call(*item(tensors, case, i)) for i in range(3)), strict=True)]
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


@dataclass(frozen=True)
class MappedExtra:
    """One optional tensor, for a call of 2 heads of 9 queries and 17 keys, over 2 batch elements and one key head."""

    id: str
    name: str
    make: Callable[[int], torch.Tensor]  # (seed) -> the tensor of one item
    dim: int | None = 0  # where the items are stacked; None: the same tensor for all
    rules: dict[str, Any] = field(default_factory=dict)


MAPPED_EXTRAS = (
    MappedExtra("bool mask, one for all", "attn_mask", lambda seed: bools(9, 17), None),
    MappedExtra("mask of batch and keys, one for all", "attn_mask", lambda seed: normal(2, 1, 1, 17), None),
    MappedExtra("mask of queries and keys", "attn_mask", lambda seed: normal(9, 17, seed=seed)),
    MappedExtra("mask of keys", "attn_mask", lambda seed: normal(17, seed=seed) > -0.5, 1),
    MappedExtra("mask of everything, items last", "attn_mask", lambda seed: normal(2, 2, 9, 17, seed=seed), 4),
    MappedExtra("slopes, one for all", "alibi_slopes", lambda seed: normal(2), None),
    MappedExtra("slopes per batch, one for all", "alibi_slopes", lambda seed: normal(2, 2), None),
    MappedExtra("slopes", "alibi_slopes", lambda seed: normal(2, seed=seed), rules=dict(causal="top_left")),
    MappedExtra("sinks per batch", "sinks", lambda seed: normal(2, 2, seed=seed), 1),
    MappedExtra("lengths, one for all", "seqlens_k", lambda seed: torch.tensor([17, 10]), None),
    MappedExtra("lengths", "seqlens_k", lambda seed: torch.tensor([17, 5]) - seed, rules=dict(causal="bottom_right")),
)


@pytest.mark.parametrize("case", MAPPED_EXTRAS, ids=lambda case: case.id)
def test_vmap_of_optional_tensors_is_a_loop(case: MappedExtra, device: str) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: torch.Tensor) -> Any:
        return lazymax.attention(q, k, v, **{case.name: extra}, **case.rules, return_lse=True)

    items = [
        (*make_qkv(2, 2, 1, 9, 17, 16, dtype=torch.float16, device=device, seed=seed), case.make(seed).to(device))
        for seed in range(2)
    ]
    q, k, v, extra = zip(*items, strict=True)
    mapped = extra[0] if case.dim is None else torch.stack(extra, case.dim)
    # k the same for all: what is not mapped has to be expanded beside what is.
    got = torch.func.vmap(call, (0, None, 1, case.dim))(torch.stack(q), k[0], torch.stack(v, 1), mapped)
    want = [call(q[i], k[0], v[i], extra[0 if case.dim is None else i]) for i in range(2)]
    for x, y in zip(got, zip(*want, strict=True), strict=True):
        assert torch.equal(x, torch.stack(y))


def test_vmap_of_an_optional_tensor_alone(device: str) -> None:
    q, k, v = make_qkv(2, 2, 1, 9, 17, 16, dtype=torch.float16, device=device)
    masks = normal(2, 9, 17).to(device)
    got = torch.func.vmap(lambda mask: lazymax.attention(q, k, v, attn_mask=mask))(masks)
    assert torch.equal(got, torch.stack([lazymax.attention(q, k, v, attn_mask=mask) for mask in masks]))


def test_vmap_with_mods_that_do_not_look_at_the_batch(device: str) -> None:
    items = [make_qkv(2, 2, 1, 9, 17, 16, dtype=torch.float16, device=device, seed=seed) for seed in range(2)]
    weight = normal(2).to(device)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return lazymax.attention(q, k, v, score_mod="calls.weigh", score_mod_args=(weight,))

    got = torch.func.vmap(call)(*(torch.stack(t) for t in zip(*items, strict=True)))
    assert torch.equal(got, torch.stack([call(*item) for item in items]))


def test_vmap_with_mods_that_look_at_the_batch_is_refused(device: str) -> None:
    """Their b would count the folded batch."""
    q, k, v = (torch.stack([t] * 3) for t in make_qkv(2, 2, 1, 9, 17, 16, dtype=torch.float16, device=device))
    for kind, options in (("mask_mod", SIEVE), ("score_mod", TILT), ("score_mod", {**SIEVE, **TILT})):
        with pytest.raises(NotImplementedError, match=f"{kind}: got .* which looks at b, under vmap"):
            torch.func.vmap(lambda *qkv, options=options: lazymax.attention(*qkv, **moved(options, device)))(q, k, v)


def test_vmap_tells_a_score_mod_from_a_mask_mod_of_the_same_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mods, "_registered", dict(mods._registered))
    mods.register_score_mod("twins", calls.weigh)
    mods.register_mask_mod("twins", calls.sieve)  # looks at b, the other does not
    q, k, v = make_qkv(2, 2, 2, 5, 7, 8, dtype=torch.float32, device=device)
    args = dict(score_mod_args=(torch.ones(2, device=device),), mask_mod_args=(torch.ones(2, device=device).int(),))
    with pytest.raises(NotImplementedError, match="mask_mod: got 'twins', which looks at b, under vmap"):
        torch.func.vmap(lambda q: lazymax.attention(q, k[:1], v[:1], score_mod="twins", mask_mod="twins", **args))(
            q[:, None]
        )


@dataclass(frozen=True)
class Unmapped:
    id: str
    call: Callable[..., Any]
    mapped: torch.Tensor  # a tensor with one item per call
    words: str


UNMAPPED = (
    Unmapped("dropout", lambda q, k, v, seed: lazymax.attention(q, k, v, dropout_p=0.5, dropout_seed=seed),
             torch.arange(2)[:, None], "dropout_p: got dropout under vmap"),
    Unmapped("arguments of a mod",
             lambda q, k, v, x: lazymax.attention(q, k, v, score_mod="calls.weigh", score_mod_args=(x,)),
             normal(2, 2), "score_args: got a vmapped tensor"),
    Unmapped("packed", lambda q, k, v, ends: lazymax.attention_varlen(q[0], k[0], v[0], ends, ends),
             torch.tensor([[0, 1], [0, 2]]), "cu_seqlens_q: got a vmapped tensor"),
    Unmapped("packed, one for all",
             lambda q, k, v, x: lazymax.attention_varlen(
                 q[0] * x, k[0], v[0], torch.tensor([0, 2], device=q.device), torch.tensor([0, 2], device=q.device)),
             normal(2), "packed sequences under vmap"),
)  # fmt: skip


@pytest.mark.parametrize("case", UNMAPPED, ids=lambda case: case.id)
def test_vmap_refuses_what_has_no_place_in_a_folded_batch(case: Unmapped, device: str) -> None:
    qkv = make_qkv(1, 2, 2, 2, 2, 8, dtype=torch.float32, device=device)
    with pytest.raises(NotImplementedError, match=case.words):
        torch.func.vmap(case.call, (None, None, None, 0))(*qkv, case.mapped.to(device))


def test_vmapped_gradients_of_optional_tensors_are_refused(device: str) -> None:
    q, k, v = make_qkv(1, 2, 2, 5, 7, 8, dtype=torch.float32, device=device)
    masks = normal(3, 5, 7).to(device)
    loss = torch.func.grad(lambda mask: lazymax.attention(q, k, v, attn_mask=mask).sum())
    with pytest.raises(NotImplementedError, match=r"vmapped gradients of attn_mask.*SDPBackend\.MATH"):
        torch.func.vmap(loss)(masks)


@pytest.mark.parametrize("case", MAPPED[:3], ids=lambda case: case.id)
def test_grad_under_vmap_is_a_loop_of_grads(case: Mapped, device: str) -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = lazymax.attention(q, k, v, return_lse=True, **case.rules)
        return out.square().sum() + lse.sum()

    tensors = batched(case, device)
    got = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), case.in_dims)(*tensors)
    want = [torch.stack(g) for g in zip(*(torch.func.grad(loss, (0, 1, 2))(*item(tensors, case, i)) for i in range(3)),
                                        strict=True)]  # fmt: skip
    for name, x, y in zip("qkv", got, want, strict=True):
        assert_within(x, y, y, f"d{name}")


def test_vmap_of_vmap_and_backward_through_vmap(device: str) -> None:
    q, k, v = (t.unflatten(0, (2, 3)) for t in make_qkv(6, 2, 1, 9, 17, 16, dtype=torch.float32, device=device))
    q, k, v = (t.unsqueeze(2) for t in (q, k, v))
    call = torch.func.vmap(torch.func.vmap(lambda *x: lazymax.attention(*x, causal="bottom_right")))
    flat = [t.flatten(0, 2) for t in (q, k, v)]
    got, want = call(q, k, v), lazymax.attention(*flat, causal="bottom_right")
    assert torch.equal(got.flatten(0, 2), want)
    ours, theirs = leaves((q, k, v)), leaves(flat)
    call(*ours).square().sum().backward()
    lazymax.attention(*theirs, causal="bottom_right").square().sum().backward()
    for name, x, y in zip("qkv", ours, theirs, strict=True):
        assert_within(x.grad.flatten(0, 2), y.grad, y.grad, f"d{name}")


def test_torch_func_grad_of_every_floating_tensor(device: str) -> None:
    q, k, v = make_qkv(2, 2, 1, 5, 7, 8, dtype=torch.float32, device=device)
    options = moved(dict(attn_mask=normal(5, 7), alibi_slopes=normal(2), sinks=normal(2, 2), **TILT), device)

    def loss(mask: torch.Tensor, slopes: torch.Tensor, sinks: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        more = dict(options, attn_mask=mask, alibi_slopes=slopes, sinks=sinks, score_mod_args=args)
        return lazymax.attention(q, k, v, **more).square().sum()

    tensors = [*(options[name] for name in ("attn_mask", "alibi_slopes", "sinks")), *options["score_mod_args"]]
    got = torch.func.grad(loss, tuple(range(5)))(*tensors)
    leaf = leaves(tensors)
    for i, (x, y) in enumerate(zip(got, torch.autograd.grad(loss(*leaf), leaf), strict=True)):
        assert_within(x, y, y, f"gradient {i}")


def test_forward_mode_is_refused_by_every_road(device: str) -> None:
    q, k, v = make_qkv(1, 2, 2, 9, 9, 16, dtype=torch.float32, device=device)
    with pytest.raises(NotImplementedError, match=r"forward-mode.*SDPBackend\.MATH"):
        torch.func.jvp(lambda q: lazymax.attention(q, k, v), (q,), (q,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            lazymax.attention(dual, k, v)
        sinks = torch.ones(2, device=device)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            lazymax.attention(q, k, v, sinks=forward_ad.make_dual(sinks, sinks))


def test_forward_mode_of_the_arguments_of_a_mod_is_refused(device: str) -> None:
    q, k, v = make_qkv(1, 2, 2, 9, 9, 16, dtype=torch.float32, device=device)
    weight = torch.ones(2, device=device)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        dual = forward_ad.make_dual(weight, weight)
        lazymax.attention(q, k, v, score_mod="calls.weigh", score_mod_args=(dual,))


def test_gradients_of_gradients_are_refused(device: str) -> None:
    q, k, v = leaves(make_qkv(1, 2, 2, 9, 9, 16, dtype=torch.float32, device=device))
    (dq,) = torch.autograd.grad(lazymax.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"gradients of gradients.*SDPBackend\.MATH"):
        dq.square().sum().backward()
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: lazymax.attention(q, k, v).sum())(q).sum())(q)


# ---- gradients


@dataclass(frozen=True)
class Grad:
    id: str
    sizes: tuple[int, ...]
    rules: dict[str, Any] = field(default_factory=dict)


GRADS = (
    Grad("plain", (2, 2, 2, 4, 5, 3)),
    Grad("grouped, D_v != D", (1, 4, 2, 3, 5, 4, 2)),
    Grad("one key head", (2, 3, 1, 3, 4, 2)),
    Grad("causal, top left", (1, 2, 2, 4, 6, 3), dict(causal="top_left")),
    Grad("causal, bottom right", (1, 2, 1, 4, 6, 3), dict(causal="bottom_right")),
    Grad("window", (1, 2, 2, 6, 6, 3), dict(window=(2, 1))),
    Grad("window, bottom right", (1, 2, 2, 3, 6, 3), dict(window=(1, None), window_align="bottom_right")),
    Grad("rows without keys", (1, 2, 2, 6, 3, 3), dict(causal="bottom_right")),
    Grad("scale", (1, 2, 2, 4, 4, 3), dict(scale=-0.7)),
    Grad("zero scale", (1, 2, 2, 4, 4, 3), dict(scale=0.0)),
)


@pytest.mark.parametrize("case", GRADS, ids=lambda case: case.id)
def test_gradcheck(case: Grad, device: str) -> None:
    q, k, v = leaves(make_qkv(*case.sizes, dtype=torch.float64, device=device))
    assert torch.autograd.gradcheck(lambda q, k, v: lazymax.attention(q, k, v, **case.rules), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", GRADS, ids=lambda case: case.id)
def test_gradients_of_out_and_lse_against_the_textbook(case: Grad, dtype: torch.dtype, device: str) -> None:
    qkv = make_qkv(*case.sizes, dtype=dtype, device=device)
    problem = Problem.from_call(*qkv, return_lse=True, **case.rules)
    weights = torch.randn(*qkv[0].shape[:3], qkv[2].shape[3], generator=torch.Generator().manual_seed(5)).to(device)

    ours = leaves(qkv)
    out, lse = lazymax.attention(*ours, return_lse=True, **case.rules)
    torch.autograd.backward((out, lse), (weights.to(dtype), weights.mean(-1)))  # rows without keys get a gradient too
    exact = leaves([t.double() for t in qkv])
    out64, lse64 = plain(*exact, problem)
    torch.autograd.backward((out64, lse64), (weights.to(dtype).double(), weights.mean(-1).double()))
    # What a kernel in this precision rounds beside the results: P, dS and the output.
    low = reference.backward(weights.to(dtype), weights.mean(-1), *qkv, problem, p_dtype=dtype)
    for name, x, y, z in zip("qkv", ours, exact, low, strict=False):
        assert x.grad.dtype == dtype
        assert_within(x.grad, y.grad, z, f"d{name}")


EXTRA_GRADS = (
    Grad("float mask, softcap", (1, 2, 1, 4, 5, 3), dict(attn_mask=normal(4, 5), softcap=1.5)),
    Grad("mask of batch and keys, transposed", (2, 2, 2, 3, 4, 3), dict(attn_mask=normal(4, 2).T[:, None, None])),
    Grad("mask, expanded", (2, 2, 1, 3, 4, 3), dict(attn_mask=normal(1, 3, 1).expand(2, 3, 4), causal="top_left")),
    Grad("bool mask, a row without keys", (1, 2, 1, 3, 4, 3), dict(attn_mask=torch.tensor([[1], [0], [1]]) > 0)),
    Grad("slopes", (2, 2, 1, 3, 5, 3), dict(alibi_slopes=normal(2, 2), causal="bottom_right")),
    Grad("sinks, rows without keys", (2, 2, 1, 5, 3, 3), dict(sinks=normal(2), causal="bottom_right")),
    Grad("lengths", (2, 2, 1, 3, 5, 3), dict(seqlens_k=torch.tensor([4, 0]), sinks=normal(2, 2))),
    Grad("mods, dropout", (2, 2, 1, 3, 5, 3), dict(**TILT, **SIEVE, dropout_p=0.3, dropout_seed=torch.tensor([5]))),
    Grad("packed", (1, 2, 1, 6, 8, 3), dict(
        cu_seqlens_q=torch.tensor([0, 2, 2, 5]), cu_seqlens_k=torch.tensor([0, 3, 4, 8]), sinks=normal(3, 2),
        alibi_slopes=normal(2), causal="bottom_right")),
)  # fmt: skip


@pytest.mark.parametrize("case", EXTRA_GRADS, ids=lambda case: case.id)
def test_gradcheck_of_optional_tensors(case: Grad, device: str) -> None:
    qkv = make_qkv(*case.sizes, dtype=torch.float64, device=device)
    options = moved(case.rules, device, torch.float64)
    leaf = leaves((*qkv, *floats(options).values()))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, with_floats(options, tensors))

    assert torch.autograd.gradcheck(call, leaf)


@pytest.mark.parametrize("case", EXTRA_GRADS, ids=lambda case: case.id)
def test_gradients_of_optional_tensors_beside_the_kernel(case: Grad, device: str) -> None:
    """bf16 inputs and fp32 optional tensors, against the same call in float64."""
    qkv = make_qkv(*case.sizes, dtype=torch.bfloat16, device=device)
    grads = []
    for kind in (None, torch.float64):
        options = moved(case.rules, device, kind)
        tensors = leaves((*(t.to(kind or t.dtype) for t in qkv), *floats(options).values()))
        out, lse = attend(*tensors[:3], with_floats(options, tensors[3:]), return_lse=True)
        (out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()).backward()
        assert all(t.grad.dtype == t.dtype and t.grad.shape == t.shape for t in tensors)
        grads.append([t.grad for t in tensors])
    # What a kernel in this precision rounds: P, dS, the output, and so the gradient that comes in.
    extras, rules = parse_options(qkv[0], **moved(case.rules, device))
    problem = Problem.from_tensors(*qkv, extras, rules, return_lse=True)
    out, lse = reference.attention(*qkv, problem, torch.float32, p_dtype=torch.bfloat16, extras=extras)
    incoming = 2 * out.bfloat16(), torch.where(lse.isinf(), 0.0, lse.cos())
    low = reference.backward(*incoming, *qkv, problem, extras, (True,) * 4, p_dtype=torch.bfloat16)
    args = (f"score_mod_args[{n}]" for n in range(len(low) - 6))
    named = dict(zip(("attn_mask", "alibi_slopes", "sinks", *args), low[3:], strict=True))
    low = [*low[:3], *(named[name] for name in floats(case.rules))]
    for i, (x, exact, z) in enumerate(zip(*grads, low, strict=True)):
        z = z.view(x.shape).to(x.dtype, copy=True)
        budget = within_budget(x, exact, z, eps=EPS[torch.bfloat16], what=f"gradient {i}")
        assert budget.ok, str(budget)


@dataclass(frozen=True)
class GradOut:
    id: str
    make: Callable[[torch.Tensor], torch.Tensor]


GRAD_OUTS = (
    GradOut("stride 0", lambda g: g[:1, :1, :1, :1].expand_as(g)),
    GradOut("stride 0 in the batch", lambda g: g[:1].expand_as(g)),
    GradOut("transposed", lambda g: stored(g, (0, 2, 1, 3))),
    GradOut("head dimension not contiguous", lambda g: stored(g, (0, 1, 3, 2))),
    GradOut("a slice", lambda g: torch.cat([g, g], -1)[..., g.shape[3] :]),
)


@pytest.mark.parametrize("case", GRAD_OUTS, ids=lambda case: case.id)
def test_grad_out_of_any_strides(case: GradOut, device: str) -> None:
    qkv = make_qkv(2, 2, 1, 9, 17, 16, dtype=torch.float32, device=device)
    grad = case.make(torch.randn(2, 2, 9, 16, generator=torch.Generator().manual_seed(5)).to(device))
    ours, theirs = leaves(qkv), leaves(qkv)
    lazymax.attention(*ours, causal="top_left").backward(grad)
    lazymax.attention(*theirs, causal="top_left").backward(grad.contiguous())
    for name, x, y in zip("qkv", ours, theirs, strict=True):
        assert_within(x.grad, y.grad, y.grad, f"d{name}")


def test_keys_outside_the_band_reach_no_gradient(device: str) -> None:
    q, k, v = make_qkv(1, 2, 2, 9, 12, 16, dtype=torch.float32, device=device)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[:, :, 9:], bad_v[:, :, 9:] = float("nan"), float("inf")
    grads = []
    for qkv in (leaves((q, k, v)), leaves((q, bad_k, bad_v))):
        lazymax.attention(*qkv, causal="top_left").square().sum().backward()
        grads.append([t.grad for t in qkv])
    for name, y, x in zip("qkv", *grads, strict=True):
        assert_within(x, y, y, f"d{name}")


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", ""], ids=lambda names: f"for {names or 'none'}")
def test_gradients_only_where_asked(wanted: str, device: str) -> None:
    qkv = dict(zip("qkv", make_qkv(1, 2, 2, 9, 9, 16, dtype=torch.float32, device=device), strict=True))
    for name in wanted:
        qkv[name].requires_grad_()
    out = lazymax.attention(**qkv)
    assert out.requires_grad is bool(wanted)
    if wanted:
        out.sum().backward()
    assert "".join(name for name, t in qkv.items() if t.grad is not None) == wanted


@pytest.mark.parametrize(
    "wanted", [*floats(dict(attn_mask=normal(1), alibi_slopes=normal(1), sinks=normal(1), **TILT)), ""]
)
def test_gradients_of_optional_tensors_only_where_asked(wanted: str, device: str) -> None:
    qkv = make_qkv(2, 2, 2, 9, 9, 16, dtype=torch.float32, device=device)
    options = moved(dict(attn_mask=normal(9, 9), alibi_slopes=normal(2), sinks=normal(2), **TILT), device)
    named = floats(options)
    if wanted:
        named[wanted].requires_grad_()
    out = lazymax.attention(*qkv, **options)
    assert out.requires_grad is bool(wanted)
    if wanted:
        out.sum().backward()
    assert [name for name, t in named.items() if t.grad is not None] == ([wanted] if wanted else [])
    with torch.no_grad():
        assert not lazymax.attention(*qkv, **options).requires_grad


def test_an_lse_that_nobody_uses_costs_no_gradient(device: str) -> None:
    ours, theirs = (leaves(make_qkv(1, 2, 2, 9, 9, 16, dtype=torch.float32, device=device)) for _ in range(2))
    lazymax.attention(*ours, return_lse=True)[0].square().sum().backward()
    lazymax.attention(*theirs).square().sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
def test_activation_checkpointing(reentrant: bool, device: str) -> None:
    ours, theirs = (leaves(make_qkv(1, 4, 2, 19, 19, 16, dtype=torch.float32, device=device)) for _ in range(2))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return lazymax.attention(q * 2, k, v, causal="top_left").sin()

    checkpoint(call, *ours, use_reentrant=reentrant).sum().backward()
    call(*theirs).sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))
