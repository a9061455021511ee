"""What another package adds to a table is chosen by its name in the options of a Trainer's strategy, and trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ls_strategy.parallel.pipeline.schedules import SCHEDULES, Action, ScheduleKind
from ls_strategy.testing import spawn
from ls_strategy.tiers import TIERS, TierKind
from tests.dist.parallel_runs import Outcome, Run, assert_same_bits, train_all
from tests.unit.one_rank import ShelfTier

pytestmark = pytest.mark.dist


def last_first(rank_of: tuple[int, ...], _ranks: int, micro_batches: int) -> list[list[Action]]:
    """All forwards, then all backwards, the last micro-batch first."""
    forwards = [[Action("F", stage, m) for m in range(micro_batches)] for stage in range(len(rank_of))]
    return [row + [each._replace(kind="B") for each in reversed(row)] for row in forwards]


def train(rank: int, world_size: int, *options: dict[str, Any]) -> list[Outcome]:
    SCHEDULES["last first"] = ScheduleKind(last_first)
    TIERS["shelf"] = TierKind("on a shelf", resident=False, open=lambda sizes, *_: ShelfTier(sizes))
    try:
        return train_all(rank, world_size, [Run(each, {"num_layers": 4}, steps=4) for each in options])
    finally:
        del SCHEDULES["last first"], TIERS["shelf"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_tier_of_another_package(stage: int) -> None:
    choices = [{"stage": stage, "offload": tier} for tier in ("cpu", "shelf")]
    assert_same_bits(spawn(train, 2, *choices, init_process_group=False)[0])


def test_a_schedule_of_another_package() -> None:
    """Gradients of micro-batches are added in another order."""
    choices = [{"stage": 1, "parallel.pipeline": {"size": 2, "schedule": name}} for name in ("gpipe", "last first")]
    gpipe, ours = spawn(train, 2, *choices, init_process_group=False)[0]
    assert ours.losses == pytest.approx(gpipe.losses, rel=1e-6)
    for name, value in gpipe.weights.items():
        torch.testing.assert_close(value, ours.weights[name], rtol=1e-5, atol=1e-6)
