"""Joining attention over disjoint sets of keys, in torch operations: memory-bound, and differentiable as it stands."""

import torch


def merge(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lazymax.merge_states`."""
    for name, t in (("out1", out1), ("lse1", lse1), ("out2", out2), ("lse2", lse2)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}, expected a torch.Tensor")
        if not t.is_floating_point():
            raise TypeError(f"{name}: got dtype {t.dtype}, expected a floating one")
    if out1.shape != out2.shape or out1.dtype != out2.dtype:
        raise ValueError(
            f"out1, out2: got {out1.dtype} of shape {tuple(out1.shape)} and {out2.dtype} of shape {tuple(out2.shape)}, "
            "expected the same"
        )
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if lse.shape != out1.shape[:-1]:
            raise ValueError(
                f"{name}: got shape {tuple(lse.shape)}, expected that of out1 without its last dimension: "
                f"{tuple(out1.shape[:-1])}"
            )
    dtype = torch.float64 if out1.dtype == torch.float64 else torch.float32
    lse1, lse2 = lse1.to(dtype), lse2.to(dtype)
    top = torch.maximum(lse1, lse2)
    # Where a side has no keys its weight is 0 and its output must not count, whatever it holds; where neither has any,
    # -inf - -inf would be NaN. Divided by the sum of the weights, not by exp(lse): that has no room for a logarithm
    # beside the lowest float.
    nothing = float("-inf")
    base = torch.where(top == nothing, 0.0, top).detach()
    weights = [torch.exp(lse - base) for lse in (lse1, lse2)]
    total = weights[0] + weights[1]
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    out = torch.zeros_like(out1, dtype=dtype)
    for part, weight in zip((out1, out2), weights, strict=True):
        out = out + torch.where((weight == 0)[..., None], 0.0, part.to(dtype) * (weight / total)[..., None])
    return out.to(out1.dtype), torch.where(empty, nothing, base + torch.log(total))
