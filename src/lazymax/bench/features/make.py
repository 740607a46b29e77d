"""Tensors of the cases, seeded, so that every process makes the same ones."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Maker:
    """What the tensors of a case are made for."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    dtype: torch.dtype
    device: torch.device

    def random(self, *size: int, normal: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Made on the device: a mask for every head has 10**9 elements. A meta device gives none."""
        if self.device.type == "meta":
            return torch.empty(*size, dtype=dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(3)
        function = torch.randn if normal else torch.rand
        return function(*size, generator=generator, dtype=dtype, device=self.device)

    def integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def partition(total: int, count: int, seed: int) -> tuple[int, ...]:
    """`total` in `count` random parts of at least 1."""
    generator = torch.Generator().manual_seed(seed)
    cuts = (torch.randperm(total - 1, generator=generator)[: count - 1] + 1).sort().values.tolist()
    return tuple(after - before for before, after in zip([0, *cuts], [*cuts, total], strict=True))


def uneven(shortest: int, longest: int, count: int, seed: int) -> tuple[int, ...]:
    """`count` random lengths, as many below the geometric mean of the bounds as above it."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return tuple(int(length) for length in shortest * (longest / shortest) ** drawn)


def nothing(make: Maker) -> dict[str, Any]:
    return {}


def triangle(make: Maker) -> dict[str, Any]:
    return dict(attn_mask=torch.ones(make.q_len, make.kv_len, dtype=torch.bool, device=make.device).tril()[None, None])


def _padding(make: Maker) -> torch.Tensor:
    """The first keys of each element, fewer from one to the next; of two: 3/4 and 1/2."""
    kept = make.integers([make.kv_len * (make.batch + 1 - i) // (make.batch + 2) for i in range(make.batch)])
    return torch.arange(make.kv_len, device=make.device)[None, None, None, :] < kept[:, None, None, None]


def key_padding(make: Maker) -> dict[str, Any]:
    return dict(attn_mask=_padding(make))


def float_key_padding(make: Maker) -> dict[str, Any]:
    zeros = torch.zeros(make.batch, 1, 1, make.kv_len, dtype=make.dtype, device=make.device)
    return dict(attn_mask=zeros.masked_fill(~_padding(make), float("-inf")))


def half(make: Maker) -> dict[str, Any]:
    return dict(attn_mask=make.random(1, 1, make.q_len, make.kv_len, normal=False) < 0.5)


def half_per_head(make: Maker) -> dict[str, Any]:
    return dict(attn_mask=make.random(make.batch, make.heads, make.q_len, make.kv_len, normal=False) < 0.5)


def float_mask(make: Maker) -> dict[str, Any]:
    return dict(attn_mask=make.random(1, 1, make.q_len, make.kv_len, normal=True, dtype=make.dtype))


def float_mask_per_head(make: Maker) -> dict[str, Any]:
    size = (make.batch, make.heads, make.q_len, make.kv_len)
    return dict(attn_mask=make.random(*size, normal=True, dtype=make.dtype))


def _slopes(make: Maker) -> torch.Tensor:
    return torch.exp2(torch.arange(1, make.heads + 1, device=make.device) * (-8.0 / make.heads))


def alibi(make: Maker) -> dict[str, Any]:
    return dict(alibi_slopes=_slopes(make))


def alibi_mod(make: Maker) -> dict[str, Any]:
    return dict(score_mod_args=(_slopes(make),))


def sinks(make: Maker) -> dict[str, Any]:
    return dict(sinks=make.random(make.heads, normal=True))


def dropout(make: Maker) -> dict[str, Any]:
    return dict(dropout_seed=torch.full((1,), 7, dtype=torch.int64, device=make.device))


def full_lengths(make: Maker) -> dict[str, Any]:
    return dict(seqlens_k=make.integers([make.kv_len] * make.batch))


def half_lengths(make: Maker) -> dict[str, Any]:
    return dict(seqlens_k=make.integers([make.kv_len // 2] * make.batch))


def prefix(make: Maker) -> dict[str, Any]:
    return dict(mask_mod_args=(make.integers([make.kv_len * (i + 1) // 4 for i in range(make.batch)]),))


def documents(make: Maker, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The number of the document of each position."""
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    return dict(mask_mod_args=(make.integers(numbers),))
