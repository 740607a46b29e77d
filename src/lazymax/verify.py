"""Verification: every call checked against the reference while it runs, and the matrix behind `lazymax verify`."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from . import reference, testing
from .compat import tritons
from .dispatch import Plan
from .extras import NO_EXTRAS, Extras, check_offsets
from .options import parse_options
from .problem import Problem


class VerificationError(AssertionError):
    """A result left the error budget. The message names the shape, the worst element, the plan and versions."""


@dataclass(slots=True)
class Verification:
    """What a `verification()` block saw."""

    on_mismatch: str
    checked: int = 0
    mismatches: list[str] = field(default_factory=list)


_active: ContextVar[Verification | None] = ContextVar("lazymax_verification", default=None)


@contextlib.contextmanager
def verification(on_mismatch: str = "raise") -> Iterator[Verification]:
    """Make every lazymax call inside also run the float64 reference and compare within the error budget.

    on_mismatch: "raise" a `VerificationError`, or "fallback": return the reference's result and warn once per block.
    Yields a `Verification` with the number of calls checked and the mismatches. Compiled functions are checked too.
    Each checked call costs a reference run and a device synchronisation, so it cannot run inside CUDA-graph capture
    (RuntimeError). Holds for the calling thread (a context variable), and for the forward.

    Raises ValueError for another on_mismatch.
    """
    if on_mismatch not in ("raise", "fallback"):
        raise ValueError(f"on_mismatch: got {on_mismatch!r}, expected 'raise' or 'fallback'")
    state = Verification(on_mismatch)
    token = _active.set(state)
    try:
        yield state
    finally:
        _active.reset(token)


def after_forward(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    plan: Plan,
    extras: Extras = NO_EXTRAS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Called by the operator with what it is about to return."""
    state = _active.get()
    if state is None or plan.route == "reference":
        return out, lse
    if q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("lazymax.verification: cannot compare during CUDA-graph capture; capture outside the block")
    check_offsets(q.shape[2], k.shape[2], extras)
    state.checked += 1
    budgets = testing.check_attention(out, lse if problem.return_lse else None, q, k, v, problem, extras)
    bad = [budget for budget in budgets if not budget.ok]
    if not bad:
        return out, lse
    message = (
        f"lazymax: {plan.describe()} left the error budget: {'; '.join(map(str, bad))}. q {tuple(q.shape)}, "
        f"k {tuple(k.shape)}, v {tuple(v.shape)}, {q.dtype}, {problem}; torch {torch.__version__}, "
        f"Triton {tritons.triton_version()}, {q.device}"
    )
    state.mismatches.append(message)
    if state.on_mismatch == "raise":
        raise VerificationError(message)
    if len(state.mismatches) == 1:
        warnings.warn(message + "; the reference's result is returned", RuntimeWarning, stacklevel=2)
    exact, exact_lse = reference.attention(q, k, v, problem, extras=extras)
    out.copy_(exact)
    if problem.return_lse:
        lse.copy_(exact_lse)
    return out, lse


@dataclass(frozen=True, slots=True)
class Check:
    """One row of `lazymax verify`."""

    name: str
    plan: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Shape:
    """One problem of the matrix: (batch, query heads, key heads, query length, key length, D, D_v) and its rules."""

    name: str
    sizes: tuple[int, int, int, int, int, int, int]
    causal: str | None = None
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    layout: str = "bhsd"
    features: Callable[[torch.Generator], dict[str, Any]] | None = None  # more arguments of `attention`, on the CPU


SHAPES = (
    Shape("one query, one key", (1, 1, 1, 1, 1, 64, 64)),
    Shape("decode, GQA", (2, 8, 2, 1, 333, 128, 128), causal="bottom_right"),
    Shape("lengths off the tile", (2, 4, 4, 130, 197, 64, 64)),
    Shape("causal, top left", (1, 4, 2, 257, 257, 128, 128), causal="top_left"),
    Shape("causal, bottom right", (1, 4, 1, 129, 300, 64, 64), causal="bottom_right"),
    Shape("rows without keys", (1, 2, 2, 150, 65, 64, 64), causal="bottom_right"),
    Shape("window", (1, 4, 4, 300, 300, 64, 64), window=(70, 33)),
    Shape("causal window", (1, 4, 4, 300, 300, 96, 96), causal="top_left", window=(63, None)),
    Shape("small head dim", (1, 3, 3, 100, 100, 40, 40)),
    Shape("odd head dims", (1, 2, 2, 70, 90, 72, 24)),
    Shape("large head dim", (1, 2, 1, 100, 120, 256, 256), causal="top_left"),
    Shape("negative scale", (1, 2, 2, 70, 70, 64, 64), scale=-0.3),
    Shape("stored as B, S, H, D", (2, 4, 2, 140, 140, 64, 64), causal="top_left", layout="bshd"),
    Shape(
        "bool mask, a row without keys", (2, 4, 2, 70, 300, 64, 64),
        features=lambda g: {
            "attn_mask": (torch.rand(2, 4, 70, 300, generator=g) > 0.5) & (torch.arange(70) != 9)[:, None],
        },
    ),
    Shape(
        "key padding, causal", (2, 4, 4, 300, 300, 64, 64), causal="top_left",
        features=lambda g: {"attn_mask": torch.arange(300)[None] < torch.tensor([[300], [170]])[:, None, None]},
    ),
    Shape(
        "float mask", (2, 4, 4, 130, 140, 128, 128),
        features=lambda g: {"attn_mask": torch.randn(130, 140, generator=g)},
    ),
    Shape(
        "softcap, ALiBi, sinks", (1, 4, 2, 130, 200, 64, 64), causal="bottom_right",
        features=lambda g: {
            "softcap": 5.0, "alibi_slopes": torch.rand(4, generator=g) / 8, "sinks": torch.randn(4, generator=g),
        },
    ),
    Shape(
        "dropout, lengths of keys", (2, 4, 2, 70, 200, 96, 80), causal="bottom_right",
        features=lambda g: {
            "dropout_p": 0.3, "dropout_seed": torch.tensor([12345678901]), "seqlens_k": torch.tensor([77, 200]),
        },
    ),
    Shape("MLA, latent", (1, 4, 1, 40, 70, 576, 512), causal="bottom_right"),
)  # fmt: skip


def run_matrix(device: torch.device, dtypes: tuple[torch.dtype, ...], impl: str = "auto") -> Iterator[Check]:
    """Check every shape and dtype on a device against the float64 reference, one `Check` at a time."""
    from .api import attention
    from .arch import of
    from .dispatch import plan as choose

    for dtype in dtypes:
        for shape in SHAPES:
            q, k, v = testing.make_qkv(*shape.sizes, dtype=dtype, device=device, layout=shape.layout)
            options: dict[str, Any] = dict(causal=shape.causal, window=shape.window, scale=shape.scale)
            if shape.features:
                made = shape.features(torch.Generator().manual_seed(0))
                options |= {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in made.items()}
            extras, rules = parse_options(q, **options)
            problem = Problem.from_tensors(q, k, v, extras, rules, return_lse=True)
            plan = choose(problem, of(device), impl)
            out, lse = attention(q, k, v, **options, impl=impl, return_lse=True)
            budgets = testing.check_attention(out, lse, q, k, v, problem, extras)
            name = f"{shape.name}, {str(dtype).removeprefix('torch.')}"
            yield Check(name, plan.describe(), all(b.ok for b in budgets), "; ".join(map(str, budgets)))
