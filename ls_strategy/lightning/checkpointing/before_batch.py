"""Save and restore values between two batches that a checkpoint leaves out, but callbacks and schedulers see.

Lightning's checkpoints are taken inside a hook, and leave out averages over the epoch so far, the metrics of the last
validation, the states of metrics, and the states of loaders on ranks above 0. A run that continues from a snapshot
restores all of these, so it logs, stops early and lowers its learning rate as an uninterrupted run does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ls_strategy.lightning._private import (
    add_epoch_values,
    epoch_values,
    loader_states,
    metric_states,
    reported_metrics,
    set_metric_states,
    set_reported_metrics,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl

MARK = "between_batches"
"""Under which a checkpoint says that it was taken before a batch was fetched."""

STATES = "before_batch"
"""Under which a checkpoint has `states`, among the random states of a rank."""


def states(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Return this rank's values, in types that ``torch.load(weights_only=True)`` accepts. Not collective.

    Loaders of virtual ranks have one state, which a checkpoint holds.
    """
    virtual = trainer.strategy.virtual is not None  # type: ignore[attr-defined]
    return {
        "loaders": [] if virtual else loader_states(trainer),
        "epoch": epoch_values(trainer),
        "reported": reported_metrics(trainer),
        "metrics": metric_states(module),
    }


def of_rank(random: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Take the values of all ranks out of their random states, and return those for ``rank`` of ``ranks``.

    On another number of ranks every rank continues with rank 0's, and rank 0 with the metrics of all of them.
    """
    found = [random[f"rank_{number}"].pop(STATES) for number in range(len(random))]
    if len(found) == ranks:
        return {**found[rank], "metrics": [found[rank]["metrics"]]}
    return {**found[0], "metrics": [each["metrics"] for each in found] if rank == 0 else []}


def restore(saved: Mapping[str, Any], trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Restore what `of_rank` has returned. Not collective."""
    add_epoch_values(trainer, module, saved["epoch"])
    set_reported_metrics(trainer, saved["reported"])
    set_metric_states(module, saved["metrics"])
