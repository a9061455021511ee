"""A rank that runs out of batches before the others ends the run on all of them, and says who has how many."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ls_strategy import ZeROStrategy
from ls_strategy.errors import DataError, LSError, RankFailedError
from tests.dist.ranks import Net, on_ranks, samples, trainer_of
from tests.limits import wall
from tests.marks import slow

pytestmark = pytest.mark.wide

FEW, MORE = 4, 6


class Endless(IterableDataset):
    """As many samples as it is given, of no known length."""

    def __init__(self, numel: int, fails_at: int | None = None, error: type[BaseException] = KeyError) -> None:
        self.numel, self.fails_at, self.error = numel, fails_at, error

    def __iter__(self) -> Iterator[Any]:
        return map(self.sample, range(self.numel))  # a generator would turn StopIteration into a RuntimeError

    def sample(self, i: int) -> Any:
        if i == self.fails_at:
            raise self.error("the file of sample 5 is gone")
        x, y = samples(self.numel)
        return x[i], y[i]


def loader(batches: int, *, sized: bool) -> DataLoader:
    """So many batches of two samples."""
    return DataLoader(TensorDataset(*samples(2 * batches)) if sized else Endless(2 * batches), batch_size=2)


def run(strategy: Any, call: str, *data: Any, module: Net | None = None, **options: Any) -> tuple[str, float]:
    """Message of the error on this rank, and the seconds to it."""
    module = module or Net()
    trainer = trainer_of(strategy, max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0, **options)
    before = time.monotonic()
    with pytest.raises(LSError) as error:
        getattr(trainer, call)(module, *data)
    assert isinstance(error.value, (DataError, RankFailedError)), error.value
    return str(error.value), time.monotonic() - before


@pytest.mark.parametrize(
    ("stage", "sized", "accumulate"),
    [(2, False, 1), slow(0, True, 1), (1, False, 3), slow(2, True, 3), slow(3, True, 1), slow(3, False, 3)],
)
@on_ranks(2)
def test_training(rank: int, world_size: int, stage: int, sized: bool, accumulate: int) -> None:
    data = loader((FEW, MORE)[rank], sized=sized)
    message, seconds = run(stage, "fit", data, accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
    assert "Got 4 batches on rank 0 in this training epoch, and" in message
    assert "on rank 1 or more" in message
    assert "limit_train_batches=4" in message
    assert seconds < wall(30)


@on_ranks(2)
def test_the_cure_works(rank: int, world_size: int) -> None:
    trainer = trainer_of(2, max_epochs=2, use_distributed_sampler=False, limit_train_batches=FEW)
    trainer.fit(Net(), loader((FEW, MORE)[rank], sized=False))
    assert trainer.global_step == 2 * FEW


@pytest.mark.parametrize(("sized", "accumulate"), [(True, 1), (False, 2)])
@on_ranks(2)
def test_nobody_runs_out_where_all_stop_at_the_same_step(
    rank: int, world_size: int, sized: bool, accumulate: int
) -> None:
    """The last batch of rank 0 is the one that reaches ``max_steps`` on all ranks, as DDP trains it."""
    ddp, ours = Net(), Net()
    for strategy, module in (("ddp", ddp), (2, ours)):
        trainer = trainer_of(
            strategy, max_epochs=-1, max_steps=FEW // accumulate, accumulate_grad_batches=accumulate,
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, loader((FEW, MORE)[rank], sized=sized))
        assert trainer.global_step == FEW // accumulate
    assert ours.losses == pytest.approx(ddp.losses, rel=1e-6)


@on_ranks(2)
def test_a_last_batch_ends_an_accumulation_on_one_rank_alone(rank: int, world_size: int) -> None:
    """Both would stop at step 2: rank 0 after its batch 4, the last, and rank 1 after batch 6."""
    options = {"max_steps": 2, "accumulate_grad_batches": 3}
    message, _ = run(2, "fit", loader((FEW, MORE)[rank], sized=True), **options)
    assert "Got 4 batches on rank 0" in message


@on_ranks(3)
def test_three_ranks(rank: int, world_size: int) -> None:
    message, _ = run(3, "fit", loader((3, 5, 2)[rank], sized=False))
    assert "Got 2 batches on rank 2 in this training epoch, and 3 batches on ranks 0, 1 or more" in message


@pytest.mark.parametrize("call", ["validate", slow("test"), slow("predict")])
@on_ranks(2)
def test_evaluation_at_stage_3(rank: int, world_size: int, call: str) -> None:
    message, seconds = run(3, call, loader((MORE, FEW)[rank], sized=False))
    assert "Got 4 batches on rank 1 in this" in message
    assert seconds < wall(30)


@on_ranks(2)
def test_an_odd_number_of_samples_at_stage_3(rank: int, world_size: int) -> None:
    """Lightning pads what is validated and tested, not what is predicted."""
    data = DataLoader(TensorDataset(*samples(9)), batch_size=2)
    for call in ("validate", "test"):
        getattr(trainer_of(3), call)(Net(), data, verbose=False)
    with pytest.raises(LSError, match=r"in this prediction.*does not pad the data.*stage=2\) or devices=1"):
        trainer_of(3).predict(Net(), data)


@on_ranks(2)
def test_validation_during_a_fit_at_stage_3(rank: int, world_size: int) -> None:
    message, _ = run(3, "fit", loader(4, sized=True), loader((MORE, FEW)[rank], sized=True), val_check_interval=2)
    assert "in this validation" in message


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_evaluation_below_stage_3_may_be_uneven_as_under_ddp(rank: int, world_size: int, stage: int) -> None:
    for call in ("validate", "predict"):
        getattr(trainer_of(stage, use_distributed_sampler=False), call)(Net(), loader((MORE, FEW)[rank], sized=True))
    trainer = trainer_of(stage, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Net(), loader(4, sized=True), loader((MORE, FEW)[rank], sized=True))
    assert trainer.global_step == 4


class EndsEarly(Net):
    """One rank leaves the epoch by Lightning's own means, and the other does not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: Any, i: int) -> int | None:
        return -1 if self.how == "skip" and self.global_rank == 1 and i == 2 else None

    def training_step(self, batch: Any, i: int) -> Any:
        if self.how == "stop" and self.global_rank == 1 and i == 2:
            self.trainer.should_stop = True
        return super().training_step(batch, i)


