"""Which kernel would run, with which tile, why, and why the others were refused: for this machine and for others.

python examples/explain.py                            no GPU is needed; nothing is compiled
"""

import json

import torch

import lazymax
from lazymax.testing import check_attention

# A prefill of 4096 tokens with grouped heads, (B, Hq, Hkv, Sq, Sk, D), on three GPUs that need not be here.
for arch in ("gfx1151", "sm_90", "sm_100"):
    lazymax.explain(shape=(1, 32, 8, 4096, 4096, 128), dtype="bf16", causal="top_left", arch=arch)
    print()

# The kernel takes every feature; float64 it does not: the plan says so.
masked = lazymax.explain(
    shape=(1, 8, 8, 100, 100, 64), dtype="fp16", arch="sm_90", attn_mask=torch.ones(100, 100, dtype=torch.bool)
)
assert masked.plan.route == "triton"
print()
assert lazymax.explain(shape=(1, 8, 8, 100, 100, 64), dtype="fp64", arch="sm_90").plan.route == "reference"
print()

# For a call on this machine: hand over the tensors of the call. `plan` is what the call then takes.
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 50, 64, device=device, dtype=torch.float16) for _ in range(3))
explained = lazymax.explain(q, k, v, window=(16, 16))
out = lazymax.attention(q, k, v, window=(16, 16))
(budget,) = check_attention(out, None, q, k, v, explained.problem)
assert budget.ok, budget
print(f"checked   {budget}")

# The same for scripts.
plan = json.loads(explained.to_json())["plan"]
assert plan["route"] == explained.plan.route
print(f"json      route {plan['route']}, backend {plan['backend']}, {len(plan['rejected'])} candidates refused")
