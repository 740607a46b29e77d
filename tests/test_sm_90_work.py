"""The kernel of sm_90 that joins the splits of a tile's keys, beside float64; and how problems are divided."""

from dataclasses import replace

import pytest
import torch
from hopper import merged

from lazymax import arch as arches
from lazymax.backends import When, registry
from lazymax.backends.sm_90 import work
from lazymax.backends.sm_90.rows import HopperTile
from lazymax.backends.sm_90.work import WHOLE, Division
from lazymax.extras import NO_EXTRAS, Extras
from lazymax.problem import Problem
from lazymax.testing import EPS, within_budget

INF, NAN = float("inf"), float("nan")
CHOSEN = next(row for row in registry()["sm_90"].forward if isinstance(row, HopperTile))
ROW = replace(CHOSEN, pack_gqa=False, split=False)
SHARED = replace(ROW, pack_gqa=True, split=True, when=When())


def launched(problem: Problem, division: Division, counts: list[int], device: str):
    from lazymax.backends.sm_90.launch import HopperLaunch

    launch = HopperLaunch.of_forward(problem, ROW, division)
    launch.counts = torch.tensor(counts, dtype=torch.int32, device=device)
    return launch


def parts_of(problem: Problem, splits: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    p, generator = problem, torch.Generator().manual_seed(splits)
    size = splits * p.batch, p.q_heads, p.q_len, p.v_head_dim
    parts, lse = torch.randn(size, generator=generator), 3 * torch.randn(size[:3], generator=generator)
    return parts.to(device), lse.to(device)


def check(problem: Problem, division: Division, counts: list[int], parts: torch.Tensor, parts_lse: torch.Tensor,
          extras: Extras = NO_EXTRAS, layout: str = "bhsd") -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of the kernel; twice, for the second call launches the binary directly."""
    p = problem
    launch = launched(p, division, counts, str(parts.device))
    size = p.batch, p.q_heads, p.q_len, p.v_head_dim
    out = torch.full(size, NAN, dtype=getattr(torch, p.dtype), device=parts.device)
    if layout == "bshd":
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.full(size[:3], NAN, device=parts.device)
    for _ in range(2):
        launch._merge(parts, parts_lse, out, lse, extras)
    exact, low = (
        (torch.empty_like(out, dtype=kind), torch.empty_like(lse, dtype=kind))
        for kind in (torch.float64, torch.float32)
    )
    for expected in (exact, low):
        merged(launch, parts.to(expected[0].dtype), parts_lse.to(expected[0].dtype), *expected, extras)
    for budget in (
        within_budget(out, exact[0], low[0].to(out.dtype), eps=EPS[out.dtype]),
        within_budget(lse[..., None], exact[1][..., None], low[1][..., None], eps=2e-6, what="lse"),
    ):
        assert budget.ok, str(budget)
    return out, lse


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sinks", [None, (4,), (2, 4)], ids=["", "sinks", "sinks of every element"])
def test_parts_are_weighed_by_their_lse(sinks: tuple[int, ...] | None, dtype: str, device: str) -> None:
    """Row blocks with few splits and with many; what lies past a block's splits must not count."""
    problem = Problem.from_shape((2, 4, 2, 36, 900, 128, 72), dtype, return_lse=True)
    extras = NO_EXTRAS
    if sinks:
        problem, extras = replace(problem, sinks=True), Extras(sinks=torch.randn(sinks, device=device))
    parts, parts_lse = parts_of(problem, 5, device)
    parts[6:, :, :32], parts_lse[6:, :, :32] = NAN, NAN  # 2 batch elements x 3 splits
    check(problem, Division(4, 5), [3, 5], parts, parts_lse, extras, "bshd" if sinks else "bhsd")


def test_rows_without_keys_and_far_apart(device: str) -> None:
    problem = Problem.from_shape((1, 2, 1, 8, 900, 64), "fp16", return_lse=True)
    parts, parts_lse = parts_of(problem, 2, device)
    parts_lse[0, :, [0, 2]], parts_lse[1, :, [1, 2]] = -INF, -INF
    parts[0, :, 0], parts[1, :, 1] = NAN, INF
    parts_lse[0, :, 4], parts_lse[1, :, 4] = 3e38, -3e38
    parts[1, :, 4] = INF
    out, lse = check(problem, Division(1, 2), [2], parts, parts_lse)
    assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == -INF).all()
    assert torch.equal(lse[:, :, 0], parts_lse[1:, :, 0]) and torch.equal(lse[:, :, [1, 4]], parts_lse[:1, :, [1, 4]])


