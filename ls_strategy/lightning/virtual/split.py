"""Split virtual ranks over the ranks: the same number for each, or the shares that the options set."""

from __future__ import annotations

from functools import lru_cache

from ls_strategy.config import ParallelConfig
from ls_strategy.distributed.rounds import Split
from ls_strategy.errors import PlanError


def check_ranks(config: ParallelConfig, ranks: int) -> None:
    """Refuse virtual ranks that this number of ranks cannot compute."""
    count, shares = config.virtual_ranks, config.virtual_ranks_per_rank
    assert count is not None
    if ranks > count:
        raise PlanError(
            f"Got parallel.virtual_ranks={count} on {ranks} ranks, but every rank needs a virtual rank. Set "
            f"parallel.virtual_ranks={ranks} or more, or devices={count}."
        )
    if isinstance(shares, tuple) and len(shares) != ranks:
        raise PlanError(
            f"Got parallel.virtual_ranks_per_rank={list(shares)} on {ranks} ranks, but there must be one number per "
            f"rank. Set devices={len(shares)}, or virtual_ranks_per_rank={list(Split.even(count, ranks).shares)}."
        )


def split_of(config: ParallelConfig, ranks: int) -> Split:
    """Return the split over ``ranks`` ranks that the options set."""
    assert config.virtual_ranks is not None
    return _split(config.virtual_ranks, ranks, config.virtual_ranks_per_rank)


@lru_cache(maxsize=8)
def _split(count: int, ranks: int, shares: tuple[int, ...] | None) -> Split:
    return Split.even(count, ranks) if shares is None else Split(shares)
