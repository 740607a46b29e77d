# mypy: ignore-errors
"""The modifications that the suite times, as a user would write them: device form, and torch form for the reference and
for flex_attention. Needs Triton; `register` gives them their names."""

import torch
import triton
import triton.language as tl

from ...mods import register_mask_mod, register_score_mod


@triton.jit
def causal(b, h, q_idx, k_idx):
    return k_idx <= q_idx


@triton.jit
def prefix_lm(b, h, q_idx, k_idx, prefix):
    return (k_idx <= q_idx) | (k_idx < tl.load(prefix + b))


@triton.jit
def same_document(b, h, q_idx, k_idx, document):
    return tl.load(document + q_idx) == tl.load(document + k_idx)


@triton.jit
def causal_document(b, h, q_idx, k_idx, document):
    return (tl.load(document + q_idx) == tl.load(document + k_idx)) & (k_idx <= q_idx)


@triton.jit
def softcap_50(score, b, h, q_idx, k_idx):
    return 100.0 * tl.sigmoid(score * 0.04) - 50.0  # tanh(x) = 2 * sigmoid(2 * x) - 1


@triton.jit
def alibi(score, b, h, q_idx, k_idx, slopes):
    return score - tl.load(slopes + h) * tl.abs(q_idx - k_idx).to(tl.float32)


def torch_causal(b, h, q_idx, k_idx):
    return k_idx <= q_idx


def torch_prefix_lm(b, h, q_idx, k_idx, prefix):
    return (k_idx <= q_idx) | (k_idx < prefix[b])


def torch_same_document(b, h, q_idx, k_idx, document):
    return document[q_idx] == document[k_idx]


def torch_causal_document(b, h, q_idx, k_idx, document):
    return (document[q_idx] == document[k_idx]) & (k_idx <= q_idx)


def torch_softcap_50(score, b, h, q_idx, k_idx):
    return 50.0 * torch.tanh(score / 50.0)


def torch_alibi(score, b, h, q_idx, k_idx, slopes):
    return score - slopes[h] * (q_idx - k_idx).abs()


MASK_MODS = {
    "bench.causal": (causal, torch_causal),
    "bench.prefix_lm": (prefix_lm, torch_prefix_lm),
    "bench.same_document": (same_document, torch_same_document),
    "bench.causal_document": (causal_document, torch_causal_document),
}
SCORE_MODS = {"bench.softcap_50": (softcap_50, torch_softcap_50), "bench.alibi": (alibi, torch_alibi)}


def register() -> None:
    """Give the modifications their names."""
    for name, (function, twin) in MASK_MODS.items():
        register_mask_mod(name, function, reference=twin)
    for name, (function, twin) in SCORE_MODS.items():
        register_score_mod(name, function, reference=twin)
