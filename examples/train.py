"""Train a small transformer with lazymax and with torch's attention from the same seed, and compare the losses.

    python examples/train.py                         # a few steps; on a CPU in Triton's interpreter
    python examples/train.py --steps 300 --seeds 8 --csv losses.csv --plot losses.png

Bytes of this repository's own sources are the text; bf16 autocast, fp32 weights. Rounding differs between two kernels,
and training amplifies it: what that does is shown by a third run, with another of torch's own kernels. The curves count
as the same if lazymax's is no farther from torch's than twice what these two are from each other, in the mean over the
seeds.
"""

import argparse
import csv
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lazymax
from lazymax.testing import make_qkv

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is at the first call

ROOT = Path(__file__).parents[1]
LAYERS, HEADS, HEAD_DIM, CONTEXT, BATCH = (6, 8, 64, 512, 32) if HAS_GPU else (1, 2, 16, 24, 2)
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Losses = list[float]
OTHER = "torch, another kernel"


def by_lazymax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return lazymax.attention(q, k, v, causal="top_left")


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_other_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Another kernel than torch chooses: on a GPU the memory-efficient one, else the formula."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if HAS_GPU else SDPBackend.MATH):
        return by_torch(q, k, v)


RUNS: dict[str, Attention] = {"lazymax": by_lazymax, "torch": by_torch, OTHER: by_other_torch}


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm."""

    def __init__(self, attend: Attention) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.attend = attend
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, attend: Attention) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def train(attend: Attention, text: torch.Tensor, steps: int, seed: int) -> list[float]:
    """The loss of every step, in nats per byte. A seed gives the same weights and batches to every attention."""
    torch.manual_seed(seed)
    model = Model(attend).to(text.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 30)
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,)).tolist()
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
        with torch.autocast(text.device.type, dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def distance(a: Losses, b: Losses) -> tuple[float, float]:
    """Mean over steps of the difference, and of its absolute value, nats per byte."""
    off = [x - y for x, y in zip(a, b, strict=True)]
    return statistics.fmean(off), statistics.fmean(map(abs, off))


def report(runs: list[dict[str, Losses]]) -> bool:
    """Prints the losses of the first seed and the distances of all. Whether lazymax's are as near as torch's own."""
    steps = len(runs[0]["torch"])
    for step in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        print(f"step {step + 1:4d}  " + "  ".join(f"{name} {losses[step]:.4f}" for name, losses in runs[0].items()))
    print("from torch's, mean over the steps, nats per byte: the difference (signed)")
    ours, others = ([distance(run[name], run["torch"]) for run in runs] for name in ("lazymax", OTHER))
    means = [tuple(map(statistics.fmean, zip(*of, strict=True))) for of in (ours, others)]
    for what, (signed, off), (other_signed, other) in [
        *zip((f"seed {seed}" for seed in range(len(runs))), ours, others, strict=True),
        ("mean  ", *means),
    ]:
        print(f"{what}  lazymax {off:.5f} ({signed:+.5f})  {OTHER} {other:.5f} ({other_signed:+.5f})")
    return means[0][1] <= 2 * means[1][1] + 1e-3


def plot(path: Path, runs: list[dict[str, Losses]]) -> None:
    """The losses of the first seed, and of all seeds the two distances from torch's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for (name, losses), style in zip(runs[0].items(), ("-", "--", ":"), strict=True):
        above.plot(range(1, len(losses) + 1), losses, style, linewidth=1.2, label=name)
    for name, colour in (("lazymax", "C0"), (OTHER, "C2")):
        off = [[x - y for x, y in zip(run[name], run["torch"], strict=True)] for run in runs]
        for values in off:
            below.plot(range(1, len(values) + 1), values, colour, linewidth=0.4, alpha=0.5)
        below.plot(range(1, len(off[0]) + 1), list(map(statistics.fmean, zip(*off, strict=True))), colour, label=name)
    above.set(ylabel="loss, nats per byte")
    below.set(xlabel="step", ylabel=f"difference from torch's, {len(runs)} seeds and mean")
    above.legend()
    below.legend()
    figure.savefig(path, dpi=120)


def parsed() -> Any:
    parser = argparse.ArgumentParser(description="Losses with lazymax and with torch's attention")
    parser.add_argument("--steps", type=int, default=20 if HAS_GPU else 2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    files = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md")])
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    text = text.to("cuda" if HAS_GPU else "cpu")
    size = BATCH, HEADS, HEADS, CONTEXT, CONTEXT, HEAD_DIM
    q, k, v = make_qkv(*size, dtype=torch.bfloat16, device=text.device)
    plans = lazymax.explain(q, k, v, causal="top_left", show=False)
    print(f"lazymax: {plans.plan.describe()}, backward {plans.backward.describe()}")
    seeds = range(options.seeds)
    runs = [{name: train(attend, text, options.steps, seed) for name, attend in RUNS.items()} for seed in seeds]
    same = report(runs)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["seed", "step", *runs[0]])
            for seed, run in enumerate(runs):
                for step, losses in enumerate(zip(*run.values(), strict=True), 1):
                    writer.writerow([seed, step, *losses])
    if options.plot:
        plot(options.plot, runs)
    if not same:
        sys.exit("the curves differ by more than rounding")


if __name__ == "__main__":
    main()
