"""Kernels under the schedules of many seeds, and with one synchronisation less; runs in a `gluon_sim.Worker`."""

from collections.abc import Callable, Sequence

from simulators.gluon_sim import Options, run_mutants

Outcome = tuple[bool, str]  # right, and what there is to say


def failures(run: Callable[[Options], Outcome], target: str, of: list[int], calls: Sequence[object]) -> list[str]:
    """What went wrong, one seed after the other; a seed has one of the calls, which `run` makes."""
    wrong = []
    for seed in of:
        try:
            ok, why = run(Options(target=target, seed=seed))
        except Exception as error:
            ok, why = False, f"{type(error).__name__}: {error}"
        if not ok:
            wrong.append(f"seed {seed} {calls[seed % len(calls)]}: {why}")
    return wrong


def survivors(
    run: Callable[[Options, int], Outcome], target: str, of: list[int], calls: Sequence[int]
) -> tuple[int, list[str]]:
    """(how many, what survived): every synchronisation of the kernel dropped or weakened once. calls: numbers."""

    def launch(options: Options) -> None:
        for which in calls:
            ok, why = run(options, which)
            assert ok, why

    outcomes = run_mutants(launch, Options(target=target, insert_fences=False), of)
    return len(outcomes), [str(outcome.mutant) for outcome in outcomes if not outcome.killed]
