"""Partitions a list of blocks into contiguous parts of about equal weight. Numbers only: no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from ls_strategy.errors import PlanError


def balance(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the bounds of the parts: part ``i`` is ``weights[bounds[i]:bounds[i + 1]]``, never empty.

    The weight of the heaviest part is minimal, exactly. Among such partitions the sum of squares is minimal, which
    evens out the other parts. Dynamic programming in ``parts * len(weights) ** 2`` steps.

    >>> balance([1] * 10, 4), balance([4, 1, 1, 1, 1], 2)
    ((0, 3, 6, 8, 10), (0, 1, 5))

    Raises:
        PlanError: There are fewer weights than parts.
    """
    count = len(weights)
    if not 1 <= parts <= count:
        raise PlanError(f"Got {count} blocks for {parts} stages, but every stage needs a block. Use fewer stages.")
    sums = [0, *accumulate(weights)]
    limit = _smallest_maximum(sums, parts)
    best: list[float] = [0.0] + [math.inf] * count
    starts: list[list[int]] = []
    for part in range(1, parts + 1):
        row, start = [math.inf] * (count + 1), [0] * (count + 1)
        for stop in range(part, count - (parts - part) + 1):
            for begin in reversed(range(part - 1, stop)):
                weight = sums[stop] - sums[begin]
                if weight > limit:
                    break
                if best[begin] + weight * weight < row[stop]:
                    row[stop], start[stop] = best[begin] + weight * weight, begin
        best = row
        starts.append(start)
    bounds = [count]
    for start in reversed(starts):
        bounds.append(start[bounds[-1]])
    return tuple(reversed(bounds))


def _smallest_maximum(sums: Sequence[float], parts: int) -> float:
    """Return the minimal weight of the heaviest part. It is a difference of two ``sums``, so no rounding occurs."""
    count = len(sums) - 1
    best = [sums[stop] - sums[0] for stop in range(count + 1)]
    for part in range(2, parts + 1):
        best = [
            min((max(best[begin], sums[stop] - sums[begin]) for begin in range(part - 1, stop)), default=math.inf)
            if stop >= part
            else math.inf
            for stop in range(count + 1)
        ]
    return best[count]
