"""What was recorded of one step, in seconds, and what is to be told of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FORWARD, BACKWARD, OPTIMIZER, DATA, OTHER = "forward", "backward", "optimizer", "data", "other"
PHASES = (FORWARD, BACKWARD, OPTIMIZER, DATA, OTHER)
"""What a step consists of."""

VALIDATION = "validation"
"""A phase between steps."""

COMMUNICATION, COPY = "communication", "copy"
"""What goes on beside computation: collectives and messages; to and from host memory and drives."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """As `ls_strategy.spans.recorder.Note`, in seconds of ``time.perf_counter``, cut to the window."""

    category: str
    name: str
    start: float
    end: float
    nbytes: int = 0
    """0 for what began before the window."""

    moves: bool = True
    waits: bool = False


@dataclass(frozen=True)
class Record:
    """One step, or several."""

    start: float
    """Seconds of ``time.perf_counter``, as all times here."""

    end: float
    phases: list[Span]
    """One after the other, without gaps."""

    spans: list[Span]
    """Of `COMMUNICATION` and `COPY`."""

    memory: list[tuple[float, str, dict[str, int]]]
    """When, after which phase or before which unit, and bytes by category."""

    sent: dict[str, int]
    """Bytes that this rank has given to the network, by kind, as the traffic meters count them."""

    @property
    def seconds(self) -> float:
        """How long the window was."""
        return self.end - self.start

    def total_s(self, category: str) -> float:
        """Seconds in which anything of ``category`` was under way."""
        return length(self._moving(category))

    def exposed_s(self, category: str) -> float:
        """Those of them in which computation stood still for it."""
        waits = union((s.start, s.end) for s in self.spans if s.category == category and s.waits)
        return length(intersection(self._moving(category), waits))

    def hidden_s(self, category: str) -> float:
        """The others: something was computed meanwhile."""
        return self.total_s(category) - self.exposed_s(category)

    def nbytes(self, category: str) -> int:
        """Bytes of all spans of ``category`` that began in the window."""
        return sum(s.nbytes for s in self.spans if s.category == category)

    def _moving(self, category: str) -> list[Interval]:
        return union((s.start, s.end) for s in self.spans if s.category == category and s.moves)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time, sorted, no two touching.

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
    """What is in both; each as `union` returns it.

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
    """Of all together."""
    return sum(end - start for start, end in intervals)
