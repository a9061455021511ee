"""The result of a check: a fact, its state, and a cure for anything that is not in order."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
"""``note``: training works, but slower or with limits. ``problem``: training fails or differs from the request."""


@dataclass(frozen=True)
class Finding:
    """One fact about this machine."""

    name: str
    value: str
    state: State = "ok"
    cure: str = ""  # what to do. Required unless the state is ``ok``.

    def __post_init__(self) -> None:
        if self.state != "ok" and not self.cure:
            raise ValueError(f"the finding {self.name!r} is a {self.state} without a cure")


def note_if(limited: bool, name: str, value: str, cure: str) -> Finding:
    """Return a note with its cure if ``limited``, otherwise a finding that is ok."""
    return Finding(name, value, "note", cure) if limited else Finding(name, value)


def run(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """Run a command and return its output and its error. One of them is empty."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"it does not answer: {one_line(str(error))}"
    if done.returncode:
        return "", f"it ended with status {done.returncode}: {one_line(done.stderr + done.stdout)}"
    return done.stdout, ""


def one_line(text: str, limit: int = 300) -> str:
    """Return the text with single spaces, truncated to ``limit`` characters.

    >>> one_line(" a   b ")
    'a b'
    """
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
