"""The shapes of `lazymax.bench.cases`, the one list, as pytest parameters; and a tiny one that any machine can time."""

import pytest

from lazymax.bench.cases import SUITES, Case

TINY = Case("tiny", (1, 4, 2, 65, 130, 64), "bottom_right", suite="any device")
CASES = (TINY, *(case for suite in SUITES.values() for case in suite))
PARAMETERS = [pytest.param(case, id=f"{case.suite}: {case.name}") for case in CASES]
