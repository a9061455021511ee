"""Which of several checkpoints was saved last, although the clocks of the nodes that saved them differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ls_strategy.checkpoint.history import History, Saved, latest

FIRST = History.begin()
SECOND = FIRST.goes_on()
OTHER = History.begin()


def at(path: str, saved_at: float, step: int, history: History | None = FIRST) -> Saved:
    return Saved(path, saved_at, step, history)


@pytest.mark.parametrize(
    ("expected", "saves"),
    [
        (None, []),
        ("10", [at("5", 3600.0, 5), at("10", 20.0, 10)]),
        ("10", [at("10", 20.0, 10), at("5", 3600.0, 5)]),
        # The same step twice: the clock.
        ("b", [at("a", 1.0, 5), at("b", 2.0, 5)]),
        # The user went back to step 5 and trains on from there.
        ("7", [at("5", 1.0, 5), at("10", 2.0, 10), at("7", 3.0, 7, SECOND)]),
        ("7", [at("5", 1.0, 5), at("10", 3600.0, 10), at("7", 3.0, 7, SECOND)]),
        # Twice: of the two that begin there, the one that was saved last.
        ("6", [at("9", 2.0, 9, SECOND), at("6", 3.0, 6, replace(SECOND, fit="another"))]),
        # Another run: its steps say nothing.
        ("new", [at("old", 1.0, 1000), at("new", 2.0, 3, OTHER)]),
        ("old", [at("old", 2.0, 3), at("new", 1.0, 1000, OTHER)]),
        # Of other strategies, or of an earlier version: the clock.
        ("b", [at("a", 1.0, 0, None), at("b", 2.0, 0, None)]),
        ("b", [at("a", 1.0, 10, None), at("b", 2.0, 5, None)]),
        ("b", [at("a", 1.0, 10), at("b", 2.0, 0, None)]),
    ],
)
def test_the_last_one(expected: str | None, saves: list[Saved]) -> None:
    found = latest(saves)
    assert (None if found is None else found.path) == expected


def test_a_history_comes_back_from_a_checkpoint() -> None:
    assert History.of(SECOND.to_dict()) == SECOND
    assert (SECOND.run, SECOND.generation) == (FIRST.run, 1)
    for other in (None, 3, {}, {"run": 1, "fit": "", "generation": 0}, {**SECOND.to_dict(), "more": 1}):
        assert History.of(other) is None
