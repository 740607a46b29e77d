"""What is timed: lazymax, the attention functions that come with torch, and flash-attn's where it is installed."""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..api import attention
from ..problem import Problem
from ..reference import TORCH_SDPA
from .cases import Case

LAZYMAX = "lazymax"


def ours(name: str) -> bool:
    """lazymax, or a row of its tables on its own (`--rows all`): a fault of it is a fault of ours."""
    return name == LAZYMAX or name.startswith(f"{LAZYMAX}:")


class LeftOut(Exception):
    """A candidate does not take the problem; the message says why."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A candidate prepared for one problem. `run` is what is timed: it returns the output, or the gradients; `context`
    is entered once around many runs, so that choosing torch's backend costs the peers no host time. `whole`: what
    memory is measured of, if that is not a run. `stream`: on which to capture it, where that matters."""

    run: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    whole: Callable[[], Any] | None = None
    stream: "torch.cuda.Stream | None" = None


Make = Callable[[Case, Problem, torch.Tensor, torch.Tensor, torch.Tensor], Ready]


def lazymax(impl: str = "auto", deterministic: bool = False) -> Make:
    def make(case: Case, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ready:
        def run() -> torch.Tensor:
            out = attention(q, k, v, causal=case.causal, window=case.window, impl=impl, deterministic=deterministic)
            assert isinstance(out, torch.Tensor)
            return out

        return Ready(run)

    return make


def compiled(case: Case, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ready:
    """lazymax under torch.compile, for the exact shape."""
    torch.compiler.reset()  # else the shapes before this one use up its recompile limit
    # Inductor wants a C++ compiler on a CPU, where this only tests the tool.
    backend = "aot_eager" if q.device.type == "cpu" else "inductor"

    @torch.compile(fullgraph=True, dynamic=False, backend=backend)
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q, k, v, causal=case.causal, window=case.window)

    return Ready(lambda: first(call(q, k, v)))


def graph(case: Case, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ready:
    """lazymax as a CUDA graph of one call."""
    if q.device.type == "cpu":
        raise LeftOut("CUDA graphs are for GPUs")
    eager = lazymax()(case, problem, q, k, v)
    eager.run()  # what is compiled and kept in a first call cannot be captured
    return captured(eager)


def captured(candidate: Ready) -> Ready:
    """The candidate, which has run once, as a CUDA graph, whose `run` returns the graph's own output. Raises
    RuntimeError where a call cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    with candidate.context(), torch.cuda.graph(graph, stream=candidate.stream):
        out = candidate.run()

    def run() -> Any:
        graph.replay()
        return out

    return Ready(run)


def sdpa(backend: str | None) -> Make:
    """torch's own function; None leaves the choice of backend to torch."""

    def make(case: Case, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ready:
        if case.window is not None:
            raise LeftOut("takes no window")
        if case.causal == "bottom_right" and problem.q_len != problem.kv_len:
            raise LeftOut("its is_causal is top-left")
        if backend == "MATH" and problem.batch * problem.q_heads * problem.q_len * problem.kv_len > 1 << 30:
            raise LeftOut("its score matrix would have more than 2**30 elements")
        causal, grouped = case.causal is not None, problem.group > 1

        def run() -> torch.Tensor:
            return TORCH_SDPA(q, k, v, is_causal=causal, enable_gqa=grouped)

        return Ready(run) if backend is None else Ready(run, torch_backend(backend))

    return make


def torch_backend(name: str) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which torch's SDPA takes this backend and no other."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, name)
    return lambda: sdpa_kernel([chosen])


def flex(case: Case, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ready:
    """torch.nn.attention.flex_attention, compiled for the exact shape."""
    if q.device.type == "cpu":
        raise LeftOut("compiled for GPUs only here")
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # else the shapes before this one use up its recompile limit, and it runs eagerly, unfused
    return flex_ready(problem, q, k, v, torch.compile(flex_attention, dynamic=False))


def flex_ready(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, function: Any) -> Ready:
    """`function` is flex_attention, compiled or not."""
    from torch.nn.attention.flex_attention import create_block_mask

    first, last = problem.first_offset, problem.last_offset

    def keep(batch: Any, head: Any, i: Any, j: Any) -> Any:
        inside = j >= 0
        if first is not None:
            inside = inside & (j >= i + first)
        if last is not None:
            inside = inside & (j <= i + last)
        return inside

    mask = None
    if first is not None or last is not None:
        mask = create_block_mask(keep, None, None, problem.q_len, problem.kv_len, device=str(q.device))
    return Ready(lambda: function(q, k, v, block_mask=mask, enable_gqa=problem.group > 1))


FA3, FA4 = ("fa3-fwd", "fa3_fwd_interface"), ("flash-attn-4", "flash_attn.cute")  # package, module


def imported(package: str, module: str, name: str, device: torch.device) -> Any:
    """A function of a package that may be absent."""
    if device.type == "cpu":
        raise LeftOut("runs on GPUs only")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise LeftOut(f"pip install {package}: {error}") from error


def first(result: Any) -> torch.Tensor:
    """The output of a function that may return more."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


def flash_attn(package: str, module: str) -> Make:
    """`flash_attn_func` as its authors ship it. It takes (B, S, H, D), which is made beforehand."""

    def make(case: Case, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Ready:
        return flash_attn_ready(imported(package, module, "flash_attn_func", q.device), case, problem, q, k, v)

    return make


def flash_attn_ready(
    function: Any, case: Case, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Ready:
    if case.window is not None:
        raise LeftOut("timed without a window here")
    if case.causal == "top_left" and problem.q_len != problem.kv_len:
        raise LeftOut("its causal is bottom-right")
    tensors = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    causal = case.causal is not None
    return Ready(lambda: first(function(*tensors, causal=causal)).transpose(1, 2))


PEERS: dict[str, Make] = {
    f"{LAZYMAX}:compiled": compiled,
    f"{LAZYMAX}:deterministic": lazymax(deterministic=True),
    f"{LAZYMAX}:graph": graph,
    "sdpa": sdpa(None),
    "sdpa-cudnn": sdpa("CUDNN_ATTENTION"),
    "sdpa-flash": sdpa("FLASH_ATTENTION"),
    "sdpa-efficient": sdpa("EFFICIENT_ATTENTION"),
    "sdpa-math": sdpa("MATH"),
    "flex": flex,
    "fa3": flash_attn(*FA3),
    "fa4": flash_attn(*FA4),
}


def candidates(against: str, impl: str = "auto") -> dict[str, Make]:
    """lazymax, then the peers of a comma list. Raises ValueError for an unknown one."""
    names = [name.strip() for name in against.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--against: got {name!r}, expected a comma list of {', '.join(PEERS)}")
    return {LAZYMAX: lazymax(impl)} | {name: PEERS[name] for name in names}


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn a peer's failure into `LeftOut` with the reason; torch gives its reasons as warnings beside the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except LeftOut:
            raise
        except Exception as error:  # whatever a peer raises is the reason why it is left out
            lines = [str(error).strip().splitlines()[0] if str(error).strip() else ""]
            lines += [str(w.message).splitlines()[0].split(" (Triggered internally")[0] for w in caught]
            raise LeftOut(f"{type(error).__name__}: " + " ".join(lines)[:400]) from error
    for w in caught:  # of one that did not fail
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
