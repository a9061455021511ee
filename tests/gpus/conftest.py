"""Every test here needs several GPUs of this host, and ends in time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TIMEOUT_S = 700
"""Above the limits of two starts of ranks, whose errors say where they stood."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def ranks() -> int:
    """Ranks, one GPU each: a power of two, at most eight."""
    found = torch.cuda.device_count()
    if found < 2:
        pytest.skip(f"needs at least two GPUs, there are {found}")
    return max(size for size in (2, 4, 8) if size <= found)
