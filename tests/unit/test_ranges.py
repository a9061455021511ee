"""Ranges of numbers: what they allow, their text, and the number that a message proposes."""

from __future__ import annotations

import math

import pytest

from ls_strategy.ranges import ANY, Range, above, at_least, between


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (ANY, [0, -1e30, 10**400], [math.inf]),
        (at_least(1), [1, 2.5], [0.999, -1]),
        (at_least(1, 8), [1, 8], [0, 9]),
        (above(0, 1), [0.1, 1], [0, 1.1]),
        (between(0, 1), [0, 1], [-0.1, 1.1]),
        (Range(least=0, below=1), [0, 0.99], [1]),
        (at_least(4096, multiple_of=4096), [4096, 8192], [4097]),
        (Range(least=0, infinite=True), [math.inf], [-math.inf]),
    ],
    ids=str,
)
def test_numbers_inside_and_outside(allowed: Range, inside: list[float], outside: list[float]) -> None:
    assert all(map(allowed.holds, inside))
    assert not any(map(allowed.holds, outside))


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        (ANY, ""),
        (at_least(1), "of at least 1"),
        (at_least(1, 65536), "from 1 to 65,536"),
        (Range(most=0.5), "of at most 0.5"),
        (above(0, 1), "above 0 and at most 1"),
        (Range(least=0, below=1), "of at least 0, below 1"),
        (at_least(4096, multiple_of=4096), "of at least 4,096, a multiple of 4096"),
    ],
)
def test_the_text_follows_the_kind_of_number(allowed: Range, text: str) -> None:
    assert str(allowed) == text


@pytest.mark.parametrize(
    ("allowed", "value", "nearest"),
    [
        (at_least(1, 8), 0, 1),
        (at_least(1, 8), 9, 8),
        (at_least(4096, multiple_of=4096), 9000, 8192),
        (above(0), -1, None),
        (at_least(0, 10), 3, 3),
    ],
)
def test_the_nearest_number_is_allowed(allowed: Range, value: float, nearest: float | None) -> None:
    assert allowed.nearest(value) == nearest