@pytest.mark.parametrize("how", ["skip", "stop"])
@pytest.mark.slow
@on_ranks(2)
def test_leaving_the_epoch_on_one_rank(rank: int, world_size: int, how: str) -> None:
    message, seconds = run(2, "fit", loader(6, sized=True), module=EndsEarly(how))
    assert "on rank 1 in this training epoch, and" in message
    assert seconds < wall(30)


@on_ranks(2)
def test_an_error_in_one_ranks_loader(rank: int, world_size: int) -> None:
    data = DataLoader(Endless(12, fails_at=5 if rank else None), batch_size=2)
    before = time.monotonic()
    with pytest.raises((KeyError, RankFailedError), match="the file of sample 5 is gone"):
        trainer_of(2, max_epochs=1).fit(Net(), data)
    assert time.monotonic() - before < wall(30)


@on_ranks(2)
def test_a_stop_iteration_in_one_ranks_loader_ends_its_data(rank: int, world_size: int) -> None:
    data = DataLoader(Endless(12, fails_at=5 if rank else None, error=StopIteration), batch_size=2)
    message, seconds = run(2, "fit", data)
    assert "Got 3 batches on rank 1 in this training epoch, and" in message
    assert seconds < wall(30)


@on_ranks(2)
def test_a_pipeline(rank: int, world_size: int) -> None:
    data = DataLoader(TensorDataset(*(t[: 2 * (FEW, MORE)[rank]] for t in samples(2 * MORE))), batch_size=2)
    message, _ = run(ZeROStrategy(1, parallel={"pipeline": {"size": 2, "micro_batches": 2}}), "fit", data)
    assert "Got 4 batches on rank 0" in message


@on_ranks(2)
def test_a_failed_run_does_not_prevent_the_next_fit(rank: int, world_size: int) -> None:
    """Both ranks leave in the same round; the numbers of rounds agree again."""
    strategy = ZeROStrategy(2)
    trainer = trainer_of(strategy, max_epochs=1)
    trainer.fit(Net(), loader(3, sized=False))
    lockstep = strategy._run.lockstep
    assert lockstep is not None
    lockstep._count += rank  # as if one rank had begun one round more
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Net(), loader(3, sized=False))
    assert torch.tensor(lockstep._count).item() >= 3


class FailsAlone(Net):
    """An exception on one rank, in the third step."""

    def training_step(self, batch: Any, i: int) -> Any:
        if i == 2 and self.global_rank == 1:
            raise ZeroDivisionError("user code failed")
        return super().training_step(batch, i)


class FailsInLast(Net):
    """Rank 1 fails in the batch that rank 0 does not begin, for it is its last."""

    def training_step(self, batch: Any, i: int) -> Any:
        if i == FEW - 1 and self.global_rank == 1:
            time.sleep(1)
            raise ZeroDivisionError("user code failed")
        return super().training_step(batch, i)


class FailsEverywhere(Net):
    def training_step(self, batch: Any, i: int) -> Any:
        raise ZeroDivisionError("user code failed")


def fails(module: Net, data: DataLoader, words: str) -> None:
    before = time.monotonic()
    with pytest.raises((LSError, ZeroDivisionError), match=words):
        trainer_of(2, max_epochs=1, use_distributed_sampler=False).fit(module, data)
    assert time.monotonic() - before < wall(15)


@pytest.mark.parametrize("first", ["alone", "uneven", "both"])
@on_ranks(2)
def test_the_fit_after_a_failure(rank: int, world_size: int, first: str) -> None:
    """Fits of one process share groups, which live on if all ranks failed alike; else the next fit says why not."""
    fails(FailsEverywhere(), loader(FEW, sized=True), "user code failed")
    module = Net()
    trainer_of(2, max_epochs=1).fit(module, loader(2 * FEW, sized=True))
    assert len(module.losses) == FEW
    if first == "alone":
        fails(FailsAlone(), loader(FEW, sized=True), "user code failed")
    elif first == "uneven":
        fails(Net(), loader((FEW, MORE)[rank], sized=False), "Got 4 batches on rank 0")
    else:
        fails(FailsInLast(), loader((FEW, MORE)[rank], sized=True), "Got 4 batches on rank 0|user code failed")
    fails(Net(), loader(FEW, sized=True), "cannot meet at .* again. Restart all processes of the run")
