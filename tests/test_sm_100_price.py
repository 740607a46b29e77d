"""Machine code of sm_100 read, counted and priced: small programs with counts known by hand, and the rows beside the
committed table, where each may only get cheaper."""

from dataclasses import replace
from typing import Any

import pytest
import sm_100_static
from price_table import recorded
from simulators import sm_100
from simulators.sm_100 import Latencies, Products, Schedule
from simulators.sm_100.streams import TENSOR_SHARE
from sm_100_static import FILE, entries
from turns import FLOOR

DEARER = 1.01  # than the table
NOISE = 1.1  # of the estimates: builds that hardly differ came out up to 10% apart


def listing(*lines: str) -> str:
    """As nvdisasm prints: labels end with a colon, all else are instructions."""
    printed, address = ["\t.section\t.text.kernel"], 0
    for line in lines:
        if line.endswith(":"):
            printed.append(line)
        else:
            printed.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(printed)


# ---- reading


def test_instructions_and_labels() -> None:
    program = sm_100.read(listing("FFMA2 R8, R2, R4, R6.F32", ".L_x_1:", "@!P0 BRA `(.L_x_1)", "BRA.U UP1, `(.L_x_1)"))
    first, second, third = program.instructions
    assert (first.address, first.predicate, first.name, first.mnemonic) == (0, None, "FFMA2", "FFMA2")
    assert (second.address, second.predicate, second.operands) == (16, "!P0", "`(.L_x_1)")
    assert (third.name, third.mnemonic) == ("BRA.U", "BRA")
    assert program.labels == {".L_x_1": 1}


@pytest.mark.parametrize(
    ("line", "read", "written"),
    [
        ("FFMA R3, R4, R5, RZ", {4, 5}, {3}),
        ("FFMA2 R8, R2.F32x2.HI_LO, R4.F32x2.HI_LO, R6.F32", {2, 3, 4, 5, 6, 7}, {8, 9}),
        ("LDTM.x32 R36, tmem[UR9+0x100]", set(), set(range(36, 68))),
        ("STTM.x4 tmem[UR9+0x100], R36", {36, 37, 38, 39}, set()),
        ("STG.E desc[UR4][R2.64], R9", {2, 9}, set()),
        ("LDL.64 R10, [R1+0x8]", {1, 2}, {10, 11}),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR4+0x38a00], R68", {68}, set()),
        ("FMNMX3 R7, R8.reuse, |R9|, -R10, !PT", {8, 9, 10}, {7}),
        ("UIADD3 UR4, UPT, UPT, UR5, 0x1, URZ", set(), set()),
    ],
)
def test_registers(line: str, read: set[int], written: set[int]) -> None:
    (instruction,) = sm_100.read(listing(line)).instructions
    assert tuple(map(set, instruction.registers())) == (read, written)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="line 3 is no instruction"):
        sm_100.read(listing("NOP") + "\n        /*0010*/          ???")
    with pytest.raises(ValueError, match="no instructions"):
        sm_100.read("\t.section .text")


# ---- loops

NESTED = listing(
    "MOV R1, R2",
    ".outer:", "IADD3 R1, R1, 0x1, RZ",
    ".inner:", "MUFU.EX2 R4, R5", "@P0 BRA `(.rare)",
    ".back:", "FADD R6, R6, R4", "@P1 BRA `(.inner)",
    "@P2 BRA `(.outer)", "EXIT",
    ".rare:", "FMUL R4, R4, R7", "BRA `(.back)",
    ".elsewhere:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0", "@!P0 BRA `(.elsewhere)", "EXIT",
)  # fmt: skip


def test_loops_and_what_every_iteration_passes() -> None:
    outer, inner, elsewhere = sm_100.loops(sm_100.read(NESTED))
    names = [instruction.mnemonic for instruction in inner.instructions]
    assert names == ["MUFU", "BRA", "FADD", "BRA", "FMUL", "BRA"]
    assert [instruction.mnemonic for instruction in inner.always] == ["MUFU", "BRA", "FADD", "BRA"]
    assert inner.once == inner.instructions and inner.blocks < outer.blocks
    assert len(outer.instructions) == 8 and len(outer.always) == 6
    assert [instruction.mnemonic for instruction in outer.once] == ["IADD3", "BRA"]
    assert elsewhere.count("SYNCS") == 1 and elsewhere.count("MUFU") == 0
    assert inner.count("MUFU", "FADD") == 2


# ---- pipes


