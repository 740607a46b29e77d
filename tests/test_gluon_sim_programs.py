"""Programs that order each other, in the simulator of Gluon kernels: what atomics release and acquire, polls, faults,
mutants."""

from collections.abc import Iterator

import pytest
import torch
from simulators import gluon_sim as gs
from simulators.gluon_sim import Options, Worker
from simulators.gluon_sim.ordering import Actor, Clocks
from simulators.gluon_sim.selftest.faults import SUM

CALLS = "simulators.gluon_sim.selftest.calls"
RESIDENT = (1, 2, 4)
UNZEROED = r"'sums' by program \d: \d+ elements were (written|updated by atomics) by "
UNFINISHED = r"(load of|atomic to) 'sums' by program \d: \d+ elements were (read|updated by atomics) by "
FAULTS: dict[str, tuple[type[Exception], str]] = {
    "ready_relaxed": (gs.GlobalRace, UNZEROED),
    "ready_polled_relaxed": (gs.GlobalRace, UNZEROED),
    "ready_no_barrier": (gs.GlobalRace, UNZEROED),
    "no_go": (gs.GlobalRace, UNZEROED),
    "no_poll_ready": (gs.GlobalRace, UNZEROED),
    "done_relaxed": (gs.GlobalRace, UNFINISHED),
    "done_polled_relaxed": (gs.GlobalRace, UNFINISHED),
    "done_no_barrier": (gs.GlobalRace, UNFINISHED),
    "no_poll_done": (gs.GlobalRace, UNFINISHED),
    "done_early": (gs.GlobalRace, UNFINISHED),
    "ready_in_cta": (gs.GlobalRace, "'ready' by program"),
    "wait_for_one_more": (gs.Livelock, "polls what nothing will change"),
}
SOMETIMES = {  # where one that does not count is late
    "done_one_fewer": (gs.GlobalRace, UNFINISHED),
    "ready_one_fewer": (gs.GlobalRace, UNZEROED),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


def test_every_fault_has_its_test() -> None:
    assert {*FAULTS, *SOMETIMES, "none"} == {*SUM}


@pytest.mark.parametrize("resident", RESIDENT)
def test_a_sum_in_turn_under_any_schedule(resident: int, worker: Worker) -> None:
    call = f"{CALLS}:sum_in_turn"
    options = [Options(target="sm_90", seed=seed, resident=resident) for seed in range(40)]
    assert len({worker.call(call, given).steps for given in options}) > 5  # the schedules do differ
    assert worker.call(call, options[0], programs=9).programs == 9


@pytest.mark.parametrize("resident", RESIDENT)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_sum_in_turn(fault: str, resident: int, worker: Worker) -> None:
    error, text = FAULTS[fault]
    for seed in range(6):
        with pytest.raises(error, match=text):
            worker.call(f"{CALLS}:sum_in_turn", Options(target="sm_90", seed=seed, resident=resident), fault)


@pytest.mark.parametrize("fault", SOMETIMES)
def test_a_count_that_is_one_short(fault: str, worker: Worker) -> None:
    error, text = SOMETIMES[fault]
    with pytest.raises(error, match=text):
        for seed in range(20):
            worker.call(f"{CALLS}:sum_in_turn", Options(target="sm_90", seed=seed, resident=3), fault)


@pytest.mark.parametrize("resident", [1, 3])
def test_every_synchronisation_of_a_sum_in_turn_is_needed(resident: int, worker: Worker) -> None:
    outcomes = worker.call(f"{CALLS}:mutate", "sum_in_turn", "sm_90", range(4), resident)
    how = [o.mutant.how for o in outcomes]
    assert (how.count("acquire nothing"), how.count("release nothing")) == (2, 3)
    assert sum(o.mutant.how == "drop" and "wait" not in o.mutant.op for o in outcomes) == 4  # barriers and an arrival
    assert all(o.killed for o in outcomes), gs.summary(outcomes)


@pytest.mark.parametrize("resident", RESIDENT)
def test_what_a_relaxed_atomic_passes_on(resident: int, worker: Worker) -> None:
    """A program reads what two others before it have written or counted; the one behind it overwrites that."""
    options = Options(target="sm_90", resident=resident)
    x = worker.call(f"{CALLS}:hand_on", options)
    assert torch.equal(x, torch.tensor([2.0, 1.0]).repeat_interleave(128))
    for fault in (1, 2):  # no barrier, nothing released
        with pytest.raises(gs.GlobalRace, match="store to 'x' by program 3: 128 elements were read by program 2"):
            worker.call(f"{CALLS}:hand_on", options, fault)
    with pytest.raises(gs.GlobalRace, match="store to 'x' by program 1: 128 elements were written by program 0"):
        worker.call(f"{CALLS}:hand_on", options, 3)  # it polled by relaxed atomics


@pytest.mark.parametrize("by_tma", [False, True])
def test_asynchronous_copies_of_what_other_programs_write(by_tma: bool, worker: Worker) -> None:
    """A copy comes after what is known where it is issued, TMA's with a fence; who waits for it comes after it."""
    unwritten = r"(TMA load|async copy|load) of '?x\w*.* by program 1: 128 elements were written by program 0"
    unread = r"store to 'x\w*' by program 2: 128 elements were read by program 1"
    for seed in range(4):
        options = Options(target="sm_90", seed=seed, resident=3)
        worker.call(f"{CALLS}:stage", options, by_tma)
        for fault in (1, 2) if by_tma else (1,):
            with pytest.raises(gs.GlobalRace, match=unwritten):
                worker.call(f"{CALLS}:stage", options, by_tma, fault)
    with pytest.raises(gs.GlobalRace, match=unread):  # unless the copy has landed by chance
        for seed in range(20):
            worker.call(f"{CALLS}:stage", Options(target="sm_90", seed=seed, resident=3), by_tma, 3)


def test_every_synchronisation_of_a_copy_by_tma_is_needed(worker: Worker) -> None:
    outcomes = worker.call(f"{CALLS}:mutate", "stage_by_tma", "sm_90", range(4), 3)
    how = [o.mutant.how for o in outcomes]
    assert how.count("acquire nothing") == 2 and sum(o.mutant.op == "tt.elementwise_inline_asm" for o in outcomes) == 3
    assert all(o.killed for o in outcomes), gs.summary(outcomes)


def test_a_time_is_what_was_done_before_the_warps_met() -> None:
    actor = Actor(3, 0, True)
    actor.used = True
    assert actor.all_warps() == {3: 1} and not actor.clock  # all arrive, none waits
    assert actor.now == 2
    actor.meet()
    assert actor.clock == {3: 1} and actor.now == 2


def test_clocks_are_kept_once() -> None:
    clocks = Clocks()
    first = clocks.number({1: 2, 5: 1})
    assert clocks.number({5: 1, 1: 2}) == first and clocks.number({}) == 0
