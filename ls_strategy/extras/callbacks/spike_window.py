"""The window of a number that is watched: its latest accepted values, and the limit that follows from them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

_SIGMA = 1.4826
"""The standard deviation of a normal distribution in units of its median absolute deviation."""

_LEAST_DEVIATION = 0.01
"""The least deviation as a share of the level, so that a window of nearly equal values does not refuse the next one."""

_LEVEL = 0.95
"""Share of the window that lies below the level. The median would refuse a rare kind of batch with a higher loss."""

_MOST_LOG = 690.0
"""Of a limit that fits into fp64."""


class SpikeWindow:
    """The latest values of a number. The one invariant: a value that was refused is not in it."""

    def __init__(self, length: int, deviations: float) -> None:
        """``length``: of the window; ``deviations``: how many the limit lies above the level."""
        self._length, self._deviations = length, deviations
        self._values: deque[float] = deque(maxlen=length)

    def limit(self) -> float:
        """Return the limit of the next value; infinite until the window is half full."""
        if 2 * len(self._values) < self._length:
            return math.inf
        return limit_of(self._values, self._deviations)

    def refuses(self, value: float) -> bool:
        """Return whether a value is above the limit or not finite."""
        return not math.isfinite(value) or value > self.limit()

    def add(self, value: float) -> None:
        """Add a value."""
        self._values.append(value)

    def state(self) -> list[float]:
        """Return the values."""
        return list(self._values)

    def restore(self, values: Iterable[float]) -> None:
        """Continue with the result of `state`, also that of a longer window."""
        self._values.clear()
        self._values.extend(values)


def limit_of(values: Iterable[float], deviations: float) -> float:
    """Return the limit: the level of the values and so many robust deviations above it.

    The level is the 95th percentile, the deviation 1.4826 times the median absolute deviation. Of positive values it is
    also computed from their logarithms, as gradient norms are skewed, and the larger limit counts.
    """
    found = sorted(values)
    limit = _above(found, deviations, least=_LEAST_DEVIATION)
    if found[0] > 0:
        skewed = _above([math.log(value) for value in found], deviations)
        limit = max(limit, math.exp(skewed) if skewed < _MOST_LOG else math.inf)
    return limit


def _above(found: Sequence[float], deviations: float, least: float = 0.0) -> float:
    """Return the limit of sorted values, whose deviation is at least a share ``least`` of their level."""
    center, level = median(found), found[math.ceil(_LEVEL * len(found)) - 1]
    deviation = _SIGMA * median(abs(value - center) for value in found)
    if not deviation:  # more than half of them are equal, which says nothing about the others
        deviation = found[-1] - center
    deviation = max(deviation, least * abs(level))
    return level + deviations * deviation if deviation or not least else math.inf
