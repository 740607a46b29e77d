"""What `import lazymax` may do: load torch, and nothing else. Every test here is a fresh process."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

PREAMBLE = """
import os, sys, warnings
warnings.simplefilter("error", UserWarning)
"""

HIDE_TRITON = """
class Without:
    "A finder that knows no triton."
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "triton" else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""

LIGHT = """
import torch
after_torch = set(sys.modules)
import lazymax
new = set(sys.modules) - after_torch
others = {name for name in new if name.split(".")[0] not in {"lazymax"} | set(sys.stdlib_module_names)}
assert others <= {"torch.utils._device"}, others  # 1 ms; what a default device is
assert not torch.cuda.is_initialized()
print("ok")
"""

SWITCHES = """
import torch
attention, sdpa = torch.nn.functional.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention
before = (dict(os.environ), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
          torch.get_default_dtype(), torch.initial_seed(), list(warnings.filters), list(sys.meta_path))
import lazymax
after = (dict(os.environ), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
         torch.get_default_dtype(), torch.initial_seed(), list(warnings.filters), list(sys.meta_path))
assert before == after
assert torch.nn.functional.scaled_dot_product_attention is attention, "patched"
assert torch._C._nn.scaled_dot_product_attention is sdpa, "patched"
print("ok")
"""

NO_TRITON = """
import torch, lazymax
q = torch.randn(1, 2, 9, 16)
out = lazymax.scaled_dot_product_attention(q, q, q, is_causal=True)
want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
assert torch.equal(out, want)
os.environ["TRITON_INTERPRET"] = "1"
lazymax.attention(q, q, q, window=(3, 0), sinks=torch.zeros(2))
for explanation in (lazymax.explain(q, q, q, show=False),
                    lazymax.explain(shape=(1, 2, 2, 9, 9, 16), arch="sm_90", show=False)):
    assert explanation.plan.route == "reference"
    assert "no module named triton (pip install 'lazymax[triton]'" in str(explanation), str(explanation)
try:
    lazymax.attention(q, q, q, impl="portable")
except NotImplementedError as error:
    assert "no module named triton" in str(error)
else:
    raise AssertionError("impl='portable' ran without triton")
assert "triton" not in sys.modules
print("ok")
"""

FORK = """
import torch, lazymax
q = torch.randn(1, 2, 9, 16)
child = os.fork()
if child == 0:
    os.environ["TRITON_INTERPRET"] = "1"
    out = lazymax.attention(q, q, q)
    if torch.cuda.is_available():
        del os.environ["TRITON_INTERPRET"]
        on_gpu = lazymax.attention(q.cuda().half(), q.cuda().half(), q.cuda().half())
        assert on_gpu.isfinite().all()
    os._exit(0 if out.isfinite().all() else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
print("ok")
"""

REFERENCE_ALONE = """
import torch, lazymax
q = torch.randn(1, 2, 9, 16)
lazymax.attention(q, q, q)
lazymax.explain(q, q, q, show=False)
with lazymax.verification() as checked:
    lazymax.attention(q, q, q)
mask, sinks = torch.randn(9, 9, requires_grad=True), torch.randn(2, requires_grad=True)
out, lse = lazymax.attention(q, q, q, attn_mask=mask, sinks=sinks, alibi_slopes=torch.rand(2), softcap=2.0,
                             dropout_p=0.1, seqlens_k=torch.tensor([7]), return_lse=True)
lazymax.merge_states(out, lse, out, lse)[0].sum().backward()
assert mask.grad.isfinite().all() and sinks.grad.isfinite().all()
ends = torch.tensor([0, 4, 9])
packed = q[0].transpose(0, 1)
lazymax.attention_varlen(packed, packed, packed, ends, ends)
lazymax.scaled_dot_product_attention(q, q, q, torch.ones(9, 9) > 0)
assert "triton" not in sys.modules, "a call without a kernel imported triton"
print("ok")
"""


@dataclass(frozen=True)
class Fresh:
    id: str
    code: str


FRESH = (
    Fresh("import loads torch and the standard library alone", LIGHT),
    Fresh("import changes no switch and patches nothing", SWITCHES),
    Fresh("without triton the reference runs and explain says why", HIDE_TRITON + NO_TRITON),
    pytest.param(
        Fresh("a child forked after the import computes", FORK),
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="runs the interpreter, for machines without a GPU"),
        id="a child forked after the import computes",
    ),
    Fresh("on a CPU no call imports triton", REFERENCE_ALONE),
)


@pytest.mark.parametrize("case", FRESH, ids=lambda case: getattr(case, "id", None))
def test_in_a_fresh_process(case: Fresh, clean_env: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", PREAMBLE + case.code], env=clean_env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["ok"], done.stdout + done.stderr


def test_import_and_a_reference_call_write_nothing(clean_env: dict[str, str], tmp_path: Path) -> None:
    """Home, caches and the working folder stay empty (B59: shared and read-only homes)."""
    env = {name: value for name, value in clean_env.items() if not name.startswith(("TRITON", "XDG", "TORCHINDUCTOR"))}
    home, temp, here = (tmp_path / name for name in ("home", "temp", "here"))
    for folder in (home, temp, here):
        folder.mkdir()
    env |= dict(HOME=str(home), TMPDIR=str(temp), PYTHONDONTWRITEBYTECODE="1")
    code = "import torch, lazymax; q = torch.randn(1, 2, 9, 16); lazymax.attention(q, q, q); lazymax.explain(q, q, q)"
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == []


def test_import_works_in_a_read_only_home(clean_env: dict[str, str]) -> None:
    env = clean_env | dict(HOME="/proc/nowhere")
    code = "import torch, lazymax; q = torch.randn(1, 2, 9, 16); lazymax.attention(q, q, q); print('ok')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["ok"], done.stderr
