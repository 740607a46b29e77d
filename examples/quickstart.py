"""One call in place of torch's, then the rules torch has no argument for, each checked against the float64 reference.

python examples/quickstart.py                         a GPU: the compiled kernel; no GPU: the reference route
TRITON_INTERPRET=1 python examples/quickstart.py      no GPU: the kernel itself, in Triton's interpreter
"""

import torch

import lazymax
from lazymax.testing import check_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16
torch.manual_seed(0)


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=device, dtype=dtype)


def check(what: str, out: torch.Tensor, lse: torch.Tensor | None, tensors: tuple[torch.Tensor, ...], **rules) -> None:
    """Compare with the float64 reference within the error budget, and say which kernel ran."""
    explained = lazymax.explain(*tensors, return_lse=lse is not None, show=False, **rules)
    budgets = check_attention(out, lse, *tensors, explained.problem)
    assert all(budget.ok for budget in budgets), budgets
    print(f"{what:28}{explained.plan.describe():44}{'; '.join(map(str, budgets))}")


# 1. In place of torch.nn.functional.scaled_dot_product_attention: 2 query heads share a key head.
q, k, v = normal(1, 2, 70, 64), normal(1, 1, 70, 64), normal(1, 1, 70, 64)
out = lazymax.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
check("drop-in, causal, GQA", out, None, (q, k, v), causal="top_left")

# 2. The last 33 queries of a sequence of 70: the diagonal ends at the last key, as flash-attn has it. With the LSE.
tail = q[:, :, -33:]
out, lse = lazymax.attention(tail, k, v, causal="bottom_right", return_lse=True)
check("causal, bottom right, LSE", out, lse, (tail, k, v), causal="bottom_right")

# 3. A sliding window: each query sees itself and the 31 keys before it.
out = lazymax.attention(q, k, v, causal="top_left", window=(31, None))
check("causal window", out, None, (q, k, v), causal="top_left", window=(31, None))

# 4. Tensors as (batch, length, heads, head dim), read by their strides, without a copy.
swapped = tuple(t.transpose(1, 2) for t in (q, k, v))
out = lazymax.attention(*swapped, layout="bshd")
check("layout bshd", out.transpose(1, 2), None, (q, k, v))

# 5. Every call checked while it runs. The reference route is not checked against itself, so it does not count.
with lazymax.verification() as seen:
    lazymax.attention(q, k, v, causal="top_left")
ran_kernel = lazymax.explain(q, k, v, causal="top_left", show=False).plan.route == "triton"
assert seen.checked == ran_kernel and not seen.mismatches
print(f"verification: {seen.checked} kernel call checked, {len(seen.mismatches)} mismatches")
