"""The schedule of ragged problems, whose lengths are known on the device only."""

import triton
import triton.language as tl

from ....kernels import bounds, sequences

CHUNK = tl.constexpr(64)  # slots that a program places


@triton.jit
def _look(slots, per_batch, q_len, kv_len, first_offset, last_offset, lengths, BLOCK_M: tl.constexpr,
          BLOCK_N: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr, BOTTOM_RIGHT: tl.constexpr):
    """(spans, first rows, key blocks) of slots; no key blocks: nothing to do."""
    span, tile = sequences.locate((slots % per_batch, slots // per_batch), q_len, kv_len, first_offset, last_offset,
                                  lengths, BLOCK_M, BOTTOM_RIGHT)
    first_row = tile * BLOCK_M
    start, _, _, stop = bounds.kv_range(first_row, tl.minimum(first_row + BLOCK_M, span.q_len) - 1, span.kv_len,
                                        span.first_offset, span.last_offset, BLOCK_N, HAS_FIRST, HAS_LAST)
    blocks = tl.maximum((stop - start + BLOCK_N - 1) // BLOCK_N, 1)
    return span, first_row, tl.where(first_row < span.q_len, blocks, 0)


@triton.jit(do_not_specialize=["n", "per_batch", "heads", "side_by_side", "ctas", "places", "q_len", "kv_len",
                               "first_offset", "last_offset"])
def arrange(table, n, per_batch, heads, side_by_side, ctas, places, q_len, kv_len, first_offset, last_offset, lengths,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
            BOTTOM_RIGHT: tl.constexpr):
    """Fill the table (rounds, CTAs, 8) int32 of `places` records: head (-1: none), batch element or sequence, first
    row, row of q where it begins, its queries, row of k, its keys, key blocks. Grid: (n / CHUNK,).

    The order is that of `launch.schedule`: heads in groups of `side_by_side`, in a group the longest tiles first. It is
    dealt to the CTAs to and fro. n slots, per_batch of a batch element: see `sequences.find`. Other arguments: of
    `attention_forward`, q_len and kv_len as in `sequences.locate`.
    """
    own = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    span, first_row, cost = _look(tl.minimum(own, n - 1), per_batch, q_len, kv_len, first_offset, last_offset, lengths,
                                  BLOCK_M, BLOCK_N, HAS_FIRST, HAS_LAST, BOTTOM_RIGHT)
    rank = 0 * own
    to_do = 0 * n
    for first in range(0, n, CHUNK):
        others = first + tl.arange(0, CHUNK)
        _, _, their_cost = _look(tl.minimum(others, n - 1), per_batch, q_len, kv_len, first_offset, last_offset,
                                 lengths, BLOCK_M, BLOCK_N, HAS_FIRST, HAS_LAST, BOTTOM_RIGHT)
        their_cost = tl.where(others < n, their_cost, -1)
        earlier = (their_cost[None, :] == cost[:, None]) & (others[None, :] < own[:, None])
        rank += tl.sum(((their_cost[None, :] > cost[:, None]) | earlier).to(tl.int32), 1)
        to_do += tl.sum((their_cost > 0).to(tl.int32), 0)
    for head in range(0, heads):
        first_head = head // side_by_side * side_by_side
        members = tl.minimum(side_by_side, heads - first_head)
        busy = first_head * to_do + rank * members + head - first_head
        place = tl.where(cost > 0, busy, to_do * heads + (rank - to_do) * heads + head)
        _write(table, place, own < n, ctas, tl.where(cost > 0, head, -1), span.batch, first_row, span.q_row, span.q_len,
               span.k_row, span.kv_len, cost)
    for first in range(n * heads + tl.program_id(0) * CHUNK, places, tl.num_programs(0) * CHUNK):
        place = first + tl.arange(0, CHUNK)
        none = 0 * place
        _write(table, place, place < places, ctas, none - 1, none, none, none, none, none, none, none)


@triton.jit
def _write(table, place, inside, ctas, head, batch, first_row, q_row, q_len, k_row, kv_len, cost):
    lap = place // ctas
    cta = place % ctas
    cta = tl.where(lap % 2 == 1, ctas - 1 - cta, cta)
    record = table + (lap * ctas + cta) * 8
    tl.store(record, head, mask=inside)
    tl.store(record + 1, batch, mask=inside)
    tl.store(record + 2, first_row, mask=inside)
    tl.store(record + 3, q_row, mask=inside)
    tl.store(record + 4, q_len, mask=inside)
    tl.store(record + 5, k_row, mask=inside)
    tl.store(record + 6, kv_len, mask=inside)
    tl.store(record + 7, cost, mask=inside)
