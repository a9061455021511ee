"""`RayReportCallback`: reports metrics and checkpoints of a fit to Ray Train."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy.checked import at_least, checked
from ls_strategy.errors import ConfigError
from ls_strategy.extras.ray.storage import RunStorage
from ls_strategy.extras.ray.strategy import RayZeROStrategy
from ls_strategy.extras.ray.train import CheckpointUploadMode, train
from ls_strategy.host.pytorch import Callback, pl, rank_zero_info, rank_zero_warn

_MOST_STEPS_BETWEEN_CHECKS = 100  # limits the delay if steps become slow after their number was chosen


class RayReportCallback(Callback):
    """Saves a checkpoint into the run's storage and reports it to Ray, with the metrics that were logged.

    ::

        every rank        saves its part of the folder into the storage of the run; nothing is copied
        the save is       committed
        ray.train.report  Ray now counts on it: it resumes from it, and removes older ones (``num_to_keep``)

    When Ray announces that a node will be taken away, a checkpoint is saved and reported at the end of a step, and
    training goes on until Ray restarts it. Start a fit with ``ckpt_path=latest_checkpoint()``, so that it continues.
    """

    @checked(every_n_epochs=at_least(0), every_n_steps=at_least(0), check_every_s=at_least(0))
    def __init__(self, *, every_n_epochs: int = 1, every_n_steps: int = 0, check_every_s: float = 5.0) -> None:
        """Set the options; none is required.

        Args:
            every_n_epochs: report at the end of every n-th epoch, after validation. 0: not at the end of epochs.
            every_n_steps: report after every n-th optimizer step as well. 0: not after steps.
            check_every_s: seconds between two questions to Ray whether a node will be taken away, rounded to optimizer
                steps, at most 100 of them. 0 asks after every step.

        Raises:
            ConfigError: a number is negative.
        """
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.check_every_s = check_every_s
        self._storage: RunStorage | None = None
        self._announced: Any = None
        self._reported: dict[str, Any] = {}
        self._last_step = 0
        self._steps = 0
        self._next_check = 1
        self._since = 0.0

    # start -----------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look at the storage of the run. The same on every rank."""
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, RayZeROStrategy):
            raise ConfigError(
                f"Got RayReportCallback with {type(trainer.strategy).__name__}. Use ls_strategy.ray.RayZeROStrategy in "
                "the train function of ray.train.torch.TorchTrainer, or Ray's RayTrainReportCallback for its own "
                "strategies."
            )
        # Last, so that the checkpoint has what other callbacks do at the end of a step or an epoch. A new list, because
        # Lightning iterates over the old one now.
        trainer.callbacks = [c for c in trainer.callbacks if c is not self] + [self]  # type: ignore[attr-defined]
        self._storage = RunStorage()
        if not self._storage.exists:
            rank_zero_warn("RayReportCallback: Ray's local mode has no storage, so only metrics are reported.")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting, and warn if the run was reported to Ray before and does not continue."""
        self._last_step = trainer.global_step
        self._steps, self._next_check, self._since = 0, 1, time.perf_counter()
        self._announced, self._reported = None, {}
        if trainer.global_step == 0 and train.get_checkpoint() is not None:
            rank_zero_warn(
                "RayReportCallback: this run has reported a checkpoint, but the fit starts from scratch. To continue, "
                "call fit(..., ckpt_path=ls_strategy.ray.latest_checkpoint())."
            )

    # report ----------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report after a step, if it is due or if Ray has announced that a node will be taken away. Collective."""
        step = trainer.global_step
        if step == self._last_step:
            return  # gradients are being accumulated
        self._last_step = step
        self._steps += 1
        announced = self._ask(trainer) if self._steps >= self._next_check else None
        if announced is not None:
            self._announced = announced
            ranks = ", ".join(map(str, announced.preempted_ranks))
            rank_zero_info(f"RayReportCallback: Ray announces that the node of ranks {ranks} will be taken away.")
        due = bool(self.every_n_steps) and step % self.every_n_steps == 0
        if announced is not None or (due and not (trainer.is_last_batch and self._ends_epoch(trainer))):
            self._report(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask Ray at the next step: validation may have been long."""
        self._next_check = 0

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report at the end of an epoch, if it is due. Collective."""
        if self._ends_epoch(trainer):
            self._report(trainer)

    def _ends_epoch(self, trainer: pl.Trainer) -> bool:
        return bool(self.every_n_epochs) and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _ask(self, trainer: pl.Trainer) -> Any:
        """Return what Ray newly announces, or None. Collective.

        The number of steps to the next question comes from the slowest rank's time, so it is equal on all ranks.
        """
        mine = int(1e6 * (time.perf_counter() - self._since) / self._steps)
        strategy = trainer.strategy
        assert isinstance(strategy, RayZeROStrategy)
        values: Tensor = strategy.require_engine().mesh.world.agree(torch.tensor([mine], dtype=torch.int64))
        due = int(self.check_every_s * 1e6 / max(int(values.item()), 1))
        self._next_check = min(max(due, 1), _MOST_STEPS_BETWEEN_CHECKS)
        self._steps, self._since = 0, time.perf_counter()
        ask = getattr(train, "get_preemption_info", None)  # newer than the oldest version that is supported
        found = None if ask is None else ask()
        return None if found == self._announced else found

    def _report(self, trainer: pl.Trainer) -> None:
        """Save and report. Collective."""
        assert self._storage is not None
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        if trainer.strategy.broadcast(metrics == self._reported):
            return  # the last step of a fit was due by itself, and ends an epoch that is due
        self._reported = metrics
        if not self._storage.exists or trainer.fast_dev_run:  # type: ignore[attr-defined]
            train.report(metrics=metrics)
            return
        strategy = trainer.strategy
        assert isinstance(strategy, RayZeROStrategy)
        wanted = f"checkpoint_epoch={trainer.current_epoch:06d}_step={trainer.global_step:09d}"
        name = strategy.broadcast(self._storage.free_name(wanted) if trainer.is_global_zero else "")
        trainer.save_checkpoint(self._storage.path(name), weights_only=False)
        if strategy.config.checkpoint.background:  # Ray must not count on a checkpoint that is not complete
            with strategy.saves.tolerating():
                strategy.wait_for_saves()
        if strategy.save_failed:
            train.report(metrics=metrics)
            return
        train.report(
            metrics=metrics,
            checkpoint=self._storage.checkpoint(name),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )
