"""``zero_run.jsonl``: what `Monitor` and ``zero_auto`` write of a run, a line of JSON per event."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

RUN_FILE = "zero_run.jsonl"


def append_line(path: Path, event: str, **fields: Any) -> None:
    """Append a line at once, so that a process that is killed leaves complete ones.

    Raises:
        OSError: the file cannot be written.
    """
    line = json.dumps({"event": event, "time": time.time(), **fields}, default=str)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines, and the number of damaged ones (the last one, if it is being written)."""
    lines: list[dict[str, Any]] = []
    damaged = 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            lines.append({**line, "event": str(line["event"]), "time": float(line["time"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
    return lines, damaged
