"""The recipes' logger."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import loggers
from typing_extensions import override


class TensorBoardLogger(loggers.TensorBoardLogger):
    """Lightning's logger without ``epoch``, which TensorBoard would show first because it sorts charts by name."""

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars."""
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)
