"""What differs between Triton versions: both sides of every range, compiled where it is about compiling."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import lazymax
from lazymax.compat import tritons
from lazymax.testing import make_qkv


@dataclass(frozen=True)
class Version:
    text: str
    want: tuple[int, ...]


VERSIONS = (
    Version("3.6.0", (3, 6, 0)),
    Version("3.6.0+git1a2b3c", (3, 6, 0)),
    Version("3.10.0", (3, 10, 0)),
    Version("3.9.0rc1", (3, 9, 0)),
    Version("3.9", (3, 9)),
    Version("3.5.1+rocm7.2.0.gita272dfa8", (3, 5, 1)),
    Version("4", (4,)),
)


@pytest.mark.parametrize("case", VERSIONS, ids=lambda case: case.text)
def test_release(case: Version) -> None:
    assert tritons.release(case.text) == case.want


def test_triton_version_is_read_without_an_import(clean_env: dict[str, str]) -> None:
    code = (
        "import sys; from lazymax.compat import tritons; version = tritons.triton_version();"
        "assert 'triton' not in sys.modules;"
        "import triton; print(version == triton.__version__, version)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean_env, capture_output=True, text=True)
    assert done.stdout.startswith("True"), done.stdout + done.stderr


@dataclass(frozen=True)
class Support:
    version: str | None
    words: str | None


SUPPORT = (
    Support(None, "no module named triton (pip install 'lazymax[triton]'"),
    Support("2.1.0", "Triton 2.1.0 is older than 3.6.0"),
    Support("3.5.1", "Triton 3.5.1 is older than 3.6.0"),
    Support("3.6.0", None),
    Support("3.6.0+rocm7", None),
    Support("3.10.0", None),
)


@pytest.mark.parametrize("case", SUPPORT, ids=lambda case: str(case.version))
def test_oldest_supported_triton(case: Support) -> None:
    got = tritons.unsupported_triton(case.version)
    assert got is None if case.words is None else got is not None and got.startswith(case.words)


SWITCHES = ((None, False), ("0", False), ("", False), ("no", False), ("1", True), ("TRUE", True), ("on", True))


@pytest.mark.parametrize(("value", "want"), SWITCHES, ids=lambda value: repr(value))
def test_interpreting_reads_the_variable_as_triton_does(
    value: str | None, want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert tritons.interpreting() is want
    assert bool(knobs.runtime.interpret) is want


def test_only_bf16_in_the_interpreter_is_multiplied_as_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert tritons.interpreter_needs_upcast("bfloat16")
    assert not tritons.interpreter_needs_upcast("float16")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not tritons.interpreter_needs_upcast("bfloat16")


def test_the_interpreter_fault_behind_the_upcast_is_still_there(device: str) -> None:
    """When this fails on the newest Triton, `interpreter_needs_upcast` gets an upper version."""
    if device != "cpu":
        pytest.skip("the fault is of Triton's interpreter; here kernels are compiled")
    from triton.runtime.interpreter import _convert_float
    from triton.runtime.interpreter import tl as language

    x = torch.tensor([1.0 + 2.0**-8 + 2.0**-9]).numpy()  # nearest bf16 is 1 + 2**-7, the one below is 1
    bits = _convert_float(x, language.float32, language.bfloat16, None)
    assert bits.view("uint16")[0] == 0x3F80, "the interpreter rounds now"


def test_the_faster_interpreter_computes_the_same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What interpreter.py replaces, beside what was there."""
    if device != "cpu":
        pytest.skip("about Triton's interpreter; here kernels are compiled")
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    q, k, v = make_qkv(1, 2, 1, 20, 35, 24, dtype=torch.float16)
    options = dict(causal="bottom_right", softcap=2.0, sinks=torch.ones(2), attn_mask=torch.arange(35) % 3 != 1)
    found = lazymax.attention(q, k, v, **options, return_lse=True)
    assert core.is_builtin(language.load), "a launch left triton.language patched"
    replaced = (interpreter, "_patch_lang"), (interpreter, "_get_np_dtype"), (core, "_type_for_tuple_values")
    for module, name in replaced:
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    for got, want in zip(found, lazymax.attention(q, k, v, **options, return_lse=True), strict=True):
        assert torch.equal(got, want)


@dataclass(frozen=True)
class Fault:
    version: str
    matrix_unit: str
    faulty: bool


FAULTS = (
    Fault("3.6.0", "tcgen05", True),
    Fault("3.7.1", "tcgen05", True),
    Fault("3.8.0+git", "tcgen05", True),
    Fault("3.9.0", "tcgen05", False),
    Fault("3.10.0", "tcgen05", False),
    Fault("3.6.0", "wgmma", False),
    Fault("3.6.0", "mma", False),
    Fault("3.6.0", "wmma", False),
)


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case.version} {case.matrix_unit}")
def test_range_of_the_branch_rescale_fault(case: Fault) -> None:
    fault = tritons.branch_rescale_fault(case.version, case.matrix_unit)
    assert (fault is not None) is case.faulty
    if fault:
        assert case.version in fault and "3.9" in fault


COMPILE = "import json, sys, compiled; print(json.dumps(compiled.form(*sys.argv[1:])))"


def compile_form(form: str, name: str, env: dict[str, str], *more: str) -> tuple[int, dict[str, object], str]:
    """(exit code, report, stderr). A process of its own: the fault aborts it on some builds of Triton."""
    env = env | {"PYTHONPATH": os.pathsep.join((env["PYTHONPATH"], str(Path(__file__).parent)))}
    done = subprocess.run([sys.executable, "-c", COMPILE, form, name, *more], env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


def test_branch_rescale_compiles_for_tensor_memory_exactly_where_the_range_says(clean_env: dict[str, str]) -> None:
    code, report, stderr = compile_form("branch", "sm_100", clean_env)
    version = tritons.triton_version()
    assert version is not None
    if tritons.branch_rescale_fault(version, "tcgen05"):
        failed = code != 0 or report.get("error") is not None
        assert failed, f"Triton {version} compiles the branch form: shrink the range in tritons.branch_rescale_fault"
        blame = stderr + str(report.get("error"))
        assert "parent layout" in blame or "rank" in blame or "PassManager" in blame or code < 0, blame[-2000:]
    else:
        assert code == 0 and report["error"] is None and report["in_loop"], (report, stderr[-2000:])


def test_select_rescale_compiles_for_tensor_memory_everywhere(compiler: Any) -> None:
    report = compiler.call("compiled:form", "select", "sm_100")
    assert report["error"] is None and report["in_loop"], report


def test_warp_specialization_still_fails_on_the_branch_form(clean_env: dict[str, str]) -> None:
    """When it compiles, rows of sm_100 may have both."""
    if tritons.branch_rescale_fault(str(tritons.triton_version()), "tcgen05"):
        pytest.skip("here the branch form fails by itself")
    code, report, stderr = compile_form("branch", "sm_100", clean_env, "roles")
    assert code != 0 or "PassManager" in str(report["error"]), report
    assert "AutomaticWarpSpecialization" in stderr, stderr[-2000:]


def test_cluster_launch_control_is_where_it_is_said_to_be() -> None:
    assert [tritons.has_clc(version) for version in ("3.6.0", "3.8.1", "3.9.0", "3.10.0")] == [False, False, True, True]
    found = importlib.util.find_spec("triton.experimental.gluon.language.nvidia.blackwell.clc")
    assert tritons.has_clc(triton.__version__) is (found is not None)
