"""Calls for the kernel of sm_90, on a GPU and in the simulator, and the schedule of ragged ones in Python."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from emulated import EDITS, laid_out

from lazymax.backends import registry
from lazymax.backends.sm_90.rows import HopperTile
from lazymax.backends.sm_90.work import WHOLE, Division
from lazymax.extras import Extras
from lazymax.options import parse_options
from lazymax.problem import Problem
from lazymax.testing import make_qkv

CAUSAL = {"causal": "bottom_right"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rows() -> list[HopperTile]:
    table = registry()["sm_90"]
    return [row for row in (*table.forward, *table.alternatives) if isinstance(row, HopperTile)]


def head_dims(row: HopperTile) -> list[tuple[int, int]]:
    """(D, D_v) of a row: full tiles first, then tiles with columns to spare."""
    widest = row.v_width or row.width
    others = {64: [], 128: [(72, 64), (104, 120)], 192: [(136, 64), (168, 104)], 256: [(136, 64), (192, 136)]}
    return [(row.width, widest), *others[row.width]]


@dataclass(frozen=True)
class Call:
    shape: tuple[int, ...]  # batch, query heads, key heads, queries, keys
    rules: dict[str, Any] = field(default_factory=dict)  # options of `attention` that are no tensors
    data: str = "normal"  # see EDITS
    layout: str = "bhsd"  # see laid_out
    sinks: bool = False
    lengths: tuple[int, ...] = ()  # seqlens_k
    offsets: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # of packed sequences
    division: Division = WHOLE

    def inputs(
        self, dims: tuple[int, int], dtype: torch.dtype, seed: int, device: str = "cpu"
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Extras, Problem]:
        """(q, k, v), the extras and the problem."""
        q, k, v = make_qkv(*self.shape, *dims, dtype=dtype, seed=seed)
        EDITS[self.data](q, k, v)
        q, k, v = (laid_out(t, self.layout, 8).to(device) for t in (q, k, v))
        rules = dict(self.rules)
        threshold = rules.pop("rescale_threshold", None)
        if self.sinks:
            rules["sinks"] = q.new_tensor([0.5, -1.0, 3.0, -torch.inf])[torch.arange(self.shape[1]) % 4].float()
        if self.lengths:
            rules["seqlens_k"] = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        if self.offsets[0]:
            rules |= {
                f"cu_seqlens_{which}": torch.tensor(ends, dtype=torch.int32, device=device)
                for which, ends in zip("qk", self.offsets, strict=True)
            }
        extras, parsed = parse_options(q, **rules)
        problem = Problem.from_tensors(q, k, v, extras, parsed, rescale_threshold=threshold, return_lse=True)
        return (q, k, v), extras, problem


# Those with heads packed, keys split, or both. Where keys are split block by block, some rows see none of a split's.
DIVIDED = (
    Call((2, 8, 2, 70, 300), CAUSAL, "rising", sinks=True, division=Division(heads=4)),
    Call((1, 6, 2, 50, 150), {"window": (60, 30), "window_align": "bottom_right"}, "huge", "bshd",
         division=Division(heads=4)),
    Call((2, 2, 1, 150, 700), CAUSAL, "rising", "bshd", sinks=True, division=Division(splits=3)),
    Call((1, 2, 1, 200, 650), {"causal": "top_left", "scale": -0.2}, division=Division(splits=2)),
    Call((1, 2, 1, 140, 700), CAUSAL | {"window": (130, None)}, "huge", division=Division(splits=5)),
    Call((3, 4, 1, 1, 600), CAUSAL, sinks=True, division=Division(4, 5)),
    Call((2, 3, 1, 5, 500), CAUSAL | {"softcap": 20.0}, "large", "padded", True, division=Division(4, 2)),
    Call((1, 16, 2, 20, 700), CAUSAL | {"window": (200, None)}, "hidden", division=Division(8, 4)),
    Call((1, 8, 2, 70, 290), {"causal": "top_left"}, "visible", "bshd", sinks=True, division=Division(4, 3)),
    Call((1, 4, 1, 70, 50), CAUSAL, sinks=True, division=Division(4, 2)),  # rows without keys; one split in the end
    Call((1, 24, 1, 3, 400), {}, "hidden", division=Division(32, 4)),
    Call((1, 64, 1, 2, 290), {}, sinks=True, division=Division(64, 3)),
)  # fmt: skip


def arranged(launch: Any, extras: Extras, device: torch.device) -> torch.Tensor:
    """What `HopperLaunch._arrange` makes on a GPU; of records without work only the head, -1, is set."""
    from lazymax.backends.sm_90.launch import USUAL
    from lazymax.backends.sm_90.work import key_blocks
    from lazymax.kernels.tma import multiprocessors

    p, tile = launch.problem, launch.tile
    if p.packed:
        assert extras.cu_seqlens_q is not None and extras.cu_seqlens_k is not None
        begins = list(zip(extras.cu_seqlens_q.tolist(), extras.cu_seqlens_k.tolist(), strict=True))
        spans = [(q, q_end - q, k, k_end - k) for (q, k), (q_end, k_end) in itertools.pairwise(begins)]
        q, k = begins[-1]
        spans.append((q, p.packed[0] - q, k, 0))  # the rows behind the last
    else:
        assert extras.seqlens_k is not None
        spans = [(0, p.q_len, 0, keys) for keys in extras.seqlens_k.tolist()]
    work = []
    for batch, (q_row, q_len, k_row, kv_len) in enumerate(spans):
        own = replace(p, batch=1, packed=None, seqlens_k=False, q_len=q_len, kv_len=kv_len)
        for first_row in range(0, q_len, tile.block_m):
            work.append((batch, first_row, q_row, q_len, k_row, kv_len, key_blocks(first_row, own, tile)))
    work.sort(key=lambda record: -record[-1])
    together = launch._heads_together(p.q_heads)
    groups = [range(head, min(head + together, p.q_heads)) for head in range(0, p.q_heads, together)]
    order = [(head, *record) for group in groups for record in work for head in group]
    tiles = p.q_tiles(tile.block_m) * p.q_heads
    ctas = min(tiles, launch.ctas or multiprocessors(USUAL, device))
    table = torch.full((-(-tiles // ctas), ctas, 8), -1, dtype=torch.int32)
    for place, record in enumerate(order):
        lap, cta = divmod(place, ctas)
        table[lap, ctas - 1 - cta if lap % 2 else cta] = torch.tensor(record, dtype=torch.int32)
    return table


def merged(
    launch: Any, parts: torch.Tensor, parts_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, extras: Extras
) -> None:
    """`HopperLaunch._merge` in torch; reads what `counts` says that there is, no more."""
    p, (heads, splits) = launch.problem, launch.division
    parts, parts_lse = (t.view(splits, p.batch, *t.shape[1:]) for t in (parts, parts_lse))
    rows = launch.tile.block_m // heads
    for block, count in enumerate(launch.counts.tolist()):
        own = slice(block * rows, (block + 1) * rows)
        lses, outs = parts_lse[:count, :, :, own], parts[:count, :, :, own]
        if extras.sinks is not None:
            sink = extras.sinks.expand(p.batch, p.q_heads)[None, :, :, None].expand_as(lses[:1])
            lses, outs = torch.cat([lses, sink]), torch.cat([outs, torch.zeros_like(outs[:1])])
        total = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - torch.where(total == -torch.inf, 0.0, total))[..., None]
        out[:, :, own] = torch.where(weights == 0, 0.0, outs * weights).sum(0).to(out.dtype)
        lse[:, :, own] = total
