"""Choose the scalars that a logger gets, and their units: no charts of unused features, no tiny numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class ByteUnit(NamedTuple):
    """A unit of memory."""

    name: str
    nbytes: int


def unit_for(nbytes: float) -> ByteUnit:
    """Return the largest unit of which ``nbytes`` has at least one."""
    for unit in (ByteUnit("gib", 1 << 30), ByteUnit("mib", 1 << 20)):
        if nbytes >= unit.nbytes:
            return unit
    return ByteUnit("kib", 1 << 10)


class Charts:
    """The scalars of one fit. A chart starts at its first value that is not 0, and then gets every value."""

    def __init__(self, always: Collection[str] = ()) -> None:
        """``always``: scalars that are logged even if they are 0."""
        self._always = frozenset(always)
        self._used: set[str] = set()

    def of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the scalars to log."""
        self._used |= {name for name, value in metrics.items() if value or name in self._always}
        return {name: value for name, value in metrics.items() if name in self._used}
