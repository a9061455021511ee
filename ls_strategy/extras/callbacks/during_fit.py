"""How a callback that takes part in the fit loop leaves it, in whatever way the fit ends."""

from __future__ import annotations

from typing_extensions import override

from ls_strategy.host.pytorch import Callback, pl, rank_zero_info


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
        """Leave the fit loop, and report."""
        self.release()
        text = self.verdict(trainer)
        if text:
            rank_zero_info(f"{type(self).__name__}: {text}")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the fit loop."""
        self.release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the fit loop."""
        self.release()
