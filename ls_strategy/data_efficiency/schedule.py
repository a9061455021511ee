"""A whole number that grows while training goes on: a line, a root, or stairs. Integers only.

The formulas are those of DeepSpeed's ``fixed_linear``, ``fixed_root`` and ``fixed_discrete``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from ls_strategy.errors import ConfigError

Kind = Literal["linear", "root", "discrete"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Values by position, which is a number of steps or of tokens.

    >>> line = Schedule(values=(64, 256), until=(100,), multiple_of=8)
    >>> [line.value(at) for at in (1, 25, 50, 99, 100, 1000)]
    [64, 112, 160, 248, 256, 256]
    >>> stairs = Schedule(values=(64, 128, 256), until=(10, 20), kind="discrete")
    >>> [stairs.value(at) for at in (1, 10, 11, 20, 21)]
    [64, 64, 128, 128, 256]
    """

    values: tuple[int, ...]
    """``linear`` and ``root``: the first and the last. ``discrete``: each in its turn."""

    until: tuple[int, ...]
    """``linear`` and ``root``: from here on it is the last value. ``discrete``: the last position of every value but
    the last."""

    kind: Kind = "linear"
    multiple_of: int = 8
    """``linear`` and ``root``: values in between are rounded down to a multiple of this, and up below the first."""

    root_degree: float = 2.0
    """``root``: 2 is a square root, which grows faster at first; 1 a line."""

    name: str = "values"
    """Of the option that ``values`` come from, for errors."""

    def __post_init__(self) -> None:
        """Refuse what is no schedule.

        Raises:
            ConfigError: with the cure.
        """
        for field in ("values", "until"):
            object.__setattr__(self, field, tuple(getattr(self, field)))  # LightningCLI gives lists
        told = f"{self.name}={list(self.values)}, until={list(self.until)}, schedule={self.kind!r}"
        if self.kind not in get_args(Kind):
            raise ConfigError(f"{told}: the schedules are {', '.join(get_args(Kind))}.")
        if not self.values or min((*self.values, *self.until, self.multiple_of)) < 1 or not self.root_degree > 0:
            raise ConfigError(
                f"{told}, multiple_of={self.multiple_of}, root_degree={self.root_degree}: all of them are above 0."
            )
        if self.kind == "discrete":
            if len(self.values) != len(self.until) + 1:
                raise ConfigError(f"{told}: give one number less in until than in {self.name}; the last value stays.")
            if any(a >= b for a, b in zip(self.until, self.until[1:], strict=False)):
                raise ConfigError(f"{told}: numbers in until ascend.")
        elif len(self.values) != 2 or len(self.until) != 1 or self.values[0] > self.values[1]:
            raise ConfigError(
                f"{told}: give the first and the last of {self.name}, the smaller one first, and one number in until: "
                f"{self.name}: [64, 1024], until: [10000]."
            )

    def value(self, at: int) -> int:
        """The value at a position, from 0 on."""
        if self.kind == "discrete":
            return next((v for v, end in zip(self.values, self.until, strict=False) if at <= end), self.values[-1])
        first, last = self.values
        if at >= self.until[0]:
            return last
        part = (float(at) / self.until[0]) ** (1.0 / (self.root_degree if self.kind == "root" else 1.0))
        value = math.floor(part * (last - first) + first)
        value -= value % self.multiple_of
        return min(max(value, -(-first // self.multiple_of) * self.multiple_of), last)

    def possible(self) -> Iterator[int]:
        """Every value there may be."""
        if self.kind == "discrete":
            yield from self.values
            return
        first, last = self.values
        yield from range(-(-first // self.multiple_of) * self.multiple_of, last, self.multiple_of)
        yield last
