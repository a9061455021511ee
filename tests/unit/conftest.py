"""What unit tests share: engines that end with their test, and a tier for tests of the registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.one_rank import ShelfTier, close_engines, register_shelf


@pytest.fixture(autouse=True)
def no_engine_left() -> Iterator[None]:
    """Close the engines of `one_rank`, whose threads would run on."""
    yield
    close_engines()


@pytest.fixture
def shelves(monkeypatch: pytest.MonkeyPatch) -> list[ShelfTier]:
    """Register a tier under a name that options know; return what was opened."""
    return register_shelf(monkeypatch, "nvme")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All texts that matplotlib draws, in full and within the image."""
    text = pytest.importorskip("matplotlib.text")
    texts: list[str] = []
    draw = text.Text.draw

    def noted(self: Any, renderer: Any, *args: Any, **options: Any) -> None:
        if self.get_text() and self.get_visible():
            texts.append(self.get_text())
            box, image = self.get_window_extent(renderer), self.get_figure(root=True).bbox
            assert image.x0 <= box.x0 <= box.x1 <= image.x1, self.get_text()
            assert image.y0 <= box.y0 <= box.y1 <= image.y1, self.get_text()
        draw(self, renderer, *args, **options)

    monkeypatch.setattr(text.Text, "draw", noted)
    return texts
