"""Which probabilities dropout keeps: the torch twin of `tl.philox`, a function of the seed and of the position alone.

The random numbers are Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011).
The seed's two words are the key; key index // 4, query index, query head and batch element (or packed sequence) are the
counters. So neither tiles nor launches nor devices change a mask.
"""

import torch

_WORD = 0xFFFFFFFF


def philox(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10. Counters and key: 32-bit words in int64 tensors that broadcast; four such words come back."""
    for _ in range(10):
        # A product of two words wraps around in 64 signed bits; its bits are right all the same.
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (odd >> 32) & _WORD ^ c1 ^ k0, odd & _WORD
        c2, c3 = (even >> 32) & _WORD ^ c3 ^ k1, even & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def kept(
    seed: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_len: int, dropout_p: float
) -> torch.Tensor:
    """Boolean (..., kv_len): the keys that queries keep. seed (1,) int64; b, h, q_idx int64, broadcasting, with a last
    dimension of 1."""
    fours = torch.arange(-(-kv_len // 4), device=q_idx.device)
    words = philox(fours, q_idx, h, b, seed & _WORD, (seed >> 32) & _WORD)
    uniform = torch.stack([(word >> 8).float() * 2.0**-24 for word in words], -1)  # exact: 24 bits
    return uniform.flatten(-2)[..., :kv_len] >= torch.tensor(dropout_p, dtype=torch.float32)


def seed_tensor(seed: int | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A seed as the operator takes it, (1,) int64; of an int, the lowest 64 bits."""
    if isinstance(seed, torch.Tensor):
        return seed.reshape(1).to(device, torch.int64)
    low = seed & (2**64 - 1)
    return torch.tensor([low - 2**64 if low >= 2**63 else low], dtype=torch.int64, device=device)
