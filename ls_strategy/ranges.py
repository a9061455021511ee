"""Ranges of numbers that an option may have, and their text in messages."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The allowed numbers. Infinity is allowed only with ``infinite``. Callers refuse NaN before."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    multiple_of: int = 1
    infinite: bool = False

    def holds(self, value: float) -> bool:
        """Return whether the range allows ``value``."""
        return (
            (self.infinite or value not in (math.inf, -math.inf))
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and (self.multiple_of == 1 or value % self.multiple_of == 0)
        )

    def __str__(self) -> str:
        """Return the range as text that follows the kind of number, such as ``from 0 to 1``."""
        parts = []
        if self.least is not None and self.most is not None:
            parts.append(f"from {_digits(self.least)} to {_digits(self.most)}")
        elif self.least is not None:
            parts.append(f"of at least {_digits(self.least)}")
        elif self.most is not None and self.above is None:
            parts.append(f"of at most {_digits(self.most)}")
        limits = [("above", self.above), ("at most", self.most if self.least is None else None), ("below", self.below)]
        if self.above is not None or self.below is not None:
            parts += [" and ".join(f"{kind} {_digits(limit)}" for kind, limit in limits if limit is not None)]
        return ", ".join([*parts, *([f"a multiple of {self.multiple_of}"] if self.multiple_of != 1 else [])])

    def nearest(self, value: float) -> float | None:
        """Return an allowed number close to ``value``, or None if none is obvious."""
        for limit in (self.least, self.most):
            if limit is not None and self.holds(limit) and (value < limit if limit is self.least else value > limit):
                return limit
        near = value - value % self.multiple_of if self.multiple_of != 1 else value
        return near if self.holds(near) else None


def _digits(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def at_least(least: float, most: float | None = None, *, multiple_of: int = 1) -> Range:
    """Return the numbers from ``least`` to ``most``."""
    return Range(least=least, most=most, multiple_of=multiple_of)


def above(limit: float, most: float | None = None) -> Range:
    """Return the numbers above ``limit``, up to ``most``."""
    return Range(above=limit, most=most)


def between(least: float, most: float) -> Range:
    """Return the numbers from ``least`` to ``most``."""
    return Range(least=least, most=most)


ANY = Range()
"""Every finite number."""
