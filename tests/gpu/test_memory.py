"""Device memory is what the planner predicts for a GPU, and pinned memory is what is planned."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.memory import BOUND, PINNED, PLANNED, SLACK_BYTES, forecast, programs
from tests.gpu.run import each, result, run

WIDTH = 3072
WORKSPACE_BYTES = 32 << 20
"""What cuBLAS may take for a product, and give back."""
LIMIT_S = 150
pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Every fit, in one process."""
    return run(each, programs(WIDTH), timeout_s=LIMIT_S)


@pytest.mark.parametrize("name", PLANNED)
def test_the_peak_is_what_was_predicted(results: dict[str, Any], name: str) -> None:
    """Notices a buffer that is allocated twice, or kept; and a state that stays on the device in spite of its tier."""
    predicted = forecast(name, WIDTH).peak.device
    assert (1 - BOUND) * predicted <= result(results, name)["device"] <= (1 + BOUND) * predicted + WORKSPACE_BYTES


@pytest.mark.parametrize("name", PINNED)
def test_the_host_pins_what_is_planned(results: dict[str, Any], name: str) -> None:
    """And two units on their way to the device. Notices torch's own blocks, which are powers of two."""
    found = result(results, name)
    assert found["registered"] > 0
    total = found["registered"] + found["by torch"]
    assert found["planned"] <= total + SLACK_BYTES
    assert total <= found["planned"] + 2 * found["unit"] + SLACK_BYTES
