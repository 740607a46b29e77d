"""What launches of kernels in Gluon have in common: TMA descriptors with a layout, and how many CTAs fill the GPU."""

from collections.abc import Sequence

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..arch import by_name


def described(
    t: torch.Tensor, shape: Sequence[int], steps: Sequence[int], box: Sequence[int], halved: int | None = None
) -> TensorDescriptor:
    """Descriptor of a view of t with blocks `box`. steps: strides of all dimensions but the last, whose stride is 1;
    those of size 1 get one that the hardware accepts (it is never used). halved: the dimension of a block of which each
    CTA of a pair has half."""
    strides = [step if size > 1 else 64 for size, step in zip(shape[:-1], steps, strict=True)]
    pair = {} if halved is None else {"cga_layout": [[int(dim == halved) for dim in range(len(shape))]]}
    swizzle = min(128, 2 * box[-1]) if box[-1] > 8 else 0
    layout = gl.NVMMASharedLayout(swizzle, 16, rank=len(shape), **pair)
    return TensorDescriptor(t, list(shape), [*strides, 1], list(box), layout)


def describe(t: torch.Tensor, rows: int, cols: int, halved: int | None = None) -> TensorDescriptor:
    """With blocks of `rows` x `cols` of one head."""
    return described(t, t.shape, t.stride()[:3], (1, 1, rows, cols), halved)


def multiprocessors(usual: str, device: torch.device | None = None) -> int:
    """Of the GPU that will run it, by default the current one; without one, of the usual card of the arch `usual`."""
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda")
    if device is not None and device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return by_name(usual).multiprocessors
