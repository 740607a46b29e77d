"""What checking an attention result takes: an error budget, input makers, poisoned outputs.

Used by the tests, the benchmarks, `lazymax verify` and verification mode, and meant for users' own kernels too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import dropout, reference
from .extras import NO_EXTRAS, Extras
from .problem import Problem

# One unit in the last place of the largest element of a row; for fp32 room for exp2 and log2 of the GPU (2 ulp each).
EPS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True, slots=True)
class Budget:
    """Result of a comparison with the float64 reference."""

    ok: bool
    error: float  # largest |x - x64|
    allowed: float  # the budget at that element
    worst: tuple[int, ...]  # its index
    what: str = "out"

    def __str__(self) -> str:
        return f"{self.what}: error {self.error:.3g}, allowed {self.allowed:.3g}, worst at {self.worst}"


def make_qkv(
    batch: int,
    q_heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    layout: str = "bhsd",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random normal q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, D_v). The numbers come from a CPU generator, so
    every device sees the same ones. layout "bshd": the same shapes, stored as (B, S, H, D)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, length: int, dim: int) -> torch.Tensor:
        t = torch.randn(batch, heads, length, dim, generator=generator).to(dtype).to(device)
        return t.transpose(1, 2).contiguous().transpose(1, 2) if layout == "bshd" else t

    v_dim = head_dim if v_head_dim is None else v_head_dim
    return normal(q_heads, q_len, head_dim), normal(kv_heads, kv_len, head_dim), normal(kv_heads, kv_len, v_dim)


def moat(t: torch.Tensor, *margin: int) -> torch.Tensor:
    """The same values as a view into a larger buffer whose other cells are NaN: a read outside `t` shows.
    margin: extra cells per dimension."""
    sizes = [size + extra for size, extra in zip(t.shape, margin, strict=True)]
    buffer = torch.full(sizes, float("nan"), dtype=t.dtype, device=t.device)
    return buffer[tuple(slice(0, size) for size in t.shape)].copy_(t)


def poisoned(*size: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An output buffer full of NaN: an element that a kernel forgot to write shows."""
    return torch.full(size, float("nan"), dtype=dtype, device=device)


def within_budget(
    actual: torch.Tensor,
    exact: torch.Tensor,
    lowered: torch.Tensor,
    *,
    eps: float,
    what: str = "out",
    excused: torch.Tensor | None = None,
) -> Budget:
    """Error budget: |actual - exact| <= 2 * |lowered - exact| + eps * |exact| + 1e-6, with the middle term taken as the
    largest of its head (last two dimensions: one row of few columns samples its rounding badly) and |exact| as the
    largest of its row.

    exact: float64. lowered: the same computation by torch in the precision that `actual` had, which says what error
    that precision costs on these inputs. excused: what is allowed beside that, element by element. Non-finite values
    must be equal. Refuses to compare an object with itself.
    """
    if actual is exact or actual is lowered or actual.data_ptr() in {exact.data_ptr(), lowered.data_ptr()} - {0}:
        raise ValueError("within_budget: got the same tensor twice, the comparison could not fail")
    if actual.shape != exact.shape or lowered.shape != exact.shape:
        raise ValueError(f"within_budget: got shapes {actual.shape}, {exact.shape}, {lowered.shape}, expected one")
    if actual.numel() == 0:
        return Budget(True, 0.0, 0.0, (), what)
    x, x64, low = actual.double(), exact.double(), lowered.double()
    same = (x == x64) | (x.isnan() & x64.isnan())
    gap = torch.where(same, 0.0, (x - x64).abs()).nan_to_num(torch.inf, torch.inf)
    cost = (low - x64).abs().nan_to_num(0.0, 0.0, 0.0)
    size = x64.abs().nan_to_num(0.0, 0.0, 0.0)
    if x64.dim() > 1:
        cost, size = cost.amax((-2, -1), keepdim=True), size.amax(-1, keepdim=True)
    allowed = (2.0 * cost + eps * size + 1e-6).expand_as(gap)
    if excused is not None:
        allowed = allowed + excused.double().abs().nan_to_num(0.0, 0.0, 0.0)
    worst = int((gap - allowed).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), gap.shape))
    return Budget(bool((gap <= allowed).all()), gap[index].item(), allowed[index].item(), index, what)


