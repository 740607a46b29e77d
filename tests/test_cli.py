"""The `lazymax` command: what each part prints, its exit codes, and one line for a mistake of the user."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lazymax import cli, console
from lazymax.cli import main
from lazymax.compat import tritons
from lazymax.verify import Check

SHAPE = "1,32,8,4096,4096,128"


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=120)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


MISTAKES = {
    "no command": ([], "COMMAND"),
    "unknown command": (["frobnicate"], "invalid choice: 'frobnicate'"),
    "unknown option": (["doctor", "--jsn"], "--jsn"),
    "short shape": (["explain", "--arch", "sm_90", "--shape", "1,2,3"], "--shape: got '1,2,3'"),
    "heads": (["explain", "--arch", "sm_90", "--shape", "1,7,3,8,8,64"], "7 query heads over 3"),
    "arch": (["explain", "--arch", "sm_999", "--shape", SHAPE], "arch: got 'sm_999'"),
    "dtype": (["explain", "--arch", "sm_90", "--shape", SHAPE, "--dtype", "int77"], "dtype: got 'int77'"),
    "causal": (["explain", "--arch", "sm_90", "--shape", SHAPE, "--causal", "left"], "--causal"),
    "window": (["explain", "--arch", "sm_90", "--shape", SHAPE, "--window", "5"], "--window: got '5'"),
    "negative window": (["explain", "--arch", "sm_90", "--shape", SHAPE, "--window=-5,0"], "window: got (-5, 0)"),
    "impl": (["explain", "--arch", "sm_90", "--shape", SHAPE, "--impl", "magic"], "impl: got 'magic'"),
    "impl that cannot": (
        ["explain", "--arch", "cpu", "--shape", SHAPE, "--impl", "portable"],
        "'portable' cannot take",
    ),
    "verify impl": (["verify", "--device", "cpu", "--impl", "portable"], "'portable' cannot take"),
    "verify device": (["verify", "--device", "toaster"], "--device: got 'toaster'"),
    "verify no such gpu": (["verify", "--device", "cuda:99"], "--device: got 'cuda:99'"),
    "bench without shapes": (["bench", "--device", "cpu"], "expected --shape or --suite"),
    "bench none left": (["bench", "--device", "cpu", "--suite", "paper", "--only", "D=3"], "--only 'D=3'"),
    "bench suite rules": (["bench", "--device", "cpu", "--suite", "gqa", "--causal"], "go with --shape"),
    "bench suite": (["bench", "--suite", "papers"], "--suite"),
    "bench peers": (["bench", "--device", "cpu", "--shape", SHAPE, "--against", "magic"], "--against: got 'magic'"),
    "bench no keys": (["bench", "--device", "cpu", "--shape", "1,2,2,8,0,64"], "no query sees a key"),
    "bench rounds": (["bench", "--device", "cpu", "--shape", SHAPE, "--rounds", "0"], "--rounds"),
    "bench folder": (["bench", "--device", "cpu", "--shape", SHAPE, "--csv", "/no/such/a.csv"], "no folder /no/such"),
    "bench overhead": (["bench", "--device", "cpu", "--overhead", "--shape", SHAPE], "--overhead"),
    "bench no gpu": (["bench", "--shape", SHAPE], "--device cpu"),
    "compile cpu": (["compile", "--arch", "cpu"], "arch: cpu"),
    "verify dtype": (["verify", "--device", "cpu", "--dtype", "fp16,int8"], "dtype: got 'int8'"),
    "compile dtype": (["compile", "--arch", "gfx1151", "--dtype", "fp64"], "--dtype: got float64"),
    "compile arch": (["compile", "--arch", "gfx9"], "arch: got 'gfx9'"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capsys, no_gpu):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("lazymax: error: ") and err.count("\n") == 1
    assert message in err


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    assert all(name in capsys.readouterr().out for name in ("doctor",))
    for name in ("doctor", "explain", "verify", "bench", "compile"):
        with pytest.raises(SystemExit) as leaving:
            main([name, "--help"])
        assert leaving.value.code == 0 and f"lazymax {name}" in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["gfx1151", "sm_90", "sm_100"])
def test_explain(arch, capsys):
    assert main(["explain", "--arch", arch, "--shape", SHAPE, "--dtype", "bf16", "--causal"]) == 0
    text = capsys.readouterr().out
    assert "causal top_left" in text and "route     triton:" in text and arch in text and "refused" in text


def test_explain_json(capsys):
    arguments = ["explain", "--arch", "sm_90", "--shape", "2,8,2,100,300,64,32", "--causal", "bottom_right"]
    assert main([*arguments, "--window", "none,7", "--dtype", "fp16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problem"]["align"] == "bottom_right" and found["problem"]["v_head_dim"] == 32
    assert found["problem"]["window"] == [None, 7] and found["problem"]["dtype"] == "float16"
    assert found["plan"]["route"] == "triton" and found["arch"]["id"] == "sm_90"


def test_doctor(capsys, no_gpu, monkeypatch, tmp_path: Path):
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "kernel.bin").write_bytes(bytes(1 << 20))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "route     reference" in text and "because" in text
    assert f"{tmp_path}: 1 files, 1.0 MiB" in text and "HSA_OVERRIDE_GFX_VERSION=11.0.0" in text
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["cache"]["bytes"] == 1 << 20 and len(found["warnings"]) == 1
    assert found["devices"][0]["arch"]["id"] == "cpu" and found["versions"]["lazymax"]


def test_doctor_fails_on_a_triton_that_is_too_old(capsys, no_gpu, monkeypatch):
    monkeypatch.setattr(tritons, "triton_version", lambda: "3.1.0")
    assert main(["doctor"]) == 1
    assert "problem   Triton 3.1.0 is older than" in capsys.readouterr().out


def test_verify_on_a_cpu_says_what_was_checked(capsys, no_gpu):
    assert main(["verify", "--device", "cpu", "--dtype", "fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and all(row["ok"] and row["plan"] == "reference:reference" for row in found["checks"])
    assert "reference route only" in found["note"] and "TRITON_INTERPRET=1" in found["note"]


def test_verify_fails_with_1(capsys, no_gpu, monkeypatch):
    checks = [Check("one", "triton:portable:row", True, "fine"), Check("two", "triton:portable:row", False, "far off")]
    monkeypatch.setattr(cli, "run_matrix", lambda *arguments: iter(checks))
    assert main(["verify", "--device", "cpu", "--dtype", "fp16"]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text and "far off" in text and "note" not in text


def compile_reports(**changes):
    compiling = pytest.importorskip("lazymax.compiling")
    values = dict(
        arch="gfx1151", backend="gfx1151", row="64x32", problem="bfloat16 D=64 full", tuned=True, triton="3.6.0",
        instruction="v_wmma", in_loop=16, in_all=76, registers=193, spills=0, shared=8192, seconds=1.5,
    )  # fmt: skip
    return compiling, [compiling.Report(**values), compiling.Report(**(values | changes))]


@pytest.mark.parametrize(
    ("changes", "code"), [({}, 0), ({"spills": 3}, 1), ({"spills": 3, "tuned": False}, 0), ({"error": "it broke"}, 1)]
)
def test_compile(changes, code, capsys, no_gpu, monkeypatch):
    compiling, reports = compile_reports(**changes)
    monkeypatch.setattr(compiling, "compile_arch", lambda arch, dtypes, impl: iter(reports))
    monkeypatch.setattr(
        pytest.importorskip("lazymax.compiling_backward"), "compile_arch", lambda arch, dtypes, impl: iter(())
    )
    assert main(["compile", "--arch", "gfx1151", "--dtype", "bf16"]) == code
    text = capsys.readouterr().out
    assert "v_wmma in loop" in text and "16 of 76" in text and ("FAIL" in text) == bool(code)
    assert changes.get("error", "") in text
    assert main(["compile", "--arch", "gfx1151", "--json"]) == code
    assert [row["ok"] for row in json.loads(capsys.readouterr().out)] == [True, not code]


def test_compile_needs_a_triton_that_compiles(capsys, no_gpu, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["compile", "--arch", "gfx1151"]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    monkeypatch.setattr(tritons, "triton_version", lambda: None)
    assert main(["compile", "--arch", "gfx1151"]) == 2
    assert "no module named triton" in capsys.readouterr().err


def test_progress_and_lines_go_through_the_bar(monkeypatch, capsys):
    seen = []

    class Bar(list):
        def __init__(self, items, desc, total, leave):
            super().__init__(items)
            seen.append((desc, total))

        write = staticmethod(seen.append)

    monkeypatch.setattr(console, "_tqdm", lambda: Bar)
    assert list(console.progress(iter("ab"), "work", 2)) == ["a", "b"]
    console.say("line")
    assert seen == [("work", 2), "line"]
    monkeypatch.setattr(console, "_tqdm", lambda: None)
    assert list(console.progress(iter("ab"), "work")) == ["a", "b"]
    console.say("plain")
    assert capsys.readouterr().out == "plain\n"


def test_the_cli_does_not_import_triton():
    code = """import sys, lazymax.cli as cli
assert cli.main(["explain", "--arch", "sm_90", "--shape", "1,1,1,8,8,64"]) == 0
assert "triton" not in sys.modules
sys.exit(cli.main(["explain", "--shape", "1"]))"""
    result = run_python("-c", code)
    assert result.returncode == 2 and "route     triton:" in result.stdout, result.stderr
    assert result.stderr.startswith("lazymax: error: --shape") and result.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: the interpreter is for machines without")
def test_bench_of_the_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    arguments = ["--shape", "1,2,1,5,9,16", "--dtype", "fp16", "--device", "cpu", "--against", "sdpa"]
    arguments += ["--causal", "--rounds", "1", "--window-ms", "1", "--json", "-"]
    result = run_python("-m", "lazymax", "bench", *arguments, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert rows[0]["plan"].startswith("triton:portable") and rows[0]["status"] == "ok" and rows[0]["ms"] > 0
