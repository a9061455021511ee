"""What a check found: a fact, its state, and beside everything that is not in order a cure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
"""``note``: training works, but slower or within limits. ``problem``: it will fail, or not be what was asked for."""


@dataclass(frozen=True)
class Finding:
    """One fact about this machine."""

    name: str
    value: str
    state: State = "ok"
    cure: str = ""
    """What to do. Never empty unless the state is ``ok``."""

    def __post_init__(self) -> None:
        """Refuse a complaint without a cure.

        Raises:
            ValueError: there is none.
        """
        if self.state != "ok" and not self.cure:
            raise ValueError(f"the finding {self.name!r} is a {self.state} without a cure")


def one_line(text: str, limit: int = 300) -> str:
    """The text with single spaces, cut after ``limit`` characters.

    >>> one_line(" a   b ")
    'a b'
    """
    words = " ".join(text.split())
    return words if len(words) <= limit else f"{words[: limit - 3]}..."
