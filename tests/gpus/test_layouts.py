"""However several GPUs divide a model, it trains as on one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.parallel_runs import differences
from tests.gpus.suite import FAILURES, LAYOUTS, ended, saved_and_resumed, too_far

DEVICE = "cuda"
END_S = 60.0


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_numbers_are_those_of_one_device(ranks: int, name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    if ranks < layout.ranks:
        pytest.skip(f"needs {layout.ranks} GPUs")
    assert not too_far(layout, DEVICE, tmp_path)


def test_half_of_the_ranks_go_on_with_what_all_have_saved(ranks: int, tmp_path: Path) -> None:
    whole, resumed = saved_and_resumed(DEVICE, ranks, ranks // 2, tmp_path)
    assert max(differences(whole, resumed).values()) <= 1e-5


@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_that_fails_ends_all_within_a_minute(ranks: int, failure: str) -> None:
    found = ended(DEVICE, ranks, failure, END_S)
    assert found["seconds"] < END_S
    assert 0 not in found["statuses"]
    assert None not in found["statuses"]
