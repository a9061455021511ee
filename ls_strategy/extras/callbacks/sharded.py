"""The strategy that the callbacks of this package require."""

from __future__ import annotations

from ls_strategy.errors import PlanError
from ls_strategy.host.pytorch import Callback, pl
from ls_strategy.lightning.strategy import ZeROStrategy


def zero_strategy(trainer: pl.Trainer, callback: Callback) -> ZeROStrategy:
    """Return the Trainer's `ZeROStrategy`.

    Raises:
        PlanError: the Trainer has another strategy.
    """
    if not isinstance(trainer.strategy, ZeROStrategy):
        raise PlanError(
            f"{type(callback).__name__} reads shards, and strategy={type(trainer.strategy).__name__} has none. "
            'Use strategy="zero0" to "zero3", or leave the callback out.'
        )
    return trainer.strategy