FEW = (
    "MUFU.EX2 R1, R2", "MUFU.RCP R1, R2", "FFMA R1, R2, R3, R4", "FFMA2 R2, R4, R6, R8", "FADD2 R2, R4, R6",
    "IMAD.MOV.U32 R1, RZ, RZ, R2", "IMAD R1, R2, R3, R4", "FMNMX3 R1, R2, R3, R4, !PT",
    "F2FP.BF16.F32.PACK_AB R1, R2, R3", "LOP3.LUT R1, R2, R3, RZ, 0xc0, !PT", "LDTM.x64 R4, tmem[UR4]",
    "LDTM R4, tmem[UR4]", "STTM.x32 tmem[UR4], R4", "STTM.16dp32bit_t16_t31.x32 tmem[UR4], R4",
    "LDS R1, [R2]", "STL [R1], R2", "LDL R2, [R1]",
    "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", "UTCHMMA gdesc[UR4]",
)  # fmt: skip


def test_clocks_of_a_few_instructions() -> None:
    program = sm_100.read(listing(*FEW))
    assert sm_100.clocks(program.instructions) == {
        "issue": 19, "mufu": 16, "fma": 1 + 2 + 2 + 1 + 2, "alu": 6, "tmem_load": 65, "tmem_store": 32 + 16,
        "shared": 1, "spill": 8,
    }  # fmt: skip


def test_an_unknown_instruction_is_refused() -> None:
    program = sm_100.read(listing("NOP", "HMMA.16816.F32.BF16 R4, R8, R12, R4"))
    with pytest.raises(sm_100.UnknownInstruction, match=r"HMMA\.16816\.F32\.BF16 at 0x10"):
        sm_100.clocks(program.instructions)
    with pytest.raises(sm_100.UnknownInstruction, match=r"LDTM\.16dp256bit"):
        sm_100.clocks(sm_100.read(listing("LDTM.16dp256bit.x8 R4, tmem[UR4]")).instructions)


@pytest.mark.parametrize(
    ("work", "count", "tensor", "operands", "arriving"),
    [
        (Products(128, 256, 128), 32, 2048, 1536, 512),
        (Products(64, 256, 128), 24, 1024, 768, 256),
        (Products(128, 256, 128, ctas=2), 32, 2048, 1024, 256),
        (Products(128, 128, 128), 16, 1024, 768, 512),
    ],
)
def test_tensor_cores_and_shared_memory(
    work: Products, count: int, tensor: float, operands: float, arriving: float
) -> None:
    assert (work.count, work.tensor, work.operands, work.arriving) == (count, tensor, operands, arriving)
    assert work.tflops(work.tensor) == pytest.approx(2243, abs=1)  # 148 * 1.85 GHz * 8192, the sheet says 2250


# ---- roles and price

WAIT, ARRIVE = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ"


def looped(name: str, *body: str) -> list[str]:
    return [f".{name}:", *body, f"@P1 BRA `(.{name})", "EXIT"]


def softmax(name: str, exponentials: int = 32, more: tuple[str, ...] = ()) -> list[str]:
    work = [f"MUFU.EX2 R{100 + i % 64}, R{4 + i % 64}" for i in range(exponentials)]
    head = (WAIT, "LDTM.x64 R4, tmem[UR4]", ARRIVE)
    return looped(name, *head, *work, *more, "STTM.x32 tmem[UR4], R100", "FENCE.VIEW.ASYNC.T", ARRIVE)


RESCALE = ("LDTM.x32 R8, tmem[UR4]", *["FMUL2 R8, R8, R6"] * 16, "STTM.x32 tmem[UR4], R8")
CORRECTION = [
    ".correction:", WAIT, "LDS R6, [R2]", "@P2 BRA `(.second)", *RESCALE,
    ".second:", ARRIVE, WAIT, "LDS R7, [R2]", "@P3 BRA `(.third)", *RESCALE,
    ".third:", ARRIVE, "@P1 BRA `(.correction)", "EXIT",
]  # fmt: skip
LOADS = looped("loads", WAIT, "UTMALDG.4D [UR8], [UR4]")
PRODUCTS = looped("products", WAIT, *["UTCHMMA gdesc[UR4]"] * 32, "UTCBAR [UR4], URZ")
WORK = Products(128, 256, 128)


def text(*parts: list[str]) -> str:
    return listing("BRX R2 -0x10", *(line for part in parts for line in part))


TWO = [*softmax("softmax0"), *softmax("softmax1")]


