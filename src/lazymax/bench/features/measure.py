"""One case after the other, each beside its base in the same rounds."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ... import ops
from ...dispatch import Plan
from ...testing import make_qkv
from ..check import OK, Oracle
from ..clock import Clock, ratio, rounds_of
from ..measure import Examined, Row, band_of, examine, figures, least_bytes
from ..peers import LAZYMAX, LeftOut, Ready
from .calls import QKV, Call, build, visible_pairs
from .cases import Feature
from .flex import FLEX, FLEX_AND_MASK

BASE = "base"
Peers = Callable[[Call], Mapping[str, Callable[[], Ready]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRow(Row):
    """One candidate on one case. The last fields are lazymax's alone, and None on a base."""

    base: str = ""
    base_ms: float | None = None  # of the base, median over the same rounds
    cost: float | None = None  # time over the base's: median of the ratios within each round
    cost_min: float | None = None
    cost_max: float | None = None
    rate: float | None = None  # TFLOP/s over the base's: the cost without what there was less (or more) to do
    allowed: float | None = None  # how far the cost may be from 1
    differs: float | None = None  # largest |difference| to the base's output, where the values are the same


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked case: what it is, who may be timed on it."""

    call: Call
    flops: float
    plan: str
    examined: Examined

    @property
    def ready(self) -> Ready | None:
        return self.examined.ready.get(LAZYMAX)


def alone(call: Call) -> Mapping[str, Callable[[], Ready]]:
    """Nobody beside lazymax."""
    return {}


class Suite:
    """Measures the cases of one dtype. `faults`: by name, of cases that failed elsewhere and must not run here."""

    def __init__(
        self,
        everything: tuple[Feature, ...],
        dtype: torch.dtype,
        clock: Clock,
        *,
        impl: str = "auto",
        rounds: int = 5,
        window_ms: float = 40.0,
        matmul_tflops: float | None = None,
        peers: Peers = alone,
        faults: Mapping[str, str] | None = None,
    ) -> None:
        self.features = {feature.name: feature for feature in everything}
        self.dtype, self.clock, self.impl = dtype, clock, impl
        self.rounds, self.window_ms, self.ceiling = rounds, window_ms, matmul_tflops
        self.peers, self.faults = peers, faults or {}
        self._inputs: dict[tuple[int, ...], QKV] = {}
        self._base: Prepared | None = None

    def inputs(self, shape: tuple[int, ...]) -> QKV:
        """q, k and v; of the last two shapes, a case's and its base's, they are kept."""
        if shape not in self._inputs:
            while len(self._inputs) > 1:
                self._inputs.pop(next(iter(self._inputs)))
            self._inputs[shape] = make_qkv(*shape, dtype=self.dtype, device=self.clock.device)
        self._inputs[shape] = self._inputs.pop(shape)  # the latest last
        return self._inputs[shape]

    def base_of(self, feature: Feature) -> Prepared | None:
        """The checked base of a case, prepared once for all cases that follow each other."""
        if feature.base is None:
            return None
        if self._base is None or self._base.call.feature.name != feature.base:
            self._base = None
            self._base = self.prepare(self.features[feature.base])
        return self._base

    def prepare(self, feature: Feature, peers: Peers = alone) -> Prepared:
        """Build, run once and check."""
        call = build(feature, self.inputs(feature.shape), self.impl)
        p = call.problem
        pairs = visible_pairs(p, call.extras, self.clock.device)
        plans: list[Plan] = []
        makes: dict[str, Callable[[], Ready]] = {LAZYMAX: lambda: self._first(call, plans)}
        makes |= peers(call)
        oracle = Oracle(p, *call.qkv, call.extras)
        examined = examine(makes, oracle, self.clock, strict=(LAZYMAX, FLEX, FLEX_AND_MASK))
        if p.return_lse and LAZYMAX in examined.ready:
            out, lse = call.result()
            verdict = examined.verdicts[LAZYMAX] = oracle.judge(out, True, lse)
            if verdict.status != OK:
                del examined.ready[LAZYMAX], examined.memory[LAZYMAX]
        return Prepared(call, 2.0 * pairs * (p.head_dim + p.v_head_dim), _described(plans), examined)

    def _first(self, call: Call, plans: list[Plan]) -> Ready:
        """The first call, which builds the kernel; `plans` gets what really ran."""
        fault = self.faults.get(call.feature.name)
        if fault:
            raise LeftOut(f"failed in a process of its own: {fault}")

        def observe(plan: Plan | None) -> None:
            if plan is not None:
                plans.append(plan)

        ops.observers.append(observe)
        try:
            call.run()
        finally:
            ops.observers.remove(observe)
        if self.clock.device.type == "cuda" and self.impl != "reference" and not _on_kernel(plans):
            raise LeftOut(f"no kernel ran but {_described(plans) or 'torch'}: {plans[-1].reason if plans else ''}")
        return Ready(call.run)

    def measure(self, feature: Feature) -> list[FeatureRow]:
        """Check and time lazymax and its peers on one case, beside the base; a row each."""
        base = self.base_of(feature)
        case = self.prepare(feature, self.peers)
        examined = case.examined
        if base is None:
            self._base = case
        differs = self._compare(case, base)
        together = ({BASE: base.ready} if base and base.ready else {}) | examined.ready
        # without lazymax's own time there is nothing to put the others beside
        times = rounds_of(together, self.clock, self.rounds, self.window_ms) if LAZYMAX in together else {}
        return [self._row(case, base, name, times, differs) for name in examined.verdicts]

    def _compare(self, case: Prepared, base: Prepared | None) -> float | None:
        """Largest difference to the base's output where it should have the same values; NaN counts as infinite. Packed
        rows come in the order of batch and length."""
        if not (case.call.feature.same and base and base.ready and case.ready):
            return None
        mine, other = (ready.run().transpose(1, 2).flatten(0, 1).float() for ready in (case.ready, base.ready))
        return float((mine - other).abs().nan_to_num(torch.inf, torch.inf, torch.inf).max())

    def _row(
        self, case: Prepared, base: Prepared | None, name: str, times: Mapping[str, list[float]], differs: float | None
    ) -> FeatureRow:
        feature, p, verdict = case.call.feature, case.call.problem, case.examined.verdicts[name]
        moved = least_bytes(p) + sum(t.numel() * t.element_size() for _, t in case.call.extras.tensors())
        beside: dict[str, float | None] = {}
        if name == LAZYMAX and base and BASE in times and name in times:
            costs = [own / other for own, other in zip(times[name], times[BASE], strict=True)]
            cost = ratio(times[name], times[BASE])
            beside = dict(
                base_ms=statistics.median(times[BASE]), cost=cost, cost_min=min(costs), cost_max=max(costs),
                rate=case.flops / base.flops / cost, allowed=feature.allowed, differs=differs,
            )  # fmt: skip
        return FeatureRow(
            suite=feature.suite,
            case=feature.name,
            shape=",".join(map(str, feature.shape)),
            dtype=p.dtype,
            band=band_of(p),
            candidate=name,
            plan=case.plan if name == LAZYMAX else "",
            status=verdict.status,
            reason=verdict.why,
            flops=case.flops,
            bytes=moved,
            intensity=case.flops / moved,
            error=verdict.error,
            extra_mib=case.examined.memory.get(name),
            base=feature.base or "",
            **figures(name, times, case.flops, self.ceiling),
            **beside,
        )


def _on_kernel(plans: list[Plan]) -> bool:
    return bool(plans) and plans[-1].route == "triton"


def _described(plans: list[Plan]) -> str:
    if not plans:
        return ""
    return plans[-1].describe() + (":listed" if plans[-1].listed else "")
