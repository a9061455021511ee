"""Numbers over steps, and their reduction to the columns of a chart."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


@dataclass
class Series:
    """The values of one scalar in the order of their steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))  # seconds since 1970; NaN where the log has none

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

    def finite(self) -> Any:
        """Return the values that are numbers, as a NumPy array."""
        values = np.array(self.values)
        return values[np.isfinite(values)]

    def cut_from(self, step: int) -> int:
        """Remove the points from ``step`` on, and return how many there were."""
        return self._keep(np.flatnonzero(np.array(self.steps) < step))

    def sort(self) -> None:
        """Sort by step; points of the same step keep their order."""
        steps = np.array(self.steps)
        if (steps[1:] < steps[:-1]).any():
            self._keep(np.argsort(steps, kind="stable"))

    def _keep(self, places: Any) -> int:
        """Keep the points at ``places``, in this order, and return how many were left out."""
        before = len(self)
        for name in ("steps", "values", "times"):
            column = getattr(self, name)
            setattr(self, name, array(column.typecode, np.array(column)[places].tobytes()))
        return before - len(self)

    def scaled(self, factor: float) -> Series:
        """Return the values times ``factor``."""
        return Series(self.steps, array("d", (np.array(self.values) * factor).tobytes()), self.times)


class Columns(NamedTuple):
    """Summaries of the points that the columns of a chart show, as NumPy arrays with a number per column."""

    step: Any  # mean of the steps
    low: Any
    mean: Any
    high: Any  # of the values that are numbers; NaN if there is none
    points: Any
    not_finite: Any  # points that are NaN or infinite


def columns_of(series: Series, most: int) -> Columns:
    """Return at most ``most`` columns: each point by itself, or minimum, mean and maximum of equal ranges of steps.

    No extreme value is lost: the minimum and the maximum of all columns are those of the series.
    """
    steps, values = np.array(series.steps, float), np.array(series.values)
    starts = np.arange(len(steps))
    if len(steps) > most:
        place = (steps - steps[0]) / max(steps[-1] - steps[0], 1) * most
        starts = np.flatnonzero(np.diff(np.minimum(place.astype(int), most - 1), prepend=-1))
    if not len(starts):
        return Columns(*[np.zeros(0)] * 6)
    points = np.diff(starts, append=len(steps))
    finite = np.isfinite(values)
    numbers = np.add.reduceat(finite, starts, dtype=int)
    low, high = (each.reduceat(np.where(finite, values, np.nan), starts) for each in (np.fmin, np.fmax))
    shares = np.where(finite, values, 0.0) / np.repeat(np.maximum(numbers, 1), points)  # their sum does not overflow
    mean = np.clip(np.where(numbers, np.add.reduceat(shares, starts), np.nan), low, high)
    return Columns(np.add.reduceat(steps, starts) / points, low, mean, high, points, points - numbers)