def dropout_keep(
    seed: int | torch.Tensor,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    dropout_p: float,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Which probabilities dropout keeps, boolean (batch, heads, q_len, kv_len): what a call with this `dropout_seed`
    keeps for these query heads, on every device and route. The batch index counts packed sequences where there are."""
    b, h, q_idx = (torch.arange(n, device=device) for n in (batch, heads, q_len))
    return dropout.kept(
        dropout.seed_tensor(seed, device), b[:, None, None, None], h[:, None, None], q_idx[:, None], kv_len, dropout_p
    )


def check_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    extras: Extras = NO_EXTRAS,
) -> list[Budget]:
    """Compare an output (and its LSE, if given) with the float64 reference of the same problem, within the error
    budget. The low-precision twin computes in float32, with P and the result rounded to the dtype of q."""
    exact, exact_lse = reference.attention(q, k, v, problem, extras=extras)
    low_dtype = reference.compute_dtype(q.dtype)
    lowered, low_lse = reference.attention(q, k, v, problem, low_dtype, p_dtype=q.dtype, extras=extras)
    budgets = [within_budget(out, exact, lowered.to(q.dtype), eps=EPS[q.dtype])]
    if lse is not None:
        budgets.append(within_budget(lse[..., None], exact_lse[..., None], low_lse[..., None], eps=2e-6, what="lse"))
    return budgets


def check_gradients(
    grads: Sequence[torch.Tensor],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    extras: Extras = NO_EXTRAS,
    needs: Sequence[bool] = (False, False, False, False),
    out: torch.Tensor | None = None,
) -> list[Budget]:
    """Compare gradients [dq, dk, dv, dmask, dslopes, dsinks, *dscore_args] with the float64 reference of the same
    problem, within the error budget; those that `needs` says are not wanted are not looked at. The low-precision twin
    computes in float32, with P, dS, the output and the results rounded to the dtype of q, whose eps counts.

    out: the output that the gradients were made with, if known. Delta, the row sums of grad_out * out, inherits its
    error, which beside a nearly one-hot softmax is all that is left of dS. The twin then gets this output instead of
    its own, and what an exact computation would make of it is allowed too. An output that is wrong excuses gradients
    that are: hold it to `check_attention`."""
    double = widened(extras)
    wide = (q.double(), k.double(), v.double())
    exact = reference.backward(grad_out, grad_lse, *wide, problem, double, needs)
    given = exact if out is None else reference.backward(grad_out, grad_lse, *wide, problem, double, needs, out=out)
    low = reference.backward(grad_out, grad_lse, q, k, v, problem, extras, needs, q.dtype, out)
    names = ("dq", "dk", "dv", "dmask", "dslopes", "dsinks", *(f"dscore_args[{i}]" for i in range(len(grads) - 6)))
    found = []
    for what, x, *of in zip(names, grads, exact, low, given, strict=True):
        if of[0].numel():  # one number for each head is a row: alone, it would sample its rounding badly
            x, x64, lowered, from_out = (t[None] if t.dim() == 1 else t for t in (x, *of))
            excused, eps = from_out - x64, max(EPS[x.dtype], EPS[q.dtype])
            found.append(within_budget(x, x64, lowered.double() - excused, eps=eps, what=what, excused=excused))
    return found


def widened(extras: Extras) -> Extras:
    """With every floating tensor in float64, in which the reference then returns its gradient."""

    def wide(t: torch.Tensor | None) -> torch.Tensor | None:
        return t.double() if t is not None and t.is_floating_point() else t

    args = tuple(t.double() if t.is_floating_point() else t for t in extras.score_args)
    mask, slopes, sinks = wide(extras.mask), wide(extras.alibi_slopes), wide(extras.sinks)
    return extras._replace(mask=mask, alibi_slopes=slopes, sinks=sinks, score_args=args)
