"""lazymax: exact attention for PyTorch, written in Triton."""

from .api import attention, explain, scaled_dot_product_attention
from .verify import VerificationError, verification

__version__ = "0.1.0"
__all__ = ["VerificationError", "attention", "explain", "scaled_dot_product_attention", "verification"]
