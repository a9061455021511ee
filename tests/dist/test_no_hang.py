"""Whatever the loaders of the ranks are like, every rank trains or every rank raises, within 30 seconds."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ls_strategy import ZeROStrategy
from ls_strategy.errors import LSError
from ls_strategy.testing import spawn
from tests.dist.ranks import Net, quiet, samples, trainer_of
from tests.limits import wall

pytestmark = pytest.mark.wide

LIMIT_S = 30


class Mapped(Dataset):
    """So many samples; a worker dies, or raises, at one of them."""

    def __init__(self, numel: int, at: int | None = None, *, dies: bool = False) -> None:
        self.x, self.y = samples(max(numel, 1))
        self.numel, self.at, self.dies = numel, at, dies

    def __len__(self) -> int:
        return self.numel

    def __getitem__(self, i: int) -> Any:
        if i == self.at:
            if self.dies and get_worker_info() is not None:
                os._exit(1)
            raise KeyError("the file of sample 5 is gone")
        return self.x[i], self.y[i]


class Streamed(IterableDataset):
    """The same without a length."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.mapped = Mapped(*args, **options)

    def __iter__(self) -> Any:
        for i in range(len(self.mapped)):
            yield self.mapped[i]


class Logging(Net):
    """Averages its loss over ranks in every step, as code of users does."""

    def training_step(self, batch: Any, i: int) -> Any:
        loss = super().training_step(batch, i)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss


FEW, MORE = 6, 12
"""Samples, in batches of two."""


def data(kind: str, rank: int) -> DataLoader:
    """One rank's own loader; rank 0 has less, or its worker fails."""
    numel = MORE if rank else FEW
    at = None if rank else 6
    options: dict[str, tuple[Dataset[Any], int]] = {
        "map": (Mapped(numel), 0),
        "iterable": (Streamed(numel), 0),
        "iterable, worker": (Streamed(numel), 1),
        "no samples": (Streamed(numel if rank else 0), 0),
        "length on one rank": (Mapped(numel) if rank else Streamed(numel), 0),
        "worker dies": (Mapped(MORE, at, dies=True), 1),
        "worker dies, iterable": (Streamed(MORE, at, dies=True), 1),
        "worker raises": (Mapped(MORE, at), 1),
        "loader raises": (Streamed(MORE, at), 0),
    }
    dataset, workers = options[kind]
    return DataLoader(dataset, batch_size=2, num_workers=workers)


FAILS = {"length on one rank", "worker dies", "worker dies, iterable", "worker raises", "loader raises"}


def fit(rank: int, world_size: int, uneven: Any, stage: Any, kind: str, options: dict[str, Any]) -> tuple[str, float]:
    """The class and text of the error, or the number of steps; and the seconds."""
    quiet()
    options = dict(options)
    validates = options.pop("validates", False)
    strategy = ZeROStrategy(stage, sharding={"min_unit_numel": 0}, uneven=uneven)
    trainer = trainer_of(strategy, max_epochs=1, use_distributed_sampler=False, **options)
    before = time.monotonic()
    try:
        loaders = (data(kind, rank), data("map", rank)) if validates else (data(kind, rank),)
        trainer.fit(Logging(), *loaders)
    except (LSError, KeyError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - before
    return str(trainer.global_step), time.monotonic() - before


CURES = {
    "length on one rank": "Give it a length on all ranks or on none",
    "worker dies": "",  # torch's own message, or that of its broken connection
    "worker dies, iterable": "",
    "worker raises": "the file of sample 5 is gone",
    "loader raises": "the file of sample 5 is gone",
}


def check(uneven: str, stage: int, kind: str, **options: Any) -> None:
    results = spawn(fit, 2, uneven, stage, kind, options, init_process_group=False, timeout_s=60)
    assert max(seconds for _, seconds in results) < wall(LIMIT_S), results
    texts = [text for text, _ in results]
    if kind in FAILS:
        assert all(CURES[kind] in text and not text.isdigit() for text in texts), texts
    elif uneven == "error":
        assert all("ZeROStrategy(uneven=" in text for text in texts), texts
    else:
        every = options.get("accumulate_grad_batches", 1)
        assert texts == [str(-(-6 // every))] * 2


@pytest.mark.parametrize("kind", ["map", "iterable", "iterable, worker", "no samples", *sorted(FAILS)])
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2), 3])
@pytest.mark.parametrize("uneven", ["error", "join"])
@pytest.mark.slow
def test_every_kind(uneven: str, stage: int, kind: str) -> None:
    check(uneven, stage, kind)


@pytest.mark.parametrize("kind", ["map", "iterable", "no samples", "worker dies"])
def test_joining_at_stage_3(kind: str) -> None:
    check("join", 3, kind)


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 4}, {"val_check_interval": 0.5, "validates": True}])
@pytest.mark.parametrize(("uneven", "stage"), [("error", 2), ("join", 2), ("join", 3)])
def test_with_accumulation_and_validation(uneven: str, stage: int, options: dict[str, Any]) -> None:
    check(uneven, stage, "map", **options)


@pytest.mark.parametrize(("uneven", "stage"), [("error", 0), ("join_samples", 3)])
def test_a_length_on_one_rank_alone(uneven: str, stage: int) -> None:
    check(uneven, stage, "length on one rank")