def test_nan_in_a_split_shows(device: str) -> None:
    problem = Problem.from_shape((1, 2, 1, 8, 900, 64), "bf16", return_lse=True)
    parts, parts_lse = parts_of(problem, 3, device)
    parts[0, 0, 1, 7], parts_lse[1, 0, 2], parts_lse[:, 0, 3] = NAN, NAN, NAN
    launch = launched(problem, Division(1, 3), [3], device)
    out, lse = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device=device), torch.empty(1, 2, 8, device=device)
    launch._merge(parts, parts_lse, out, lse, NO_EXTRAS)
    assert out[0, 0, 1].isnan().sum() == 1 and lse[0, 0, 1].isfinite()
    assert out[0, 0, 2:4].isnan().all() and lse[0, 0, 2:4].isnan().all()
    assert out[0, 1].isfinite().all() and lse[0, 1].isfinite().all()


SHAPES = [
    ((1, 16, 16, 512, 512, 128), {}),
    ((1, 16, 16, 1024, 1024, 128), {"causal": "top_left"}),
    ((2, 32, 8, 64, 4096, 128), {"causal": "bottom_right"}),
    ((4, 32, 8, 1, 8192, 128), {}),
    ((1, 32, 8, 1, 100000, 128), {"window": (4000, 0), "window_align": "bottom_right"}),
    ((1, 6, 2, 1000, 3001, 128), {"causal": "bottom_right"}),
    ((1, 8, 2, 700, 300, 128), {"causal": "bottom_right"}),  # tiles without keys
    ((4, 32, 8, 4096, 4096, 128), {}),
]


@pytest.mark.parametrize(("shape", "rules"), SHAPES, ids=lambda value: str(value))
def test_splits_hold_every_key_block_once(shape, rules) -> None:
    problem = Problem.from_shape(shape, "bf16", **rules)
    chosen = SHARED.division(problem, 132)
    assert chosen.heads in (1, 1 << (problem.group - 1).bit_length())
    for division in {chosen, Division(1, 3), Division(chosen.heads, 16)}:
        rows = range(0, problem.q_len, work.queries(SHARED, division.heads))
        splits = work.splits_of(problem, SHARED, division)
        for row, of in zip(rows, splits, strict=True):
            first, stop = work.key_range(row, problem, SHARED, division.heads)
            assert [begin for begin, _ in of] + [stop] == [first] + [end for _, end in of]
            assert all(begin < end for begin, end in of) and len(of) <= division.splits
            assert len(of) == 1 or min(end - begin for begin, end in of) * SHARED.block_n >= work.LEAST_KEYS
        heads = len(work.first_heads(problem, division.heads))
        assert work.programs(problem, SHARED, division) == sum(map(len, splits)) * heads


def test_what_is_packed_and_split() -> None:
    def division(shape, row=SHARED, **rules):
        return row.division(Problem.from_shape(shape, "bf16", **rules), 132)

    assert division((4, 32, 8, 4096, 4096, 128)) == WHOLE  # tiles enough
    assert division((4, 32, 8, 1, 8192, 128)) == Division(4, 4)  # 32 tiles for 132 multiprocessors
    assert division((4, 32, 8, 1, 8192, 128), replace(SHARED, pack_gqa=False)) == WHOLE  # 128
    assert division((4, 32, 8, 1, 8192, 128), replace(SHARED, split=False)) == Division(4, 1)
    assert division((4, 24, 8, 1, 8192, 128)).heads == 4 and division((1, 24, 3, 16, 8192, 128)).heads == 8
    assert division((1, 128, 1, 1, 8192, 128)).heads == 1  # more heads than rows
    assert division((1, 16, 16, 64, 300, 128)) == WHOLE  # too few keys
    assert division((1, 2, 2, 128, 16384, 128)).splits > 8
    ragged = torch.empty(4, dtype=torch.int32, device="meta")
    assert division((4, 32, 8, 1, 8192, 128), seqlens_k=ragged) == WHOLE


def test_splits_count_as_programs() -> None:
    """A row for many programs takes a problem that it can cut into so many; explain says how."""
    arch = replace(arches.by_name("sm_90"), multiprocessors=132)
    problem = Problem.from_shape((4, 32, 8, 1, 8192, 128), "bf16")
    row = replace(SHARED, when=When(min_programs=0.7))
    assert row.refusal(problem, arch) is None
    assert replace(row, split=False).refusal(problem, arch) is not None
    said = row.describe_for(problem, arch)
    assert said == "the 4 heads of a group in one tile, keys in up to 4 splits, then joined: 128 programs"
    assert ROW.describe_for(problem, arch) is None


def test_a_query_alone_in_a_tile_goes_elsewhere() -> None:
    arch = replace(arches.by_name("sm_90"), multiprocessors=132)
    lengths = torch.empty(64, dtype=torch.int32, device="meta")
    alone = Problem.from_shape((64, 32, 8, 1, 2048, 128), "bf16", seqlens_k=lengths)
    said = CHOSEN.refusal(alone, arch)
    assert said == "for 16 queries and more, unless heads share tiles or keys are split, got 1"
    assert CHOSEN.refusal(replace(alone, q_len=16), arch) is None
    assert CHOSEN.refusal(replace(alone, seqlens_k=False), arch) is None  # its heads share tiles


WIDE, NARROW = (row for row in registry()["sm_90"].forward if isinstance(row, HopperTile) and row.width == 64)
LARGE = next(row for row in registry()["sm_90"].forward if isinstance(row, HopperTile) and row.width == 256)


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("row", [CHOSEN, WIDE, NARROW, LARGE], ids=lambda row: row.name)
def test_every_tile_is_dealt_once_and_work_evenly(row: HopperTile, batch: int) -> None:
    """Causal, 16K tokens: with the short tiles where their group is, up to 15% more on one CTA than on the others."""
    from lazymax.backends.sm_90.launch import HopperLaunch

    heads, tokens = 2048 // row.width, 16384 // batch
    problem = Problem.from_shape((batch, heads, heads, tokens, tokens, row.width), "bf16", causal="top_left")
    launch = HopperLaunch.of_forward(problem, row)
    launch.ctas = 132
    table, _ = launch._schedule(torch.device("cpu"))
    codes = table[table >= 0].tolist()
    blocks = -(-tokens // row.block_m)
    assert sorted(codes) == sorted(head << 16 | block for head in range(batch * heads) for block in range(blocks))
    costs = [work.cost(block * row.block_m, problem, row) + work.TILE_COST for block in range(blocks)] + [0.0]
    loads = [sum(costs[code & 0xFFFF] for code in cta if code >= 0) for cta in table.T.tolist()]
    assert max(loads) < 1.035 * sum(loads) / len(loads)


@pytest.mark.parametrize(
    ("tokens", "heads", "rules", "found"),
    [
        (1000, 16, {}, 16),  # all at once
        (2000, 16, {}, 16),
        (1500, 16, {"causal": "top_left"}, -16),
        (3000, 2, {"causal": "top_left", "window": (400, None)}, 0),  # the longest tiles are not the last
        (16384, 16, {}, 3),  # K and V of three heads fit the L2
        (200, 24, {"packed": True}, 3),  # of 24 heads over 3 the first of each group
    ],
)
def test_the_first_lap_follows_a_rule(tokens: int, heads: int, rules: dict, found: int) -> None:
    """The kernel's own, see `bounds._code`."""
    from lazymax.backends.sm_90.launch import HopperLaunch

    packed = rules.pop("packed", False)
    problem = Problem.from_shape((1, heads, 3 if packed else heads, tokens, tokens, 128), "bf16", **rules)
    launch = HopperLaunch.of_forward(problem, CHOSEN, work.Division(8 if packed else 1))
    launch.ctas = 132
    table, lap = launch._schedule(torch.device("cpu"))
    assert lap == found
    blocks = -(-tokens // (16 if packed else 128))
    for cta, code in enumerate(table[0].tolist() if lap else []):
        rank, head = divmod(cta, abs(lap))
        assert code == head * (8 if packed else 1) << 16 | (rank if lap > 0 else blocks - 1 - rank)


def test_tiles_of_192_rows_go_where_they_are_estimated_faster() -> None:
    """H200, 2026-11-30, TFLOP/s: 383 and 307 at S=1536, full, 334 and 443 at 2048; causal 191 and 231 at 1536."""
    arch = replace(arches.by_name("sm_90"), multiprocessors=132)

    def refusal(tokens: int, batch: int = 1, heads: int = 16, **rules) -> str | None:
        shape = (batch, heads, heads, tokens, tokens, 64)
        return WIDE.refusal(Problem.from_shape(shape, "bf16", **rules), arch)

    assert refusal(1536) is None  # all at once
    said = refusal(2048)
    assert said == "estimated at 42.2 us, tiles of 128 queries at 29.9"
    assert refusal(1536, causal="top_left") is not None
    assert refusal(4096, 4, 32) is None and refusal(4096, 4, 32, causal="top_left") is None
    assert refusal(16384, 1, 32) is None and refusal(16384, 64, 128) is None
    lengths = {"cu_seqlens_q": torch.empty(17, dtype=torch.int32, device="meta")}
    lengths["cu_seqlens_k"] = lengths["cu_seqlens_q"]
    assert refusal(32768, heads=32, max_seqlen_q=8000, max_seqlen_k=8000, **lengths) is None
