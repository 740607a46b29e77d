"""`kernels.bounds.kv_range` and `q_range`, and the band of `Problem`, against brute force."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from lazymax.kernels import bounds
from lazymax.problem import Problem

WIDTH = 4096


@triton.jit
def _ranges(cases, out, n, BLOCK_N: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
            WIDTH: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    """kv_range (TURNED: q_range) of WIDTH cases at once: it is element-wise, so that a vector of tiles does what one
    tile would."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = at < n
    first_row = tl.load(cases + at, mask=inside, other=0)
    last_row = tl.load(cases + n + at, mask=inside, other=0)
    kv_len = tl.load(cases + 2 * n + at, mask=inside, other=0)
    first = tl.load(cases + 3 * n + at, mask=inside, other=0)
    last = tl.load(cases + 4 * n + at, mask=inside, other=0)
    if TURNED:
        a, b, c, d = bounds.q_range(first_row, last_row, kv_len, first, last, BLOCK_N, HAS_FIRST, HAS_LAST)
    else:
        a, b, c, d = bounds.kv_range(first_row, last_row, kv_len, first, last, BLOCK_N, HAS_FIRST, HAS_LAST)
    tl.store(out + at, a, mask=inside)
    tl.store(out + n + at, b, mask=inside)
    tl.store(out + 2 * n + at, c, mask=inside)
    tl.store(out + 3 * n + at, d, mask=inside)


def kv_ranges(cases, block_n, has_first, has_last, device, turned=False):
    """(5, n) of first_row, last_row, kv_len, first, last offset -> (4, n) of start, inner_start, inner_stop, stop."""
    n = cases.shape[1]
    out = torch.full((4, n), -1, dtype=torch.int32, device=device)
    _ranges[(triton.cdiv(n, WIDTH),)](
        cases.int().contiguous().to(device), out, n, block_n, has_first, has_last, WIDTH, turned, enable_fp_fusion=False
    )
    return out.cpu().long()


def tiles(q_lens, kv_lens, block_m, has_first, has_last, offsets):
    """Every query tile of every (Sq, Sk, first, last offset), first <= last; `offsets(sq, sk)` lists the offsets."""
    rows = []
    for sq, sk in itertools.product(q_lens, kv_lens):
        for first, last in itertools.product(offsets(sq, sk), repeat=2):
            if (first and not has_first) or (last and not has_last) or (has_first and has_last and first > last):
                continue  # an absent bound is passed as 0, as the launcher does
            rows += [(m, min(m + block_m, sq) - 1, sk, first, last) for m in range(0, sq, block_m)]
    return torch.tensor(rows).T


def visible_keys(cases, block_m, has_first, has_last, turned=False):
    """Brute force: (n, block_m) rows that exist, and (n, block_m, keys) what they see. turned: keys that exist, and
    which queries see them."""
    first_row, last_row, kv_len, first, last = (x[:, None, None] for x in cases)
    row = first_row + torch.arange(block_m)[None, :, None]
    key = torch.arange(int(kv_len.max()) + 1)[None, None, :]
    seen = (row <= last_row) & (key < kv_len)
    query, other = (key, row) if turned else (row, key)
    if has_first:
        seen = seen & (other >= query + first)
    if has_last:
        seen = seen & (other <= query + last)
    return (row <= last_row)[..., 0], seen


