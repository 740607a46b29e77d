"""What features add to the kernel compiles for GPUs that are not there, with the checks of tests/test_compiling.py: the
matrix instruction is in the loop, shared memory fits, and a row called tuned does not spill; nor do the others with one
feature, except where that was measured to be faster. A sample in CI; `--slow` takes every feature, as
`lazymax compile --arch A --features` does."""

import pytest
from turns import mine

ARCHS = ("gfx1151", "sm_90", "sm_100")
SAMPLE = {  # what takes most registers, and each kind of argument once; the second is for the other Triton
    "gfx1151": ["bool mask", "mask_mod", "all at once"],
    "sm_90": ["float mask, causal", "packed, causal", "all at once"],
    "sm_100": ["dropout", "score_mod", "float mask, causal"],
}


# On Hopper the row for masks and dropout spills, and is the fastest nevertheless (backends/sm_90/tiles.py).
MAY_SPILL = "sm_90"


def check(reports):
    for report in reports:
        assert report["ok"] and report["in_loop"], report
        tuned_size = report["problem"].split()[1] in ("D=64", "D=128")
        if report["arch"] != MAY_SPILL and tuned_size and "all at once" not in report["problem"]:
            assert report["spills"] == 0, report


@pytest.mark.parametrize("arch", ARCHS)
def test_sample(arch, compiler):
    names = [SAMPLE[arch][0], SAMPLE[arch][2]] if mine(ARCHS.index(arch)) else [SAMPLE[arch][1]]
    reports = compiler.call("compiled:features", arch, names, [(64, 64)])
    assert len(reports) == len(names)
    check(reports)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_all(arch, compiler):
    check(compiler.call("compiled:features", arch, None, [(64, 64), (128, 128), (96, 96), (192, 128)]))
