"""All habits under all strategies, one after the other."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ls_strategy.extras.conformance.habit import Habit
from ls_strategy.extras.conformance.ranks import Ending, Job, run_phase
from ls_strategy.extras.conformance.specification import Specification
from ls_strategy.extras.conformance.verdict import Trusted, Verdict, failure, judge

PLAINEST = "plain_sgd"
"""A strategy that cannot run this habit cannot run the others either."""


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
