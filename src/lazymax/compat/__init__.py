"""Fitting in with others: `tritons`, what differs between Triton versions; and the names that people already write:
`flash_attn` (flash-attn's functions), `sdpa` (`F.scaled_dot_product_attention` itself)."""
