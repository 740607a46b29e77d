"""Calls with optional arguments, for the tests of more than one file."""

from typing import Any

import torch
import triton
import triton.language as tl

import lazymax
from lazymax.testing import EPS, within_budget

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def leaves(qkv: Any) -> Any:
    return tuple(t.detach().clone().requires_grad_() for t in qkv)


def stored(t: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values, dense in this order of dimensions."""
    return t.permute(order).contiguous().permute([order.index(dim) for dim in range(t.dim())])


def assert_within(actual: torch.Tensor, exact: torch.Tensor, low: torch.Tensor, what: str) -> None:
    eps = EPS[actual.dtype]
    budget = within_budget(actual.detach(), exact.detach().double(), low.detach().clone(), eps=eps, what=what)
    assert budget.ok, str(budget)


def packed(*tensors: torch.Tensor) -> Any:
    """q, k, v of one batch element as `attention_varlen` takes them."""
    return (t[0].transpose(0, 1) for t in tensors)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], **more: Any) -> Any:
    """`attention`, or, with packed offsets among the options, `attention_varlen` of the one batch element."""
    if "cu_seqlens_q" not in options:
        return lazymax.attention(q, k, v, **options, **more)
    return lazymax.attention_varlen(*packed(q, k, v), **options, **more)


def with_floats(options: dict[str, Any], tensors: Any) -> dict[str, Any]:
    """The options with other floating tensors, in the order of `floats`."""
    rest = iter(tensors)
    options = {n: next(rest) if n in floats(options) else value for n, value in options.items()}
    if "score_mod_args" in options:
        options["score_mod_args"] = tuple(rest)
    return options


@triton.jit
def tilt(score, b, h, q_idx, k_idx, weight, table):
    return score * (1.0 + 0.25 * tl.load(weight + h)) + tl.load(table + b * 3 + (q_idx + k_idx) % 3)


def tilt_reference(score, b, h, q_idx, k_idx, weight, table):
    return score * (1.0 + 0.25 * weight[h]) + table[b, (q_idx + k_idx) % 3]


@triton.jit
def sieve(b, h, q_idx, k_idx, limit):
    return ((q_idx + 2 * k_idx + h) % 5 != 0) & (k_idx < tl.load(limit + b))


def sieve_reference(b, h, q_idx, k_idx, limit):
    return ((q_idx + 2 * k_idx + h) % 5 != 0) & (k_idx < limit[b])


@triton.jit
def weigh(score, b, h, q_idx, k_idx, weight):
    return score * tl.load(weight + h)


def weigh_reference(score, b, h, q_idx, k_idx, weight):
    return score * weight[h]


@triton.jit
def shift(score, b, h, q_idx, k_idx, weight):
    return score + tl.load(weight + h) * k_idx


def shift_reference(score, b, h, q_idx, k_idx, weight):
    return score + weight[h] * k_idx


@triton.jit
def bend(score, b, h, q_idx, k_idx, weight):
    return score + tl.load(weight + h) * score * score * (1 + (q_idx + k_idx) % 2)


@triton.jit
def bend_derivative(score, b, h, q_idx, k_idx, weight):
    return 1.0 + 2.0 * tl.load(weight + h) * score * (1 + (q_idx + k_idx) % 2)


def bend_reference(score, b, h, q_idx, k_idx, weight):
    return score + weight[h] * score * score * (1 + (q_idx + k_idx) % 2)


lazymax.register_score_mod("calls.bend", bend, reference=bend_reference, derivative=bend_derivative)
lazymax.register_score_mod("calls.tilt", tilt, reference=tilt_reference)
lazymax.register_score_mod("calls.weigh", weigh, reference=weigh_reference)
lazymax.register_mask_mod("calls.sieve", sieve, reference=sieve_reference)


def normal(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bools(*shape: int) -> torch.Tensor:
    return normal(*shape) > -0.7


def moved(value: Any, device: str, dtype: torch.dtype | None = None, grad: bool = False) -> Any:
    """Options of a call on the device, floating tensors in `dtype` and, with `grad`, as leaves."""
    if isinstance(value, dict):
        return {name: moved(item, device, dtype, grad) for name, item in value.items()}
    if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
        return tuple(moved(item, device, dtype, grad) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    if any(step == 0 and n > 1 for step, n in zip(value.stride(), value.shape, strict=True)):
        # Expanded, and so it stays: a copy would be dense.
        stored = value[tuple(slice(0, 1) if step == 0 else slice(None) for step in value.stride())]
        return moved(stored, device, dtype, grad).expand(value.shape)
    if not value.is_floating_point():
        return value.to(device)
    odd = value.data_ptr() % 16 != 0  # and so it stays: a copy would be aligned
    value = value.to(device, dtype or value.dtype).detach()
    value = odd_address(value) if odd else value
    return value.requires_grad_() if grad else value


def odd_address(t: torch.Tensor) -> torch.Tensor:
    """A copy whose address 16 does not divide."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def floats(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the options that can have a gradient."""
    named = {name: t for name, t in options.items() if isinstance(t, torch.Tensor)}
    named |= {f"score_mod_args[{i}]": t for i, t in enumerate(options.get("score_mod_args", ()))}
    return {name: t for name, t in named.items() if t.is_floating_point()}


TILT = dict(score_mod="calls.tilt", score_mod_args=(normal(2), normal(2, 3, seed=4)))
BEND = dict(score_mod="calls.bend", score_mod_args=(normal(2) * 0.2,))
SIEVE = dict(mask_mod="calls.sieve", mask_mod_args=(torch.tensor([30, 0]),))