def test_price_of_a_small_kernel() -> None:
    masked = softmax("masked", more=("FSEL R4, R4, R5, P3",) * 20)
    kernel = sm_100.kernel(text(TWO, masked, CORRECTION, PRODUCTS, LOADS))
    price = sm_100.price(kernel, WORK)
    assert len(kernel.softmax) == 2 and kernel.softmax[0] is not kernel.softmax[1] and not kernel.whole
    step = 1 + 1 + 1 + 32 + 1 + 1 + 1 + 1
    assert (price.instructions, price.masked_instructions) == (step, step + 20)
    assert (price.mufu, price.packed, price.tmem_loads, price.tmem_stores, price.products) == (32, 0, 1, 1, 32)
    assert (price.softmax_registers, price.correction_registers, price.spills) == (132, 40, 0)
    assert (price.tensor_cycles, price.operand_cycles, price.shared_cycles) == (2048, 1536, 2048)
    assert (price.mufu_cycles, price.fma_cycles, price.alu_cycles) == (2 * 32 * 8, 0, 0)
    assert price.tmem_cycles == 2 * (64 + 32)
    assert (price.rescale_fma_cycles, price.rescale_tmem_cycles) == (2 * 16 * 2, 2 * (32 + 32))
    assert price.issue_cycles == 2 * step + 9 + 35 + 3
    assert price.most_issue_cycles == price.issue_cycles + 2 * 18
    assert (price.binds, price.floor) == ("tensor", 2048)
    assert sm_100.share(2048, WORK) == pytest.approx(0.997, abs=1e-3)  # 2243 of 2250


def unsplit(name: str) -> list[str]:
    work = [f"MUFU.EX2 R{100 + i % 64}, R{4 + i % 64}" for i in range(120)]
    rescaled = (f"@P2 BRA `(.{name}_on)", *RESCALE, f".{name}_on:")
    store = ("STTM.x32 tmem[UR4], R100", "FENCE.VIEW.ASYNC.T", ARRIVE)
    return looped(name, WAIT, "LDTM.x64 R4, tmem[UR4]", *rescaled, *work, *store)


def test_a_softmax_that_rescales_by_itself() -> None:
    kernel = sm_100.kernel(text(unsplit("softmax0"), unsplit("softmax1"), PRODUCTS, LOADS), split=False)
    price = sm_100.price(kernel, WORK)
    assert not kernel.whole and kernel.correction is None and price.correction_registers == 0
    assert (price.fma_cycles, price.tmem_cycles) == (0, 2 * (64 + 32))
    assert (price.rescale_fma_cycles, price.rescale_tmem_cycles) == (2 * 16 * 2, 2 * (32 + 32))
    lazy, always = (sm_100.estimate(kernel, Schedule(128, rescale=rescale), (USUAL,)) for rescale in (False, True))
    assert lazy and always and always.period > lazy.period + 2 * 16 * 2


def test_spills_and_the_pipe_that_binds() -> None:
    spilled = softmax("softmax0", 160, more=("STL [R1], R9", "LDL R9, [R1]"))
    price = sm_100.price(sm_100.kernel(text(spilled, CORRECTION, PRODUCTS, LOADS)), WORK)
    assert price.spills == 2  # one loop for both tiles of queries
    assert (price.binds, price.floor) == ("mufu", 2 * 160 * 8)


def test_a_kernel_of_one_role() -> None:
    body = (WAIT, "UTMALDG.4D [UR8], [UR4]", *["UTCHMMA gdesc[UR4]"] * 16, *["MUFU.EX2 R4, R5"] * 64)
    price = sm_100.price(sm_100.kernel(text(looped("whole", *body))), Products(128, 128, 128))
    assert (price.products, price.tensor_cycles, price.mufu_cycles) == (16, 2048, 2 * 2 * 64 * 8)


def test_roles_that_part_twice() -> None:
    """As Triton's own warp specialisation makes them: without a mask and with one; more warps may rescale."""
    one = [".correction:", WAIT, "LDS R6, [R2]", *RESCALE, ARRIVE, "@P1 BRA `(.correction)", "EXIT"]
    again = [[line.replace(f".{name}", f".{name}_2") for line in of]
             for name, of in (("correction", one), ("products", PRODUCTS), ("loads", LOADS))]  # fmt: skip
    code = text(softmax("plain"), softmax("masked", more=("FSEL R4, R4, R5, P3",) * 20), one, PRODUCTS, LOADS, *again)
    few, many = (sm_100.price(sm_100.kernel(code, correcting=warps, stretches=2), WORK) for warps in (1, 2))
    assert few.masked_instructions == few.instructions + 20 and few.tmem_cycles == 2 * (64 + 32) + 32 + 32
    assert many.tmem_cycles == few.tmem_cycles + 32 + 32
    assert many.issue_cycles == few.issue_cycles + len(one) - 2
    with pytest.raises(ValueError, match="expected one loop of each role beside the softmax, got 2 of products"):
        sm_100.kernel(code)
    with pytest.raises(ValueError, match="expected 3 loops of each role"):
        sm_100.kernel(code, stretches=3)


