"""Applies mutations to copies of the repository and runs tests on them.

The one invariant: the working tree is never changed. Every worker has one copy of the package and of the tests, and
undoes an edit before the next. The ranks that tests spawn find the copy as well, since it is first in ``PYTHONPATH``,
before a package that was installed in editable mode.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import limits
from tests.mutations import Mutation

ROOT = Path(__file__).parents[2]

COPIED = ("ls_strategy", "tests", "pyproject.toml")
"""What a copy has of its own. Everything else is a link to the repository."""

TEST_LIMIT_S = 60
"""Limit of one test, by the clock of `tests.limits`. Those of the default selection take ten seconds at most."""

RUN_LIMIT_S = 200
"""Limit of one run of pytest, by the same clock: for a hang that pytest itself does not end."""

_TIMEOUTS = ("+++ Timeout +++", "RankTimeoutError")
"""What the output of pytest has after a hang: of pytest-timeout, and of `ls_strategy.testing.spawn`."""


@dataclass(frozen=True)
class Result:
    """What became of one mutation."""

    name: str
    verdict: str
    """``killed``, ``killed by time``, ``SURVIVED``, ``passes`` (without a mutation), or ``ERROR``: no test has run."""

    seconds: float
    output: str
    """What pytest has printed."""

    @property
    def is_good(self) -> bool:
        """Whether this is what must be."""
        return self.verdict in ("killed", "killed by time", "passes")


def make_copy(folder: Path) -> Path:
    """Copy the repository to ``folder``, which does not exist yet, and return it."""
    folder.mkdir(parents=True)
    for entry in ROOT.iterdir():
        if entry.name.startswith(".git") or entry.name == "build":
            continue
        if entry.name not in COPIED:
            (folder / entry.name).symlink_to(entry)
        elif entry.is_dir():
            shutil.copytree(entry, folder / entry.name)
        else:
            shutil.copy2(entry, folder / entry.name)
    return folder


@contextmanager
def applied(mutation: Mutation, copy: Path) -> Iterator[None]:
    """Apply a mutation to a copy of the repository, and undo it at the end.

    Raises:
        ValueError: the mutation's text does not occur exactly once.
    """
    path = copy / mutation.file
    before = path.read_text()
    if before.count(mutation.old) != 1:
        raise ValueError(f"{mutation.file} has the text of {mutation.name!r} {before.count(mutation.old)} times")
    path.write_text(before.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        path.write_text(before)


def run_mutated(mutation: Mutation, copy: Path) -> Result:
    """Run the tests of a mutation on the mutated copy."""
    with applied(mutation, copy):
        code, output, seconds = run_tests(mutation.tests, copy, "-x", "-q")
    return Result(mutation.name, _verdict(code, output), seconds, output)


def run_unchanged(mutations: Sequence[Mutation], copy: Path) -> tuple[list[Result], str]:
    """Run the tests of all mutations together on the copy as it is.

    A test that is skipped, or not in the default selection, would not fail with a mutation either.

    Returns:
        A result for every mutation, and what pytest has printed.
    """
    tests = tuple(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    _, output, seconds = run_tests(tests, copy, "-v", limit_s=RUN_LIMIT_S + 10 * len(tests))
    verdicts = re.findall(r"^(tests/\S+?\.py::.+?) ([A-Z]+)\b", output, re.MULTILINE)

    def passes(test: str) -> bool:
        found = {verdict for case, verdict in verdicts if case == test or case.startswith((f"{test}[", f"{test}::"))}
        return found == {"PASSED"}

    results = [
        Result(mutation.name, "passes" if all(map(passes, mutation.tests)) else "DO NOT PASS", seconds, "")
        for mutation in mutations
    ]
    return results, output


def _verdict(code: int | None, output: str) -> str:
    if code is None or (code == 1 and any(word in output for word in _TIMEOUTS)):
        return "killed by time"
    # Other codes: the tests could not be collected, or none was selected. That would prove nothing.
    return {0: "SURVIVED", 1: "killed"}.get(code, "ERROR")


def run_tests(
    tests: Sequence[str], copy: Path, *options: str, limit_s: float = RUN_LIMIT_S
) -> tuple[int | None, str, float]:
    """Run tests of the default selection on a copy.

    Args:
        tests: their ids.
        copy: the copy.
        options: of pytest.
        limit_s: limit of time, by the clock of `tests.limits`.

    Returns:
        The exit status of pytest, None after the limit of time; its output; seconds.
    """
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the copy is for many runs, and each starts several processes
    started, end = time.monotonic(), limits.clock() + limit_s
    with (copy / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [*command, f"--timeout={TEST_LIMIT_S}", f"--basetemp={copy / 'basetemp'}", *tests],
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while process.poll() is None and limits.clock() < end:
            time.sleep(0.2)
        code = process.poll()
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)  # ranks that lead a group of their own end with their parent
            process.wait()
        output.seek(0)
        return code, output.read(), time.monotonic() - started
