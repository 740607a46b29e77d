"""How the tests run: compiled on a GPU if there is one, else in Triton's interpreter on CPU tensors.

TRITON_INTERPRET has to be set before the first `import triton`, so it is set here, at the top. Tests that compile for
absent GPUs need it unset: they call the `compiler` process, or start one of their own with the `clean_env` fixture.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # interpreted tiles are too small for threads, which only fight
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch

NO_GPU = "needs a GPU: torch.cuda.is_available() is False"

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import interpreter

    interpreter.faster()


def pytest_addoption(parser):
    group = parser.getgroup("lazymax")
    group.addoption("--slow", action="store_true", help="run the long sweeps too")
    group.addoption("--fuzz-shard", type=int, metavar="N", help="examples that share one variant on a GPU")
    group.addoption(
        "--fuzz-examples", type=int, metavar="N", help="examples of all fuzz tests together (a GPU does thousands)"
    )


def pytest_configure(config):
    # The interpreter computes with numpy, which warns where IEEE arithmetic is meant: inf - inf before the first
    # visible key, 0 * NaN at a masked key, log2 of an empty row. Only there; a warning from our own code still shows.
    for message in ("invalid value encountered", "divide by zero encountered", "overflow encountered"):
        config.addinivalue_line("filterwarnings", f"ignore:{message}:RuntimeWarning:triton.runtime.interpreter")
    # Triton 3.6 to 3.9 turn one-element arrays into loop bounds.
    config.addinivalue_line(
        "filterwarnings", "ignore:Conversion of an array:DeprecationWarning:triton.runtime.interpreter"
    )


# Long sweeps of interpreted kernels: a default run takes a fixed eighth of their parametrised cases, `--slow` and a
# GPU take all.
SWEEPS = {
    "test_features.py",
    "test_backward.py",
    "test_varlen.py",
    "test_forward.py",
    "test_blocks.py",
    "test_scores.py",
    "test_dropout.py",
}
SWEEPS |= {"test_sequences.py", "test_merging.py"}


def thinned(items):
    def kept(item):
        swept = item.path.name in SWEEPS and hasattr(item, "callspec")
        return not swept or zlib.crc32(item.nodeid.encode()) % 8 == 0

    return [item for item in items if kept(item)]


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))
    named = any("::" in argument for argument in config.args)  # a test asked for by name runs
    if INTERPRETED and not named and not config.getoption("--slow"):
        items[:] = thinned(items)
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run: "cuda" compiled, or "cpu" interpreted."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def clean_env() -> dict[str, str]:
    """Environment for a fresh process that sees this checkout and no interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(__file__).parents[1] / "src")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (source, env.get("PYTHONPATH"))))
    return env


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder at the start of the session, where its processes share what they have compiled."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "builds"


@pytest.fixture(scope="session")
def compiler() -> Iterator[Any]:
    """A process without the interpreter: `compiler.call("compiled:rows", ...)` calls a function of compiled.py."""
    from simulators.gluon_sim import Worker

    with Worker() as worker:
        yield worker
