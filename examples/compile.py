"""torch.compile: attention is one node of the graph, and one compiled graph serves all lengths.

python examples/compile.py                            a GPU: the compiled kernel; no GPU: the reference route
TRITON_INTERPRET=1 python examples/compile.py         no GPU: the kernel itself, in Triton's interpreter
"""

import torch

import lazymax
from lazymax.testing import check_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16
heads, kv_heads, head_dim = 2, 1, 32
torch.manual_seed(0)


class Block(torch.nn.Module):
    """Projections around a causal grouped-query attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(64, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = torch.nn.Linear(heads * head_dim, 64, bias=False)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        return tuple(t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in self.qkv(x).split(sizes, -1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended = lazymax.scaled_dot_product_attention(*self.split(x), is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2)), attended


block = Block().to(device, dtype).eval().requires_grad_(False)
# Inductor is torch's default; on a CPU it wants a C++ compiler, which this example should not need.
backend = "inductor" if device == "cuda" else "aot_eager"
compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)

for length in (24, 40, 67):
    x = torch.randn(1, length, 64, device=device, dtype=dtype)
    # After the first length, a recompilation would raise.
    with torch.compiler.set_stance("default" if length == 24 else "fail_on_recompile"):
        _, attended = compiled(x)
    q, k, v = block.split(x)
    explained = lazymax.explain(q, k, v, causal="top_left", show=False)
    (budget,) = check_attention(attended, None, q, k, v, explained.problem)
    assert budget.ok, budget
    print(f"length {length:4}  {explained.plan.describe():44}{budget}")
print("one graph, three lengths, no recompilation")
