"""What a checkpoint notes about training data: who knows the position of a loader, and whether batches are the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
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


class Told(Stream):
    """Has to be told its position, as the datasets of litdata and mosaicml-streaming."""

    def state_dict(self, samples: int, from_beginning: bool) -> dict[str, int]:
        return {"n": samples}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Embedding(Stream, nn.Module):
    """Computes with weights, which are its state."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


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
        (DataLoader(Told()), "read"),
        (DataLoader(Embedding()), "read"),
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


@pytest.mark.parametrize("error", [NotImplementedError(), "state"])
def test_what_has_no_state_after_all_is_read(error: Any) -> None:
    class Broken(StatefulLoader):
        def state_dict(self) -> Any:
            if isinstance(error, Exception):
                raise error
            return {"lock": threading.Lock()}  # which no checkpoint can hold

    loader, notes = Broken(), DataNotes()
    notes.follow([loader])
    notes.made()
    for batch in loader:
        notes.fetched(batch)
    saved = notes.saved(4)
    assert (saved["kinds"], saved["states"]) == (["read"], None)
    assert saved["sum"] == checksum(4, checksum(3, checksum(2, checksum(1))))


def test_a_state_that_would_make_a_checkpoint_unreadable_stays_out_of_it() -> None:
    """Checkpoints are opened without running code in them, and one object that needs it would be the end of all."""

    class Arrays(StatefulStream):
        extra: Any = np.arange(3)

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.extra}

    dataset, notes = Arrays(), DataNotes()
    notes.follow([DataLoader(dataset)])
    notes.made()
    assert notes.saved(0)["kinds"] == ["read"]
    dataset.extra = 1
    notes.follow([DataLoader(dataset)])
    notes.made()
    assert notes.saved(0)["states"] == [{"n": 1}]
    dataset.extra = np.arange(3)
    notes.fetched(1)
    assert notes.saved(1)["states"] is None


def batch() -> dict[str, Any]:
    return {"x": torch.arange(6000).view(2, 3000), "y": [torch.zeros(0), "text", (1, None)], "z": object()}


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.arange(6000)},
        {"x": torch.arange(6000.0).view(2, 3000)},
        {"x": torch.arange(6000).view(2, 3000).flip(1)},
        {"y": [torch.zeros(0), "another", (1, None)]},
        {"y": [torch.zeros(0), "text", [1, None]]},
        {"z": None},
        {"z": {str(i): i for i in range(300)}},
        {"z": {str(i): 2 * i for i in range(300)}},
    ],
)
def test_other_values_types_and_structures_have_other_checksums(change: dict[str, Any]) -> None:
    assert checksum({**batch(), **change}) != checksum(batch()) == checksum(batch())


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.ones(2, 2).to_sparse(),
        torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
    ],
)
def test_every_kind_of_tensor_has_a_checksum(value: Any) -> None:
    assert checksum([value]) == checksum([value]) != checksum([value, value])


def test_long_lists_are_sampled() -> None:
    """Tokens that nobody has put into a tensor: a call per element would take longer than many a step."""

    class Token(int):
        read = 0

        def __repr__(self) -> str:
            Token.read += 1
            return super().__repr__()

    tokens = [[Token(i) for i in range(10_000)] for _ in range(2)]
    assert checksum(tokens) != checksum([each[::-1] for each in tokens])
    assert Token.read < 2000


def test_the_order_of_batches_counts() -> None:
    assert checksum(2, checksum(1)) != checksum(1, checksum(2))
