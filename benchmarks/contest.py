"""Contenders that take turns in one run, so that a noisy machine is noisy for all, and what is said about their times.

In every round each of them has one turn, and another one begins. Times of one round are compared with each other, and
of these ratios the quartiles are reported: a disturbance that lasts for rounds changes both sides of a ratio, and one
that hits a single turn changes a single ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name")


def turns(names: Sequence[Name], rounds: int, *, uncounted: int = 0) -> Iterator[tuple[bool, Name]]:
    """Who is next, and whether the turn counts.

    Args:
        names: of the contenders.
        rounds: that count.
        uncounted: rounds before, in which contenders allocate and build kernels.

    >>> ["".join(name) for _, name in turns("abc", 3)]
    ['a', 'b', 'c', 'b', 'c', 'a', 'c', 'a', 'b']
    """
    for round_ in range(uncounted + rounds):
        first = round_ % len(names)
        for name in (*names[first:], *names[:first]):
            yield round_ >= uncounted, name


def clocked(
    contenders: Mapping[str, Callable[[], object]], rounds: int, *, uncounted: int = 1
) -> dict[str, list[float]]:
    """Seconds of every contender in every counted round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for counts, name in turns(list(contenders), rounds, uncounted=uncounted):
        begin = time.perf_counter()
        contenders[name]()
        spent = time.perf_counter() - begin
        if counts:
            times[name].append(spent)
    return times


def ratios(times: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Of the times of the same round.

    >>> ratios([2.0, 3.0], [1.0, 2.0])
    [2.0, 1.5]
    """
    return [a / b for a, b in zip(times, baseline, strict=True)]


def quartiles(values: Sequence[float], digits: int = 3) -> list[float]:
    """25 %, 50 % and 75 %, rounded; of few values no further out than those are.

    >>> quartiles([1.0, 2.0, 3.0]), quartiles([1.23456])
    ([1.0, 2.0, 3.0], [1.235, 1.235, 1.235])
    >>> quartiles([1.0, 2.0])
    [1.0, 1.5, 2.0]
    """
    cuts = statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3
    return [round(min(max(cut, min(values)), max(values)), digits) for cut in cuts]


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """`quartiles` by name."""
    low, middle, high = quartiles(values, digits)
    return {"median": middle, "q1": low, "q3": high}


def against(times: Mapping[str, Sequence[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Per contender: median seconds, and the quartiles of the ratio to the baseline in the same round."""
    result: dict[str, dict[str, float]] = {}
    for name, seconds in times.items():
        low, middle, high = quartiles(ratios(seconds, times[baseline]))
        result[name] = {
            "median_s": round(statistics.median(seconds), 6),
            "ratio": middle,
            "ratio_q1": low,
            "ratio_q3": high,
        }
    return result
