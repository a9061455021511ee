"""A clock for tests, in the place of a module's ``time``."""

from __future__ import annotations


class Clock:
    """Time passes when the test says so."""

    def __init__(self, at: float = 0.0) -> None:
        self.at = at

    def perf_counter(self) -> float:
        return self.at

    def wait(self, seconds: float) -> None:
        self.at += seconds
