"""Device and head line of the benchmark suite."""

import pytest
import torch

from lazymax import arch as arches


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_report_header() -> str:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return f"lazymax benchmarks on {arches.of(device)}, torch {torch.__version__}"
