"""Base class of callbacks with a value that follows a `Schedule`."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from ls_strategy.extras.data_efficiency.schedule import Schedule
from ls_strategy.host.pytorch import Callback, pl, rank_zero_info, rank_zero_warn


class ScheduledCallback(Callback):
    """Keeps one value for all micro-batches of an optimizer step, in logs and checkpoints. Steps count from 1."""

    tag = "value"
    """Name in the logs."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.value: int | None = None
        """Value at the current step; None before the first."""
        self._step = 0

    def position(self) -> int:
        """Return the current position in the schedule: the step."""
        return self._step

    def current(self, trainer: pl.Trainer) -> int:
        """Return the value for the next batch, which is the same for all batches of a step. Not collective."""
        step = trainer.global_step + 1
        if self.value is None or step != self._step:
            self._step = step
            value = self.schedule.value(self.position())
            if self.value is None or (value != self.value and value == self.schedule.values[-1]):
                rank_zero_info(f"{type(self).__name__}: {self.tag} is {value} from step {step} on")
            self.value = value
        return self.value

    def _stop(self) -> None:
        """Undo the changes made for training. Idempotent."""
        raise NotImplementedError

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def log_value(self, module: pl.LightningModule) -> None:
        """Log the value, from a hook around a training batch."""
        if self.value is not None:
            module.log(self.tag, float(self.value), on_step=True, on_epoch=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "value": self.value}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the saved step. Warn if the schedule has changed."""
        self._step, self.value = state_dict["step"], None
        before = state_dict["value"]
        now = self.schedule.value(self.position())
        if before is not None and before != now:
            rank_zero_warn(
                f"{type(self).__name__}: {self.tag} was {before} at step {self._step} of the checkpoint's run, but "
                f"this schedule gives {now}. The run continues with this schedule. Pass the old one to keep the "
                "previous values."
            )
