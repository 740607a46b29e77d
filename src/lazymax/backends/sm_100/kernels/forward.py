"""The forward for Blackwell, in Gluon: products in tensor memory, TMA, and a role for each group of warps.

A persistent CTA works on two Q tiles of 128 rows at a time, a pair of CTAs (full bands, Triton 3.9) on two of 256, so
that each key and value is in the shared memory of one of them. Roles: loads, products, stores (a warp each), a softmax
for each Q tile and the correction (four warps each). Tensor memory, 512 columns: at head dim 128 S0 | S1 | O0 | O1, at
64 three S that go round, O0 | O1. P lies in the lower half of its S. Every rung of the FlashAttention-4 ladder is a
field of `Config`; docs/notes/sm_100.md walks it.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import allocate_tensor_memory, fence_async_shared, mbarrier

from . import layouts
from .assembly import seldom
from .copies import loads, stores
from .correction import correction
from .products import products
from .schedule import ROLES, slots
from .softmax import softmax


class Config(NamedTuple):
    """What one build is specialised for; every field a `gl.constexpr`."""

    ROWS: Any  # of a Q tile: 128, or 256 of a pair of CTAs, see layouts.py
    D: Any  # of q, k and v
    D_V: Any  # the same
    HAS_FIRST: Any  # the band has a left bound
    HAS_LAST: Any  # the band has a right bound
    NEGATE: Any  # the scale is negative: scores change sign
    STORE_LSE: Any
    SLOTS: Any  # of the ring of K and V
    S_BUFFERS: Any  # of scores in tensor memory: 2, or 3 at head dim 64
    COUNTER: Any  # tiles are drawn from a counter, see schedule.py
    CLC: Any  # they are drawn from the grid, see there
    SOFTWARE: Any  # columns of every 16 whose exp2 is on the FMA pipe, even
    DEGREE: Any  # of its polynomial: 2, 3 or 5
    EARLY: Any  # columns of P that are published before the rest: 64, 96, or 128 for all at once
    CHUNK: Any  # columns of P that are stored at a time
    ORDER: Any  # no chunk of P before the one so many earlier is done; 0: any order
    MAX3: Any  # maxima of three, in independent chains
    READS: Any  # loads that fetch a row of S
    BRANCH: Any  # a rescale that no row of its Q tile needs is jumped over
    SPLIT: Any  # the correction rescales O, else each softmax the O of its Q tile
    REGISTERS: Any  # of a thread of the softmax; the correction gets what all others leave
    # Read by the cold path that sm_90 shares; of features that this kernel does not take.
    HEADS: Any
    SOFTCAP: Any
    SINKS: Any


class Call(NamedTuple):
    """The arguments of `attention_forward`, see there."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    lse_rows: Any
    q_tiles: Any
    k_tiles: Any
    v_tiles: Any
    out_tiles: Any
    counter: Any
    heads_together: Any
    scale_log2: Any
    threshold: Any
    q_len: Any
    kv_len: Any
    first_offset: Any
    last_offset: Any
    heads: Any
    q_heads: Any
    group: Any


class Memory(NamedTuple):
    """Shared and tensor memory."""

    q: Any  # two Q tiles
    kv: Any  # the ring
    out: Any  # two tiles of O
    stats: Any  # a number for each row: factors, later sums, of Q tile 0; its pivots; the same of 1
    flags: Any  # of each Q tile: the correction stored its rows
    votes: Any  # of the softmax of each Q tile and of the correction, see rescale.py
    found: Any  # of a pair: rows that are doubtful; else nothing of its own
    next: Any  # see schedule.py
    s: Any
    o: Any


