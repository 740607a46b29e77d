"""O of a consumer's 64 rows on its way to memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from . import bounds, copies, guarded, layouts


@gluon.jit
def _copy_out(o, row, column, span, out, call, config):
    out.reshape(o.shape).store(o)
    fence_async_shared()
    if config.HEADS == 1:
        copies.store(call.out_tiles, [span.slab, span.head, span.q_row + row, column], out)
    else:
        copies.store(call.out_tiles, [span.slab, span.head // call.group, 0, span.q_row + row, column], out)


@gluon.jit
def _store_tile(o, row, span, out, call, config):
    """By TMA, which stops at the end of the tensor."""
    HALF: gl.constexpr = layouts.out_width(config.D, config.D_V)
    if o.shape[1] == HALF:
        _copy_out(o, row, 0, span, out, call, config)
    else:
        left, right = o.reshape([64, 2, HALF]).permute((0, 2, 1)).split()
        _copy_out(left, row, 0, span, out, call, config)
        tma.store_wait(0)
        copies.barrier()
        _copy_out(right, row, HALF, span, out, call, config)


@gluon.jit
def _store_rows(o, row, span, call, config):
    """From the registers: splits, and the last rows of a packed sequence, which others follow."""
    query, head, inside = bounds.rows(span, row, gl.SliceLayout(1, o.type.layout), call, config)
    cols = gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))
    places = guarded.rows_of(call.out, span.out_slab, span, query, head)
    gl.store(places[:, None] + cols[None, :], o, mask=inside[:, None] & (cols < config.D_V)[None, :])


@gluon.jit
def store(o, row, span, out, call, config):
    """o: (64, columns of V), row: of the first query. out: the consumer's shared memory."""
    if config.SPLIT or (config.PACKED and row + 64 > span.q_len):
        _store_rows(o, row, span, call, config)
    else:
        _store_tile(o, row, span, out, call, config)
