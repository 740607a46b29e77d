"""Every row for the backward compiles for its GPU, without the GPU, like the forward's (test_compiling.py): matrix
instruction in the loop, shared memory fits, no spills where the tables say so. A sample in CI, all with `--slow`."""

from typing import Any

import pytest

from lazymax import arch as arches
from lazymax import compiling_backward
from lazymax.backends import registry

# Registers (AMD) or bytes of stack (NVIDIA) that rows are known to spill; all others spill nothing.
MAY_SPILL = {("sm_90", "D=128"): 64}  # rows of 4 warps 24 bytes
# The same by row, on Triton 3.6 and later. sm_90 at 128: full, causal and with a window 24, 104 and 136 bytes on 3.6.0,
# 208, 152 and 136 on 3.9.0. sm_100, fp32 at 96: of the 8 bytes ptxas calls none a spill.
ROW_MAY_SPILL = {
    "all-ws-128x128-s2-finishes": (120, 272),
    "all-ws-128x128-s2-pipelined-finishes": (128, 96),
    "all-ws-64x128-s2": (136, 208),
    "all-ws-64x128-s2-finishes": (64, 208),
    "dkdv-16x16-w8-s1-r255-oneloop-ptr": (0, 8),
}
OWN = [name for name, backend in registry().items() if backend.backward and name != "portable"]


def check(lines: list[dict[str, Any]]) -> None:
    assert lines, "nothing was compiled"
    for line in lines:
        assert line["ok"] and line["error"] is None, line
        assert line["in_loop"] or not line["half"], line
        assert line["shared"] <= arches.by_name(line["arch"]).shared_memory, line
        size = line["problem"].split()[1]
        strict = line["half"] and (size in ("D=64", "D=128") or line["arch"] == "gfx1151")
        if strict or line["backend"] == "sm_100":
            known = MAY_SPILL.get((line["arch"], size), 0)
            if line["row"] in ROW_MAY_SPILL:
                known = ROW_MAY_SPILL[line["row"]][not line["triton"].startswith("3.6.")]
            assert line["spills"] <= known, line


@pytest.mark.parametrize(
    "arch, head_dim", [("sm_90", 128), ("sm_100", 128), ("gfx1151", 64), ("gfx1151", 256), ("gfx1100", 128)]
)
def test_sample(arch, head_dim, compiler):
    check(compiler.call("compiled:backward", [arch], [head_dim], ["bfloat16"], True, 1))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", [*(pytest.param(n, marks=pytest.mark.slow) for n in (64, 96, 192, 256)), 128])
def test_gfx1151_spills_nothing(dim, dtype, compiler):
    """No vector register, and no scalar one, in any band, with and without a group of heads."""
    lines = compiler.call("compiled:backward_spills", "gfx1151", dim, dtype)
    assert len(lines) == 6 * (2 if dim == 64 else 3)
    assert [line for line in lines if line["vector"] or line["scalar"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("dim", [192, 256])
def test_gfx1150_spills_nothing_of_dq(dim, compiler):
    """A smaller register file than that of gfx1151: a row of its own."""
    lines = [line for line in compiler.call("compiled:backward_spills", "gfx1150", dim, "bfloat16")
             if line["kernel"] == "dq"]  # fmt: skip
    assert len(lines) == 6
    assert [line for line in lines if line["vector"] or line["scalar"]] == []


# (head dims, dtype, by descriptors): every row of sm_100, one tile of the head dimension and two.
FEW = [((128, 128), "bfloat16", True), ((128, 128), "bfloat16", False), ((256, 256), "float32", False)]
SOURCES = (("bfloat16", True), ("bfloat16", False), ("float32", False))
MANY = [(dims, *of) for dims in ((128, 128), (64, 64), (256, 256), (96, 96), (192, 128)) for of in SOURCES]
MANY += [((128, 128), "float16", True), ((128, 128), "float16", False)]
MANY += [((dim, dim), "bfloat16", True) for dim in (72, 80)]  # whose cold path spilled


@pytest.mark.parametrize("arch, build, few", [
    *(("sm_100", build, True) for build in FEW),
    *(pytest.param("sm_100", build, False, marks=pytest.mark.slow) for build in MANY),
    *(pytest.param("sm_103", build, True, marks=pytest.mark.slow) for build in FEW),
])  # fmt: skip
def test_sm_100_spills_nothing(arch, build, few, compiler):
    """By ptxas, in no function, in any band, with and without a group of heads."""
    lines = compiler.call("compiled:backward_assembled", arch, *build, few)
    assert len(lines) == 2 * (2 if few else 6) and all(line["fits"] for line in lines)
    assert [line for line in lines if line["spills"]] == []


def test_sm_103_has_the_rows_of_sm_100():
    table = registry()["sm_100"]
    found = [compiling_backward.rows(arches.by_name(name), table) for name in ("sm_100", "sm_103")]
    assert found[0] == found[1] and {tile for tile, _ in found[0].values()} == set(table.backward)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_every_row_of(name, compiler):
    archs = list(registry()[name].archs)
    check(compiler.call("compiled:backward", archs, None, ["bfloat16", "float32"], None))


@pytest.mark.slow
def test_portable_rows(compiler):
    lines = compiler.call("compiled:backward", ["gfx90a"], [64], ["bfloat16"], True)
    assert lines and all(line["backend"] == "portable" for line in lines)
    check(lines)


ALL_DIMS = [(64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]


@pytest.mark.parametrize("arch, names, head_dims", [
    ("sm_100", ["float mask, causal"], [(128, 128)]),
    pytest.param("sm_90", None, [(64, 64), (128, 128)], marks=pytest.mark.slow),
    pytest.param("sm_100", None, ALL_DIMS, marks=pytest.mark.slow),
    pytest.param("gfx1151", None, [(64, 64), (128, 128)], marks=pytest.mark.slow),
])  # fmt: skip
def test_features(arch, names, head_dims, compiler):
    lines = compiler.call("compiled:backward_features", arch, names, head_dims)
    assert lines
    for line in lines:
        assert line["error"] is None and line["in_loop"], line
        assert line["spills"] == 0 or arch == "sm_90", line