class Barriers(NamedTuple):
    """Each counts one arrival of a CTA, if nothing is said."""

    q_full: Any
    q_empty: Any
    full: Any  # of the ring of K and V
    empty: Any
    s_full: Any
    p_full: Any  # under SPLIT two arrivals: the first columns of P are there, O is rescaled
    p_rest: Any
    stats_full: Any
    stats_empty: Any
    o_full: Any  # P V is done: with three score buffers of every block, else of a tile's last
    out_full: Any
    out_empty: Any
    next_full: Any
    next_empty: Any  # an arrival of every role


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr, SHARED: gl.constexpr, config):
    """SHARED: a pair of CTAs has them in the first, whose products wait for both; the others each CTA has."""
    EACH: gl.constexpr = 1 if SHARED else config.ROWS // 128
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, EACH], layouts.barriers(config.ROWS, SHARED))
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def _allocate(call, config):
    """Memory, and barriers that are ready."""
    DTYPE: gl.constexpr = call.q_tiles.dtype
    D: gl.constexpr = config.D
    BUFFERS: gl.constexpr = config.S_BUFFERS
    ROWS: gl.constexpr = config.ROWS
    ARRIVALS: gl.constexpr = 2 if config.SPLIT else 1
    q = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], call.q_tiles.layout)
    kv = gl.allocate_shared_memory(DTYPE, [config.SLOTS, 1, 1, 128, D], call.k_tiles.layout)
    out = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], call.out_tiles.layout)
    stats = gl.allocate_shared_memory(gl.float32, [4, ROWS], layouts.numbers(ROWS, True))
    flags = gl.allocate_shared_memory(gl.int32, [2, 1], layouts.numbers(ROWS))
    votes = gl.allocate_shared_memory(gl.int32, [3, 4], layouts.numbers(ROWS))
    found = flags
    if ROWS == 256:
        found = gl.allocate_shared_memory(gl.int8, [ROWS], layouts.numbers(ROWS, True))
    s = allocate_tensor_memory(gl.float32, [BUFFERS, ROWS, 128], layouts.accumulator(ROWS, 128))
    o = allocate_tensor_memory(gl.float32, [2, ROWS, D], layouts.accumulator(ROWS, D))
    bars = Barriers(
        _barriers(2, 1, True, config), _barriers(2, 1, False, config), _barriers(config.SLOTS, 1, True, config),
        _barriers(config.SLOTS, 1, False, config), _barriers(BUFFERS, 1, False, config),
        _barriers(BUFFERS, ARRIVALS, True, config), _barriers(BUFFERS, 1, True, config), _barriers(2, 1, False, config),
        _barriers(2, 1, False, config), _barriers(2, 1, False, config), _barriers(2, 1, False, config),
        _barriers(2, 1, False, config), _barriers(2, 1, False, config), _barriers(2, ROLES, False, config))
    fence_async_shared()
    return Memory(q, kv, out, stats, flags, votes, found, slots(config), s, o), bars


@gluon.jit
def _worker(ROLE: gl.constexpr, memory, bars, call, config):
    """The role of warps that are not the kernel's own; LLVM shall prepare nothing for it before they part."""
    if seldom():
        if ROLE == "softmax 0":
            softmax(memory, bars, call, config, 0)
        elif ROLE == "softmax 1":
            softmax(memory, bars, call, config, 1)
        elif ROLE == "products":
            products(memory, bars, call, config)
        elif ROLE == "loads":
            loads(memory, bars, call, config)
        else:
            stores(memory, bars, call, config)


@gluon.jit(do_not_specialize=["heads_together", "q_len", "kv_len", "first_offset", "last_offset", "heads", "q_heads",
                              "group"])
def attention_forward(q, k, v, out, lse, q_tiles, k_tiles, v_tiles, out_tiles, counter, heads_together, scale_log2,
                      threshold, q_len, kv_len, first_offset, last_offset, heads, q_heads, group, config):
    """out = softmax(scale * q @ k^T inside the band) @ v. Grid: (CTAs,), at most as many as tiles, with CLC as many; 4
    warps and those of the other roles.

    q, out (B, Hq, Sq, D), k, v (B, Hkv, Sk, D): `memory.View`s, fp16 or bf16, used by the cold path, and descriptors
    with blocks of 128 rows. lse: (B, Hq, Sq) fp32, contiguous. counter: one int32, 0, under COUNTER.
    heads_together: of B * Hq heads, those worked on side by side, see `bounds.tile`. scale_log2: |scale| * log2(e), not
    0. threshold: of the lazy rescale, log2 units. Query i sees keys i + first_offset to i + last_offset, as far as the
    band has bounds. heads: B * Hq. group: query heads per key head.
    """
    call = Call(q, k, v, out, lse, q_len, q_tiles, k_tiles, v_tiles, out_tiles, counter, heads_together, scale_log2,
                threshold, q_len, kv_len, first_offset, last_offset, heads, q_heads, group)
    memory, bars = _allocate(call, config)
    R: gl.constexpr = config.REGISTERS
    gl.warp_specialize([
        (correction, (memory, bars, call, config)), (_worker, ("softmax 0", memory, bars, call, config)),
        (_worker, ("softmax 1", memory, bars, call, config)), (_worker, ("products", memory, bars, call, config)),
        (_worker, ("loads", memory, bars, call, config)), (_worker, ("stores", memory, bars, call, config)),
    ], [4, 4, 1, 1, 1], [R, R, 24, 24, 24])
