"""`kernels.blocks`: the lists of key blocks, as the launcher makes them, against brute force over all pairs."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from calls import SIEVE, bools, moved, normal, sieve_reference

import lazymax
from lazymax import testing
from lazymax.backends import Tile
from lazymax.dispatch import Plan
from lazymax.extras import Extras
from lazymax.kernels.launch import ForwardLaunch, lengths_of, modifiers_of
from lazymax.options import parse_options
from lazymax.problem import Problem

BLOCK_M, BLOCK_N = 16, 16
FULL, PARTIAL = "full", "partial"


def documents(*lengths: int) -> torch.Tensor:
    which = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return which[:, None] == which[None, :]


@dataclass(frozen=True)
class Case:
    """A call of 37 queries over 100 keys: 3 query tiles, 7 key blocks, the last ones with tails."""

    id: str
    options: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (2, 2, 1, 37, 100)  # B, Hq, Hkv, Sq, Sk; packed: one batch element

    def call(self, device: str) -> tuple[Any, ...]:
        """q, k, v, problem, extras"""
        q, k, v = testing.make_qkv(*self.sizes, 16, dtype=torch.float16, device=device)
        extras, rules = parse_options(q, **moved(self.options, device))
        return q, k, v, Problem.from_tensors(q, k, v, extras, rules, return_lse=True), extras


def prepare(problem: Problem, listed: bool) -> ForwardLaunch:
    row = Tile(block_m=BLOCK_M, block_n=BLOCK_N, num_warps=4, num_stages=1, reason="test", provenance="test")
    plan = Plan(route="triton", backend="test", tile=row, rescale="select", level="", reason="", rejected=(),
                listed=listed)  # fmt: skip
    return ForwardLaunch.prepare(problem, plan)


def listed(problem: Problem, extras: Extras, batch: int, device: str) -> torch.Tensor:
    """The rows of the list, (batches, heads, slots, blocks + 2)."""
    launch = prepare(problem, True)
    found = launch._list(
        lengths_of(launch.problem, extras), modifiers_of(launch.problem, extras), batch, torch.device(device)
    )
    rows: torch.Tensor = found.ptr.cpu()
    assert (found.batch_stride, found.head_stride) == tuple(
        stride if size > 1 else 0 for size, stride in zip(rows.shape[:2], rows.stride()[:2], strict=True)
    )
    return rows


@dataclass(frozen=True)
class Sequence:
    """What one batch element or packed sequence is: its number, and the slots of its query tiles."""

    index: int
    q_len: int
    kv_len: int
    slots: dict[int, int]  # slot -> query tile


def sequences(problem: Problem, extras: Extras) -> list[Sequence]:
    if problem.packed is None:
        tiles = {tile: tile for tile in range(-(-problem.q_len // BLOCK_M))}
        lengths = [problem.kv_len] * problem.batch if extras.seqlens_k is None else extras.seqlens_k.tolist()
        return [Sequence(b, problem.q_len, length, tiles) for b, length in enumerate(lengths)]
    found = []
    q, k = extras.cu_seqlens_q.tolist(), extras.cu_seqlens_k.tolist()  # type: ignore[union-attr]
    for i in range(problem.batch):
        q_len = q[i + 1] - q[i]
        slots = {q[i] // BLOCK_M + i + tile: tile for tile in range(-(-q_len // BLOCK_M))}
        found.append(Sequence(i, q_len, k[i + 1] - k[i], slots))
    return found


def kept(case: Case, sequence: Sequence, head: int) -> torch.Tensor:
    """Which pairs bool mask and mask_mod keep."""
    keep = torch.ones(sequence.q_len, sequence.kv_len, dtype=torch.bool)
    mask = case.options.get("attn_mask")
    if mask is not None:
        whole = mask.expand(case.sizes[0], case.sizes[1], *case.sizes[3:])
        keep &= whole[sequence.index, head][:, : sequence.kv_len]
    if "mask_mod" in case.options:
        rows, cols = torch.arange(sequence.q_len)[:, None], torch.arange(sequence.kv_len)[None, :]
        at = torch.tensor(sequence.index), torch.tensor(head), rows, cols
        keep &= sieve_reference(*at, *case.options["mask_mod_args"])
    return keep


def inside(case: Case, sequence: Sequence) -> torch.Tensor:
    """Which pairs the band keeps."""
    o = case.options
    bottom = "bottom_right" in (o.get("causal"), o.get("window_align"))
    shift = sequence.kv_len - sequence.q_len if bottom else 0
    distance = torch.arange(sequence.kv_len)[None, :] - torch.arange(sequence.q_len)[:, None] - shift
    left, right = o.get("window", (None, None))
    keep = torch.ones(distance.shape, dtype=torch.bool)
    keep &= distance >= (-(10**6) if left is None else -left)
    return keep & (distance <= (0 if o.get("causal") else 10**6 if right is None else right))


def expected(case: Case, sequence: Sequence, head: int, tile: int) -> dict[int, str]:
    """block -> FULL or PARTIAL, of the blocks that band and length leave whole for this query tile."""
    rows = slice(tile * BLOCK_M, (tile + 1) * BLOCK_M)
    band, keep = inside(case, sequence)[rows], kept(case, sequence, head)[rows]
    found = {}
    for block in range(sequence.kv_len // BLOCK_N):
        cols = slice(block * BLOCK_N, (block + 1) * BLOCK_N)
        if band[:, cols].all() and keep[:, cols].any():
            found[block] = FULL if keep[:, cols].all() else PARTIAL
    return found


def read(row: torch.Tensor) -> dict[int, str]:
    """A row of the list: full blocks from the front in rising order, partial ones from the end in falling order."""
    n_full, n_partial = row[:2].tolist()
    blocks = row[2:].tolist()
    assert n_full + n_partial <= len(blocks)
    full, partial = blocks[:n_full], blocks[len(blocks) - n_partial :]
    assert full == sorted(set(full)) and partial == sorted(set(partial), reverse=True)
    assert not set(full) & set(partial)
    return {block: FULL for block in full} | {block: PARTIAL for block in partial}


HOLES = torch.arange(100)[None, :] // 16 != torch.arange(37)[:, None] // 16 + 1  # whole blocks away, others left
KEYS = torch.arange(4200)
THIRDS = (KEYS // 16 % 3 != 1) & ((KEYS // 16 % 3 != 2) | (KEYS % 16 != 5))  # full, none, partial, and again
PADDING = torch.arange(100) < torch.tensor([80, 33])[:, None, None, None]
CASES = (
    Case("all kept", dict(attn_mask=torch.ones(1, 100) > 0)),
    Case("none kept", dict(attn_mask=torch.zeros(1, 100) > 0)),
    Case("padding", dict(attn_mask=PADDING)),
    Case("holes", dict(attn_mask=HOLES)),
    Case("documents", dict(attn_mask=documents(20, 30, 50)[:37])),
    Case("random rows", dict(attn_mask=(normal(37, 1) > 0).expand(37, 100))),
    Case("of heads", dict(attn_mask=bools(1, 2, 1, 100))),
    Case("of batch and heads, random", dict(attn_mask=normal(2, 2, 37, 100) > 1.5)),
    Case("one pair", dict(attn_mask=(torch.arange(3700) == 3000).view(37, 100))),
    Case("all but one pair", dict(attn_mask=(torch.arange(3700) != 3000).view(37, 100))),
    Case("the last row, which a tail repeats", dict(attn_mask=(torch.arange(37) == 36)[:, None])),
    Case("stored keys first", dict(attn_mask=HOLES.mT.contiguous().mT)),
    Case("causal", dict(attn_mask=HOLES, causal="top_left")),
    Case("causal, bottom right", dict(attn_mask=PADDING, causal="bottom_right")),
    Case("window", dict(attn_mask=HOLES, window=(20, 40))),
    Case("window, bottom right", dict(attn_mask=PADDING, window=(50, None), window_align="bottom_right")),
    Case("lengths", dict(attn_mask=HOLES, seqlens_k=torch.tensor([50, 0]))),
    Case("lengths, causal, bottom right", dict(attn_mask=PADDING, seqlens_k=torch.tensor([64, 90]),
                                               causal="bottom_right")),
    Case("mask_mod of batch and head", SIEVE),
    Case("mask_mod and mask, causal", dict(**SIEVE, attn_mask=PADDING, causal="bottom_right")),
    Case("packed", dict(mask_mod="calls.sieve", mask_mod_args=(torch.tensor([30, 0, 99, 9]),),
                        cu_seqlens_q=torch.tensor([0, 5, 5, 37, 37]), cu_seqlens_k=torch.tensor([0, 40, 60, 100, 100])),
         (1, 2, 1, 37, 100)),
    Case("packed, causal, rows of no sequence", dict(
        mask_mod="calls.sieve", mask_mod_args=(torch.tensor([99, 99]),), cu_seqlens_q=torch.tensor([0, 20, 33]),
        cu_seqlens_k=torch.tensor([0, 40, 91]), causal="bottom_right"), (1, 2, 1, 37, 100)),
    Case("more blocks than a chunk", dict(attn_mask=THIRDS), (1, 1, 1, 3, 4200)),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_lists_of_key_blocks(case: Case, device: str) -> None:
    q, _, _, problem, extras = case.call(device)
    rows = listed(problem, extras, q.shape[0], device)
    seen = set()
    for sequence in sequences(problem, extras):
        for head in range(problem.q_heads):
            for slot, tile in sequence.slots.items():
                place = (0 if problem.packed or rows.shape[0] == 1 else sequence.index, head % rows.shape[1], slot)
                want = expected(case, sequence, head, tile)
                assert read(rows[place]) == want, (place, tile)
                seen.add(slot)
    for slot in set(range(rows.shape[2])) - seen:  # of no rows
        assert not rows[:, :, slot, :2].any()


@dataclass(frozen=True)
class Shared:
    id: str
    options: dict[str, Any]
    shape: tuple[int, int]  # batch elements and heads that have lists of their own


SHARED = (
    Shared("one for all", dict(attn_mask=HOLES), (1, 1)),
    Shared("per batch element", dict(attn_mask=PADDING), (2, 1)),
    Shared("per head", dict(attn_mask=bools(1, 2, 1, 100)), (1, 2)),
    Shared("expanded: one for all", dict(attn_mask=HOLES.expand(2, 2, 37, 100)), (1, 1)),
    Shared("lengths", dict(attn_mask=HOLES, seqlens_k=torch.tensor([50, 9])), (2, 1)),
    Shared("a mask_mod that looks at both", SIEVE, (2, 2)),
)


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.id)
def test_lists_are_shared_where_they_are_the_same(case: Shared, device: str) -> None:
    q, _, _, problem, extras = Case("", case.options).call(device)
    rows = listed(problem, extras, q.shape[0], device)
    assert rows.shape == (*case.shape, 3, 7 + 2)


RUN = ("holes", "window", "lengths, causal, bottom right", "packed, causal, rows of no sequence")


@pytest.mark.parametrize("case", [case for case in CASES if case.id in RUN], ids=lambda case: case.id)
def test_a_list_changes_no_result(case: Case, device: str) -> None:
    """The same launch with a list, against the reference: no block is lost, none comes twice."""
    q, k, v, problem, extras = case.call(device)
    out = testing.poisoned(*q.shape, dtype=q.dtype, device=device)
    lse = testing.poisoned(*q.shape[:3], dtype=torch.float32, device=device)
    prepare(problem, True)(q, k, v, out, lse, extras)
    for budget in testing.check_attention(out, lse, q, k, v, problem, extras):
        assert budget.ok, budget


def test_lists_are_made_anew_for_every_call(device: str) -> None:
    """A mask that was changed in place, with the same decision behind it."""
    q, k, v = testing.make_qkv(1, 4, 2, 20, 200, 16, dtype=torch.float16, device=device)
    mask = torch.zeros(200, dtype=torch.bool, device=device)
    assert lazymax.explain(q, k, v, attn_mask=mask, show=False).plan.listed
    for keep in (slice(0, 40), slice(150, 200), slice(70, 71)):
        mask.fill_(False)
        mask[keep] = True
        got = lazymax.attention(q, k, v, attn_mask=mask)
        want = lazymax.attention(q, k[:, :, keep], v[:, :, keep], impl="reference")
        budget = testing.within_budget(got, want.double(), want + 0, eps=2 * testing.EPS[torch.float16])
        assert budget.ok, budget
