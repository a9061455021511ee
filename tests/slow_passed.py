"""Plugin of pytest for `tests.slow`: notes what has passed at once, leaves out what had passed, prints what fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed-before", type=Path, help="file with the names of tests to leave out")
    parser.addoption("--passed-now", type=Path, help="file to which the names of tests that pass are added")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set(config.getoption("passed_before").read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


class _Notes:
    """In the process that starts the workers: what each part of a test has come to."""

    def __init__(self, now: Path) -> None:
        self._now = now
        self._bad: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._bad.add(report.nodeid)
        if report.failed:
            print(f"\nFAILED in {report.when}: {report.nodeid}", file=sys.__stderr__, flush=True)
        if report.when == "teardown" and report.nodeid not in self._bad:
            with self._now.open("a") as file:
                file.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Notes(config.getoption("passed_now")))
