"""Which nodes are left out after failures of their ranks: counts belong to places, and outlive restarts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ls_strategy.extras.callbacks import elastic_errors
from ls_strategy.extras.callbacks.elastic_failures import NOTE, Failures


def failures(
    monkeypatch: pytest.MonkeyPatch, memory: Path, nodes: dict[str, list[int]], *, meets_on: str = ""
) -> Failures:
    """As the first node's lead sees them; every rank has the same in its memory."""
    where = [name for name, ranks in nodes.items() for _ in ranks]
    own = SimpleNamespace(
        memory=SimpleNamespace(folder=memory), is_lead=True,
        all=[SimpleNamespace(id=name, ranks=ranks) for name, ranks in nodes.items()],
    )  # fmt: skip
    monkeypatch.setattr(elastic_errors, "launcher", lambda: 1)
    monkeypatch.setattr(elastic_errors, "is_meeting_place", lambda *_: False)

    def exchange(mine: tuple[bool, Any]) -> list[Any]:
        return [(name != meets_on, mine[1]) for name in where]

    return Failures(own, exchange)  # type: ignore[arg-type]


def test_the_second_failure_of_a_place_leaves_its_node_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = failures(monkeypatch, tmp_path, {"a": [0, 1], "b": [2, 3]})
    assert found.note({3: 1}) == []
    assert found.note({3: 1, 2: 1}) == [], "another rank"
    assert found.note({3: 2, 2: 1}) == [2, 3]


def test_a_count_follows_its_place_through_restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert failures(monkeypatch, tmp_path, {"a": [0, 1], "b": [2, 3]}).note({3: 1}) == []
    restarted = failures(monkeypatch, tmp_path, {"b": [0, 1], "c": [2, 3]})
    assert restarted.by_rank() == {1: 1}
    assert restarted.note({1: 1, 3: 1}) == [], "only the other rank has failed again"
    assert restarted.note({1: 2, 3: 1}) == [0, 1]
    (tmp_path / NOTE).write_text("[")
    assert failures(monkeypatch, tmp_path, {"a": [0, 1]}).by_rank() == {}, "damaged"


def test_a_node_that_the_run_needs_is_not_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert failures(monkeypatch, tmp_path, {"a": [0, 1]}).note({1: 2}) == [], "the only one"
    two = {"a": [0], "b": [1]}
    assert failures(monkeypatch, tmp_path, two, meets_on="b").note({1: 2}) == []
    assert failures(monkeypatch, tmp_path, {"x": [0], "y": [1]}).note({0: 2, 1: 2}) == [], "all of them"
