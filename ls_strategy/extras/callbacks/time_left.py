"""`TimeLeft`: when a fit will end, by its speed now, and by the plan."""

from __future__ import annotations

import datetime
import math
import time

from ls_strategy.extras.callbacks.intervals import Interval
from ls_strategy.host.pytorch import Timer, pl, rank_zero_info
from ls_strategy.spans import VALIDATION


class TimeLeft:
    """The time that one fit still takes: its steps at the speed of the last interval, and validation as so far."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, planned_step_s: float | None) -> None:
        """Say what the plan expects.

        Args:
            trainer: whose fit begins.
            module: that it trains.
            planned_step_s: seconds per step of the plan. None: there is none.
        """
        self._steps = last_step(trainer, module)
        self._planned_step_s = planned_step_s
        self._timers = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
        self._validation_s = 0.0
        self._counted = 0
        self._said = False
        if planned_step_s is not None and self._steps is not None:
            left = self._steps - trainer.global_step
            rank_zero_info(
                f"Monitor: the plan expects {planned_step_s:.3g} s per step, {_hours(left * planned_step_s)} for "
                f"{left:,} steps."
            )

    def add(self, interval: Interval, step: int) -> dict[str, float]:
        """Return the scalars after an interval. The second one also logs when the end is, because first steps compile.

        Args:
            interval: the last one.
            step: ``trainer.global_step``.
        """
        self._counted += interval.steps
        self._validation_s += interval.seconds.get(VALIDATION, 0.0)
        if self._steps is None:
            return {}
        left, step_s, plan = max(self._steps - step, 0), interval.step_s / interval.steps, self._planned_step_s
        validation_s = self._validation_s / self._counted
        left_s = self._until_stopped(left * (step_s + validation_s))
        metrics = {"zero/hours_left": left_s / 3600}
        if plan is not None:
            metrics["zero/hours_left_by_plan"] = self._until_stopped(left * (plan + validation_s)) / 3600
            metrics["zero/step_over_plan"] = step_s / plan
        if self._counted > interval.steps and left and not self._said:
            self._said = True
            planned = "" if plan is None else f" The plan expected {plan:.3g} s per step."
            end = datetime.datetime.fromtimestamp(time.time() + left_s).astimezone()
            rank_zero_info(
                f"Monitor: {_hours(left_s)} left after step {step:,} of {self._steps:,} at {step_s:.3g} s per step, "
                f"until {end:%Y-%m-%d %H:%M %Z}.{planned}"
            )
        return metrics

    def _until_stopped(self, seconds: float) -> float:
        """Return ``seconds``, or the time after which ``Trainer(max_time=)`` ends the fit, if that is less."""
        remaining = (timer.time_remaining() for timer in self._timers)
        return min([seconds, *(max(each, 0.0) for each in remaining if each is not None)])


def last_step(trainer: pl.Trainer, module: pl.LightningModule) -> int | None:
    """Return ``trainer.global_step`` at the end of the fit; None if it is not known."""
    if not module.automatic_optimization:  # a batch may take any number of steps
        return trainer.max_steps if trainer.max_steps > 0 else None
    steps = trainer.estimated_stepping_batches
    return int(steps) if math.isfinite(steps) and steps > 0 else None


def _hours(seconds: float) -> str:
    """Return a duration as text, as exact as is of interest."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"
