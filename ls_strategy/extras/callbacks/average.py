"""`ShardedEMA`: an average of the weights, stored in shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy.access.average import exchange_masters
from ls_strategy.checked import at_least, between, checked
from ls_strategy.checkpoint.full import full_state_dict, masters_from_state_dict
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError, StateError
from ls_strategy.extras.callbacks.during_fit import zero_strategy
from ls_strategy.host.pytorch import Callback, pl
from ls_strategy.precision import at_least_fp32
from ls_strategy.zero.flat.flat_buffer import FlatBuffer


class ShardedEMA(Callback):
    """Exponential moving average of the weights in fp32 shards (fp64 for fp64), at every stage, without communication.

    The average replaces the weights during validation. Checkpoints have the full average under ``ema_state_dict``, with
    the names and shapes of ``state_dict``, so that ``module.load_state_dict(checkpoint["ema_state_dict"])`` works
    anywhere.
    """

    @checked(decay=between(0, 1), every_n_steps=at_least(1))
    def __init__(self, decay: float = 0.999, every_n_steps: int = 1, validate_with_average: bool = True) -> None:
        """Set the averaging options.

        Args:
            decay: weight of the old average in each update: ``ema = decay * ema + (1 - decay) * weights``.
            every_n_steps: optimizer steps between updates.
            validate_with_average: run validation with the average instead of the weights.
        """
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.validate_with_average = validate_with_average
        self._average: list[Tensor] = []
        self._last_step = 0
        self._swapped = False
        self._exact: dict[int, Tensor] = {}  # while swapped: averages, by number, that the masters cannot hold
        self._loaded: Mapping[str, Tensor] | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from the weights, or from the checkpoint's average."""
        engine = zero_strategy(trainer, self).require_engine()
        self._average = [_copy(m) for m in engine.trainable_masters()]
        frozen: dict[int, Tensor] = {}
        if self._loaded is not None:
            masters_from_state_dict(pl_module, self._loaded, engine.stepper.flats_that_train, self._average)
            frozen = self._averages_of_frozen(pl_module, self._loaded, engine.flats)
            self._loaded = None
        engine.stepper.unfreezing.on_admitted.append(partial(self._add, weakref.ref(engine), frozen))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count from the step of a checkpoint, which is in its average: a batch may end without a step."""
        self._last_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update after every ``every_n_steps`` optimizer steps."""
        if trainer.global_step == self._last_step or trainer.global_step % self.every_n_steps:
            return
        self._last_step = trainer.global_step
        engine = self._engine(trainer)
        for average, master in zip(self._average, engine.trainable_masters(), strict=True):
            average.lerp_(master.detach().to(average.dtype), 1.0 - self.decay)

    def copy_for_rewind(self, trainer: pl.Trainer) -> Callable[[bool], None]:
        """Return a function that puts back the average of now, after the run has gone back to this step."""
        kept, last_step = [average.clone() for average in self._average], self._last_step

        def put_back(_: bool) -> None:
            self._last_step = last_step
            for average, value in zip(self._average, kept, strict=True):
                average.copy_(value)

        return put_back

    @staticmethod
    def _averages_of_frozen(
        module: pl.LightningModule, saved: Mapping[str, Tensor], flats: Sequence[FlatBuffer]
    ) -> dict[int, Tensor]:
        """Return the averages of buffers that are frozen now but have trained before, by ``id`` of the buffer."""
        found: dict[int, Tensor] = {}
        names = {id(p): name for name, p in module.named_parameters()}
        for flat in flats:
            if flat.is_frozen and all(names[id(p)] in saved for p in flat.params):
                value = _copy(flat.read_master())
                average = value.clone()
                masters_from_state_dict(module, saved, [flat], [average])
                if not torch.equal(value, average):
                    found[id(flat)] = average
        return found

    def _add(self, engine: weakref.ref[Engine], frozen: dict[int, Tensor], flats: list[FlatBuffer]) -> None:
        """Average buffers that were frozen until now. Their average so far is their value, or in ``frozen``."""
        now = engine()
        for place, flat in enumerate([] if now is None else now.stepper.flats_that_train):
            if flat in flats:
                average = frozen.pop(id(flat), None)
                self._average.insert(place, _copy(flat.read_master()) if average is None else average)

    def _engine(self, trainer: pl.Trainer) -> Engine:
        """Return the engine, if its shards are still those of the average. Not collective."""
        engine = zero_strategy(trainer, self).require_engine()
        shards = [flat.stepped_numel for flat in engine.stepper.flats_that_train]
        if shards != [a.numel() for a in self._average]:
            raise PlanError(
                "ShardedEMA averages the parameters that were in the optimizers when the fit began, but parameters "
                "were added since (add_param_group, or a fine-tuning callback). Give all parameters to the optimizer "
                "in configure_optimizers, and freeze those that train later by requires_grad_(False)."
            )
        return engine

    def _swap(self, trainer: pl.Trainer) -> None:
        engine = self._engine(trainer)
        if not self._swapped:  # masters in 16 bits would give a rounded average back
            rounding = zip(engine.stepper.flats_that_train, self._average, strict=True)
            self._exact = {n: a.clone() for n, (flat, a) in enumerate(rounding) if flat.master_dtype != a.dtype}
        exchange_masters(engine, self._average)
        if self._swapped:
            for number, exact in self._exact.items():
                self._average[number].copy_(exact)
            self._exact = {}
        self._swapped = not self._swapped

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Swap the average in."""
        if self.validate_with_average and self._average and not self._swapped:
            self._swap(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Swap the weights back in, before `ModelCheckpoint` saves."""
        if self._swapped:
            self._swap(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Forget a swap; nothing collective may run here."""
        self._swapped = False

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the full average on rank 0. Collective.

        Raises:
            StateError: the average is in the weights' place.
        """
        if not self._average:
            return
        if self._swapped:  # the checkpoint's state_dict has been read already, from the average
            raise StateError(
                "Got a save during validation, while ShardedEMA has put the average in the weights' place: the "
                "checkpoint would exchange the two. Save in on_validation_end of a callback after ShardedEMA, as "
                "ModelCheckpoint does, or later; or set ShardedEMA(validate_with_average=False)."
            )
        strategy, engine = zero_strategy(trainer, self), self._engine(trainer)
        raw = strategy.raw_state_dict()
        if strategy.collection is not None:
            checkpoint["ema_state_dict"] = strategy.collection.weights(raw, self._average)
            return
        averages = dict(zip(engine.stepper.flats_that_train, self._average, strict=True))
        checkpoint["ema_state_dict"] = full_state_dict(raw, engine.units, engine.mesh, others=averages)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the average until the shards exist."""
        self._loaded = checkpoint.get("ema_state_dict")


def _copy(master: Tensor) -> Tensor:
    """Return the weights in fp32, or fp64 for fp64: during validation the average's memory holds the weights."""
    return master.detach().to(at_least_fp32(master.dtype), copy=True)