def check_ranges(cases, block_m, block_n, has_first, has_last, device, turned=False):
    start, inner_start, inner_stop, stop = edges = kv_ranges(cases, block_n, has_first, has_last, device, turned)
    exists, seen = visible_keys(cases, block_m, has_first, has_last, turned)
    by_any, by_all = seen.any(1), (seen | ~exists[..., None]).all(1)
    key = torch.arange(seen.shape[2])

    def covered(low, high):
        """Keys of the blocks from `low`, as the kernel's loop `range(low, high, BLOCK_N)` takes them."""
        blocks = (high - low).clamp(min=0).add(block_n - 1) // block_n
        return (key >= low[:, None]) & (key < (low + blocks * block_n)[:, None])

    stretches = torch.stack([covered(start, inner_start), covered(inner_start, inner_stop), covered(inner_stop, stop)])
    times = stretches.sum(0)

    def none(wrong, what):
        hit = wrong.any(1).nonzero()
        assert not len(hit), f"{what}: {cases[:, hit[0, 0]].tolist()} gives {edges[:, hit[0, 0]].tolist()}"

    none(by_any & (times == 0), "a visible key that no block covers")
    none(times > 1, "a key that two blocks cover")
    none(stretches[1] & ~by_all, "an unmasked key that some row may not see")
    for edge, name in ((start, "start"), (inner_start, "inner_start"), (inner_stop, "inner_stop")):
        none((edge % block_n != 0)[:, None], f"{name} off the blocks")
    none(((start < 0) | (start > inner_start) | (inner_start > inner_stop))[:, None], "edges out of order")

    # Not only right but tight: no block without a visible key, no full block that is masked without need.
    blocks = torch.nn.functional.pad(by_any, (0, -by_any.shape[1] % block_n)).unflatten(1, (-1, block_n))
    visited = torch.nn.functional.pad(times > 0, (0, -by_any.shape[1] % block_n)).unflatten(1, (-1, block_n))
    idle = visited.any(2) & ~blocks.any(2)
    none(idle & by_any.any(1, keepdim=True), "a visited block without a visible key")
    none((idle.sum(1) > 1)[:, None], "more than one block visited although no key is visible")
    whole = by_all[:, : by_all.shape[1] // block_n * block_n].unflatten(1, (-1, block_n)).all(2)
    unmasked = stretches[1][:, : by_all.shape[1] // block_n * block_n].unflatten(1, (-1, block_n)).all(2)
    none(whole & ~unmasked, "a block that every row sees, masked")


BANDS = [
    pytest.param(first, last, id=f"first={first}-last={last}")
    for first, last in itertools.product((False, True), repeat=2)
]


@pytest.mark.parametrize("block_m, block_n", [(4, 4), (2, 4), (4, 2), (3, 4)])
@pytest.mark.parametrize("has_first, has_last", BANDS)
def test_kv_range_all_small_shapes(has_first, has_last, block_m, block_n, device):
    """Every Sq, Sk up to two blocks and a bit, every pair of offsets (Problem clamps them to -Sq..Sk)."""
    longest = 2 * max(block_m, block_n) + 2
    cases = tiles(range(1, longest), range(longest), block_m, has_first, has_last, lambda q, k: range(-q, k + 1))
    check_ranges(cases, block_m, block_n, has_first, has_last, device)


@pytest.mark.parametrize("block_n, block_m", [(4, 4), (2, 4), (4, 2), (3, 4)])
@pytest.mark.parametrize("has_first, has_last", BANDS)
def test_q_range_all_small_shapes(has_first, has_last, block_n, block_m, device):
    """Tiles of keys and the queries that see them: the same with the parts changed, offsets -Sq..Sk."""
    longest = 2 * max(block_m, block_n) + 2
    cases = tiles(range(1, longest), range(longest), block_n, has_first, has_last, lambda k, q: range(-q, k + 1))
    check_ranges(cases, block_n, block_m, has_first, has_last, device, turned=True)


def _edges(sq, sk):
    """Offsets around every edge at real block sizes: the diagonals of both alignments, windows, the clamps."""
    near = {d + e for d in (0, sk - sq) for e in (-33, -32, -16, -15, -1, 0, 1, 15, 16, 32, 33)}
    return sorted({max(-sq, min(sk, o)) for o in near} | {-sq, sk, 0})


@pytest.mark.parametrize("block_m, block_n", [(16, 16), (16, 32), (32, 16), (64, 32), (128, 64)])
@pytest.mark.parametrize("has_first, has_last", BANDS)
def test_kv_range_real_tiles(has_first, has_last, block_m, block_n, device):
    lengths = (1, 16, 33, 70)
    cases = tiles(lengths, (0, 15, *lengths, 131), block_m, has_first, has_last, _edges)
    check_ranges(cases, block_m, block_n, has_first, has_last, device)


@pytest.mark.slow
@pytest.mark.parametrize("block_m, block_n", [(16, 16), (16, 32), (32, 16), (32, 32)])
@pytest.mark.parametrize("has_first, has_last", BANDS)
def test_kv_range_every_length_to_70(has_first, has_last, block_m, block_n, device):
    for sq in range(1, 71):
        cases = tiles([sq], range(71), block_m, has_first, has_last, _edges)
        check_ranges(cases, block_m, block_n, has_first, has_last, device)


# ---- the band of a Problem, in Python ----


def band(sq, sk, causal, window, align):
    """Brute force from the words of the docstring: (Sq, Sk), True where the query sees the key."""
    diagonal = torch.arange(sq)[:, None] + (sk - sq if align == "bottom_right" else 0)
    distance = torch.arange(sk)[None, :] - diagonal
    left, right = window
    keep = torch.ones(sq, sk, dtype=torch.bool)
    if causal:
        keep &= distance <= 0
    if left is not None:
        keep &= distance >= -left
    if right is not None:
        keep &= distance <= right
    return keep


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_problem_band_all_small_shapes(causal, align):
    """first_offset, last_offset, visible_pairs and flops, for every length to 7 and windows to beyond it."""
    sides = (None, 0, 1, 2, 4, 7, 9)
    for sq, sk, left, right in itertools.product(range(8), range(8), sides, sides):
        window = (left, right)
        problem = Problem(
            batch=2, q_heads=6, kv_heads=3, q_len=sq, kv_len=sk, head_dim=5, v_head_dim=7, dtype="float16",
            causal=causal, window=window, align=align,
        )  # fmt: skip
        keep = band(sq, sk, causal, window, align)
        first, last = problem.first_offset, problem.last_offset
        distance = torch.arange(sk)[None, :] - torch.arange(sq)[:, None]
        seen = torch.ones(sq, sk, dtype=torch.bool)
        seen &= distance >= (-sq if first is None else first)
        seen &= distance <= (sk if last is None else last)
        what = f"Sq={sq} Sk={sk} window={window}"
        assert torch.equal(seen, keep), what
        assert problem.visible_pairs == keep.sum().item(), what
        assert problem.flops == 2 * 6 * keep.sum().item() * 2 * (5 + 7), what
        assert all(offset is None or -sq <= offset <= sk for offset in (first, last)), what  # fits in 32 bits


def test_problem_offsets_absent_without_bounds():
    """No bound means no masked stretch in the kernel: None, not a large number."""
    full = Problem.from_shape((1, 1, 1, 9, 5, 8), "fp16")
    assert (full.first_offset, full.last_offset) == (None, None)
    causal = Problem.from_shape((1, 1, 1, 9, 5, 8), "fp16", causal="bottom_right")
    assert (causal.first_offset, causal.last_offset) == (None, -4)
    window = Problem.from_shape((1, 1, 1, 9, 5, 8), "fp16", window=(2, -1))
    assert (window.first_offset, window.last_offset) == (-2, None)
