"""Which ranks are named as slow, since when and where, in runs whose own times are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.extras.callbacks.slow_ranks import SlowRank, SlowRanks, median_of_others
from ls_strategy.extras.callbacks.stragglers import ROWS, common_steps
from ls_strategy.spans import PHASES

STEP_S = torch.tensor([0.030, 0.055, 0.008, 0.001, 0.003], dtype=torch.float64)
"""Forward, backward, optimizer, data, other."""

Change = Callable[[int, Tensor], None]
"""Gets a step's number and own times, ``(ranks, phases)``, to change."""


class Reported:
    """What was said during a run, with the step at which it was."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.compared = SlowRanks(groups)
        self.begun: list[tuple[int, SlowRank]] = []
        self.ended: list[tuple[int, int, int]] = []
        """When, the rank, and since when."""


def run(ranks: int, steps: int, change: Change, *, noise: float = 0.0, seed: int = 0, groups: Any = None) -> Reported:
    """Compare ranks that take `STEP_S` but for noise and ``change``; four steps arrive at a time."""
    random, reported = torch.Generator().manual_seed(seed), Reported(groups or [range(ranks)])
    for first in range(1, steps, 4):
        numbers = range(first, first + 4)
        rows = STEP_S * torch.randn(4, ranks, len(PHASES), generator=random, dtype=torch.float64).mul(noise).exp()
        for number, each in zip(numbers, rows, strict=True):
            change(number, each)
        begun, ended = reported.compared.add(list(numbers), rows)
        reported.begun += [(numbers[-1], slow) for slow in begun]
        reported.ended += [(numbers[-1], slow.rank, until) for slow, until in ended]
    return reported


def slow_from(first: int, rank: int, factor: float = 1.3, phase: int | None = None, until: int = 1 << 30) -> Change:
    def change(step: int, seconds: Tensor) -> None:
        if first <= step < until:
            seconds[rank, slice(None) if phase is None else phase] *= factor

    return change


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.08])
@pytest.mark.parametrize("phase", [None, 0, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_rank_slowed_by_1_3_is_named_once_with_its_phase_within_20_steps(
    ranks: int, phase: int | None, noise: float
) -> None:
    reported = run(ranks, 200, slow_from(101, ranks - 1, phase=phase), noise=noise)
    (at, slow), = reported.begun  # fmt: skip
    # 3 steps pass until a step is written, and one until it is read.
    assert 101 <= at <= 101 + 20 - 4
    assert (slow.rank, slow.peers) == (ranks - 1, ranks - 1)
    assert abs(slow.since - 101) <= (0 if not noise else 6)
    if phase is None and noise:
        return  # every phase is slower, and noise decides which one most
    assert slow.phase == PHASES[1 if phase is None else phase]
    assert slow.seconds / slow.others_s == pytest.approx(1.3, abs=3 * noise + 1e-9)
    assert reported.ended == []


def nothing(step: int, seconds: Tensor) -> None:
    pass


def spikes(step: int, seconds: Tensor) -> None:
    """A checkpoint and a log on rank 0, garbage collection on rank 1."""
    seconds[0, 4] += 2.0 * (step % 50 == 0) + 0.02 * (step % 4 == 0)
    seconds[1, 0] += 0.08 * (step % 7 == 0)


def taking_turns(step: int, seconds: Tensor) -> None:
    """The long batch is on another rank in every step."""
    seconds[step % len(seconds), :2] *= 2


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("change", [nothing, spikes, taking_turns])
@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_no_false_alarm_among_equal_ranks(ranks: int, change: Change, noise: float) -> None:
    for seed in range(3):
        reported = run(ranks, 400, change, noise=noise, seed=seed)
        assert (reported.begun, reported.ended) == ([], [])


def test_a_little_slower_is_not_slow_and_1_25_x_is() -> None:
    assert run(4, 400, slow_from(1, 2, 1.15)).begun == []
    assert [slow.rank for _, slow in run(4, 400, slow_from(1, 2, 1.25)).begun] == [2]


def test_the_end_is_told_once_and_a_rank_in_between_neither_ends_nor_begins_again() -> None:
    def change(step: int, seconds: Tensor) -> None:
        seconds[1] *= 1.3 if 101 <= step < 150 else (1.15 if step % 2 else 1.22) if 150 <= step < 300 else 1.0

    reported = run(4, 500, change)
    assert [slow.since for _, slow in reported.begun] == [101]
    ((at, rank, until),) = reported.ended
    assert (rank, until) == (1, 300)
    assert at <= 320
    assert reported.compared.slow == {}


def test_a_rank_that_is_slow_again_is_named_again() -> None:
    def change(step: int, seconds: Tensor) -> None:
        seconds[3] *= 2.0 if 41 <= step < 81 or step >= 201 else 1.0

    reported = run(4, 300, change)
    assert [slow.since for _, slow in reported.begun] == [41, 201]
    assert [until for _, _, until in reported.ended] == [81]


def test_several_ranks_are_named_each_with_its_own_phase() -> None:
    def change(step: int, seconds: Tensor) -> None:
        seconds[2, 0] *= 1.4
        seconds[5, 3] += 0.01

    assert {slow.rank: slow.phase for _, slow in run(8, 100, change).begun} == {2: "forward", 5: "data"}


def test_ranks_with_other_work_are_not_compared() -> None:
    """Two stages of a pipeline, the second of which has twice the work, and a third with a rank of its own."""

    def change(step: int, seconds: Tensor) -> None:
        seconds[2:4] *= 2
        seconds[4] *= 5

    stages = [[0, 1], [2, 3], [4]]
    assert run(5, 200, change, groups=stages).begun == []
    found = run(5, 200, lambda i, s: (change(i, s), slow_from(1, 3)(i, s))[0], groups=stages).begun
    assert [(slow.rank, slow.peers) for _, slow in found] == [(3, 1)]


def test_what_takes_next_to_nothing_is_not_compared() -> None:
    def change(step: int, seconds: Tensor) -> None:
        seconds[0, 3] *= 3  # data: 2 ms of 97
        seconds[1, 4] *= 2  # what rank 0 alone logs is no phase of its own

    assert run(2, 200, change).begun == []


@pytest.mark.parametrize("ranks", range(1, 8))
def test_the_median_of_others_is_that_of_the_other_rows(ranks: int) -> None:
    values = torch.rand(3, ranks, 2, dtype=torch.float64)
    for rank in range(ranks):
        others = [r for r in range(ranks) if r != rank] or [rank]
        expected = values[:, others].quantile(0.5, 1)
        assert torch.allclose(median_of_others(values)[:, rank], expected, rtol=0, atol=1e-15)


def test_ratios_are_those_of_the_window_and_1_where_nothing_takes_time() -> None:
    reported = run(2, 100, lambda _, seconds: seconds[1].mul_(torch.tensor([1.5, 1, 1, 1, 1])))
    expected = torch.tensor([[97 / 112, 30 / 45, 1, 1, 1, 1], [112 / 97, 1.5, 1, 1, 1, 1]], dtype=torch.float64)
    torch.testing.assert_close(reported.compared.ratios(), expected)


def test_only_steps_that_all_ranks_have_count_and_damaged_values_do_not() -> None:
    values = torch.zeros(2, ROWS, 1 + len(PHASES), dtype=torch.float64)
    values[:, :, 0] = -1
    values[0, :5, 0], values[1, :5, 0] = torch.tensor([[3, 4, 5, 6, 7], [4, 5, 6, 7, 8]], dtype=torch.float64)
    values[0, 2, 1], values[0, 3, 1] = float("nan"), float("inf")
    values[0, 4, 1], values[1, 3, 1] = 0.5, 0.25
    values[:, 6, 0] = float("inf")
    steps, seconds = common_steps(values, after=3)
    assert steps == [4, 7]
    assert seconds[1, :, 0].tolist() == [0.5, 0.25]
    assert common_steps(values, after=7)[1].shape == (0, 2, len(PHASES))
