"""What features add to the kernel compiles for GPUs that are not there, with the checks of tests/test_compiling.py: the
matrix instruction is in the loop, shared memory fits, and a row called tuned does not spill; nor do the others with one
feature, except where that was measured to be faster. A sample in CI; `--slow` takes every feature, as
`lazymax compile --arch A --features` does."""

import json
import subprocess
import sys

import pytest

ARCHS = ("gfx1151", "sm_90", "sm_100")
SAMPLE = {  # what takes most registers, and each kind of argument once
    "gfx1151": ["bool mask", "mask_mod", "all at once"],
    "sm_90": ["float mask, causal", "packed, causal", "all at once"],
    "sm_100": ["dropout", "score_mod", "float mask, causal"],
}
CODE = """
import json, sys
from lazymax import arch, compiling
names, dims = json.loads(sys.argv[2]), json.loads(sys.argv[3])
reports = compiling.compile_features(arch.by_name(sys.argv[1]), names, [tuple(pair) for pair in dims])
print(json.dumps([report.as_dict() for report in reports]))
"""


def compiled(arch, names, dims, env):
    """Reports from a fresh process without the interpreter."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, arch, json.dumps(names), json.dumps(dims)],
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


# On Hopper the row for masks and dropout spills, and is the fastest nevertheless (backends/sm_90/tiles.py).
MAY_SPILL = "sm_90"


def check(reports):
    for report in reports:
        assert report["ok"] and report["in_loop"], report
        tuned_size = report["problem"].split()[1] in ("D=64", "D=128")
        if report["arch"] != MAY_SPILL and tuned_size and "all at once" not in report["problem"]:
            assert report["spills"] == 0, report


@pytest.mark.parametrize("arch", ARCHS)
def test_sample(arch, clean_env):
    reports = compiled(arch, SAMPLE[arch], [(64, 64)], clean_env)
    assert len(reports) == len(SAMPLE[arch])
    check(reports)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_all(arch, clean_env):
    check(compiled(arch, None, [(64, 64), (128, 128), (96, 96), (192, 128)], clean_env))
