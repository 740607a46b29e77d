"""What Triton 3.6 and 3.9 name differently, of what the test kernels use."""

# mypy: ignore-errors

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

partition_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

if hasattr(blackwell, "get_tmem_reg_layout"):  # Triton 3.6
    tmem_registers = blackwell.get_tmem_reg_layout
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    copy_async = async_copy.async_copy_global_to_shared

    @builtin
    def tma_add(desc, coord, src, _semantic=None):
        """Add a tile to global memory: Triton 3.6 has the operation, Gluon no word for it."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)

    @gluon.jit
    def tmem_columns_as(tile, dtype: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
        """The bytes of a 32-bit tile of 128 rows as N columns of a 16-bit dtype."""
        return tile._reinterpret(dtype, [128, N], layout)

else:
    tma_load, tma_store, copy_async = tma.async_load, tma.async_store, async_copy.async_load
    tma_add = tma.async_atomic_add

    @gluon.constexpr_function
    def tmem_registers(element_ty, shape, layout, num_warps):
        """Layout of a tile of tensor memory in registers."""
        return blackwell.tensor_memory_descriptor_type(element_ty, shape, layout, shape).get_reg_layout(num_warps)

    @gluon.jit
    def tmem_columns_as(tile, dtype: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
        """The bytes of a 32-bit tile of 128 rows as N columns of a 16-bit dtype."""
        return tile.reinterpret(dtype, [128, N], layout)
