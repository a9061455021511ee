"""Tables of what an option names, such as a tier: an entry of another package is a value that the option takes.

>>> from ls_strategy.tiers import TIERS, TierKind
>>> TIERS["shelf"] = TierKind("on a shelf", resident=False, open=...)  # doctest: +SKIP
>>> ZeROStrategy(stage=3, offload="shelf")  # doctest: +SKIP

A table is made above the options that name its entries, so these know its name only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Entry = TypeVar("Entry")

_ADDED: dict[str, list[str]] = {}
"""What other packages have added to each table."""


class Registry(dict[str, Entry]):
    """A table, in the order in which its entries came. A name can be given another entry."""

    def __init__(self, table: str, entries: Mapping[str, Entry]) -> None:
        """Begin with this package's entries, which the hints of options list themselves.

        Args:
            table: its name, for `EntryOf`.
            entries: by name.
        """
        super().__init__(entries)
        self._added = _ADDED.setdefault(table, [])

    def __setitem__(self, name: str, entry: Entry) -> None:
        """Add an entry."""
        if name not in self:
            self._added.append(name)
        super().__setitem__(name, entry)

    def __delitem__(self, name: str) -> None:
        """Take an entry away that was added."""
        super().__delitem__(name)
        if name in self._added:
            self._added.remove(name)


@dataclass(frozen=True)
class EntryOf:
    """In the type hint of an option, ``Annotated[str, EntryOf(table)]``: a name that was added to the table."""

    table: str

    @property
    def names(self) -> list[str]:
        """What other packages have added, in order."""
        return list(_ADDED.get(self.table, ()))
