"""The stage table and the formulas of `tests.papers` against the ZeRO paper (Rajbhandari et al., arXiv:1910.02054)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_strategy.zero_stages import POLICIES
from tests import papers


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_bytes_are_figure_1(stage, gigabytes) -> None:
    """7.5 B parameters on 64 ranks, decimal GB, to the digits the paper prints."""
    assert papers.bytes_per_rank(stage, 7_500_000_000, 64) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("stage", "share"),
    [
        (0, lambda p, n: 16 * p),
        (1, lambda p, n: 4 * p + 12 * p / n),
        (2, lambda p, n: 2 * p + 14 * p / n),
        (3, lambda p, n: 16 * p / n),
    ],
)
@given(numel=st.integers(0, 10**12), world_size=st.integers(1, 4096))
def test_bytes_are_section_5(stage, share, numel, world_size) -> None:
    """Adam in mixed precision: 2 + 2 + 12 bytes per parameter."""
    assert papers.bytes_per_rank(stage, numel, world_size) == pytest.approx(share(numel, world_size))


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
@given(shard=st.integers(0, 10**9), world_size=st.integers(1, 4096))
def test_traffic_without_accumulation_is_section_7(stage, volume, shard, world_size) -> None:
    """2 P per step like plain data parallelism, 3 P where parameters are sharded; a rank sends (N - 1) / N of it."""
    numel = shard * world_size
    assert papers.elements_sent(stage, numel, world_size) == volume * shard * (world_size - 1)


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 4), (3, 9)])
def test_traffic_with_three_micro_batches(stage, volume) -> None:
    """Stages 0 and 1 average once per step, stage 2 every micro-batch, stage 3 gathers every micro-batch too."""
    assert papers.elements_sent(stage, 400, 4, micro_batches=3) == volume * 300


def test_each_stage_shards_one_kind_more() -> None:
    sharded = [(p.optimizer, p.gradients, p.parameters) for p in (POLICIES[s] for s in (0, 1, 2, 3))]
    assert sharded == [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
