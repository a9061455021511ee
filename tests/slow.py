"""Run the tests marked slow in pieces, record the result: ``python -m tests.slow [PIECE...]`` (see ``.ci/slow``).

A run that was ended goes on where it was when it is called again on the same commit: what has passed by then stands in
``tests/records/slow.passed`` (not in git) and is left out. With ``--keep`` so it is with what has passed on the commits
before, and the record says in ``earlier`` how many tests on which: for changes that cannot concern them.

``python -m tests.slow --failed`` runs once more what failed in the record. What passes by now is counted as passed, and
the record says in ``mended`` with which commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.record import environment

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "records" / "slow.json"
SELECTION = "slow and not gpu and not slurm"
PASSED = ROOT / "tests" / "records" / "slow.passed"
"""The commit, then the names of what has passed so far, a line each; after a tab the commit, if it was another one.
`tests.slow_passed` writes it."""

LIMIT_COMMITS = 200
"""How many commits a record may lie back."""

PIECES: dict[str, tuple[str, ...]] = {
    "parity": ("tests/dist/test_parity*.py",),
    "parallel": (
        "tests/dist/test_pipeline*.py",
        "tests/dist/test_tensor_*.py",
        "tests/dist/test_sequence_*.py",
        "tests/dist/test_expert_*.py",
        "tests/dist/test_moe_*.py",
    ),
    "offload": ("tests/dist/test_offload*.py", "tests/dist/test_host_memory.py", "tests/dist/test_predict_offload.py"),
    "checkpoints": ("tests/dist/test_checkpoint_*.py", "tests/dist/test_preemption.py"),
    "programs": ("tests/recipes", "tests/docs", "tests/ops"),
    "rest": (),  # everything that no other piece has, so that no test can be left out
}


def paths_of(piece: str) -> list[str]:
    """Arguments of pytest that select the files of a piece."""
    if piece != "rest":
        found = [str(p.relative_to(ROOT)) for pattern in PIECES[piece] for p in sorted(ROOT.glob(pattern))]
        return found or [f"{piece} has no files"]
    others = [path for name in PIECES if name != "rest" for path in paths_of(name)]
    return ["tests", *(f"--ignore={path}" for path in others)]


def tested_commit() -> str:
    """The last commit that changed anything but the record itself; with ``+`` where the checkout differs."""
    not_the_record = ("--", ".", ":!tests/records")
    commit = _git("log", "-1", "--format=%h", *not_the_record)
    return commit + ("+" if _git("status", "--porcelain", *not_the_record) else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def passed_of(report: Path) -> set[str]:
    """Names of the tests that passed in pytest's JUnit report."""
    cases: dict[str, list[bool]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # a test whose fixture fails afterwards is there twice
        name = f"{case.get('classname')}::{case.get('name')}"
        cases.setdefault(name, []).append(all(case.find(kind) is None for kind in ("failure", "error", "skipped")))
    return {name for name, passed in cases.items() if all(passed)}


def figures_of(report: Path) -> dict[str, Any]:
    """Counts and names out of pytest's JUnit report."""
    counts: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"].append(name)
        elif (skipped := case.find("skipped")) is not None:
            counts["skipped"].append(f"{name}: {skipped.get('message')}")
        else:
            counts["passed"] += 1
    return counts


def passed_before(*, keep: bool = False) -> dict[str, str]:
    """Names of the tests that have passed, with the commit; those of other commits are forgotten but with ``keep``."""
    commit = tested_commit()
    first, *lines = PASSED.read_text().splitlines() if PASSED.is_file() else [""]
    found = {name: on or first for name, _, on in (line.partition("\t") for line in lines)}
    if commit.endswith("+") or first.endswith("+") or (first != commit and not keep):
        found = {}
    if first != commit or not found:
        PASSED.parent.mkdir(exist_ok=True)
        kept = [name if on == commit else f"{name}\t{on}" for name, on in found.items()]
        PASSED.write_text("".join(f"{line}\n" for line in (commit, *kept)))
    return found


def run(piece: str, workers: int, *, keep: bool = False) -> dict[str, Any]:
    """Run what has not passed of one piece; the figures of it. Every test has a limit of its own."""
    known = passed_before(keep=keep)
    with tempfile.TemporaryDirectory() as folder:
        report, before = Path(folder) / "report.xml", Path(folder) / "passed"
        before.write_text("\n".join(known))
        command = [sys.executable, "-m", "pytest", "-q", "-m", SELECTION, "-p", "no:cacheprovider", "--durations=10"]
        command += ["-p", "tests.slow_passed", f"--passed-before={before}", f"--passed-now={PASSED}"]
        command += ["-n", str(workers), "--dist", "loadfile", f"--junitxml={report}", *paths_of(piece)]
        begin = time.monotonic()
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        figures: dict[str, Any] = {"exit_status": status, "seconds": round(time.monotonic() - begin)}
        counts = figures_of(report) if report.is_file() else {"passed": 0, "failed": ["no report"]}
    mine = [on for name, on in known.items() if _is_in(name, piece)]
    if earlier := Counter(on for on in mine if on != tested_commit()):
        figures["earlier"] = dict(earlier)
    return figures | counts | {"passed": counts["passed"] + len(mine)}


def _is_in(name: str, piece: str) -> bool:
    """Return whether a test, by pytest's name of it, is in a piece."""
    path = ROOT / name.partition("::")[0]
    inside = {each: any(path.is_relative_to(ROOT / p) for p in paths_of(each)) for each in PIECES if each != "rest"}
    return not any(inside.values()) if piece == "rest" else inside[piece]


def save(piece: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Put a piece's figures into the record; those of another commit go."""
    record: dict[str, Any] = {"command": "bash .ci/slow", "commit": tested_commit(), **environment(), "pieces": {}}
    if RECORD.is_file():
        before = json.loads(RECORD.read_text())
        if before["commit"] == record["commit"]:
            record["pieces"] = before["pieces"]
    record["pieces"][piece] = figures
    record["complete"] = set(record["pieces"]) == set(PIECES)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return record


def node_of(name: str) -> str:
    """Return pytest's id of a test that a report calls ``package.module[.Class]::name``."""
    module, _, test = name.partition("::")
    parts = module.split(".")
    length = next((n for n in range(len(parts), 0, -1) if (ROOT / Path(*parts[:n])).with_suffix(".py").is_file()), 0)
    if not length:
        raise SystemExit(f"Got {name!r} in {RECORD.name}, but there is no such file. Run its piece again.")
    return "::".join([f"{'/'.join(parts[:length])}.py", *parts[length:], test])


def mend() -> list[str]:
    """Run the record's failed tests again; move what passes to ``mended``, return what does not.

    What is skipped, or not marked slow any more, has not passed.
    """
    record = json.loads(RECORD.read_text())
    failed = [name for figures in record["pieces"].values() for name in figures["failed"]]
    if not failed:
        return []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", SELECTION, "-p", "no:cacheprovider"]
        status = subprocess.run([*command, f"--junitxml={report}", *map(node_of, failed)], cwd=ROOT, check=False)
        if status.returncode not in (0, 1):
            raise SystemExit(f"pytest ended with status {status.returncode}; the record is as it was")
        still = set(failed) - passed_of(report)
    for figures in record["pieces"].values():
        passed = [name for name in figures["failed"] if name not in still]
        figures["failed"] = [name for name in figures["failed"] if name in still]
        figures["passed"] += len(passed)
        if passed:
            figures.setdefault("mended", {}).update(dict.fromkeys(passed, tested_commit()))
        if not figures["failed"] and figures["exit_status"] == 1:
            figures["exit_status"] = 0
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return sorted(still)


def commits_since(commit: str) -> int | None:
    """How many commits the checkout is ahead of one; None where the history does not tell."""
    try:
        return int(_git("rev-list", "--count", f"{commit.rstrip('+')}..HEAD"))
    except (subprocess.CalledProcessError, FileNotFoundError):  # no checkout of git, or not all of its history
        return None


def oldest_of(record: dict[str, Any]) -> int | None:
    """How many commits ago the first of a record's tests ran; None where the history does not tell."""
    commits = {record["commit"], *(on for figures in record["pieces"].values() for on in figures.get("earlier", ()))}
    ages = [age for age in map(commits_since, commits) if age is not None]
    return max(ages) if len(ages) == len(commits) else None


def complaints(record: dict[str, Any], commits: int, *, but_for: Iterable[str] = ()) -> list[str]:
    """What is wrong with a record that is ``commits`` old: its age, what did not run, and what failed.

    Args:
        record: as `save` writes it.
        commits: how many were made since.
        but_for: names of tests that may fail.
    """
    found = []
    if commits > LIMIT_COMMITS:
        found.append(f"it is {commits} commits old, {LIMIT_COMMITS} are allowed")
    if missing := sorted(set(PIECES) - set(record["pieces"])):
        found.append(f"did not run: {', '.join(missing)}")
    for piece, figures in record["pieces"].items():
        if failed := sorted(set(figures["failed"]) - set(but_for)):
            found.append(f"{piece}: failed {', '.join(failed)}")
        elif figures["exit_status"] not in (0, 1, 5):  # 1: a test failed, which is named or allowed; 5: no tests
            found.append(f"{piece}: ended with status {figures['exit_status']}")
    return found


def main() -> int:
    """Run the pieces that are asked for; the exit status is 0 if nothing failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}; default: all")
    options.add_argument("-n", "--workers", type=int, default=2, help="tests at a time; default: %(default)s")
    options.add_argument("--keep", action="store_true", help="leave out what has passed on earlier commits, too")
    options.add_argument("--failed", action="store_true", help="only what failed in the record")
    asked = options.parse_args()
    if asked.failed and asked.pieces:
        options.error(f"Got --failed with {asked.pieces}, but it takes all that failed. Leave one of them out.")
    if asked.failed:
        return int(bool(mend()))
    if unknown := set(asked.pieces) - set(PIECES):
        options.error(f"Got {sorted(unknown)}, but the pieces are {', '.join(PIECES)}.")
    bad = 0
    for piece in asked.pieces or PIECES:
        print(f"=== {piece}", flush=True)
        figures = run(piece, asked.workers, keep=asked.keep)
        save(piece, figures)
        bad += figures["exit_status"] not in (0, 5)  # 5: no test is marked slow there
        print(
            f"=== {piece}: {figures['passed']} passed, {len(figures['failed'])} failed in {figures['seconds']} s",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
