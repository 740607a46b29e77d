"""Which tile is next, which key blocks it visits, and which of them the band or the length cuts.

A tile is 64 query rows for each consumer warpgroup, of one head. Blocks are visited from the last to the first, so that
the one cut by the length, and under a causal mask by the diagonal, comes first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile(i, call):
    """The i-th tile of this CTA: (row block, batch * q_heads + head); the second is negative if there is none."""
    code = gl.load(call.schedule + i * gl.num_programs(0) + gl.program_id(0))
    return code & 0xFFFF, code >> 16


@gluon.jit
def key_blocks(first_row, call, config):
    """Key blocks [first, stop) that the tile visits: all that its rows can see, and at least one."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    first = 0 * call.kv_len
    end = call.kv_len
    if config.HAS_LAST:
        last_row = gl.minimum(first_row + 64 * config.WARPGROUPS, call.q_len) - 1
        end = gl.minimum(end, gl.maximum(last_row + call.last_offset + 1, 0))
    if config.HAS_FIRST:
        first = gl.minimum(gl.maximum(first_row + call.first_offset, 0), end) // BLOCK_N
    return first, gl.maximum((end + BLOCK_N - 1) // BLOCK_N, first + 1)


@gluon.jit
def visits(i, call, config, W: gl.constexpr):
    """Of consumer W in the i-th tile: (count, begin, end, row, key). Visit n of `count` is to the keys from key - n *
    BLOCK_N on; row is its first of 64. In the visits [begin, end) every row sees every key; visit 0 counts as cut.

    The tile is read anew, so that what comes before need not hold what is computed here.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    row_block, _ = tile(i, call)
    first_row = row_block * (64 * config.WARPGROUPS)
    first, stop = key_blocks(first_row, call, config)
    row = first_row + W * 64
    begin = 0 * first + 1
    end = stop - first
    if config.HAS_LAST:
        inner_stop = gl.minimum(call.kv_len, gl.maximum(row + call.last_offset + 1, 0)) // BLOCK_N
        begin = gl.minimum(stop - first, gl.maximum(stop - inner_stop, 1))
    if config.HAS_FIRST:
        inner_first = (gl.maximum(row + 63 + call.first_offset, 0) + BLOCK_N - 1) // BLOCK_N
        end = gl.maximum(begin, gl.minimum(stop - inner_first, stop - first))
    return stop - first, begin, end, row, (stop - 1) * BLOCK_N
