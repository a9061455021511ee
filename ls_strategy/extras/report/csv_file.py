"""``metrics.csv`` of Lightning's CSVLogger."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from ls_strategy.extras.report.series import Series


def read(path: Path) -> tuple[dict[str, Series], str]:
    """Return the scalars by name, and why some rows were left out (empty if none was)."""
    found: dict[str, Series] = {}
    left_out = 0
    csv.field_size_limit(min(sys.maxsize, 1 << 30))
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        # A NUL byte is what some file systems leave of a write that power loss cut off.
        rows = csv.reader(line.replace("\0", "") for line in file)
        names = next(rows, [])
        if "step" not in names:
            return {}, "it has no column named step" if names else ""
        place = names.index("step")
        for row in rows:
            if len(row) != len(names) or not _add(found, names, row, place):
                left_out += 1
    return found, f"{left_out} rows are incomplete and left out" if left_out else ""


def _add(found: dict[str, Series], names: list[str], row: list[str], place: int) -> bool:
    """Add a row. Returns whether its step is a number."""
    try:
        step = int(float(row[place]))
    except (ValueError, OverflowError):
        return False
    for i, (name, text) in enumerate(zip(names, row, strict=True)):
        if i != place and text:
            try:
                value = float(text)
            except ValueError:
                continue  # a text, which no chart shows
            found.setdefault(name, Series()).add(step, value)
    return True
