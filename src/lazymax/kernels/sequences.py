"""Which batch element, or which packed sequence, a program works on, and where it lies in the tensors."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Span(NamedTuple):
    """The part of the tensors that a program works on. Rows and keys count from the span's first."""

    batch: Any  # index of the batch element or sequence
    slab: Any  # its index in the tensors' batch dimension: 0 if packed
    q_row: Any  # row of the tensors where it begins: 0 unless packed
    k_row: Any
    q_len: Any
    kv_len: Any
    first_offset: Any  # the band, see `bounds.kv_range`
    last_offset: Any
    shift: Any  # key under the diagonal of query 0


@triton.jit
def offset_at(offsets, index, count, total):
    """The row where a packed sequence begins, inside the tensor whatever the offsets hold; `total` behind the last."""
    at = tl.load(offsets + index, mask=index <= count, other=total)
    return tl.minimum(tl.maximum(at, 0), total).to(tl.int32)


@triton.jit
def find(slot, cu_seqlens_q, count, steps, total_q, BLOCK_M: tl.constexpr):
    """Sequence and query tile of a slot of the grid.

    Sequence i owns the slots from cu_seqlens_q[i] // BLOCK_M + i on: never fewer than its tiles, one more at times. So
    total_q // BLOCK_M + count + 1 slots serve any lengths, and no length has to be known on the host. The rows behind
    the last offset are one more sequence, number `count`, which has no keys.
    """
    low = 0 * slot  # a tensor where the slots are one
    high = low + count
    for _ in tl.range(0, steps):
        middle = (low + high + 1) // 2
        inside = offset_at(cu_seqlens_q, middle, count, total_q) // BLOCK_M + middle <= slot
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle - 1)
    return low, slot - (offset_at(cu_seqlens_q, low, count, total_q) // BLOCK_M + low)


@triton.jit
def span_of(batch, q_len, kv_len, first_offset, last_offset, lengths, BOTTOM_RIGHT: tl.constexpr):
    """The span of a batch element or packed sequence; arguments as in `locate`."""
    if lengths.cu_seqlens_q is not None:
        count = lengths.count
        slab = 0 * batch
        q_row = offset_at(lengths.cu_seqlens_q, batch, count, q_len)
        k_row = offset_at(lengths.cu_seqlens_k, batch, count, kv_len)
        own_q = tl.maximum(offset_at(lengths.cu_seqlens_q, batch + 1, count, q_len) - q_row, 0)
        own_k = tl.maximum(offset_at(lengths.cu_seqlens_k, batch + 1, count, kv_len) - k_row, 0)
        own_k = tl.where(batch == count, 0, own_k)
    else:
        slab = batch
        q_row = 0
        k_row = 0
        own_q = q_len
        own_k = kv_len
        if lengths.seqlens_k is not None:
            own_k = tl.minimum(tl.maximum(tl.load(lengths.seqlens_k + batch), 0), kv_len).to(tl.int32)
    shift = own_k - own_q
    if not BOTTOM_RIGHT:
        shift = 0 * shift
    elif lengths.cu_seqlens_q is not None or lengths.seqlens_k is not None:  # else the host has added it
        first_offset += shift
        last_offset += shift
    return Span(batch, slab, q_row, k_row, own_q, own_k, first_offset, last_offset, shift)


@triton.jit
def locate(index, q_len, kv_len, first_offset, last_offset, lengths, BLOCK_M: tl.constexpr, BOTTOM_RIGHT: tl.constexpr):
    """(span, query tile) of a program. index: (tile or slot, batch element). lengths: `Lengths`, whose fields are None
    where all batch elements are alike; q_len and kv_len are the packed rows then, or the most keys."""
    batch = index[1]
    tile = index[0]
    if lengths.cu_seqlens_q is not None:
        batch, tile = find(tile, lengths.cu_seqlens_q, lengths.count, lengths.steps, q_len, BLOCK_M)
    of = span_of(batch, q_len, kv_len, first_offset, last_offset, lengths, BOTTOM_RIGHT)
    own_k = tl.where(tile * BLOCK_M < of.q_len, of.kv_len, 0)  # a slot too many: no keys, and no rows to store
    return Span(of.batch, of.slab, of.q_row, of.k_row, of.q_len, own_k, of.first_offset, of.last_offset, of.shift), tile


@triton.jit
def locate_keys(index, q_len, kv_len, first_offset, last_offset, lengths, BLOCK_N: tl.constexpr,
                BOTTOM_RIGHT: tl.constexpr):
    """(span, key tile, end) of a program that works on keys. end: how many keys from the span's first it may write, as
    many as the tensors have: those behind a length and behind the last packed sequence too. It has no queries where its
    tile has no keys that count."""
    batch = index[1]
    tile = index[0]
    if lengths.cu_seqlens_q is not None:
        batch, tile = find(tile, lengths.cu_seqlens_k, lengths.count, lengths.steps, kv_len, BLOCK_N)
    of = span_of(batch, q_len, kv_len, first_offset, last_offset, lengths, BOTTOM_RIGHT)
    end = kv_len
    if lengths.cu_seqlens_q is not None:
        end = tl.maximum(offset_at(lengths.cu_seqlens_k, batch + 1, lengths.count, kv_len) - of.k_row, 0)
    own_q = tl.where(tile * BLOCK_N < of.kv_len, of.q_len, 0)
    of = Span(of.batch, of.slab, of.q_row, of.k_row, own_q, of.kv_len, of.first_offset, of.last_offset, of.shift)
    return of, tile, end


class Lengths(NamedTuple):
    """Lengths in device memory, None where the problem has none."""

    seqlens_k: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    count: Any = None  # of packed sequences
    steps: Any = None  # of the bisection: enough for count + 1 candidates
