"""Numbers over steps, and their reduction to the columns of a chart."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Series:
    """The values of one scalar in the order of their steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))
    """Seconds since 1970; NaN where the log has none."""

    def add(self, step: int, value: float, time: float = math.nan) -> None:
        """Append a point."""
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time)

    def __len__(self) -> int:
        return len(self.steps)

    def points(self) -> Iterator[tuple[int, float]]:
        """Iterate over steps and values."""
        return zip(self.steps, self.values, strict=True)

    def finite(self) -> list[float]:
        """Return the values that are numbers."""
        return [value for value in self.values if math.isfinite(value)]

    def last(self) -> float | None:
        """Return the last value that is a number."""
        return next((value for value in reversed(self.values) if math.isfinite(value)), None)

    def cut_from(self, step: int) -> int:
        """Remove the points from ``step`` on, and return how many there were."""
        keep = [i for i, each in enumerate(self.steps) if each < step]
        removed = len(self) - len(keep)
        if removed:
            for name in ("steps", "values", "times"):
                column = getattr(self, name)
                setattr(self, name, array(column.typecode, (column[i] for i in keep)))
        return removed

    def sort(self) -> None:
        """Sort by step; points of the same step keep their order."""
        if any(after < before for before, after in zip(self.steps, self.steps[1:], strict=False)):
            order = sorted(range(len(self)), key=self.steps.__getitem__)
            for name in ("steps", "values", "times"):
                column = getattr(self, name)
                setattr(self, name, array(column.typecode, (column[i] for i in order)))

    def scaled(self, factor: float) -> Series:
        """Return the values times ``factor``."""
        return Series(self.steps, array("d", (value * factor for value in self.values)), self.times)


class Column(NamedTuple):
    """Summary of the points that one column of a chart shows."""

    step: float
    """Mean of the steps."""

    low: float
    mean: float
    high: float
    """Of the values that are numbers; NaN if there is none."""

    points: int
    not_finite: int
    """Points that are NaN or infinite."""


def columns_of(series: Series, most: int) -> list[Column]:
    """Return at most ``most`` columns: each point by itself, or minimum, mean and maximum of equal ranges of steps.

    No extreme value is lost: the minimum and the maximum of all columns are those of the series.
    """
    if len(series) <= most:
        return [_column([step], [value]) for step, value in series.points()]
    first, last = series.steps[0], series.steps[-1]
    width = max(last - first, 1) / most
    result: list[Column] = []
    begin, number = 0, 0
    for i, step in enumerate(series.steps):
        here = min(int((step - first) / width), most - 1)
        if here != number:
            if i > begin:
                result.append(_column(series.steps[begin:i], series.values[begin:i]))
            begin, number = i, here
    result.append(_column(series.steps[begin:], series.values[begin:]))
    return result


def _column(steps: Sequence[int], values: Sequence[float]) -> Column:
    finite = [value for value in values if math.isfinite(value)]
    mean_step = steps[0] if len(steps) == 1 else sum(steps) / len(steps)
    if not finite:
        return Column(mean_step, math.nan, math.nan, math.nan, len(values), len(values))
    low, high = min(finite), max(finite)
    mean = finite[0] if len(finite) == 1 else math.fsum(value / len(finite) for value in finite)
    return Column(mean_step, low, min(max(mean, low), high), high, len(values), len(values) - len(finite))
