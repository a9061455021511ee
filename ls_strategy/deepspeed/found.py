"""The keys of one DeepSpeed configuration: their values, checked for type, and what became of each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ls_strategy.deepspeed.keys import KEYS, AnyBlock, Key, Table
from ls_strategy.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """What became of one key."""

    key: str
    value: Any
    outcome: Literal["mapped", "auto", "ignored"]
    text: str


@dataclass
class Found:
    """The values that are mapped, by dotted key, and a row for every key."""

    values: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)

    def read(self, config: Mapping[str, Any], table: Table, prefix: str) -> None:
        """Take one block.

        Raises:
            ConfigError: an unknown or refused key.
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
                raise ConfigError(f"{key}={value!r}: this is a block: {{{', '.join(entry)}}}.")

    def _key(self, key: str, value: Any, entry: Key) -> None:
        if entry.outcome == "refused" and not any(value == off and type(value) is type(off) for off in entry.off):
            raise ConfigError(f"{key}={value!r} in the DeepSpeed configuration: {entry.text}.")
        if isinstance(value, str) and value == "auto" and entry.outcome == "mapped":
            self.rows[key] = Row(key, value, "auto", f"{entry.text}: left to the Trainer, or the default")
            return
        self.rows[key] = Row(key, value, "mapped" if entry.outcome == "mapped" else "ignored", _reason(entry))
        if entry.outcome == "mapped" and value is not None:
            self.values[key] = value

    def _block(self, key: str, value: Any, entry: AnyBlock) -> None:
        inner: Any = entry.key
        if inner.outcome == "refused":
            on = value.get(entry.switch, False) if entry.switch and isinstance(value, Mapping) else bool(value)
            if on:
                raise ConfigError(f"{key} in the DeepSpeed configuration: {inner.text}.")
        self.rows[key] = Row(key, value, "mapped" if inner.outcome == "mapped" else "ignored", _reason(inner))
        if inner.outcome == "mapped":
            self.values[key] = value

    def note(self, key: str, text: str, *, ignored: bool = False) -> None:
        """Say more about a key that is there."""
        if key in self.rows:
            row = self.rows[key]
            self.rows[key] = Row(key, row.value, "ignored" if ignored else row.outcome, text)

    def auto(self, key: str) -> bool:
        """Whether it is left to the Trainer."""
        return key in self.rows and self.rows[key].outcome == "auto"

    def flag(self, key: str) -> bool | None:
        """True or false, None if it is not there.

        Raises:
            ConfigError: something else.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f'{key}={value!r}: use true, false or "auto".')
        return value

    def number(self, key: str, *, least: float, whole: bool = False) -> Any:
        """A number of at least ``least``, None if it is not there; whole ones as ``int``, also from ``5e8``.

        Raises:
            ConfigError: something else.
        """
        value = self.values.get(key)
        if value is None:
            return None
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least
        if not good or (whole and value != int(value)):
            kind = "whole number" if whole else "number"
            raise ConfigError(f"{key}={value!r}: use a {kind} of at least {least:g}.")
        return int(value) if whole else float(value)


def _reason(entry: Key) -> str:
    return "it is switched off" if entry.outcome == "refused" else entry.text


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
        hint = f"Delete it; keys known here are {', '.join(table)}."
    return ConfigError(f"{key}: DeepSpeed has no such key. {hint}")
