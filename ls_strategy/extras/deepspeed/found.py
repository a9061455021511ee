"""The keys of one DeepSpeed configuration: their values, checked for type, and the outcome of each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ls_strategy.errors import ConfigError
from ls_strategy.extras.deepspeed.keys import KEYS, AnyBlock, Key, Table


@dataclass(frozen=True)
class Row:
    """The outcome of one key."""

    key: str
    value: Any
    outcome: Literal["mapped", "auto", "ignored"]
    text: str


@dataclass
class Found:
    """The values of mapped keys, by dotted key, and a row for every key."""

    values: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)

    def read(self, config: Mapping[str, Any], table: Table, prefix: str) -> None:
        """Read one block.

        Raises:
            ConfigError: A key is unknown or refused.
        """
        for name, value in config.items():
            key = prefix + name
            entry = table.get(name)
            if entry is None:
                raise _unknown(key, name, table, prefix)
            if isinstance(entry, Key):
                self._key(key, value, entry)
            elif isinstance(entry, AnyBlock):
                self._block(key, value, entry)
            elif isinstance(value, Mapping):
                self.read(value, entry, f"{key}.")
            elif value is not None:
                raise ConfigError(f"Got {key}={value!r}, but {key} is a block with the keys {', '.join(entry)}.")

    def _key(self, key: str, value: Any, entry: Key) -> None:
        if entry.outcome == "refused" and not any(value == off and type(value) is type(off) for off in entry.off):
            raise ConfigError(f"Got {key}={value!r} in the DeepSpeed configuration, but {entry.text}.")
        if value == "auto" and entry.outcome == "mapped":
            self.rows[key] = Row(key, value, "auto", f"{entry.text}: left to the Trainer, or the default")
        else:
            self._accept(key, value, entry)

    def _block(self, key: str, value: Any, entry: AnyBlock) -> None:
        on = value.get(entry.switch, False) if entry.switch and isinstance(value, Mapping) else bool(value)
        if entry.key.outcome == "refused" and on:
            raise ConfigError(f"Got {key} in the DeepSpeed configuration, but {entry.key.text}.")
        self._accept(key, value, entry.key)

    def _accept(self, key: str, value: Any, entry: Key) -> None:
        mapped = entry.outcome == "mapped"
        text = "it is disabled" if entry.outcome == "refused" else entry.text
        self.rows[key] = Row(key, value, "mapped" if mapped else "ignored", text)
        if mapped and value is not None:
            self.values[key] = value

    def note(self, key: str, text: str, *, ignored: bool = False) -> None:
        """Replace the text of a key that is present."""
        if key in self.rows:
            row = self.rows[key]
            self.rows[key] = Row(key, row.value, "ignored" if ignored else row.outcome, text)

    def flag(self, key: str) -> bool | None:
        """Return a boolean, or None if the key is missing.

        Raises:
            ConfigError: The value is not a boolean.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f'Got {key}={value!r}. Use true, false or "auto".')
        return value

    def number(self, key: str, *, least: float, integer: bool = False) -> Any:
        """Return a number of at least ``least``, or None if the key is missing. Integers may be given as ``5e8``.

        Raises:
            ConfigError: The value is not such a number.
        """
        value = self.values.get(key)
        if value is None:
            return None
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least
        if not good or (integer and value != int(value)):
            kind = "an integer" if integer else "a number"
            raise ConfigError(f"Got {key}={value!r}. Use {kind} of at least {least:g}.")
        return int(value) if integer else float(value)


def _unknown(key: str, name: str, table: Table, prefix: str) -> ConfigError:
    elsewhere = [f"{block}.{name}" for block, inner in KEYS.items() if isinstance(inner, dict) and name in inner]
    close = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    if prefix and name in KEYS:
        hint = f"Did you mean {name}, outside of {prefix.rstrip('.')}?"
    elif elsewhere:
        hint = f"Did you mean {elsewhere[0]}?"
    elif close:
        hint = f"Did you mean {prefix}{close[0]}?"
    else:
        hint = f"Delete it; the known keys are {', '.join(table)}."
    return ConfigError(f"Got {key}, but DeepSpeed has no such key. {hint}")
