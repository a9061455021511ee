"""A callback whose number follows a `Schedule`: what it is at this step, in checkpoints, in the logs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from ls_strategy.data_efficiency.schedule import Schedule


class ScheduledCallback(Callback):
    """Keeps one value for all micro-batches of an optimizer step. Steps are counted from 1."""

    tag = "value"
    """Under which it is logged."""

    def __init__(self, schedule: Schedule) -> None:
        """Follow ``schedule``."""
        self.schedule = schedule
        self.value: int | None = None
        """At the running step; None before the first."""
        self._step = 0

    def position(self) -> int:
        """Where in the schedule the running step is: its number."""
        return self._step

    def current(self, trainer: pl.Trainer) -> int:
        """The value for the batch that comes next, the same for all batches of a step. Not collective."""
        step = trainer.global_step + 1
        if self.value is None or step != self._step:
            self._step = step
            value = self.schedule.value(self.position())
            if self.value is None or (value != self.value and value == self.schedule.values[-1]):
                rank_zero_info(f"{type(self).__name__}: {self.tag} is {value} from step {step} on")
            self.value = value
        return self.value

    def _stop(self) -> None:
        """Undo what was changed for training. Idempotent."""
        raise NotImplementedError

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The model is as it was."""
        self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Likewise."""
        self._stop()

    def log_value(self, module: pl.LightningModule) -> None:
        """Hand the value to the loggers. From a hook around a training batch."""
        if self.value is not None:
            module.log(self.tag, float(self.value), on_step=True, on_epoch=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run compares."""
        return {"step": self._step, "value": self.value}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; say so if the schedule is another one now."""
        self._step, self.value = state_dict["step"], None
        before = state_dict["value"]
        now = self.schedule.value(self.position())
        if before is not None and before != now:
            rank_zero_warn(
                f"{type(self).__name__}: {self.tag} was {before} at step {self._step} of the checkpoint's run, and "
                f"this schedule says {now} there. The run goes on with this schedule; give the old one to go on as "
                "before."
            )
