"""Process groups that existed before the strategy, and the timeout of those that it makes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from ls_strategy import ZeROStrategy
from ls_strategy.errors import OutOfStepError, RankFailedError
from ls_strategy.testing import spawn
from tests.models import quiet
from tests.trainers import bare_trainer

pytestmark = pytest.mark.dist


class Fails(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank == 1:
            raise ValueError("the file is gone")
        return super().training_step(batch, batch_idx)


class LeavesStep(BoringModel):
    """One rank enters a collective that the other does not enter."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank == 1:
            self.all_gather(torch.ones(3))
        return super().training_step(batch, batch_idx)


def trainer_of(strategy: Any, **options: Any) -> pl.Trainer:
    return bare_trainer(strategy, **{"devices": 2, "max_steps": 8, "limit_val_batches": 0, **options})


def fails(rank: int, world_size: int, before: str, module: type) -> str:
    quiet()
    if before == "ddp":
        trainer_of("ddp", max_steps=2).fit(BoringModel())
    else:
        dist.init_process_group("gloo")
    stage = 3 if module is LeavesStep else 1
    try:
        trainer_of(ZeROStrategy(stage=stage, explain_waits_after=1.0)).fit(module())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("before", ["ddp", "own"])
def test_a_failure_ends_all_ranks_in_a_group_that_the_strategy_has_not_made(before: str):
    waiting, failed = spawn(fails, 2, before, Fails, init_process_group=False)
    assert waiting.startswith(RankFailedError.__name__)
    assert "the file is gone" in waiting
    assert failed == "ValueError: the file is gone"


@pytest.mark.wide
def test_a_deadlock_is_ended_in_a_group_that_the_strategy_has_not_made():
    errors = spawn(fails, 2, "own", LeavesStep, init_process_group=False)
    assert all(error.startswith(OutOfStepError.__name__) for error in errors), errors


class Timeouts(pl.Callback):
    """Of all process groups."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_rank(group) >= 0]
        self.found = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
        self.count = len(groups)


def timeouts(rank: int, world_size: int, sharding: dict[str, Any]) -> list[tuple[int, set[float]]]:
    quiet()
    found = []
    for seconds in (150, 90):  # the second strategy uses the groups of the first
        callback = Timeouts()
        strategy = ZeROStrategy(stage=2, timeout=timedelta(seconds=seconds), sharding=sharding)
        trainer_of(strategy, devices=world_size, max_steps=1, callbacks=[callback]).fit(BoringModel())
        found.append((callback.count, {t.total_seconds() for t in callback.found}))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks", "sharding"), [(2, {}), (4, {"shard_size": 2})], ids=["plain", "mesh"])
def test_the_timeout_reaches_every_group(ranks: int, sharding: dict[str, Any]):
    for first, second in spawn(timeouts, ranks, sharding, init_process_group=False):
        assert first[0] > 1
        assert first[1] == {150.0}
        assert second[1] == {90.0, 150.0}  # the default group is that of the first fit
