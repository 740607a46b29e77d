"""The examples and the Python blocks of the README run, and every link and path that the pages name exists."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lazymax.backends import When

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# A path in backticks counts when it starts with one of these or is a page at the top.
TREES = ("src/", "tests/", "docs/", "examples/", "benchmarks/", "kernels/", "backends/")


def environment() -> dict[str, str]:
    """Of a fresh process: this checkout first, and the kernels interpreted when there is no GPU."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), env.get("PYTHONPATH"))))
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    return env


def run(arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment(), timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The page without its code blocks, in which made-up names are allowed."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path):
    out = run([str(path)])
    assert "triton:" in out  # the kernel ran, not only the reference


def test_examples_import_only_torch_and_lazymax():
    """And Triton, where one writes kernel code of one's own."""
    for path in EXAMPLES:
        imported = set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        assert imported - set(sys.stdlib_module_names) == {"torch", "lazymax"} | (
            {"triton"} if path.name == "mods.py" else set()
        ), path.name


def test_readme_blocks_run(tmp_path):
    """In order, as one program: a later block may use the names of an earlier one."""
    blocks = python_blocks(ROOT / "README.md")
    assert blocks
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    run([str(script)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page):
    for number, block in enumerate(python_blocks(page)):
        compile(block, f"{page.name}, block {number}", "exec")


def test_tile_table_of_the_guide_is_valid():
    """The complete tiles.py in docs/adding-an-arch.md builds a backend whose last row has no condition."""
    (block,) = [b for b in python_blocks(ROOT / "docs/adding-an-arch.md") if "BACKEND = " in b]
    names: dict[str, Any] = {}
    exec(block.replace("from .. import", "from lazymax.backends import"), names)
    assert names["BACKEND"].archs and names["BACKEND"].forward[-1].when == When()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page):
    text = prose(page)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    for name in re.findall(r"`([\w./-]+)`", text):
        if name.startswith(TREES) and not any((base / name).exists() for base in (ROOT, ROOT / "src/lazymax")):
            missing.append(name)
    assert not missing, f"{page.name} names what is not there: {', '.join(missing)}"
