"""Which scalars a logger is given, and in which unit: no chart of what is not used, no number too small to read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class ByteUnit(NamedTuple):
    """Of amounts of memory."""

    name: str
    nbytes: int


def unit_for(nbytes: float) -> ByteUnit:
    """The largest unit of which an amount has at least one."""
    for unit in (ByteUnit("gib", 1 << 30), ByteUnit("mib", 1 << 20)):
        if nbytes >= unit.nbytes:
            return unit
    return ByteUnit("kib", 1 << 10)


class Charts:
    """Scalars of one fit. A chart begins when its number is not 0 for the first time, and has every point since."""

    def __init__(self, always: Collection[str] = ()) -> None:
        """``always``: names of scalars whose 0 says something."""
        self._always = frozenset(always)
        self._used: set[str] = set()

    def of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What is given to the loggers."""
        self._used |= {name for name, value in metrics.items() if value or name in self._always}
        return {name: value for name, value in metrics.items() if name in self._used}
