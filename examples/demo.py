"""The main job on real input: `make demo`, or `python examples/demo.py` where lazymax is installed.

1. A causal GQA prefill whose lengths are no multiple of any tile, in fp16 and bf16, by the Triton kernel (compiled on
   a GPU, else in Triton's interpreter), compared with float64.
2. What lazymax would run on a Strix Halo, an H200 and a B200, and why.
3. That kernel compiled for the three, without owning them, and what is in the binaries.
"""

import json
import os
import subprocess
import sys
import time

import torch

HAS_GPU = torch.cuda.is_available()
COMPILING = "--compile" in sys.argv  # the child process of step 3
if not HAS_GPU and not COMPILING:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import lazymax
from lazymax import arch, testing
from lazymax.dispatch import plan
from lazymax.problem import Problem

ARCHS = ("gfx1151", "sm_90", "sm_100")
PREFILL = (1, 32, 8, 4099, 4099, 128)  # B, Hq, Hkv, Sq, Sk, D of a Llama-3-8B layer
SIZES = PREFILL if HAS_GPU else (1, 4, 2, 179, 179, 64)  # the interpreter does about 10 million scores a minute


def run(dtype: torch.dtype) -> str:
    """One prefill, checked; a line of the table."""
    device = "cuda" if HAS_GPU else "cpu"
    q, k, v = testing.make_qkv(*SIZES, dtype=dtype, device=device)
    problem = Problem.from_call(q, k, v, causal="top_left")
    start = time.perf_counter()
    out = lazymax.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if HAS_GPU:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    (budget,) = testing.check_attention(out, None, q, k, v, problem)
    if not budget.ok:
        raise SystemExit(f"wrong result: {budget}")
    line = f"{str(dtype).removeprefix('torch.'):9s} error {budget.error:.1e} (allowed {budget.allowed:.1e})"
    if not HAS_GPU:
        return f"{line}  right, {seconds:.1f} s in Triton's interpreter"
    return f"{line}  right, {speed(q, k, v, problem)}"


def speed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> str:
    """TFLOP/s of lazymax and of torch's SDPA on the same input."""
    from triton.testing import do_bench

    def measure(function) -> float:  # type: ignore[no-untyped-def]
        milliseconds = do_bench(lambda: function(q, k, v, is_causal=True, enable_gqa=True), return_mode="median")
        return problem.flops / milliseconds / 1e9

    ours = measure(lazymax.scaled_dot_product_attention)
    torchs = measure(torch.nn.functional.scaled_dot_product_attention)
    return f"{ours:.0f} TFLOP/s, torch SDPA {torchs:.0f}"


def compile_here() -> None:
    """Child process without the interpreter: compile the prefill's kernel for each arch, print JSON lines."""
    from lazymax import compiling

    problem = Problem.from_shape(PREFILL, "fp16", causal="top_left")
    for name in ARCHS:
        target = arch.by_name(name)
        print(json.dumps(compiling.report(problem, plan(problem, target), target).as_dict()), flush=True)


def main() -> None:
    print(f"1. causal GQA prefill, B, Hq, Hkv, Sq, Sk, D = {SIZES}\n")
    for dtype in (torch.float16, torch.bfloat16):
        print("  ", run(dtype), flush=True)
    print("\n2. what would run, and why\n")
    for name in ARCHS:
        lazymax.explain(shape=PREFILL, dtype=torch.float16, is_causal=True, arch=name)
        print()
    print("3. compiled here for GPUs that are not here\n")
    print(f"   {'arch':8s} {'row':34s} {'instruction':18s}  in loop  registers  spills  shared  seconds")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.Popen([sys.executable, __file__, "--compile"], stdout=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None
    failed = False
    for line in child.stdout:
        r = json.loads(line)
        failed |= not r["ok"]
        print(
            f"   {r['arch']:8s} {r['row']:34s} {r['instruction']:18s} {r['in_loop']:8d} {r['registers']:10d} "
            f"{r['spills']:7d} {r['shared'] / 1024:5.0f} K {r['seconds']:8.1f}  {r['error'] or ''}",
            flush=True,
        )
    if child.wait() or failed:
        raise SystemExit("a kernel did not compile as it should")


if __name__ == "__main__":
    compile_here() if COMPILING else main()
