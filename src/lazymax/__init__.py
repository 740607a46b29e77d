"""lazymax: exact attention for PyTorch, written in Triton."""

from .api import attention, attention_varlen, explain, merge_states
from .compat.sdpa import replace_sdpa
from .drop_in import scaled_dot_product_attention
from .mods import register_mask_mod, register_score_mod
from .verify import VerificationError, verification

__version__ = "0.1.0"
__all__ = [
    "VerificationError",
    "attention",
    "attention_varlen",
    "explain",
    "merge_states",
    "register_mask_mod",
    "register_score_mod",
    "replace_sdpa",
    "scaled_dot_product_attention",
    "verification",
]
