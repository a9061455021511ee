"""When a fit will end, for intervals whose times are made up."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Timer

from ls_strategy.extras.callbacks.intervals import Interval, TimeLeft
from ls_strategy.spans import FORWARD, VALIDATION


def trainer_of(**given: Any) -> Any:
    return SimpleNamespace(**{"global_step": 0, "callbacks": [], "estimated_stepping_batches": 3700, **given})


AUTOMATIC: Any = SimpleNamespace(automatic_optimization=True)
MANUAL: Any = SimpleNamespace(automatic_optimization=False)


def interval(step_s: float, validation_s: float = 0.0) -> Interval:
    return Interval(50, {FORWARD: 50 * step_s, VALIDATION: validation_s}, None)


def test_steps_at_the_speed_now_and_validation_as_so_far() -> None:
    left = TimeLeft(trainer_of(), AUTOMATIC, planned_step_s=1.0)
    left.add(interval(9.0, validation_s=100.0), 50)
    metrics = left.add(interval(2.0), 100)
    assert metrics == pytest.approx(
        {"zero/hours_left": 3.0, "zero/hours_left_by_plan": 2.0, "zero/step_over_plan": 2.0}
    )


def test_without_a_plan_there_is_no_comparison() -> None:
    assert TimeLeft(trainer_of(), AUTOMATIC, None).add(interval(1.0), 100) == {"zero/hours_left": 1.0}


def test_the_end_is_logged_once_after_the_steps_that_compile(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        left = TimeLeft(trainer_of(global_step=50), AUTOMATIC, planned_step_s=2.0)
        for step in (100, 150, 200):
            left.add(interval(4.0), step)
    assert caplog.messages[0] == "Monitor: the plan expects 2 s per step, 2.0 h for 3,650 steps."
    assert caplog.messages[1].startswith("Monitor: 3.9 h left after step 150 of 3,700 at 4 s per step, until 2")
    assert caplog.messages[1].endswith(" The plan expected 2 s per step.")
    assert len(caplog.messages) == 2


def test_a_fit_that_ends_by_the_clock_ends_then() -> None:
    timer = Timer(duration={"minutes": 30})
    assert TimeLeft(trainer_of(callbacks=[timer]), AUTOMATIC, None).add(interval(1.0), 100) == {"zero/hours_left": 0.5}


@pytest.mark.parametrize(
    ("trainer", "module"),
    [
        (trainer_of(estimated_stepping_batches=float("inf")), AUTOMATIC),
        (trainer_of(estimated_stepping_batches=-1), AUTOMATIC),
        (trainer_of(max_steps=-1), MANUAL),
    ],
    ids=["endless", "data without a length", "any number of steps per batch"],
)
def test_an_unknown_end_is_not_predicted(trainer: Any, module: Any) -> None:
    assert TimeLeft(trainer, module, 1.0).add(interval(1.0), 50) == {}


def test_manual_optimization_ends_with_its_steps() -> None:
    assert TimeLeft(trainer_of(max_steps=3650), MANUAL, None).add(interval(1.0), 50) == {"zero/hours_left": 1.0}
