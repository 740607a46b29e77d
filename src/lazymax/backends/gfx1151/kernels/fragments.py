"""V into fragment order: the kernel of `fragments.to_fragments`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["kv_len"])
def value_fragments(v, fragments, kv_heads, kv_len, batch_stride, head_stride, row_stride, out_head_stride,
                    D: tl.constexpr, COLS: tl.constexpr, FIRST: tl.constexpr, KEYS: tl.constexpr):
    """Keys [KEYS * program, ...) of one head, columns [FIRST, FIRST + COLS). v (B, Hkv, Sk, D) -> fragments (B * Hkv,
    ceil(Sk / 16), D / 16, 2, 16, 8); keys past the end become 0. Grid (blocks of keys, B * Hkv)."""
    start = tl.program_id(0) * KEYS
    unit = tl.program_id(1)
    base = v + (unit // kv_heads).to(tl.int64) * batch_stride + (unit % kv_heads).to(tl.int64) * head_stride
    key = start + tl.arange(0, KEYS)
    column = FIRST + tl.arange(0, COLS)
    tile = tl.load(base + key.to(tl.int64)[:, None] * row_stride + column[None, :], mask=(key < kv_len)[:, None],
                   other=0.0)
    tile = tile.reshape([KEYS // 16, 2, 8, COLS // 16, 2, 8]).permute([0, 3, 1, 5, 4, 2])
    tile = tile.reshape([KEYS // 16, COLS * 16])
    block = start // 16 + tl.arange(0, KEYS // 16)
    place = block[:, None] * (16 * D) + FIRST * 16 + tl.arange(0, COLS * 16)[None, :]
    tl.store(fragments + unit.to(tl.int64) * out_head_stride + place, tile)
