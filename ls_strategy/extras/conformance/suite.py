"""All habits under all strategies, one after the other."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ls_strategy.extras.conformance.habit import Habit
from ls_strategy.extras.conformance.ranks import Ending, Job, run_phase
from ls_strategy.extras.conformance.specification import Specification
from ls_strategy.extras.conformance.verdict import SERIOUS, Outcome, Trusted, Verdict, failure, judge

PLAINEST = "plain_sgd"  # a strategy that cannot run this habit cannot run the others either


class SuiteError(RuntimeError):
    """The trusted run itself has failed."""


class Suite:
    """Runs habits under strategies, each phase in processes of its own below ``folder``."""

    def __init__(self, folder: Path, *, devices: int, accelerator: str, limit_s: float, keep: bool) -> None:
        self.folder, self.keep = folder, keep
        self.devices, self.accelerator, self.limit_s = devices, accelerator, limit_s
        self._trusted: dict[str, Trusted] = {}

    def run(
        self, chosen: list[Habit], strategies: list[Specification]
    ) -> Iterator[tuple[Habit, Specification, Verdict]]:
        """Yield a verdict for every habit and strategy; strategies that run nothing are left out after the first.

        Raises:
            SuiteError: the trusted run of a habit has failed.
        """
        cannot: dict[str, str] = {}
        for habit in chosen:
            for strategy in strategies:
                if strategy.label in cannot:
                    yield habit, strategy, Verdict("not run", cannot[strategy.label])
                    continue
                verdict = self.one(habit, strategy)
                if habit.name == PLAINEST and verdict.outcome in ("refused", "raw error"):
                    cannot[strategy.label] = f"{PLAINEST}: {verdict.detail}"
                yield habit, strategy, verdict

    def one(self, habit: Habit, strategy: Specification) -> Verdict:
        """Return the verdict on one habit under one strategy."""
        trusted = self.trusted(habit)
        folder = self.folder / strategy.label / habit.name
        started = time.monotonic()
        endings: list[Ending] = []
        for index in range(len(habit.phases)):
            endings.append(run_phase(self.job(habit, index, folder, strategy)))
            if failure(habit, endings) is not None:
                break
        verdict = failure(habit, endings) or judge(habit, endings, trusted)
        if not self.keep:
            with suppress(OSError):
                shutil.rmtree(folder)
        seconds = round(time.monotonic() - started, 1)
        return replace(verdict, detail=_without_places(verdict.detail, self.folder), seconds=seconds)

    def job(self, habit: Habit, index: int, folder: Path, strategy: Specification | None, one: bool = False) -> Job:
        """Return the phase ``index`` of a habit; ``one``: on one process that stands for all ranks."""
        method = multiprocessing.get_start_method()
        return Job(habit.name, index, self.devices, folder, strategy, self.accelerator, self.limit_s, method, one)

    def trusted(self, habit: Habit) -> Trusted | None:
        """Return the notes of the trusted run, which is made once.

        Raises:
            SuiteError: it has failed.
        """
        if habit.trusted == "nobody":
            return None
        if habit.name not in self._trusted:
            ddp = Specification("ddp", "ddp") if habit.trusted == "ddp" else None
            folder = self.folder / "trusted" / habit.name
            phases = []
            for index in range(1 if habit.trusted_phases == "first" else len(habit.phases)):
                ending = run_phase(self.job(habit, index, folder, ddp, one=ddp is None))
                reports = [report for report in ending.reports if report is not None and not report.error]
                if len(reports) < len(ending.reports):
                    failed = next((f"{each.error}: {each.message}" for each in ending.reports if each), "no report")
                    raise SuiteError(
                        f"The trusted run of {habit.name} failed: {failed}. Its log is in {folder}, with --keep."
                    )
                phases.append([report.notes for report in reports])
            self._trusted[habit.name] = Trusted(phases)
        return self._trusted[habit.name]


def _without_places(text: str, folder: Path) -> str:
    """Return a text that is the same wherever the suite and the packages stand."""
    return re.sub(r"/[^\s'\"]*/(?:site-packages|ls_strategy/extras)/", "", text.replace(str(folder), "FOLDER"))


# --- the table of all verdicts, for a terminal and for Markdown -------------------------------------------------------


Verdicts = Mapping[str, Mapping[str, Verdict]]  # by habit and by the label of the strategy
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
