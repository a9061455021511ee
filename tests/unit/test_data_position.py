"""The position in an epoch after a resume, with other ranks and batch sizes too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from ls_strategy.lightning.checkpointing.data_position import SkippingSampler, forget, resume

SAMPLES = list(range(24))


def loader(batch_size: int = 2) -> DataLoader:
    return DataLoader(SAMPLES, batch_size=batch_size)  # type: ignore[arg-type]


def trainer(*, done: int, replicas: int = 1, epochs: tuple[int, int] = (1, 0), last: bool = False) -> Any:
    """In the first epoch, after so many batches."""
    current = SimpleNamespace(ready=done, started=done, processed=done, completed=done)
    progress = SimpleNamespace(current=current, is_last_batch=last)
    epoch = SimpleNamespace(started=epochs[0], processed=epochs[1])
    return SimpleNamespace(
        limit_train_batches=1.0,
        strategy=SimpleNamespace(data_parallel_size=replicas),
        fit_loop=SimpleNamespace(
            epoch_progress=SimpleNamespace(current=epoch), epoch_loop=SimpleNamespace(batch_progress=progress)
        ),
    )


def saved(replicas: int = 1, batch_size: int = 2) -> dict[str, Any]:
    return {"world_size": replicas, "batch_sizes": [batch_size]}


def first(data: DataLoader) -> int:
    return int(next(iter(data))[0])


@pytest.mark.parametrize(
    ("run", "passes"),
    [
        (trainer(done=3), [6, 0]),
        (trainer(done=3, epochs=(1, 1)), [0, 0]),
        (trainer(done=12, last=True), [0, 0]),
    ],
    ids=["in an epoch", "between epochs", "at the end of an epoch"],
)
def test_the_middle_of_an_epoch_goes_on_with_the_next_batch_once(run: Any, passes: list[int]) -> None:
    data = loader()
    resume(run, data, saved())
    assert [first(data), first(data)] == passes


@pytest.mark.parametrize(("replicas", "batch_size", "done"), [(2, 2, 6), (4, 1, 6), (1, 4, 3)])
def test_as_many_samples_are_done_in_other_batches(replicas: int, batch_size: int, done: int) -> None:
    """Six batches of one replica by two samples are done with two replicas by two: so are as many samples here."""
    data, run = loader(), trainer(done=done)
    state = saved(replicas, batch_size)
    resume(run, data, state)
    progress = run.fit_loop.epoch_loop.batch_progress.current
    assert progress.processed == progress.completed == done * replicas * batch_size // 2
    assert first(data) == done * replicas * batch_size % len(SAMPLES)
    assert state == saved()


def test_a_random_order_is_left_to_lightning() -> None:
    data = DataLoader(SAMPLES, batch_size=2, sampler=RandomSampler(SAMPLES))  # type: ignore[arg-type]
    resume(trainer(done=3), data, saved())
    assert isinstance(data.batch_sampler.sampler, RandomSampler)  # type: ignore[union-attr]


def test_a_distributed_sampler_gets_the_number_of_the_epoch_first() -> None:
    sampler = DistributedSampler(SAMPLES, 1, 0)  # type: ignore[arg-type]
    data = DataLoader(SAMPLES, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    resume(trainer(done=3, epochs=(5, 4)), data, saved())
    order = DistributedSampler(SAMPLES, 1, 0)  # type: ignore[arg-type]
    order.set_epoch(4)
    assert first(data) == list(order)[6]


def test_a_skipping_sampler_is_removed_and_passes_attributes_on() -> None:
    data = loader()
    inner = data.batch_sampler.sampler  # type: ignore[union-attr]
    data.batch_sampler.sampler = skipping = SkippingSampler(inner, 4)  # type: ignore[union-attr]
    assert len(skipping) == 24
    assert skipping.data_source is SAMPLES
    forget(data)
    assert data.batch_sampler.sampler is inner  # type: ignore[union-attr]
