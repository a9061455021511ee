"""``zero_run.jsonl``: the lines that `Monitor` writes when a fit begins and ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RUN_FILE = "zero_run.jsonl"


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