def test_what_is_no_such_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no loop has 24 exponentials"):
        sm_100.kernel(text(CORRECTION, PRODUCTS, LOADS))
    with pytest.raises(ValueError, match="got 1 of products, 0 of correction, 1 of loads"):
        sm_100.kernel(text(TWO, PRODUCTS, LOADS))
    with pytest.raises(ValueError, match="32 products in a loop, expected 24"):
        sm_100.price(sm_100.kernel(text(TWO, CORRECTION, PRODUCTS, LOADS)), Products(64, 256, 128))


# ---- the simulated period

USUAL = Latencies()
CHAIN = ("FADD R3, R3, R3",) * 200


def period(schedule: Schedule, *parts: list[str], latencies: Latencies = USUAL) -> float:
    kernel = sm_100.kernel(text(*parts, CORRECTION, PRODUCTS, LOADS))
    estimate = sm_100.estimate(kernel, schedule, (latencies,))
    assert estimate
    return estimate.period


def test_the_tensor_pipe_binds_where_the_softmax_is_short() -> None:
    assert period(Schedule(128), TWO) == pytest.approx(2048 / TENSOR_SHARE, rel=1e-3)
    faster = replace(USUAL, tensor_share=1.0)
    assert period(Schedule(128), TWO, latencies=faster) == pytest.approx(2048, rel=1e-3)


def test_the_exponentials_bind_where_they_are_many() -> None:
    many = [*softmax("softmax0", 200), *softmax("softmax1", 200)]
    exponentials, products = 2 * 200 * 8, 2048 / TENSOR_SHARE
    assert exponentials <= period(Schedule(64), many) <= exponentials + products / 2
    # Both warps in phase: their products lie under no softmax.
    assert exponentials <= period(Schedule(128), many) <= exponentials + products


def test_what_lies_between_the_bounds_is_latency() -> None:
    some = [*softmax("softmax0", 120), *softmax("softmax1", 120)]
    usual = period(Schedule(128), some)
    assert usual > 2048 / TENSOR_SHARE
    assert period(Schedule(128), some, latencies=replace(USUAL, product=400)) > usual + 100
    chain = [*softmax("softmax0", more=CHAIN), *softmax("softmax1", more=CHAIN)]
    least = 4 * len(CHAIN)
    assert period(Schedule(64), chain) > least + 1024 / TENSOR_SHARE / 2
    assert period(Schedule(64, buffers=3), chain) < 0.85 * period(Schedule(64), chain)
    assert period(Schedule(64, rescale=True), chain) > period(Schedule(64), chain)


def test_what_is_published_early_is_used_early() -> None:
    def published(name: str) -> list[str]:
        half = [f"MUFU.EX2 R{100 + i}, R{4 + i}" for i in range(60)]
        store = ("STTM.x32 tmem[UR4], R100", "FENCE.VIEW.ASYNC.T", ARRIVE)
        return looped(name, WAIT, "LDTM.x64 R4, tmem[UR4]", ARRIVE, *half, *half[:30], *store, *half[:30], *store)

    early = [*published("softmax0"), *published("softmax1")]
    once = [*softmax("softmax0", 120), *softmax("softmax1", 120)]
    assert period(Schedule(128, early=96), early) < 0.98 * period(Schedule(128), once)


def test_roles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 arrivals in every iteration, expected \['alpha', 'p1', 'p2'\]"):
        period(Schedule(128, early=96), TWO)
    idle = looped("correction", *RESCALE)
    kernel = sm_100.kernel(text(TWO, idle, PRODUCTS, LOADS))
    with pytest.raises(ValueError, match="0 waits in every iteration, expected 2"):
        sm_100.estimate(kernel, Schedule(128))


# ---- kernels of the project


KEY = ("table", "row", "head_dim", "band", "lse")


