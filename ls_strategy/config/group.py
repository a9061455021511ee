"""`Group`: the base of all option dataclasses, which records which options were given explicitly.

The one invariant: a group refuses an unknown option and names the nearest one it has.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ls_strategy.checked import show, unknown_option
from ls_strategy.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass(frozen=True, kw_only=True)  # or jsonargparse writes class paths into YAML
class Group:
    """Base of all groups. Their ``__init__`` is the dataclass's own, keyword-only."""

    __slots__ = ("_written",)  # jsonargparse takes what is in ``vars(group)`` for options

    _written: ClassVar[frozenset[str]]

    def __new__(cls, **written: Any) -> Self:
        """Record which options are given, including those given with their default.

        Raises:
            ConfigError: an option is unknown, or a required one is missing.
        """
        fields = dataclasses.fields(cls)
        names = [field.name for field in fields]
        for name in written:
            if name not in names:
                raise unknown_option(cls, name, f"{cls.__name__}({name}=...)")
        for field in fields:
            if field.default is field.default_factory and field.name not in written:
                given = ", ".join(f"{name}={show(value)}" for name, value in written.items())
                raise ConfigError(
                    f"Got {cls.__name__}({given}), but {field.name} is required. Add {field.name}=..., as in "
                    f"{cls.__name__}({', '.join([f'{field.name}=...', *([given] if given else [])])})."
                )
        return _make(cls, {}, frozenset(written))

    @staticmethod
    def short_form(value: Any, stage: Any) -> dict[str, Any] | None:
        """Return the options that ``value`` sets if it is a short form of this group, None if there are no short forms.

        Args:
            value: neither a group nor a mapping.
            stage: the ZeRO stage, or ``"auto"``.
        """
        return None

    @property
    def written(self) -> dict[str, Any]:
        """The values of the options that were given."""
        return {name: getattr(self, name) for name in sorted(self._written)}

    def __reduce__(self) -> Any:
        return _make, (type(self), dict(vars(self)), self._written)

    def _set(self, name: str, value: Any) -> None:
        """Set a field in ``__post_init__``, to replace a short form by its full form."""
        object.__setattr__(self, name, value)


Made = TypeVar("Made", bound=Group)


def _make(kind: type[Made], options: dict[str, Any], written: frozenset[str]) -> Made:
    """Return a group with ``options``, unchecked."""
    group = object.__new__(kind)
    vars(group).update(options)
    object.__setattr__(group, "_written", written)
    return group
