"""What unit tests share: engines that end with their test, and a tier for tests of the registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ls_strategy.tiers import TIERS, TierKind
from ls_strategy.tiers.base import Sizes
from tests.unit.one_rank import ShelfTier, close_engines


@pytest.fixture(autouse=True)
def no_engine_left() -> Iterator[None]:
    """Close the engines of `one_rank`, whose threads would run on."""
    yield
    close_engines()


@pytest.fixture
def shelves(monkeypatch: pytest.MonkeyPatch) -> list[ShelfTier]:
    """Register a tier under a name that options know; return what was opened."""
    opened: list[ShelfTier] = []

    def open_shelf(sizes: Sizes, *_: Any) -> ShelfTier:
        opened.append(ShelfTier(sizes))
        return opened[-1]

    monkeypatch.setitem(TIERS, "nvme", TierKind("on a shelf", resident=False, open=open_shelf))
    return opened
