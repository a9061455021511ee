"""What a checkpoint notes about training data: who knows the position of a loader, and whether batches are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from ls_strategy.lightning.checkpointing.data_notes import DataNotes, checksum, kind_of

SAMPLES: Any = list(range(24))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(SAMPLES)


class StatefulStream(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class StatefulLoader:
    """Returns the state that it changes later."""

    def __init__(self) -> None:
        self.state = {"n": 0}

    def __iter__(self) -> Iterator[int]:
        for self.state["n"] in range(1, 5):
            yield self.state["n"]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        (DataLoader(SAMPLES), "order"),
        (DataLoader(SAMPLES, sampler=DistributedSampler(SAMPLES, 2, 0), num_workers=2), "order"),
        (DataLoader(SAMPLES, sampler=RandomSampler(SAMPLES)), "read"),
        (DataLoader(Stream()), "read"),
        (DataLoader(StatefulStream()), "dataset"),
        (DataLoader(StatefulStream(), num_workers=2), "read"),  # the workers have its state
        (StatefulLoader(), "loader"),
        (SAMPLES, "read"),
    ],
)
def test_who_knows_the_position(loader: Any, kind: str) -> None:
    assert kind_of(loader) == kind


def test_states_are_those_behind_a_batch_although_later_ones_were_fetched() -> None:
    loader, notes = StatefulLoader(), DataNotes()
    notes.follow([loader])
    for batch in loader:
        notes.fetched(batch)
        if batch > 1:
            assert notes.saved(batch - 1)["states"] == [{"n": batch - 1}]


def batch() -> dict[str, Any]:
    return {"x": torch.arange(6000).view(2, 3000), "y": [torch.zeros(0), "text", (1, None)], "z": object()}


def test_equal_batches_have_equal_checksums() -> None:
    assert checksum(batch()) == checksum(batch())


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.arange(6000)},
        {"x": torch.arange(6000.0).view(2, 3000)},
        {"x": torch.arange(6000).view(2, 3000).flip(1)},
        {"y": [torch.zeros(0), "another", (1, None)]},
        {"y": [torch.zeros(0), "text", [1, None]]},
        {"z": None},
    ],
)
def test_other_values_types_and_structures_have_other_checksums(change: dict[str, Any]) -> None:
    assert checksum({**batch(), **change}) != checksum(batch())


def test_the_order_of_batches_counts() -> None:
    assert checksum(2, checksum(1)) != checksum(1, checksum(2))
