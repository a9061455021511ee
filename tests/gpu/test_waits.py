"""How often training waits for the GPU: hardly more often than a plain Trainer, whose waits are counted too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.programs import WAITING, waiting_programs
from tests.gpu.run import each, result, run

STEPS = 6
LIMIT_S = 120
pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Every count, in one process."""
    return run(each, waiting_programs(), timeout_s=LIMIT_S)


@pytest.mark.parametrize("name", WAITING)
def test_training_waits_for_the_device_once_a_step(results: dict[str, Any], name: str) -> None:
    """Notices an ``item()``, a copy to memory that is not pinned, or a wait for every unit."""
    _, precision, allowed = WAITING[name]
    found, plain = result(results, name), result(results, f"plain, {precision}")
    assert sum(found.values()) <= sum(plain.values()) + STEPS * allowed, found


def test_a_wait_in_every_step_is_counted(results: dict[str, Any]) -> None:
    """So that the other test can fail."""
    reading, plain = result(results, "reading"), result(results, "plain, 32-true")
    assert sum(reading.values()) >= sum(plain.values()) + STEPS
