"""Every row of every table compiles for its GPU, without the GPU: matrix instruction in the loop, no spills in rows
called tuned, shared memory fits. In another process (compiled.py), since TRITON_INTERPRET is set in this one."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from turns import mine

from lazymax import arch as arches
from lazymax import compiling
from lazymax.backends import registry
from lazymax.compiling import Report, loop_counts

PORTABLE_ARCHS = ("sm_80",)  # of the default run; all of them in the slow one


def faults(lines: list[dict[str, Any]]) -> list[str]:
    found = []
    for line in lines:
        what = f"{line['arch']} {line.get('row')} {line.get('problem')}: "
        if "missed" in line:
            found += [f"{line['arch']}: no problem reaches row {row}" for row in line["missed"]]
            continue
        if line["error"]:
            found.append(what + line["error"])
            continue
        if line["half"] and not line["in_loop"]:
            found.append(what + f"no {line['instruction']} in the loop ({line['in_all']} in all)")
        if line["tuned"] and line["spills"]:
            found.append(what + f"tuned, and spills {line['spills']}")
        if line["shared"] > arches.by_name(line["arch"]).shared_memory:
            found.append(what + f"{line['shared']} bytes of shared memory")
        if not line["ok"]:
            found.append(what + "not ok")
    return sorted(set(found))


FAMILIES = [name for name, backend in registry().items() if backend.automatic]  # variants: with --slow


# Rows that are not called tuned take turns between the Tritons. These tables begin with the other half: each has a like
# one (of gfx1151, gfx942, sm_89, sm_90) that does not.
OTHER_HALF = {"gfx1100", "gfx950", "sm_120", "sm_100"}


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of(name: str, compiler: Any) -> None:
    archs = registry()[name].archs[:1] or PORTABLE_ARCHS
    turn = int(not mine(name in OTHER_HALF))
    lines = compiler.call("compiled:rows", name, archs, False, turn)
    compiled = {line["row"] for line in lines if "row" in line}
    assert compiled, "nothing was compiled"
    half = [tile.name for tile in registry()[name].forward if tile.when.dtypes != ("float32",)]
    assert compiled & set(half)
    assert faults(lines) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", list(registry()))
def test_every_row_dtype_head_dim_and_band_for_every_arch_of(name: str, compiler: Any) -> None:
    archs = registry()[name].archs or tuple(
        name for name in arches.names() if arches.by_name(name).matrix_unit != "none"
    )
    lines = compiler.call("compiled:rows", name, archs, True)
    assert {line["row"] for line in lines if "row" in line} == {tile.name for tile in registry()[name].forward}
    assert faults(lines) == []


# ---- what the harness itself does


def test_a_report_says_what_is_wrong(compiler: Any) -> None:
    good, poor, bad, restored = compiler.call("compiled:good_poor_and_bad")
    assert restored, "the driver was not put back"
    assert good["ok"] and good["error"] is None
    assert (good["arch"], good["backend"], good["problem"]) == ("sm_80", "portable", "bfloat16 D=64 causal")
    assert good["instruction"] == "mma.sync" and 0 < good["in_loop"] <= good["in_all"]
    assert 32 < good["registers"] <= 255 and 0 < good["shared"] <= 163 * 1024 and good["seconds"] > 0
    assert not poor["ok"] and poor["error"] == f"{good['shared']} bytes of shared memory, sm_80 has 1024"
    assert not bad["ok"] and "power of 2" in bad["error"], bad["error"]


GOOD = Report("sm_80", "portable", "row", "problem", True, "3.6.0", "mma.sync", 8, 16, 128, 0, 1024, 1.0)


@dataclass(frozen=True)
class Verdict:
    id: str
    change: dict[str, Any]
    ok: bool


VERDICTS = (
    Verdict("good", {}, True),
    Verdict("a tuned row spills", dict(spills=4), False),
    Verdict("an untuned row spills", dict(spills=4, tuned=False), True),
    Verdict("failed", dict(error="no", tuned=False), False),
)


@pytest.mark.parametrize("case", VERDICTS, ids=lambda case: case.id)
def test_verdict_of_a_report(case: Verdict) -> None:
    report = replace(GOOD, **case.change)
    assert report.ok is case.ok and report.as_dict()["ok"] is case.ok


PTX = """
$L__BB0_1:
    mma.sync.aligned.m16n8k16 {%r1}, {%r2};   // outer
$L__BB0_2:
    mma.sync.aligned.m16n8k16 {%r1}, {%r2};
    // mma.sync in a comment
    mma.sync.aligned.m16n8k16 {%r1}, {%r2};
    @%p1 bra $L__BB0_2;
$L__BB0_3:
    mma.sync.aligned.m16n8k16 {%r1}, {%r2};
    @%p2 bra.uni $L__BB0_3;
    @%p3 bra $L__BB0_1;
    bra $L__BB0_9;
$L__BB0_9:
    mma.sync.aligned.m16n8k16 {%r1}, {%r2};
    ret;
"""
AMD = """
.LBB0_1:
    v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
    ; v_wmma in a comment
    s_cbranch_scc1 .LBB0_3
    v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
.LBB0_3:
    v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
    s_cbranch_vccnz .LBB0_1
    v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
    s_branch .LBB0_9
.LBB0_9:
    s_endpgm
"""

LATCH_FIRST = """
$L__BB0_5:
    add.s32 %r1, %r1, 1;
    @%p1 bra $L__BB0_3;
    bra.uni $L__BB0_6;
$L__BB0_3:
    @%p2 bra $L__BB0_5;
    tcgen05.mma a;
waitLoop:
    @!complete bra.uni waitLoop;
    tcgen05.mma b;
    bra.uni $L__BB0_5;
$L__BB0_6:
    ret;
"""


@dataclass(frozen=True)
class Count:
    id: str
    text: str
    pattern: str
    want: tuple[int, int]


COUNTS = (
    Count("PTX: the innermost loop with most, forward branches are no loops", PTX, r"mma\.sync", (2, 5)),
    Count("AMD: a branch forward inside a loop", AMD, r"v_wmma", (3, 4)),
    Count("another instruction", PTX, r"wgmma", (0, 0)),
    Count("no loop", "    mma.sync a;\n    ret;", r"mma\.sync", (0, 1)),
    Count("a loop of one line", "$L1: mma.sync a; @p bra $L1;", r"mma\.sync", (1, 1)),
    Count("a round that may end early, a loop that waits inside it", LATCH_FIRST, r"tcgen05\.mma", (2, 2)),
    Count("nothing", "", "x", (0, 0)),
)


@pytest.mark.parametrize("case", COUNTS, ids=lambda case: case.id)
def test_loop_counts(case: Count) -> None:
    assert loop_counts(case.text, case.pattern) == case.want


@pytest.mark.parametrize("name", arches.names())
def test_every_gpu_has_a_matrix_instruction_to_look_for(name: str) -> None:
    unit = arches.by_name(name).matrix_unit
    assert unit == "none" or unit in compiling.MATRIX_INSTRUCTIONS
