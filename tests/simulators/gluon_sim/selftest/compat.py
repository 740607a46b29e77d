"""What Triton 3.6 and 3.9 name differently, of what the test kernels use."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(blackwell, "get_tmem_reg_layout"):  # Triton 3.6
    tmem_registers = blackwell.get_tmem_reg_layout
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    copy_async = async_copy.async_copy_global_to_shared

    @gluon.jit
    def tmem_columns_as(tile, dtype: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
        """The bytes of a 32-bit tile of 128 rows as N columns of a 16-bit dtype."""
        return tile._reinterpret(dtype, [128, N], layout)

else:
    tma_load, tma_store, copy_async = tma.async_load, tma.async_store, async_copy.async_load

    @gluon.constexpr_function
    def tmem_registers(element_ty, shape, layout, num_warps):
        """Layout of a tile of tensor memory in registers."""
        return blackwell.tensor_memory_descriptor_type(element_ty, shape, layout, shape).get_reg_layout(num_warps)

    @gluon.jit
    def tmem_columns_as(tile, dtype: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
        """The bytes of a 32-bit tile of 128 rows as N columns of a 16-bit dtype."""
        return tile.reinterpret(dtype, [128, N], layout)
