"""The rows of the suite as text: a line per case, and what the house wanted to know."""

from collections.abc import Sequence

from ..check import LEFT_OUT, OK
from ..peers import LAZYMAX
from ..report import summary
from .measure import FeatureRow


def case_line(rows: Sequence[FeatureRow]) -> str:
    """One case: lazymax and the cost beside its base, then the peers."""
    own = next(row for row in rows if row.candidate == LAZYMAX)
    if own.case.startswith(f"{own.base}, "):
        head = f"  {own.case.removeprefix(own.base)[2:]:<34}"
    else:
        beside = f" beside {own.base}" if own.base else ""
        head = f"\n{own.case}  [{own.shape}] {own.dtype}{beside}\n{'':<36}"
    return " | ".join([f"{head} {_figures(own)}", *(_peer(row) for row in rows if row is not own)])


def _figures(row: FeatureRow) -> str:
    if row.ms is None or row.tflops is None:
        return _no_time(row)
    text = f"{row.ms:>8.4g} ms {f'({row.ms_min:.4g}..{row.ms_max:.4g})':<18} {row.tflops:>6.1f} TFLOP/s"
    if row.matmul_share is not None:
        text += f" {row.matmul_share:>4.0%}"
    if row.cost is not None:
        text += f"  cost {row.cost:.3f} ({row.cost_min:.3f}..{row.cost_max:.3f}) rate {row.rate:.3f}"
    if row.differs is not None:
        text += "  same bits" if row.differs == 0 else f"  differs {row.differs:.2g}"
    memory = "" if row.extra_mib is None else f"  +{row.extra_mib:.1f} MiB"
    return f"{text}  err {row.error:.1e}{memory}  {row.plan}"


def _no_time(row: FeatureRow) -> str:
    status = row.status if row.status == LEFT_OUT else row.status.upper()
    return f"{status}: {row.reason}" if row.status != OK else "not timed: lazymax has no time"


def _peer(row: FeatureRow) -> str:
    if row.ms is None:
        return f"{row.candidate} {_no_time(row)}"
    ratio = "" if row.lazymax_speed is None else f" {row.lazymax_speed:.3f}x"
    return f"{row.candidate} {row.ms:.4g} ms ({row.ms_min:.4g}..{row.ms_max:.4g}){ratio}"


def closing(rows: Sequence[FeatureRow]) -> str:
    """Costs that have a bound, values that should be the same, speed beside others, and what failed."""
    lines = []
    for row in rows:
        if row.cost is not None and row.allowed is not None:
            kept = abs(row.cost - 1.0) <= row.allowed
            lines.append(
                f"{row.case} ({row.dtype}): cost {row.cost:.3f}, within {row.allowed:.0%}: {'yes' if kept else 'NO'}"
            )
    same = [row for row in rows if row.differs is not None]
    if same:
        apart = [row for row in same if row.differs]
        lines.append(f"{len(same) - len(apart)} of {len(same)} cases that mean the same as their base give its bits")
        lines += [f"  {row.case} ({row.dtype}): differs by {row.differs:.2g} at most" for row in apart]
    lines += summary(rows).splitlines()
    wrong = [row for row in rows if row.status not in (OK, LEFT_OUT)]
    lines += [f"{row.status.upper()}: {row.case}, {row.candidate}: {row.reason}" for row in wrong]
    return "\n".join(lines)


COUNTED = "TFLOP/s over the pairs that count, counted on the device. "
LEGENDS = {
    "features": "cost: time over that of the base, the case above that stands alone, in the same rounds; rate: TFLOP/s "
    f"over the base's.\n{COUNTED}flex+mask makes its block mask in every call, flex has it ready; 1.10x: lazymax is "
    "10% faster.",
    "varlen": f"{COUNTED}1.10x: lazymax is 10% faster.",
}
