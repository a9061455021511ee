"""How a callback that takes part in the fit loop leaves it, in whatever way the fit ends."""

from __future__ import annotations

from typing_extensions import override

from ls_strategy.errors import PlanError
from ls_strategy.host.pytorch import Callback, pl, rank_zero_info
from ls_strategy.lightning.strategy import ZeROStrategy


class DuringFit(Callback):
    """Takes part in the fit loop from its ``on_train_start`` on."""

    def release(self) -> None:
        """Leave the fit loop as it was. It may be called several times."""
        raise NotImplementedError

    def verdict(self, trainer: pl.Trainer) -> str:
        """Return a line for the log at the end of a fit; empty for none."""
        del trainer
        return ""

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.release()
        text = self.verdict(trainer)
        if text:
            rank_zero_info(f"{type(self).__name__}: {text}")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.release()


# --- the strategy that the callbacks of this package require ----------------------------------------------------------


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
