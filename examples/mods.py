"""Scores and masks of your own: four that everybody knows, each equal to the argument that does the same.

python examples/mods.py     a GPU: compiled kernels; no GPU: Triton's interpreter, on small sizes

A score_mod changes a score, a mask_mod says which keys a query sees. Both are `@triton.jit` functions of positions that
the kernel inlines; `reference` is the same in torch operations, for the CPU route, for verification and for gradients.
The tensors that they need come as arguments: as pointers to the one, as tensors to the other.
"""

import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    # It computes with numpy, which warns where IEEE arithmetic is meant.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import lazymax  # noqa: E402
from lazymax import testing  # noqa: E402
from lazymax.options import parse_options  # noqa: E402
from lazymax.problem import Problem  # noqa: E402

# ---- soft-capping (Gemma 2): scores never pass +-CAP

CAP = tl.constexpr(20.0)


def soft_capping_in_torch(score, b, h, q_idx, k_idx):
    return CAP.value * torch.tanh(score / CAP.value)


@triton.jit
def soft_capping(score, b, h, q_idx, k_idx):
    return (2.0 * tl.sigmoid(score * (2.0 / CAP)) - 1.0) * CAP  # tanh


lazymax.register_score_mod("soft_capping", soft_capping, reference=soft_capping_in_torch)


# ---- ALiBi (Press et al., 2021): the farther, the less; each head by its own slope


def alibi_in_torch(score, b, h, q_idx, k_idx, slopes):
    return score - slopes[h] * (q_idx - k_idx).abs()


@triton.jit
def alibi(score, b, h, q_idx, k_idx, slopes):
    return score - tl.load(slopes + h) * tl.abs(q_idx - k_idx)


lazymax.register_score_mod("alibi", alibi, reference=alibi_in_torch)


# ---- documents: several texts in one row of tokens, none of which sees another. Blocks of keys that no query needs are
# not visited, so this costs what the documents cost by themselves.


def same_document_in_torch(b, h, q_idx, k_idx, document):
    return document[q_idx] == document[k_idx]


@triton.jit
def same_document(b, h, q_idx, k_idx, document):
    return tl.load(document + q_idx) == tl.load(document + k_idx)


lazymax.register_mask_mod("same_document", same_document, reference=same_document_in_torch)


# ---- prefix LM (Raffel et al., 2020): all see the prompt, which is each batch element's own, else what came before


def prefix_lm_in_torch(b, h, q_idx, k_idx, prompt):
    return (k_idx <= q_idx) | (k_idx < prompt[b])


@triton.jit
def prefix_lm(b, h, q_idx, k_idx, prompt):
    return (k_idx <= q_idx) | (k_idx < tl.load(prompt + b))


lazymax.register_mask_mod("prefix_lm", prefix_lm, reference=prefix_lm_in_torch)


# ---- each beside the argument that says the same

SIZES = (2, 16, 4, 4096, 4096, 128) if HAS_GPU else (2, 2, 1, 80, 80, 32)  # B, Hq, Hkv, Sq, Sk, D
DEVICE = "cuda" if HAS_GPU else "cpu"


@dataclass(frozen=True)
class Example:
    name: str
    mod: dict[str, Any]
    same_as: str
    same: dict[str, Any]
    both: dict[str, Any] = field(default_factory=dict)  # what both calls say


def examples() -> list[Example]:
    _, heads, _, length, _, _ = SIZES
    at = torch.arange(length, device=DEVICE)
    slopes = 2.0 ** -torch.linspace(1, 8, heads, device=DEVICE)
    document = at * 5 // length  # five of one length; any will do
    prompt = length // torch.tensor([3, 2], device=DEVICE, dtype=torch.int32)
    before = at <= at[:, None]
    return [
        Example("soft-capping", dict(score_mod="soft_capping"), "softcap=20", dict(softcap=CAP.value)),
        Example(
            "ALiBi", dict(score_mod="alibi", score_mod_args=(slopes,)),
            "alibi_slopes", dict(alibi_slopes=slopes), dict(causal="top_left"),
        ),
        Example(
            "documents", dict(mask_mod="same_document", mask_mod_args=(document,)),
            "attn_mask", dict(attn_mask=document == document[:, None]), dict(causal="top_left"),
        ),
        Example(
            "prefix LM", dict(mask_mod="prefix_lm", mask_mod_args=(prompt,)),
            "attn_mask", dict(attn_mask=(before | (at < prompt[:, None, None]))[:, None]),
        ),
    ]  # fmt: skip


def main() -> None:
    q, k, v = testing.make_qkv(*SIZES, dtype=torch.float16, device=DEVICE)
    q = q * 8.0  # so that the cap does something
    # Inductor is torch's default; on a CPU it wants a C++ compiler, which this example should not need.
    compiled = torch.compile(lazymax.attention, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
    print(f"B, Hq, Hkv, Sq, Sk, D = {SIZES}, {q.dtype}; errors against float64, in brackets what is allowed\n")
    print(f"{'':14s}{'as a mod':21s}{'compiled':11s}{'as an argument':36s}route of the mod")
    for example in examples():
        as_mod, as_argument = example.mod | example.both, example.same | example.both
        out = lazymax.attention(q, k, v, **as_mod)
        errors = [error(t, q, k, v, as_argument) for t in (out, lazymax.attention(q, k, v, **as_argument))]
        if not torch.equal(compiled(q, k, v, **as_mod), out):
            raise SystemExit(f"{example.name}: compiled, other bits came")
        route = lazymax.explain(q, k, v, **as_mod, show=False).plan.describe()
        argument = f"{example.same_as:14s}{errors[1]}"
        print(f"{example.name:14s}{errors[0]:21s}{'same bits':11s}{argument:36s}{route}")


def error(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> str:
    """Of an output, against the reference of the argument's form."""
    extras, rules = parse_options(q, **options)
    (budget,) = testing.check_attention(out, None, q, k, v, Problem.from_tensors(q, k, v, extras, rules), extras)
    if not budget.ok:
        raise SystemExit(f"wrong result: {budget}")
    return f"{budget.error:.1e} ({budget.allowed:.1e})"


if __name__ == "__main__":
    main()
