"""A TMA descriptor to be: what a test can send to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@dataclass(frozen=True)
class Box:
    """Stands for a TMA descriptor of `tensor`, 2-D and 16 bits."""

    tensor: torch.Tensor
    block: tuple[int, int]

    def descriptor(self) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for(list(self.block), gl.float16)
        return TensorDescriptor.from_tensor(self.tensor, list(self.block), layout)
