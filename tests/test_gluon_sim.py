"""The simulator of Gluon kernels (tests/simulators/gluon_sim): every kind of fault is found on a small kernel that has
it, right kernels pass under any schedule, and its parts against torch and Triton.

Gluon kernels exist only where TRITON_INTERPRET is not set, so they are simulated in a `Worker`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from simulators import gluon_sim as gs
from simulators.gluon_sim import Options, Worker, ptx
from simulators.gluon_sim.dtypes import dtype, round_tf32
from simulators.gluon_sim.layouts import shared_offsets, tmem_offsets
from simulators.gluon_sim.mlir import parse_constant, parse_type
from simulators.gluon_sim.registers import register_order
from simulators.gluon_sim.selftest.box import Box
from simulators.gluon_sim.selftest.faults import ATTENTION, EXCHANGE, EXCHANGE_TMA, GEMM
from simulators.gluon_sim.views import Footprint

CALLS = "simulators.gluon_sim.selftest.calls"
SEEDS = range(10)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


def launch(worker: Worker, kernel: str, grid: tuple[int, ...], *args: Any, **options: Any) -> tuple[Any, Any]:
    """Arguments as they are afterwards, and what the launch did."""
    return worker.call(f"{CALLS}:launch", kernel, grid, *args, options=Options(**options))


# ---- right kernels


@pytest.mark.parametrize("call, target", [("gemm", "sm_90"), ("exchange", "sm_90"), ("attention", "sm_100")])
def test_right_kernels_pass_under_any_schedule(call: str, target: str, worker: Worker) -> None:
    steps = set()
    for seed in range(60):
        steps.add(worker.call(f"{CALLS}:{call}", Options(target=target, seed=seed)).steps)
    assert len(steps) > 10  # the schedules do differ


def test_a_seed_is_a_schedule(worker: Worker) -> None:
    first, second = (worker.call(f"{CALLS}:gemm", Options(target="sm_90", seed=7)) for _ in range(2))
    assert first == second


def test_addresses_are_the_compilers(worker: Worker) -> None:
    stats = worker.call(f"{CALLS}:attention", Options(target="sm_100"))
    assert stats.tmem_columns == 128  # S and O, 64 columns each
    own = worker.call(f"{CALLS}:gemm", Options(target="sm_90", physical_alloc=False))
    assert own.shared_bytes > 2 * 2 * (128 * 64 * 2)


# ---- faults of a pipeline: each under every seed. Triton 3.9 would insert a missing fence itself, 3.6 does not: the
# kernel is judged as it is written.


GEMM_FAULTS = {
    "consumer_no_wait": (gs.RaceError, gs.UninitialisedRead),
    "producer_no_empty_wait": (gs.RaceError, gs.BarrierError),
    "wrong_phase": (gs.RaceError, gs.UninitialisedRead),
    "release_before_wgmma_done": (gs.RaceError,),
    "no_store_fence": (gs.MissingFence,),
    "expect_too_few_bytes": (gs.RaceError, gs.UninitialisedRead, gs.Deadlock),
    "no_release": (gs.Deadlock,),
    "no_store_wait": (gs.InFlightAtExit,),
    "double_release": (gs.BarrierError, gs.Deadlock, gs.RaceError),
    "expect_too_many_bytes": (gs.Deadlock,),
}
ATTENTION_FAULTS = {
    "softmax_no_wait_s": (gs.UninitialisedRead, gs.RaceError),
    "mma_no_wait_p": (gs.RaceError, gs.BarrierError),
    "p_aliases_live_s": (AssertionError,),  # synchronised, but the wrong bytes of tensor memory
    "final_no_wait_o": (gs.RaceError,),
    "load_no_wait_empty": (gs.RaceError, gs.BarrierError),
    "no_commit_o": (gs.Deadlock,),
    "wrong_phase_p": (gs.RaceError, gs.BarrierError, gs.Deadlock),
    "no_o_fence": (gs.MissingFence,),
    "alpha_published_early": (gs.RaceError, gs.UninitialisedRead),
    "no_commit_kv": (gs.Deadlock,),
    "first_mma_accumulates": (gs.UninitialisedRead,),
}
EXCHANGE_FAULTS = {
    "no_sync": (gs.RaceError, gs.UninitialisedRead),
    "no_arrive": (gs.Deadlock,),
    "arrive_before_store": (gs.RaceError, gs.UninitialisedRead),
    "no_fence": (gs.MissingFence,),
    "clear_first": (gs.GlobalRace,),
    "one_id": (gs.BarrierError,),
    "add_plainly": (gs.GlobalRace,),
    "no_store_wait": (gs.RaceError,),
    "no_stage_fence": (gs.MissingFence,),
}


def test_every_fault_has_its_test() -> None:
    assert {*GEMM_FAULTS, "none"} == {*GEMM} and {*ATTENTION_FAULTS, "none"} == {*ATTENTION}
    assert {*EXCHANGE_FAULTS, "none"} == {*EXCHANGE, *EXCHANGE_TMA}


@pytest.mark.parametrize("fault", GEMM_FAULTS)
def test_faults_of_a_hopper_pipeline(fault: str, worker: Worker) -> None:
    for seed in SEEDS:
        with pytest.raises(GEMM_FAULTS[fault]):
            worker.call(f"{CALLS}:gemm", Options(target="sm_90", seed=seed, insert_fences=False), fault)


@pytest.mark.parametrize("fault", EXCHANGE_FAULTS)
def test_faults_of_an_exchange(fault: str, worker: Worker) -> None:
    for seed in SEEDS:
        with pytest.raises(EXCHANGE_FAULTS[fault]):
            options = Options(target="sm_90", seed=seed, insert_fences=False)
            worker.call(f"{CALLS}:exchange", options, fault, fault in EXCHANGE_TMA)


@pytest.mark.parametrize("fault", ATTENTION_FAULTS)
def test_faults_of_a_blackwell_pipeline(fault: str, worker: Worker) -> None:
    for seed in SEEDS:
        with pytest.raises(ATTENTION_FAULTS[fault]):
            worker.call(f"{CALLS}:attention", Options(target="sm_100", seed=seed, insert_fences=False), fault)


def test_a_race_is_named(worker: Worker) -> None:
    with pytest.raises(gs.RaceError) as info:
        worker.call(f"{CALLS}:gemm", Options(target="sm_90", seed=0), "release_before_wgmma_done")
    text = str(info.value)
    for part in ("a_bufs[0]", "wgmma", "_producer", "_consumer", "kernels_hopper.py:", "seed 0"):
        assert part in text


def test_a_deadlock_names_the_barriers(worker: Worker) -> None:
    with pytest.raises(gs.Deadlock) as info:
        worker.call(f"{CALLS}:attention", Options(target="sm_100"), "no_commit_kv")
    text = str(info.value)
    # barriers made by a helper are told apart by the line that called it
    assert "_load" in text and "waits for parity" in text and "b@" in text


# ---- faults between partitions, programs, and the edges of memory


def test_a_tile_added_by_tma(worker: Worker) -> None:
    for seed in SEEDS:
        worker.call(f"{CALLS}:exchange", Options(target="sm_90", seed=seed), by_tma=True)


@pytest.mark.parametrize("kernel", ["two_writers", "named_barrier"])
def test_partitions_need_a_barrier(kernel: str, worker: Worker) -> None:
    for seed in SEEDS:
        launch(worker, kernel, (1,), torch.zeros(128), True, seed=seed)
        with pytest.raises((gs.RaceError, gs.UninitialisedRead)):
            launch(worker, kernel, (1,), torch.zeros(128), False, seed=seed)


def test_tma_over_what_was_read_needs_a_fence(worker: Worker) -> None:
    """Where kernels read a tile through ordinary loads, the next one may overtake them: seen on an H200."""
    src = torch.randint(-9, 9, (128, 64)).half()
    given = "refilled", (1,), Box(src, (64, 64)), torch.zeros(64, 64).half()
    (_, dst, _), _ = launch(worker, *given, True, insert_fences=False)
    assert torch.equal(dst, src[:64] + src[64:])
    with pytest.raises(gs.MissingFence, match="last used through the generic proxy: shared load"):
        launch(worker, *given, False, insert_fences=False)


def test_masked_tail_and_bounds(worker: Worker) -> None:
    src = torch.arange(200.0)
    args, _ = launch(worker, "add_one", (2,), src, torch.zeros(200), 200, 128, True)
    assert torch.equal(args[1], src + 1)
    with pytest.raises(gs.OutOfBounds, match="56 of 128 lanes"):
        launch(worker, "add_one", (2,), src, torch.zeros(200), 200, 128, False)


def test_a_slot_outside_of_its_ring(worker: Worker) -> None:
    args, _ = launch(worker, "ring_slot", (1,), torch.zeros(128), 2, 2)
    assert (args[0] == 2).all()
    with pytest.raises(gs.OutOfBounds, match="index 2 of ring, which has 2 buffers"):
        launch(worker, "ring_slot", (1,), torch.zeros(128), 2, 3)


def test_unwritten_shared_memory(worker: Worker) -> None:
    with pytest.raises(gs.UninitialisedRead):
        launch(worker, "uninit_shared", (1,), torch.zeros(128), False)
    args, _ = launch(worker, "uninit_shared", (1,), torch.zeros(128), True)
    assert (args[0] == 3).all()


def test_more_shared_memory_than_there_is(worker: Worker) -> None:
    launch(worker, "big_buffer", (1,), torch.zeros(1), 128, target="sm_120")
    with pytest.raises(gs.ResourceError, match="shared memory, sm_120 has"):
        launch(worker, "big_buffer", (1,), torch.zeros(1), 256, target="sm_120")


def test_programs_must_not_share_output(worker: Worker) -> None:
    with pytest.raises(gs.GlobalRace):
        launch(worker, "same_output", (2,), torch.zeros(128), 128, False)
    args, _ = launch(worker, "same_output", (2,), torch.zeros(128), 128, True)
    assert (args[0] == 2).all()


@pytest.mark.parametrize("source, target, done", [(0, 1, "written"), (1, 0, "read")])
def test_programs_must_not_read_each_others_output(source: int, target: int, done: str, worker: Worker) -> None:
    with pytest.raises(gs.GlobalRace, match=f"by program 1: 128 elements were {done} by program 0"):
        launch(worker, "from_block_to_block", (2,), torch.zeros(384), 128, source, target)
    launch(worker, "from_block_to_block", (2,), torch.zeros(512), 128, source * 2, target * 2)
    launch(worker, "from_block_to_block", (2,), torch.zeros(384), 128, source, target, global_races=False)


@pytest.mark.parametrize("what, how", [(0, "load of"), (1, "store to")])
def test_atomics_and_other_accesses(what: int, how: str, worker: Worker) -> None:
    with pytest.raises(gs.GlobalRace, match=f"{how} 'dst' by program 1: 128 elements were updated by atomics"):
        launch(worker, "add_and_touch", (2,), torch.zeros(256), 128, what)
    (dst, *_), _ = launch(worker, "add_and_touch", (2,), torch.zeros(256), 128, 2)
    assert (dst[:128] == 2).all()


@pytest.mark.parametrize("shift, wrong", [(2, "misaligned address in 'out'"), (4, "1 of 1024 lanes are out of bounds")])
def test_where_vectors_are_added(shift: int, wrong: str, worker: Worker) -> None:
    with pytest.raises(gs.OutOfBounds, match=rf"^red\.relaxed\.gpu\.global\.add\.v4\.f32.*{wrong}"):
        worker.call(f"{CALLS}:exchange", Options(target="sm_90"), shift=shift)


@pytest.mark.parametrize("lanes, times", [(128, 1), (64, 2)])
def test_each_thread_adds_what_it_holds(lanes: int, times: int, worker: Worker) -> None:
    (dst, _), _ = launch(worker, "add_pairs", (1,), torch.zeros(2 * lanes + 2), lanes)
    assert (dst[2:] == times).all() and (dst[:2] == 0).all()


def test_which_named_barrier(worker: Worker) -> None:
    ids, differing = torch.full((128,), 8, dtype=torch.int32), torch.arange(128, dtype=torch.int32)
    launch(worker, "barrier_of", (1,), ids, "$1", 128)
    for given, ident, count, wrong in (
        (differing, "$1", 128, "not the same in all threads"),
        (ids, "0", 128, "named barrier 0: those that Triton leaves are 1 to 15"),
        (ids + 8, "$1", 128, "named barrier 16: "),
        (ids, "$1", 100, "100 threads are no whole warps"),
    ):
        with pytest.raises(gs.BarrierError, match=wrong):
            launch(worker, "barrier_of", (1,), given, ident, count)


def test_integer_overflow(worker: Worker) -> None:
    with pytest.raises(gs.KernelAssert, match="overflow"):
        launch(worker, "overflow", (1,), torch.zeros(1, dtype=torch.int32), 1 << 20, 1 << 20)


def test_programs_can_run_together(worker: Worker) -> None:
    worker.call(f"{CALLS}:spin", Options(resident=2), alone=False)
    with pytest.raises(gs.Livelock):
        worker.call(f"{CALLS}:spin", Options(max_steps=2000), alone=True)


# ---- mutation testing


def test_every_synchronisation_of_the_gemm_is_needed(worker: Worker) -> None:
    outcomes = worker.call(f"{CALLS}:mutate", "gemm", "sm_90", range(4))
    assert all(o.killed for o in outcomes) and len(outcomes) == 12, gs.summary(outcomes)


def test_mutants_of_the_attention(worker: Worker) -> None:
    outcomes = worker.call(f"{CALLS}:mutate", "attention", "sm_100", range(4))
    alive = [(o.mutant.how, o.mutant.op) for o in outcomes if not o.killed]
    # two waits are implied by other barriers (tcgen05 commits cover everything issued before them)
    assert alive == 2 * [("drop", "ttng.wait_barrier")] and len(outcomes) > 40
    assert gs.summary(outcomes).startswith("SURVIVED: drop: ttng.wait_barrier at")


def test_mutants_of_a_product_with_its_barrier(worker: Worker) -> None:
    outcomes = worker.call(f"{CALLS}:mutate", "product", "sm_100", range(4))
    assert "drop its commit" in {o.mutant.how for o in outcomes} and all(o.killed for o in outcomes)


def test_every_synchronisation_of_the_exchange_is_needed(worker: Worker) -> None:
    outcomes = worker.call(f"{CALLS}:mutate", "exchange", "sm_90", range(4))
    assert sum(o.mutant.how == "drop its named barrier" for o in outcomes) == 4
    assert all(o.killed for o in outcomes), gs.summary(outcomes)


def test_mutants_of_two_barriers_in_a_block(worker: Worker) -> None:
    outcomes = worker.call(f"{CALLS}:mutate", "handshake", "sm_90", range(4))
    assert {o.mutant.how for o in outcomes} == {"drop its named barrier 1", "drop its named barrier 2"}
    alive = [o.mutant.how for o in outcomes if not o.killed]
    assert len(outcomes) == 32 and alive == 2 * ["drop its named barrier 2"], gs.summary(outcomes)  # the last waits


def test_mutants_of_a_named_barrier(worker: Worker) -> None:
    outcomes = worker.call(f"{CALLS}:mutate", "named", "sm_90", range(4))
    assert [o.mutant.how for o in outcomes] == 2 * ["drop its named barrier"]
    assert all(o.killed for o in outcomes)


# ---- what is simulated is what Triton compiles


def test_tensor_memory_aliases_by_bytes(worker: Worker) -> None:
    (dst, dst16), _ = launch(worker, "tmem_alias", (1,), torch.zeros(128, 128), torch.zeros(128, 128).half())
    want = torch.arange(128 * 128.0).reshape(128, 128)
    assert torch.equal(dst[:, 64:], want[:, 64:])  # P covers columns 0..63 of S only
    one = torch.tensor([1.0, 1.0]).half().view(torch.float32)  # two fp16 ones read as one fp32
    assert (dst[:, :64] == one).all() and (dst16 == 1).all()


def test_tma_fills_outside_with_zero(worker: Worker) -> None:
    src = torch.randn(100, 64).half()
    (_, dst, _), _ = launch(worker, "tma_edge", (1,), Box(src, (64, 64)), torch.ones(64, 64).half(), 64)
    assert torch.equal(dst[:36], src[64:]) and (dst[36:] == 0).all()


def test_descriptor_made_on_the_device(worker: Worker) -> None:
    src = torch.randn(128, 64).half()
    (_, dst, *_), _ = launch(worker, "device_descriptor", (2,), src, torch.zeros_like(src), 128, 64)
    assert torch.equal(src, dst)


def test_cp_async_groups(worker: Worker) -> None:
    a, b = torch.randn(32, 128).half(), torch.randn(128, 32).half()
    for seed in SEEDS:
        given = ("pipelined_mma_v2", (1,), a, b, torch.zeros(32, 32), 128, 32)
        (_, _, c, *_), _ = launch(worker, *given, False, target="sm_80", seed=seed)
        assert (c - a.float() @ b.float()).abs().max() < 1e-4
        with pytest.raises(gs.RaceError):
            launch(worker, *given, True, target="sm_80", seed=seed)


def test_compile_time_features(worker: Worker) -> None:
    (dst, *_), _ = launch(worker, "compile_time", (1,), torch.zeros(128, dtype=torch.int32), 20, 3)
    assert torch.equal(dst.long(), 3 * (torch.arange(128) * 6 + 20) + 3 + 4)


def test_a_tuple_with_a_constant(worker: Worker) -> None:
    assert torch.equal(worker.call(f"{CALLS}:configured").long(), torch.arange(128) * 3 + 7)


@pytest.mark.parametrize("order, signs", [([1, 0], [1, -1, 1, -1]), ([0, 1], [1, 1, 1, 1])])
def test_packed_assembly_follows_the_layout(order: list[int], signs: list[int], worker: Worker) -> None:
    dst = worker.call(f"{CALLS}:packed", order)
    assert torch.equal(dst[0].sign().long(), torch.tensor(signs))
    assert (dst < 0).sum() == 512


def test_activate_runs_host_code(worker: Worker) -> None:
    src, dst, programs = worker.call(f"{CALLS}:hosted", Options(seed=3))
    assert torch.equal(dst, src + 1) and programs == 2


def test_memory_of_a_dead_barrier_is_reused(worker: Worker) -> None:
    (dst,), stats = launch(worker, "dead_barrier", (1,), torch.zeros(128))
    assert (dst == 1).all() and stats.shared_bytes == 8


# ---- how it refuses


def test_a_plain_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a @gluon\.jit or @triton\.jit function"):
        gs.simulate(print, (1,))


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match="'gfx1151' is not one of sm_80"):
        Options(target="gfx1151")


def test_clusters_are_refused(worker: Worker) -> None:
    """But for pairs of CTAs where Triton has products for them."""
    given = "overflow", (1,), torch.zeros(1, dtype=torch.int32), 2, 3
    with pytest.raises(gs.Unsupported, match="clusters: overflow is launched with num_ctas=4 for sm_100"):
        worker.call(f"{CALLS}:launch", *given, num_ctas=4)
    with pytest.raises(gs.Unsupported, match="num_ctas=2 for sm_90"):
        worker.call(f"{CALLS}:launch", *given, num_ctas=2, options=Options(target="sm_90"))


def test_errors_cross_the_process(worker: Worker) -> None:
    with pytest.raises(AttributeError):
        worker.call(f"{CALLS}:absent")
    with pytest.raises(RuntimeError, match="the worker ended with 3"), Worker() as other:
        other.call("os:_exit", 3)


# ---- parts: number formats, inline PTX, layouts, the reader


def test_rounding_matches_torch() -> None:
    x = torch.cat([torch.randn(4096) * 10.0**k for k in range(-6, 6)] + [torch.tensor([0.0, -0.0, np.inf, -np.inf])])
    for name, td in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        with np.errstate(over="ignore"):
            got = torch.from_numpy(np.asarray(dtype(name).cast(x.numpy()), np.float32))
        assert torch.equal(got, x.to(td).float())
    for name, td, big in (("f8E4M3FN", torch.float8_e4m3fn, 448.0), ("f8E5M2", torch.float8_e5m2, 57344.0)):
        y = x.clamp(-big, big)
        got = torch.from_numpy(dtype(name).cast(y.numpy()))
        assert torch.equal(got, y.to(td).float())


def test_tf32_keeps_ten_bits() -> None:
    x = np.float32([1 + 2**-10, 1 + 2**-11, 1 + 2**-12])
    assert round_tf32(x).tolist() == [1 + 2**-10, 1 + 2**-10, 1.0]


def run_asm(text: str, constraints: str, *ins: np.ndarray) -> np.ndarray:
    """The first output, as floats."""
    asm = ptx.parse(text, constraints)
    blank = [np.zeros(ins[0].shape, np.uint32) for _ in range(asm.n_outputs)]
    regs = [np.ascontiguousarray(x).view(np.uint32) for x in ins]
    return ptx.Machine(asm, blank + regs, ins[0].shape).run()[0].view(np.float32)


def test_ptx_packed_fma() -> None:
    a, b, c = (np.random.default_rng(k).normal(size=(1, 32, 4)).astype(np.float32) for k in range(3))
    text = """{ .reg .b64 x, y, z; .reg .b32 t;
        mov.b64 x, {$1, $1}; mov.b64 y, {$2, $2}; mov.b64 z, {$3, $3};
        fma.rn.f32x2 x, x, y, z; mov.b64 {$0, t}, x; }"""
    assert np.array_equal(run_asm(text, "=r,r,r,r", a, b, c), (a.astype(np.float64) * b + c).astype(np.float32))


def test_ptx_predicated_branch_and_vote() -> None:
    x = np.ones((2, 32, 1), np.float32)
    x[1, 5] = 2  # only the second warp must take the multiplication
    text = (
        "{ .reg .pred p, q; setp.neu.f32 p, $1, 0f3F800000; vote.sync.any.pred q, p, 0xffffffff; mov.b32 $0, $1; "
        "@!q bra skip; mul.f32 $0, $1, 0f40400000; skip: }"
    )
    got = run_asm(text, "=f,f", x)
    assert (got[0] == 1).all() and np.array_equal(got[1], 3 * x[1])


@pytest.mark.parametrize(
    "text, x, expected",
    [
        ("add.rm.f32 $0, $1, 0f4B400000; sub.rn.f32 $0, $0, 0f4B400000;", 3.7, 3.0),
        ("max.f32 $0, $1, 0f40800000;", 3.5, 4.0),
        ("neg.f32 $0, $1;", 3.5, -3.5),
        ("ex2.approx.ftz.f32 $0, $1;", 3.0, 8.0),
        ("shl.b32 $0, $1, 0;", 3.5, 3.5),
        ("lop3.b32 $0, $1, 0x80000000, 0, 0x3C;", 3.5, -3.5),  # a ^ b
        ("shr.s32 $0, $1, 40;", 3.5, 0.0),
        ("prmt.b32 $0, $1, 0, 0x3210;", 3.5, 3.5),
        ("and.b32 $0, $1, 0xFFF00000;", 3.7, 3.5),
        ("cvt.rmi.f32.f32 $0, $1;", 3.7, 3.0),
    ],
)
def test_ptx_instructions(text: str, x: float, expected: float) -> None:
    assert run_asm(text, "=f,f", np.full((1, 1, 1), x, np.float32)).item() == expected


@pytest.mark.parametrize(
    "text",
    [
        "red.shared.add.f32 [$2], $1;",
        "red.release.gpu.global.add.f32 [$2], $1;",
        "ld.global.nc.f32 $0, [$2];",
        "ld.acquire.cta.global.b32 $0, [$2];",
        "fence.acq_rel.gpu;",
        "st.shared.f32 [$2], $1;",
        "bar.sync 8;",
        "bar.red.popc.u32 8, 32;",
    ],
)
def test_ptx_that_does_something_else_than_named(text: str) -> None:
    asm = ptx.parse(text, "=r,f,l")
    blank = [np.zeros((1, 32, 1), np.uint32) for _ in asm.constraints]
    with pytest.raises(gs.Unsupported):
        list(ptx.Machine(asm, blank, (1, 32, 1)).steps())


def test_ptx_unknown_instruction() -> None:
    with pytest.raises(gs.Unsupported):
        run_asm("sqrt.approx.f64x9 $0, $1;", "=f,f", np.ones((1, 1, 1), np.float32))


@pytest.mark.parametrize("width, shape", [(128, (64, 128)), (64, (32, 64)), (32, (16, 16)), (0, (8, 8))])
def test_nvmma_layout_is_a_permutation(width: int, shape: tuple[int, int]) -> None:
    enc = f"#ttg.nvmma_shared<{{swizzlingByteWidth = {width}, transposed = false, elementBitWidth = 16}}>"
    off, size = shared_offsets(enc, shape, 16)
    assert size == shape[0] * shape[1] * 2
    assert np.array_equal(np.sort(off.ravel()), np.arange(0, size, 2))
    if width == 128:
        assert off[1, 0] == 128 + 16 and off[0, 64] == 64 * 128  # xor swizzle; next slab after all rows


def test_tensor_memory_packing() -> None:
    def offsets(columns: int, bits: int) -> tuple[np.ndarray, int]:
        enc = f"#ttng.tensor_memory_encoding<blockM = 128, blockN = 64, colStride = {columns}>"
        return tmem_offsets(enc, (128, 64), bits)

    (full, full_columns), (half, half_columns), (loose, loose_columns) = offsets(1, 32), offsets(1, 16), offsets(2, 16)
    assert (full_columns, half_columns, loose_columns) == (64, 32, 64)
    assert np.array_equal(half[:, ::2], full[:, :32]) and np.array_equal(loose, full)


MMA3 = "#ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}>"
MMA2 = "#ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [2, 2], instrShape = [16, 8]}>"
BLOCKED = "#ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [4, 1], order = [1, 0]}>"


@pytest.mark.parametrize(
    "name, enc, shape",
    [
        ("wgmma", MMA3, (128, 128)),
        ("mma", MMA2, (64, 64)),
        ("blocked", BLOCKED, (64, 64)),
        ("slice", f"#ttg.slice<{{dim = 1, parent = {BLOCKED}}}>", (64,)),
    ],
)
def test_register_order_is_tritons(name: str, enc: str, shape: tuple[int, ...], worker: Worker) -> None:
    linear = worker.call(f"{CALLS}:linear_layout", name, shape)
    ours, theirs = register_order(enc, shape), register_order(linear, shape)
    assert ours is not None and theirs is not None and np.array_equal(ours, theirs)


def test_footprints() -> None:
    whole = Footprint.of(np.arange(0, 64, 4), 4)
    odd = Footprint.of(np.arange(4, 64, 8), 4)
    even = Footprint.of(np.arange(0, 64, 8), 4)
    assert whole.mask is None and odd.mask is not None
    assert whole.covers(odd) and not odd.covers(whole) and whole.overlaps(odd) and not odd.overlaps(even)


def test_constants() -> None:
    assert parse_constant("0xFF800000 : f32", parse_type("f32")) == -np.inf
    assert parse_constant("0xFF80 : bf16", parse_type("bf16")) == -np.inf
    assert parse_constant("-1 : i32", parse_type("i32")) == -1
    t = parse_type("tensor<2x2xi32, #ttg.blocked<{sizePerThread = [1, 4]}>>")
    assert parse_constant("dense<[[1, 2], [3, 4]]> : tensor<2x2xi32>", t).tolist() == [[1, 2], [3, 4]]
    assert parse_constant("dense<1.5> : tensor<4xf16>", parse_type("tensor<4xf16>")).tolist() == [1.5] * 4
