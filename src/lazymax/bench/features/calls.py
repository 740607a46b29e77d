"""A case on tensors: the call itself, and how many pairs it sees."""

from dataclasses import dataclass
from typing import Any

import torch

from ...api import attention, attention_varlen
from ...drop_in import scaled_dot_product_attention
from ...extras import Extras
from ...options import parse_options
from ...problem import Problem
from ...reference_scores import Scoring, chunks, mask_rows, parts
from .cases import Feature
from .make import Maker

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """What is timed, and the same as the reference takes it (B, H, S, D)."""

    feature: Feature
    tensors: QKV  # as the function takes them
    options: dict[str, Any]
    qkv: QKV
    problem: Problem
    extras: Extras
    impl: str

    def result(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output (B, H, S, Dv), LSE or None)"""
        found: Any
        if self.feature.drop_in:
            found = scaled_dot_product_attention(*self.tensors, **self.options)
        elif self.feature.lengths:
            found = attention_varlen(*self.tensors, **self.options, impl=self.impl)
        else:
            found = attention(*self.tensors, **self.options, impl=self.impl)
        out, lse = found if isinstance(found, tuple) else (found, None)
        return stand(out) if self.feature.lengths else out, lse

    def run(self) -> torch.Tensor:
        return self.result()[0]


def maker(feature: Feature, dtype: torch.dtype, device: torch.device) -> Maker:
    batch, heads, _, q_len, kv_len, *_ = feature.shape
    return Maker(batch, heads, q_len, kv_len, dtype, device)


def build(feature: Feature, qkv: QKV, impl: str = "auto") -> Call:
    """The call on q, k and v of the feature's shape, which are packed first where it packs them."""
    dtype, device = qkv[0].dtype, qkv[0].device
    options = dict(feature.options) | feature.tensors(maker(feature, dtype, device))
    tensors, standing, parsed = qkv, qkv, dict(options)
    if feature.lengths:
        q, k, v = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in qkv)
        tensors, standing = (q, k, v), (stand(q), stand(k), stand(v))
        ends = torch.tensor([0, *feature.lengths]).cumsum(0).to(device, torch.int32)
        longest = max(feature.lengths)
        options |= dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest)
        parsed = dict(options)
    if parsed.pop("is_causal", False):
        parsed["causal"] = "top_left"
    return_lse = parsed.pop("return_lse", False)
    extras, rules = parse_options(standing[0], **parsed)
    problem = Problem.from_tensors(*standing, extras, rules, return_lse=return_lse)
    return Call(feature, tensors, options, standing, problem, extras, impl)


def stand(t: torch.Tensor) -> torch.Tensor:
    """(total, H, D) -> (1, H, total, D)"""
    return t.transpose(0, 1)[None]


def visible_pairs(problem: Problem, extras: Extras, device: torch.device) -> int:
    """(query, key) pairs that count, of all heads and batch elements: looked at one by one on the device, not derived.
    A key under -inf in a float mask does not count."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts(problem, extras):
        p, scoring = part.problem, Scoring(part, torch.float32, device)
        for rows in chunks(p):
            pairs = p.batch * p.q_heads * (rows.stop - rows.start) * p.kv_len
            seen = scoring.allowed(scoring.positions(rows), rows)
            if problem.mask not in (None, "bool"):
                assert part.extras.mask is not None
                finite = mask_rows(part.extras.mask, rows) != float("-inf")
                seen = finite if seen is None else seen & finite
            total += pairs if seen is None else seen.sum() * (pairs // max(1, seen.numel()))
    return int(total)
