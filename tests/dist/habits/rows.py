"""How a habit is trained, and compared with the same code under DDP.

Many habits share the processes of one call. A habit that cannot work is refused by an error that says what to do
instead, on every rank, and its row names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl

from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist import ranks
from tests.dist.ranks import global_batches, mean_over_ranks, quiet, trainer_of, weights
from tests.dist.test_habits import OPTIONS, Habit

STEPS = 4
EPOCHS = 2


class Row(Habit):
    """A habit, and how it is trained."""

    trusted = "ddp"
    """Strategy of the trusted run on two ranks."""

    refused: ClassVar[dict[str, str]] = {}
    """Configuration -> what its error says."""

    options: ClassVar[dict[str, Any]] = {}
    """Of the Trainer."""

    def callbacks(self, root: Path) -> list[pl.Callback]:
        return []

    def train_under(self, strategy: Any, data: Any, root: Path) -> pl.Trainer:
        options = {"use_distributed_sampler": False, "max_epochs": EPOCHS, "default_root_dir": root, **self.options}
        trainer = trainer_of(strategy, callbacks=self.callbacks(root), **options)
        trainer.fit(self, data, data if "limit_val_batches" in self.options else None)
        return trainer


class Manual(Row):
    """Manual optimization."""

    manual = True


def outcome(rank: int, world_size: int, row: type[Row], strategy: Any, root: Path) -> tuple[Any, ...]:
    """Losses, what was noted, and the final weights."""
    module = row()
    module.train_under(strategy, global_batches(rank, world_size, STEPS), root)
    assert len(module.losses) > 1, "nothing was trained"
    return mean_over_ranks(module.losses), mean_over_ranks(module.seen), weights(module)


def differences(
    rank: int, world_size: int, rows: Sequence[type[Row]], names: Sequence[str], root: str
) -> dict[str, str]:
    """What is not as under DDP: row and configuration -> how it differs. Collective."""
    quiet()
    found: dict[str, str] = {}
    for row in rows:
        where = Path(root) / row.__name__
        expected = outcome(rank, world_size, row, row.trusted if world_size > 1 else "auto", where / "trusted")
        different = ranks.differences(
            lambda name: outcome(rank, world_size, row, ZeROStrategy(**OPTIONS[name]), where / name),  # noqa: B023
            expected,
            names,
        )
        for name in names:
            words = different.get(name, "was not refused" if name in row.refused and world_size > 1 else "")
            if words and (name not in row.refused or not re.search(row.refused[name], words)):
                found[f"{row.__name__}, {name}"] = words
    return found


def require_equal(rows: Sequence[type[Row]], names: Sequence[str], root: Path, *, ranks: int = 2) -> None:
    found = spawn(differences, ranks, rows, names, str(root), timeout_s=170)
    assert not any(found), "\n".join(f"{where}: {words}" for where, words in {**found[-1], **found[0]}.items())
