"""Named shapes: the one list that `lazymax bench --suite` and the pytest-benchmark suite share."""

from dataclasses import dataclass

import torch

from ..problem import Problem
from ..testing import make_qkv

Window = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem to time; `shape` is B, Hq, Hkv, Sq, Sk, D[, Dv]."""

    name: str
    shape: tuple[int, ...]
    causal: str | None = None
    window: Window | None = None
    suite: str = "shape"

    def problem(self, dtype: torch.dtype) -> Problem:
        return Problem.from_shape(self.shape, dtype, causal=self.causal, window=self.window)

    def tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return make_qkv(*self.shape, dtype=dtype, device=device)


def label(shape: tuple[int, ...], causal: str | None, window: Window | None = None) -> str:
    """Name of a shape that the user gave."""
    band = (f" causal {causal}" if causal else "") + (f" window {window[0]},{window[1]}" if window else "")
    return ",".join(map(str, shape)) + (band or " full")


def _grid(
    suite: str,
    heads: tuple[tuple[int, int, int], ...],
    lengths: tuple[int, ...] = (1024, 4096, 16384),
    tokens: int | None = 16384,
) -> tuple[Case, ...]:
    """The FlashAttention papers' grid: `tokens` in all, so that every length is the same memory; None: one element."""
    return tuple(
        Case(
            f"D={dim} S={length} {'causal' if causal else 'full'}",
            (tokens // length if tokens else 1, q_heads, kv_heads, length, length, dim),
            causal=causal,
            suite=suite,
        )
        for q_heads, kv_heads, dim in heads
        for length in lengths
        for causal in ("top_left", None)
    )


SUITES: dict[str, tuple[Case, ...]] = {
    # H * D = 2048, as in the FlashAttention-2, -3 and -4 papers
    "paper": _grid("paper", ((32, 32, 64), (16, 16, 128), (8, 8, 256))),
    "gqa": _grid("gqa", ((32, 8, 128),)),
    # too few tiles for a large card, or fewer queries than keys
    "short": (
        *_grid("short", ((16, 16, 64), (16, 16, 128)), lengths=(512, 1024, 1536, 2048), tokens=None),
        Case("D=128, 1000 of 3001 full", (1, 16, 16, 1000, 3001, 128), suite="short"),
        Case("D=128, 1000 of 3001 causal", (1, 16, 16, 1000, 3001, 128), "bottom_right", suite="short"),
        Case("D=64, 1000 of 3001 causal", (1, 16, 16, 1000, 3001, 64), "bottom_right", suite="short"),
        Case("D=128, 64 of 4096 full, 32 over 8", (2, 32, 8, 64, 4096, 128), suite="short"),
        Case("D=128, 64 of 4096 causal, 32 over 8", (2, 32, 8, 64, 4096, 128), "bottom_right", suite="short"),
    ),
    # one request each; lengths as prompts have them
    "prefill": (
        Case("8B, 8192", (1, 32, 8, 8192, 8192, 128), "top_left", suite="prefill"),
        Case("8B, 3001", (1, 32, 8, 3001, 3001, 128), "top_left", suite="prefill"),
        Case("8B, 333", (1, 32, 8, 333, 333, 128), "top_left", suite="prefill"),
        Case("8B, 512 after 7680", (1, 32, 8, 512, 8192, 128), "bottom_right", suite="prefill"),
        Case("70B, 4097", (1, 64, 8, 4097, 4097, 128), "top_left", suite="prefill"),
        Case("D=64, 1500", (1, 14, 2, 1500, 1500, 64), "top_left", suite="prefill"),
        Case("D=96, 2048", (1, 32, 32, 2048, 2048, 96), "top_left", suite="prefill"),
        Case("D=256, 2047, window 1024", (1, 16, 8, 2047, 2047, 256), "top_left", (1023, 0), suite="prefill"),
    ),
    # self attention over image patches (with text tokens where the model joins them), cross attention to 77 text tokens
    "diffusion": (
        Case("Flux 1024px, D=128", (1, 24, 24, 4608, 4608, 128), suite="diffusion"),
        Case("SD3 1024px, D=64", (2, 24, 24, 4250, 4250, 64), suite="diffusion"),
        Case("PixArt 1024px, D=72", (2, 16, 16, 4096, 4096, 72), suite="diffusion"),
        Case("77 tokens of text, D=72", (2, 16, 16, 4096, 77, 72), suite="diffusion"),
        Case("SDXL 1024px, D=64", (2, 10, 10, 4096, 4096, 64), suite="diffusion"),
        Case("SDXL 1024px, D=64, text", (2, 10, 10, 4096, 77, 64), suite="diffusion"),
        Case("SD1.5 512px, D=40", (2, 8, 8, 4096, 4096, 40), suite="diffusion"),
        Case("SD1.5 512px, D=40, text", (2, 8, 8, 4096, 77, 40), suite="diffusion"),
        Case("Wan 480p video, D=128", (1, 12, 12, 32760, 32760, 128), suite="diffusion"),
    ),
}
