"""What every group of options is: a frozen dataclass that knows which of its options were written.

The one invariant: a group refuses what it has no option for, with the nearest option that it has.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from ls_strategy.checked import unknown_option

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass(frozen=True, kw_only=True)  # or jsonargparse writes class paths into YAML
class Group:
    """Base of all groups. Their ``__init__`` is that of a dataclass, with keywords alone."""

    RENAMED: ClassVar[dict[str, str]] = {}
    """Options of earlier versions, with what they are now."""

    __slots__ = ("_written",)  # jsonargparse takes what is in ``vars(group)`` for options

    _written: ClassVar[frozenset[str]]

    def __new__(cls, **written: Any) -> Self:
        """Note which options are written, also those with the value of their default.

        Raises:
            ConfigError: there is no option of this name.
        """
        options = [field.name for field in dataclasses.fields(cls)]
        for name in written:
            if name not in options:
                raise unknown_option(cls, name, f"{cls.__name__}({name}=...)")
        group = super().__new__(cls)
        object.__setattr__(group, "_written", frozenset(written))
        return group

    @property
    def written(self) -> dict[str, Any]:
        """Values of the options that were written."""
        return {name: getattr(self, name) for name in sorted(self._written)}

    def __getstate__(self) -> Any:
        return vars(self), self._written

    def __setstate__(self, state: Any) -> None:
        options, written = state
        vars(self).update(options)
        object.__setattr__(self, "_written", written)

    def _set(self, name: str, value: Any) -> None:
        """Replace a short form by what it stands for, in ``__post_init__``."""
        object.__setattr__(self, name, value)
