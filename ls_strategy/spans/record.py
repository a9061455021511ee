"""Store what was recorded of one step, in seconds, and compute sums over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FORWARD, BACKWARD, OPTIMIZER, DATA, OTHER = "forward", "backward", "optimizer", "data", "other"
PHASES = (FORWARD, BACKWARD, OPTIMIZER, DATA, OTHER)
"""The phases of a step."""

VALIDATION = "validation"
"""A phase between steps."""

COMMUNICATION, COPY = "communication", "copy"
"""Categories that overlap computation: collectives and point-to-point; copies to and from host memory and NVMe."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """A `ls_strategy.spans.recorder.Note`, in seconds of ``time.perf_counter``, clipped to the window."""

    category: str
    name: str
    start: float
    end: float
    nbytes: int = 0
    """0 if it started before the window."""

    moves: bool = True
    waits: bool = False


@dataclass(frozen=True)
class SpanRecord:
    """One step, or several."""

    start: float
    """Seconds of ``time.perf_counter``, like all times here."""

    end: float
    phases: list[Span]
    """Consecutive, without gaps."""

    spans: list[Span]
    """Those of `COMMUNICATION` and `COPY`."""

    memory: list[tuple[float, str, dict[str, int]]]
    """Time, name of the phase before or of the unit after it, and bytes by category."""

    sent: dict[str, int]
    """Bytes that this rank sent, by kind, as the traffic meters count them."""

    @property
    def seconds(self) -> float:
        """Duration of the window."""
        return self.end - self.start

    def total_s(self, category: str) -> float:
        """Return the seconds in which anything of ``category`` was in flight."""
        return length(self._moving(category))

    def exposed_s(self, category: str) -> float:
        """Return the part of `total_s` that blocked computation."""
        waits = union((s.start, s.end) for s in self.spans if s.category == category and s.waits)
        return length(intersection(self._moving(category), waits))

    def hidden_s(self, category: str) -> float:
        """Return the part of `total_s` that computation overlapped."""
        return self.total_s(category) - self.exposed_s(category)

    def nbytes(self, category: str) -> int:
        """Return the bytes of all spans of ``category`` that started in the window."""
        return sum(s.nbytes for s in self.spans if s.category == category)

    def _moving(self, category: str) -> list[Interval]:
        return union((s.start, s.end) for s in self.spans if s.category == category and s.moves)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint, sorted intervals that cover the same points.

    >>> union([(4, 5), (1, 2), (2, 3)])
    [(1, 3), (4, 5)]
    """
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the points in both; each argument is a result of `union`.

    >>> intersection([(1, 3), (4, 6)], [(2, 5)])
    [(2, 3), (4, 5)]
    """
    result: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            result.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return result


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths."""
    return sum(end - start for start, end in intervals)
