"""``strategy="zero_auto"``: planned when a fit begins, the same on all ranks; and what a failed allocation says."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ls_strategy.config import nested
from ls_strategy.distributed.comm import make_comm
from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.extras.planner import fit as planner_fit
from ls_strategy.extras.planner import learned
from ls_strategy.extras.planner.fit import OutOfMemory
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.micro_speeds import _seconds, measure
from ls_strategy.extras.planner.speeds import Speeds
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.spans import SpanRecorder
from ls_strategy.testing import spawn
from tests.dist.ranks import on_ranks
from tests.models import Case, PrivateNet, loader, quiet
from tests.trainers import bare_trainer

pytestmark = pytest.mark.wide

CASE = Case(stage=3, traits=("private",), width=64, blocks=4, steps=2, fused=None)


def trainer(strategy: Any, world_size: int) -> pl.Trainer:
    return bare_trainer(strategy, world_size, max_epochs=1)


MESSAGES = Speeds(
    flops=inf, link=inf, message=1.0, update=inf, host_update=inf, bus=inf, overlaps=False
)  # fmt: skip
"""Of a machine on which only the number of messages takes time."""


def fit_on(rooms: list[int], world_size: int, stage: Any = "auto", speeds: Speeds = MESSAGES) -> tuple[Any, PrivateNet]:
    """Train on ranks with so much room each: the smallest counts."""
    plain, measured = planner_fit.smallest, planner_fit.measure

    def smallest(world: Any, device: torch.device, path: str) -> Hardware:
        everyones = world.exchange_objects(rooms[world.rank])
        found = plain(world, device, path)
        assert found.host_memory
        return Hardware(
            ranks=found.ranks, ranks_per_node=found.ranks_per_node, device="cpu", device_memory=min(everyones),
            reserved_share=0, reserved_bytes=0,
        )  # fmt: skip

    planner_fit.smallest = smallest
    planner_fit.measure = lambda *_: speeds
    try:
        chosen = ZeROStrategy(stage, sharding={"min_unit_numel": 0})
        module = PrivateNet(CASE)
        trainer(chosen, world_size).fit(module, loader(CASE, world_size))
        return chosen, module
    finally:
        planner_fit.smallest, planner_fit.measure = plain, measured


def choose_many(rank: int, world_size: int) -> list[Any]:
    quiet()
    result: list[Any] = []
    for rooms in ([10**9] * 2, [10**9, 1_900_000], [1_500_000] * 2):
        strategy, module = fit_on(rooms, world_size)
        assert strategy.planning.planned_step_s > 0
        offload = strategy.config.offload.optimizer
        recompute = strategy.config.activations.recompute
        result.append(
            (strategy.config.stage, offload, recompute, module.result.losses[-CASE.steps :])
        )  # planning ran steps, too
    updates, module = fit_on([10**9] * 2, world_size, speeds=replace(MESSAGES, update=1.0, host_update=1.0))
    result.append((updates.config.stage, updates.config.offload.optimizer, None, module.result.losses[-CASE.steps :]))
    with pytest.raises(PlanError, match=r"nothing fits\..* comes closest and needs"):
        fit_on([1000] * 2, world_size)
    unplanned, trusted = fit_on([10**9] * 2, world_size, stage=0)
    assert unplanned.planning.planned_step_s is None
    result.append(trusted.result.losses)
    return result


def measure_together(rank: int, world_size: int) -> Speeds:
    return measure(make_comm(), torch.device("cpu"), torch.bfloat16)


def test_all_ranks_take_the_speeds_of_the_slowest() -> None:
    first, second = spawn(measure_together, 2, timeout_s=60)
    assert first == second
    assert 1e5 < first.link < 1e12
    assert 1e-6 < first.message < 5


def measure_uneven(rank: int, world_size: int) -> float:
    calls = [0]

    def work() -> None:
        calls[0] += 1
        time.sleep(0.05 if calls[0] % 2 == rank else 0.0)

    return _seconds(make_comm(), torch.device("cpu"), work)[0]


def test_a_measurement_lasts_until_the_last_rank_is_done() -> None:
    """Each of them is quick in half of the attempts, but never both."""
    first, second = spawn(measure_uneven, 2, timeout_s=60)
    assert first == second
    assert first >= 0.05


def test_the_smallest_rank_decides_for_all_and_the_losses_are_the_same() -> None:
    first, second = spawn(choose_many, 2, init_process_group=False, timeout_s=170)
    *chosen, trusted = first
    assert [c[:3] for c in chosen] == [c[:3] for c in second[:-1]]
    assert chosen[0][:3] == (0, None, None)
    assert chosen[1][:3] == (1, None, None)
    assert (chosen[2][0], chosen[2][1].tier, chosen[2][2].policy) == (3, "cpu", "full")
    assert chosen[3][0] == 1, "stage 0 fits, but every rank updates everything"
    assert all(losses == trusted for *_, losses in chosen)


class Hungry(PrivateNet):
    """Wants more than there is, in its second batch."""

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx:
            torch.empty(1 << 60, dtype=torch.uint8)
        return super().loss(batch, batch_idx)


@on_ranks(2, timeout_s=120)
def test_a_failed_allocation_names_what_takes_less(rank: int, world_size: int) -> None:
    with pytest.raises(OutOfMemory) as caught:
        trainer(ZeROStrategy(0, sharding={"min_unit_numel": 0}), world_size).fit(Hungry(CASE), loader(CASE, world_size))
    words = str(caught.value)
    assert words.startswith("out of memory: ")
    assert "zero0 needs " in words
    assert "ZeROStrategy(stage=" in words
    assert "per rank, 2 ranks" in words


@pytest.mark.parametrize(
    "options", [{"offload.optimizer": "cpu"}, {"activations.offload": "cpu"}, {"parallel.tensor.size": 2}]
)
def test_what_auto_chooses_or_does_not_plan_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='stage="auto"'):
        ZeROStrategy("auto", **nested(options))


class Stream(IterableDataset[Any]):
    """Goes on where the last iterator over it has stopped."""

    def __init__(self) -> None:
        self._left = iter(torch.randn(8, 4))

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Tensor:
        return next(self._left)


def test_data_that_give_every_batch_once_are_not_planned_with() -> None:
    for data in (DataLoader(Stream(), batch_size=2), iter([torch.randn(2, 4)])):
        with pytest.raises(PlanError, match=r"gives every batch once.*Set the stage"):
            trainer(ZeROStrategy("auto"), 1).fit(PrivateNet(CASE), data)


def test_the_alias() -> None:
    strategy = trainer("zero_auto", 1).strategy
    assert isinstance(strategy, ZeROStrategy)
    assert strategy.planning._auto


# --- learning ---------------------------------------------------------------------------------------------------------


class Watched(PrivateNet):
    """Notes the callbacks that a fit has."""

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer: Any = self.trainer
        self.callbacks = [type(each).__name__ for each in trainer.callbacks]


def learn(rank: int, world_size: int, folder: str) -> list[Any]:
    """Two fits with ``zero_auto``: what the planner has, the losses, and what is logged."""
    quiet()
    os.environ[learned.SWITCH] = "1"
    learned.cache_dir = lambda: Path(folder) / f"rank{rank}"
    case = replace(CASE, steps=8)
    logged: list[str] = []
    planner_fit.rank_zero_info = logged.append
    result: list[Any] = []
    for _ in range(2):
        module = Watched(case)
        chosen: Any = bare_trainer(ZeROStrategy("auto", sharding={"min_unit_numel": 0}), world_size, max_epochs=1)
        chosen.fit(module, loader(case, world_size))
        left = [type(each).__name__ for each in chosen.callbacks]
        result.append((chosen.strategy.config, module.result.losses[-case.steps :], module.callbacks, left))
    return [result, logged, SpanRecorder.active is None]


@pytest.mark.own_ranks
def test_runs_are_learned_from_by_one_rank_and_all_ranks_choose_the_same(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir(mode=0o700)
    (first, logged, stopped), (second, _, _) = spawn(
        learn, 2, str(tmp_path), init_process_group=False, timeout_s=120
    )  # fmt: skip
    assert [run[0] for run in first] == [run[0] for run in second]
    assert stopped
    assert "StepClock" in first[0][2], "the clock runs on the rank that writes"
    assert "StepClock" not in second[0][2]
    assert all("StepClock" not in run[3] for run in first), "it has left the Trainer"
    assert not list((tmp_path / "rank1").iterdir())
    runs = json.loads((tmp_path / "rank0" / "measured_steps.json").read_text())["runs"]
    assert len(runs) == 2
    for run in runs:
        seconds = run["seconds"]
        parts = sum(seconds[name] for name in ("forward", "backward", "optimizer", "rest"))
        assert parts == pytest.approx(seconds["step"])
        assert min(seconds.values()) > 0
    for text in logged:
        assert text.count("\n") <= 3
        assert "measured ms per step" in text
    assert len(logged) == 2
