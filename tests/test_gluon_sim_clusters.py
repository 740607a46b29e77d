"""Pairs of CTAs and cluster launch control in the simulator of Gluon kernels: right kernels under any schedule, faults,
mutants, refusals."""

from collections.abc import Iterator

import pytest
import torch
from simulators import gluon_sim as gs
from simulators.gluon_sim import Options, Worker
from simulators.gluon_sim.selftest.faults import CANCEL, PAIR
from turns import FLOOR

pytestmark = pytest.mark.skipif(FLOOR, reason="Gluon of Triton 3.6 has neither")
CALLS = "simulators.gluon_sim.selftest.calls"
FAULTS = {
    "products_wait_for_one_p": (gs.RaceError, gs.BarrierError),
    "load_no_wait_empty": (gs.RaceError, gs.BarrierError),
    "expect_bytes_of_both": (gs.Deadlock,),
    "products_no_wait_p": (gs.RaceError, gs.BarrierError),
    "no_commit_kv": (gs.Deadlock,),
    "products_wait_for_one_half": (gs.RaceError, gs.UninitialisedRead),
}

CANCEL_FAULTS: dict[str, tuple[type[Exception], str]] = {
    "expect_too_few_bytes": (gs.Deadlock, "-8 bytes outstanding"),
    "no_wait": (gs.SimError, "nothing has waited|hold no data|no parity"),
    "no_fence": (gs.MissingFence, "clc.try_cancel"),
    "id_of_a_refusal": (gs.SimError, "request that cancelled none"),
    "ask_again": (gs.SimError, "after an answer that no program was cancelled"),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


def test_every_fault_has_its_test() -> None:
    assert {*FAULTS, "none"} == {*PAIR} and {*CANCEL_FAULTS, "none"} == {*CANCEL}


def test_a_pair_of_ctas_under_any_schedule(worker: Worker) -> None:
    steps = {worker.call(f"{CALLS}:pair", Options(seed=seed)).steps for seed in range(40)}
    assert len(steps) > 10


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_pair_of_ctas(fault: str, worker: Worker) -> None:
    for seed in range(10):
        with pytest.raises(FAULTS[fault]):
            worker.call(f"{CALLS}:pair", Options(seed=seed, insert_fences=False), fault)


def test_mutants_of_a_pair_of_ctas(worker: Worker) -> None:
    outcomes = worker.call(f"{CALLS}:mutate", "pair", "sm_100", range(3))
    assert all(o.killed for o in outcomes) and len(outcomes) == 20, gs.summary(outcomes)


def test_what_each_cta_of_a_pair_has(worker: Worker) -> None:
    dst = worker.call(f"{CALLS}:numbered_by_pairs", 1)
    assert torch.equal(dst[:256].long(), torch.arange(256))
    assert torch.equal(dst[256:].long(), torch.arange(128) + 1001)
    with pytest.raises(gs.GlobalRace):
        worker.call(f"{CALLS}:numbered_by_pairs", 2)


def test_what_crosses_from_cta_to_cta_is_refused(worker: Worker) -> None:
    with pytest.raises(gs.Unsupported, match="a reduction over the parts of two CTAs"):
        worker.call(f"{CALLS}:maximum_of_a_pair")


@pytest.mark.parametrize("resident", [1, 3])
def test_cancelled_programs_never_start(resident: int, worker: Worker) -> None:
    started = {
        worker.call(f"{CALLS}:cancel", Options(target="sm_100", seed=seed, resident=resident)).programs
        for seed in range(30)
    }
    assert len(started) > 1 and min(started) == resident  # requests are refused too


@pytest.mark.parametrize("fault", CANCEL_FAULTS)
def test_faults_of_launch_control(fault: str, worker: Worker) -> None:
    kind, words = CANCEL_FAULTS[fault]
    for seed in range(10):
        with pytest.raises(kind, match=words):
            worker.call(f"{CALLS}:cancel", Options(target="sm_100", seed=seed, insert_fences=False), fault)