def beside_the_table(lines: list[dict[str, Any]]) -> list[str]:
    known = {(line["triton"], *(line[name] for name in KEY)): line for line in recorded(FILE)}
    wrong = []
    for line in lines:
        key = (line["triton"], *(str(line[name]) for name in KEY))
        before = known.get(key)
        if before is None:
            if key[0] in {triton for triton, *_ in known}:
                wrong.append(f"{key}: not in the table; python tests/sm_100_static.py --write")
            continue
        for what in HELD:
            allowed = NOISE if what == "period" else DEARER
            if line[what] != "" and float(line[what]) > allowed * float(before[what] or "inf"):
                wrong.append(f"{key}: {what} {line[what]}, was {before[what]}")
    return wrong


HELD = ("instructions", "masked_instructions", "spills", "tensor_cycles", "shared_cycles", "mufu_cycles", "fma_cycles",
        "alu_cycles", "tmem_cycles", "issue_cycles", "most_issue_cycles", "period")  # fmt: skip


def test_the_comparison_can_fail() -> None:
    line: dict[str, Any] = {**recorded(FILE)[0]}
    line |= {what: float(line[what]) if line[what] else "" for what in HELD}
    assert beside_the_table([line]) == []
    for what in HELD:
        if line[what] != "":
            assert what in beside_the_table([line | {what: 1.2 * line[what] + 1}])[0]
    assert "not in the table" in beside_the_table([line | {"row": "7x7"}])[0]


def test_what_the_table_shows() -> None:
    """The claims of benchmarks/README.md and docs/notes/sm_100.md, for every Triton."""
    for triton in {line["triton"] for line in recorded(FILE)}:
        lines = [line for line in recorded(FILE) if line["triton"] == triton]
        for line in lines:
            if line["table"] == "rows":
                wide = line["head_dim"] == "128"
                assert line["binds"] == ("tensor" if wide else "issue"), line
                assert (line["products"], line["tmem_columns"]) == ("32" if wide else "24", "512"), line
                assert float(line["mufu_cycles"]) < (0.8 if wide else 1.3) * float(line["tensor_cycles"]), line
                # Of pairs of CTAs, which have 512 rows, each port carries half of K and V.
                port = float(line["shared_cycles"]) / float(line["tensor_cycles"])
                assert port == (0.625 if "-512x" in line["row"] else 1.0), line
        for head_dim, last in (("64", 9), ("128", 6)):
            rungs = [line for line in lines if line["table"] == "ladder" and line["head_dim"] == head_dim]
            assert [int(line["row"][0]) for line in rungs] == list(range(last + 1))
            mufu = [float(line["mufu_cycles"]) for line in rungs]
            assert mufu[0] == mufu[1] > 2048 > 0.8 * 2048 > mufu[2] == mufu[6]
            period = [float(line["period"]) for line in rungs]
            assert period[3] < 0.95 * period[2] and period[6] < 0.9 * period[3]  # lazy rescale; with split correction
            assert min(period[5:7]) < 0.97 * period[4]  # early, in order or not
            if head_dim == "64":
                assert period[8] < 0.95 * period[7] and min(period[8:]) < min(period[:8])  # three S buffers


def test_the_machine_code_was_read_completely(compiler: Any) -> None:
    entry = next(entry for entry in entries() if entry.table == "portable" and not entry.tile.warp_specialize)
    ptx, code = compiler.call("sm_100_static:texts", entry.key)
    program = sm_100.read(code)
    assert sm_100.differences(ptx, program) == {}
    fewer = replace(program, instructions=[of for of in program.instructions if of.name != "MUFU.EX2"])
    assert list(sm_100.differences(ptx, fewer)) == ["MUFU.EX2"]


def default(entry: sm_100_static.Entry) -> bool:
    """A row that runs, in turns between the Tritons; a portable one is compiled in the test above."""
    if (entry.band, entry.lse) != ("full", "no") or entry.table == "ladder":
        return False
    return entry.head_dim == (128 if FLOOR or entry.table == "portable" else 64)


def test_rows(compiler: Any) -> None:
    keys = [entry.key for entry in entries() if default(entry)][:1]
    lines = compiler.call("sm_100_static:prices", keys)
    assert len(lines) == len(keys) == 1
    assert beside_the_table(lines) == []


@pytest.mark.slow
def test_every_row_and_rung(compiler: Any) -> None:
    lines = compiler.call("sm_100_static:prices", [entry.key for entry in entries()])
    assert beside_the_table(lines) == []
