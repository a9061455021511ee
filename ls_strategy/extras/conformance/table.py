"""The table of all verdicts, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from ls_strategy.extras.conformance.verdict import SERIOUS, Outcome, Verdict

Verdicts = Mapping[str, Mapping[str, Verdict]]
"""By habit and by the label of the strategy."""

_SHOWN: dict[Outcome, str] = {
    "equal": "equal",
    "refused": "refused",
    "other, with a warning": "warned",
    "silently other": "OTHER",
    "raw error": "error",
    "hang": "HANG",
    "lost data": "LOST",
    "not run": "-",
}

LEGEND = """equal    the right answer
refused  an error whose text says what to do instead
error    an error that does not
warned   not the right answer, and a warning that says so
OTHER    not the right answer, without a word
HANG     had not ended at the limit
LOST     what was saved cannot be loaded
-        not run: the strategy cannot run the plainest habit"""


def terminal(verdicts: Verdicts, labels: list[str]) -> str:
    """Return the table, its legend, the numbers of outcomes, and a line on everything that is not equal."""
    rows = [["", *labels]]
    rows += [[habit, *(_cell(by, label) for label in labels)] for habit, by in verdicts.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*table, "", LEGEND, "", *_counts(verdicts, labels), "", *_details(verdicts, labels)])


def _cell(by: Mapping[str, Verdict], label: str) -> str:
    return _SHOWN[by[label].outcome] if label in by else ""  # it was interrupted before


def _counts(verdicts: Verdicts, labels: list[str]) -> list[str]:
    width = max(map(len, labels))
    lines = []
    for label in labels:
        outcomes = [by[label].outcome for by in verdicts.values() if label in by]
        counted = ", ".join(f"{outcomes.count(each)} {each}" for each in _SHOWN if each in outcomes)
        lines.append(f"{label.ljust(width)}  {counted}")
    return lines


def _details(verdicts: Verdicts, labels: list[str]) -> list[str]:
    return [
        f"{label} {habit}: {by[label].outcome}: {by[label].detail}"
        for label in labels
        for habit, by in verdicts.items()
        if label in by and by[label].outcome not in ("equal", "not run")
    ]


def is_serious(verdicts: Verdicts) -> bool:
    """Return whether some habit is silently other, hangs or has lost data."""
    return any(verdict.outcome in SERIOUS for by in verdicts.values() for verdict in by.values())
