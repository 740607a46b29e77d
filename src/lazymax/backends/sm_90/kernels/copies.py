"""Copies of tiles by TMA, the barrier of a warpgroup, and shared memory as other tiles, under one name: Triton 3.6 and
3.9 share none."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
view_as = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
