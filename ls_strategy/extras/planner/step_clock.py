"""`StepClock`: the phases of the first steps of a fit, on one rank, by Lightning's hooks and `SpanRecorder`.

It records for `STEPS` optimizer steps, then does nothing. Where another recorder is active (`Monitor`'s), it takes the
steps without their phases.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from ls_strategy import device as dev
from ls_strategy.extras._lightning import around_fetches
from ls_strategy.host.pytorch import Callback
from ls_strategy.spans import BACKWARD, DATA, FORWARD, OPTIMIZER, VALIDATION, SpanRecorder

if TYPE_CHECKING:
    import lightning.pytorch as pl

SKIPPED = 2  # optimizer steps at the start that are not counted: they allocate
LEAST = 3  # a run with fewer counted steps teaches nothing
STEPS = 64
"""Optimizer steps that are counted. A step is as many batches as are accumulated: one in manual optimization."""

_TOGETHER = {True: 8, False: 1}
"""Optimizer steps that are timed together, on an accelerator and on the host: a reading waits for the device."""

Done = Callable[[dict[str, float]], None]
"""Called when a fit ends, with seconds per step: ``step``, and if known ``forward``, ``backward``, ``optimizer`` and
``rest``."""


class StepClock(Callback):
    """Takes the time of the first steps of one fit, then removes itself from its Trainer."""

    def __init__(self, device: torch.device, done: Done) -> None:
        """Prepare.

        Args:
            device: where the model computes.
            done: called at the end of a fit that had enough steps and no exception.
        """
        self._device, self._done = device, done
        self._recorder: SpanRecorder | None = None
        self._undo: Callable[[], None] | None = None
        self._samples: list[dict[str, float]] = []
        self._batches, self._since, self._counts = 0, 0.0, False
        self._running = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._running, self._counts, self._samples, self._batches = True, False, [], 0
        if SpanRecorder.active is None:
            self._recorder = SpanRecorder(self._device)
            self._undo = around_fetches(
                trainer, partial(self._recorder.enter, DATA), partial(self._recorder.leave, DATA)
            )
            self._recorder.start()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the time of the steps since the last reading."""
        if not self._running:
            return
        self._batches += 1
        steps, left = divmod(self._batches, max(int(trainer.accumulate_grad_batches), 1))
        if left or steps < (_TOGETHER[dev.is_accelerator(self._device)] if self._counts else SKIPPED):
            return
        sample = self._read()
        if self._counts:
            self._samples.append({name: seconds / steps for name, seconds in sample.items()})
        self._counts, self._batches = True, 0
        if len(self._samples) * steps >= STEPS:
            self._stop()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start what does not count as part of a step."""
        if self._running and self._recorder is not None:
            self._recorder.enter(VALIDATION)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End it; without a recorder, take the steps until now out."""
        if self._running and self._recorder is not None:
            self._recorder.leave(VALIDATION)
        elif self._running:
            self._since, self._batches = time.perf_counter(), 0

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        if len(self._samples) >= LEAST:
            self._done(typical(self._samples))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave(trainer)

    def _leave(self, trainer: pl.Trainer) -> None:
        """Make a new list, because the Trainer goes through this one now."""
        self._stop()
        trainer.callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]

    def _read(self) -> dict[str, float]:
        """Return the seconds since the last reading."""
        if self._recorder is None or SpanRecorder.active is not self._recorder:
            dev.synchronize(self._device)
            since, self._since = self._since, time.perf_counter()
            return {"step": self._since - since}
        phases = self._recorder.take_phases()
        phases.pop(VALIDATION)
        known = {name: phases.pop(name) for name in (FORWARD, BACKWARD, OPTIMIZER)}
        rest = sum(phases.values())
        return {**known, "rest": rest, "step": sum(known.values()) + rest}

    def _stop(self) -> None:
        self._running = False
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None
        if self._undo is not None:
            self._undo()
            self._undo = None


def typical(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of the faster half of samples: what disturbs a step only makes it longer."""
    ordered = sorted(samples, key=lambda sample: sample["step"])
    half = ordered[: (len(ordered) + 1) // 2]
    names = [name for name in half[0] if all(name in sample for sample in half)]
    return {name: statistics.fmean(sample[name] for sample in half) for name in names}
