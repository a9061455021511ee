"""A strategy draws nothing from the user's random generators: they stand where they stand under DDP."""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import seed_everything

from ls_strategy import ZeROStrategy
from ls_strategy.config import nested
from tests.dist.ranks import Net, batches, on_ranks, trainer_of

pytestmark = pytest.mark.wide

OPTIONS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "offload.optimizer": "cpu"},
    {"stage": 2, "precision.moments": "int8"},
    {"stage": 3, "activations.checkpointing": "full"},
    {"stage": "auto"},
]


class Watching(Net):
    """Notes where Python's, NumPy's and torch's generators stand, at every place where user code runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def note(self, where: str) -> None:
        state = (random.getstate(), numpy.random.get_state(legacy=True)[1].tobytes(), torch.get_rng_state().tolist())  # type: ignore[index, union-attr]
        self.seen.append((where, hashlib.sha256(pickle.dumps(state)).hexdigest()))

    def train_dataloader(self) -> Any:
        """Draws, as one does that splits the data."""
        assert torch.rand(()) + numpy.random.rand() + random.random() >= 0
        return batches(16)

    def on_train_start(self) -> None:
        self.note("on_train_start")

    def training_step(self, batch: Any, i: int) -> Any:
        self.note(f"training_step {i}")
        return super().training_step(batch, i)

    def on_validation_epoch_end(self) -> None:
        self.note("on_validation_epoch_end")

    def on_fit_end(self) -> None:
        self.note("on_fit_end")


def seen(strategy: Any) -> list[tuple[str, str]]:
    model = Watching()
    trainer = trainer_of(strategy, devices=2, max_epochs=2)
    seed_everything(7, verbose=False)
    trainer.fit(model, val_dataloaders=batches(8))
    return model.seen


@on_ranks(2)
def test_the_users_random_numbers_are_those_of_ddp(rank: int, world_size: int) -> None:
    expected = seen("ddp")
    assert len(expected) > 5
    for options in OPTIONS:
        assert seen(ZeROStrategy(**nested(options))) == expected, options


@on_ranks(2)
def test_steps_of_a_pipeline_move_no_generator_outside(rank: int, world_size: int) -> None:
    """Inside of its steps each stage has numbers of its own."""
    expected = outside(seen("ddp"))
    assert len(expected) > 3
    strategy = ZeROStrategy(1, parallel={"pipeline": {"size": 2, "micro_batches": 2}})
    found = seen(strategy)
    assert outside(found) == expected
    inside = [state for place, state in found if place.startswith("training_step")]
    passes = 2 * 4 * 2  # of two micro-batches in four steps of two epochs; runs on shapes leave no trace
    assert len(inside) == len(set(inside)) == passes, "no two micro-batches begin with the same numbers"


def outside(places: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of the steps."""
    return [place for place in places if not place[0].startswith("training_step")]
