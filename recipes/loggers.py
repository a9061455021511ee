"""What the recipes log with."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import loggers
from typing_extensions import override


class TensorBoardLogger(loggers.TensorBoardLogger):
    """Lightning's, without the chart of ``epoch``: TensorBoard sorts charts by name, so it would be the first one."""

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars."""
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)
