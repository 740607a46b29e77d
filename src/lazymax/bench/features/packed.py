"""Packed sequences by other libraries: what `--suite varlen` times beside `attention_varlen`, checked alike."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...reference import TORCH_SDPA
from ..peers import FA3, FA4, LeftOut, Ready, first, imported, torch_backend
from .calls import Call, stand

Make = Callable[[Call], Ready]


def flash_attn(package: str, module: str) -> Make:
    """`flash_attn_varlen_func` as its authors ship it."""

    def make(call: Call) -> Ready:
        return flash_attn_ready(imported(package, module, "flash_attn_varlen_func", call.tensors[0].device), call)

    return make


def flash_attn_ready(function: Any, call: Call) -> Ready:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options = {name: call.options[name] for name in names} | {"causal": call.problem.causal}
    return Ready(lambda: stand(first(function(*call.tensors, **options))))


def torch_varlen(call: Call) -> Ready:
    """torch.nn.attention.varlen, flash attention by torch for packed sequences."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise LeftOut(f"torch {torch.__version__} has none") from error
    return torch_varlen_ready(varlen_attn, call)


def torch_varlen_ready(function: Any, call: Call) -> Ready:
    ends, longest = call.options["cu_seqlens_q"], call.options["max_seqlen_q"]
    options: dict[str, Any] = {"window_size": (-1, 0) if call.problem.causal else (-1, -1)}
    if "enable_gqa" in inspect.signature(function).parameters:  # torch 2.11 takes grouped heads without a word
        options["enable_gqa"] = call.problem.group > 1
    return Ready(lambda: stand(first(function(*call.tensors, ends, ends, longest, longest, **options))))


def nested(backend: str) -> Make:
    """torch's SDPA on jagged nested tensors, which are made beforehand."""

    def make(call: Call) -> Ready:
        ends, lengths = call.options["cu_seqlens_q"], call.feature.lengths
        jagged = partial(
            torch.nested.nested_tensor_from_jagged, offsets=ends, min_seqlen=min(lengths), max_seqlen=max(lengths)
        )
        q, k, v = (jagged(t).transpose(1, 2) for t in call.tensors)
        options: dict[str, Any] = {"is_causal": call.problem.causal, "enable_gqa": call.problem.group > 1}
        return Ready(lambda: stand(TORCH_SDPA(q, k, v, **options).transpose(1, 2).values()), torch_backend(backend))

    return make


PEERS: dict[str, Make] = {
    "fa3": flash_attn(*FA3),
    "fa4": flash_attn(*FA4),
    "torch-varlen": torch_varlen,
    "sdpa-cudnn": nested("CUDNN_ATTENTION"),
    "sdpa-flash": nested("FLASH_ATTENTION"),
}


def peers(names: Sequence[str], call: Call) -> Mapping[str, Callable[[], Ready]]:
    """What is compared on this case, prepared when called."""
    return {name: partial(PEERS[name], call) for name in names}
