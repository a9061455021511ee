"""Habits that libraries and published programs bring along: the same code under DDP gives the same numbers.

As `tests.dist.test_habits`, with the rows of `tests.dist.habits`.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest

from ls_strategy.config import nested
from ls_strategy.errors import OutOfStepError
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.habits import averages, gradients, networks, trainers, weights
from tests.dist.habits.rows import Row, outcome, require_equal
from tests.dist.ranks import on_ranks
from tests.dist.test_habits import OPTIONS
from tests.limits import wall
from tests.marks import slow

pytestmark = pytest.mark.wide

CHEAP = ("zero2", "zero3, small units")

GROUPS = {
    module.__name__.rpartition(".")[2]: [
        row
        for row in vars(module).values()
        if isinstance(row, type)
        and issubclass(row, Row)
        and row.__module__ == module.__name__
        and row not in (trainers.LogsOnOneRank, networks.Compiled)
    ]
    for module in (weights, averages, networks, gradients, trainers)
}


@pytest.mark.parametrize("group", GROUPS)
def test_on_two_ranks_as_under_ddp(group: str, tmp_path: Path) -> None:
    require_equal(GROUPS[group], CHEAP, tmp_path)


@pytest.mark.parametrize("name", ["zero3, small units", slow("zero3"), slow("zero3_offload"), slow("zero1_offload")])
@on_ranks(2)
def test_logging_weights_on_one_rank_is_explained_where_they_are_sharded(
    rank: int, world_size: int, name: str, tmp_path: Path
) -> None:
    root = str(tmp_path)
    strategy = ZeROStrategy(explain_waits_after=1.0, timeout=timedelta(seconds=100), **nested(OPTIONS[name]))
    started = time.monotonic()
    with pytest.raises(OutOfStepError, match="all_gather of"):
        outcome(rank, world_size, trainers.LogsOnOneRank, strategy, Path(root))
    assert time.monotonic() - started < wall(30)


def test_logging_weights_on_one_rank_is_as_under_ddp_where_every_rank_has_them(tmp_path: Path) -> None:
    require_equal([trainers.LogsOnOneRank], ["zero1", "zero2"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in CHEAP])
@pytest.mark.parametrize("group", GROUPS)
def test_at_other_stages_and_tiers_as_under_ddp(group: str, name: str, tmp_path: Path) -> None:
    require_equal(GROUPS[group], [name], tmp_path)


@pytest.mark.slow
def test_compiled_modules_are_as_under_ddp(tmp_path: Path) -> None:
    require_equal([networks.Compiled], list(OPTIONS), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_on_one_rank_as_a_plain_trainer(group: str, tmp_path: Path) -> None:
    require_equal(GROUPS[group], list(OPTIONS), tmp_path, ranks=1)
