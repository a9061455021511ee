"""Traces in Chrome's format, for ui.perfetto.dev and chrome://tracing.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Row = tuple[int, int]
"""Process and thread of the viewer."""


class ChromeTrace:
    """Collects events, and formats them as JSON. Times are seconds of any one clock."""

    def __init__(self, zero_s: float = 0.0) -> None:
        """``zero_s`` is shown as 0."""
        self._zero_s = zero_s
        self.events: list[dict[str, Any]] = []

    def name_process(self, process: int, name: str) -> None:
        """Name a group of rows; groups are sorted by their numbers."""
        self.events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        self.events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})

    def name_row(self, row: Row, name: str) -> None:
        """Name a row."""
        self.events.append({"ph": "M", "name": "thread_name", **_at(row), "args": {"name": name}})

    def slice(self, row: Row, name: str, category: str, start_s: float, end_s: float, **arguments: Any) -> None:
        """Add an event with a duration."""
        times = {"ts": self._microseconds(start_s), "dur": round((end_s - start_s) * 1e6, 3)}
        self.events.append({"ph": "X", "name": name, "cat": category, **_at(row), "args": arguments, **times})

    def instant(self, row: Row, name: str, at_s: float) -> None:
        """Add an event without a duration."""
        self.events.append({"ph": "i", "s": "t", "name": name, **_at(row), "ts": self._microseconds(at_s)})

    def counter(self, process: int, name: str, at_s: float, values: Mapping[str, float]) -> None:
        """Set values that are shown stacked under one name."""
        self.events.append(
            {"ph": "C", "name": name, "pid": process, "ts": self._microseconds(at_s), "args": dict(values)}
        )

    def json(self) -> str:
        """Return the file's text."""
        return json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"})

    def _microseconds(self, at_s: float) -> float:
        return round((at_s - self._zero_s) * 1e6, 3)


def _at(row: Row) -> dict[str, int]:
    return {"pid": row[0], "tid": row[1]}
