"""Statistics of routers: sums over calls, and loads that only `take_loads` resets."""

from __future__ import annotations

import pytest
import torch

from ls_strategy.moe.statistics import Counts

CPU = torch.device("cpu")


def counted() -> Counts:
    counts = Counts(3)
    counts.add(routed=torch.tensor([1, 2, 3]), kept=None, values=torch.tensor([1.0, 2.0, 3.0]))
    counts.add(routed=torch.tensor([3, 2, 1]), kept=torch.tensor([1, 1, 1]), values=torch.tensor([3.0, 4.0, 5.0]))
    return counts


def test_pairs_are_summed_and_values_are_means_over_calls() -> None:
    statistics = counted().statistics(CPU)
    assert statistics.routed.tolist() == [4, 4, 4]
    assert statistics.kept.tolist() == [2, 3, 4]
    values = [v.item() for v in (statistics.entropy, statistics.balance_loss, statistics.z_loss)]
    assert values == [2.0, 3.0, 4.0]
    assert statistics.calls == 2


def test_without_calls_everything_is_zero() -> None:
    statistics = Counts(3).statistics(CPU)
    assert statistics.routed.tolist() == statistics.kept.tolist() == [0, 0, 0]
    assert statistics.entropy.item() == statistics.calls == 0


def test_statistics_are_copies() -> None:
    counts = counted()
    before = counts.statistics(CPU)
    counts.add(routed=torch.ones(3, dtype=torch.int64), kept=None, values=torch.zeros(3))
    assert before.routed.tolist() == [4, 4, 4]


@pytest.mark.parametrize("reset", [True, False])
def test_loads_are_taken_once_and_a_reset_keeps_them(reset: bool) -> None:
    counts = counted()
    if reset:
        counts.reset()
    assert counts.statistics(CPU).calls == (0 if reset else 2)
    assert counts.take_loads(CPU).tolist() == [4.0, 4.0, 4.0]
    assert counts.take_loads(CPU).tolist() == [0.0, 0.0, 0.0]
    assert counts.statistics(CPU).calls == (0 if reset else 2)
