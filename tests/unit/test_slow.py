"""`.ci/slow`: its pieces leave nothing out, and its record says what ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import slow

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure message="1 != 2"/></testcase>
<testcase classname="tests.a" name="broken"><error message="no fixture"/></testcase>
<testcase classname="tests.a" name="left"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


SAMPLE = """
import pytest
pytestmark = pytest.mark.slow
@pytest.mark.parametrize("x", [1, 2])
def test_mended(x): pass
class TestClass:
    def test_mended(self): pass
def test_broken(): assert False
def test_skipped(): pytest.skip("not here")
@pytest.fixture
def ends_badly():
    yield
    raise ValueError
def test_ends(ends_badly): pass
"""


def test_every_test_file_is_in_exactly_one_piece() -> None:
    named = [path for piece in slow.PIECES if piece != "rest" for path in slow.paths_of(piece)]
    files = [f for path in named for f in ((slow.ROOT / path).rglob("test_*.py") if "." not in path else [Path(path)])]
    assert len(files) == len(set(files)) > 40
    assert slow.paths_of("rest") == ["tests", *(f"--ignore={path}" for path in named)]


def test_a_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert slow.figures_of(tmp_path / "report.xml") == {
        "passed": 1,
        "failed": ["tests.a::bad", "tests.a::broken"],
        "skipped": ["tests.a::left: no GPU"],
    }


def test_a_record_is_complete_when_all_pieces_ran_on_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "RECORD", tmp_path / "records" / "slow.json")
    monkeypatch.setattr(slow, "tested_commit", lambda: "one")
    pieces = list(slow.PIECES)
    for piece in pieces[:-1]:
        assert not slow.save(piece, {"passed": 1})["complete"]
    assert slow.save(pieces[-1], {"passed": 1})["complete"]
    monkeypatch.setattr(slow, "tested_commit", lambda: "two")
    after = slow.save(pieces[0], {"passed": 2})
    assert after["pieces"] == {pieces[0]: {"passed": 2}}
    assert not after["complete"]


@pytest.mark.wide
def test_a_run_goes_on_with_what_has_not_passed_on_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sample.py").write_text(SAMPLE)
    monkeypatch.setattr(slow, "ROOT", tmp_path)
    monkeypatch.setattr(slow, "PASSED", tmp_path / "records" / "slow.passed")
    monkeypatch.setattr(slow, "PIECES", {"rest": ()})
    monkeypatch.setenv("PYTHONPATH", str(Path(slow.__file__).parents[1]))
    monkeypatch.setattr(slow, "tested_commit", lambda: "one")
    good = [f"tests/test_sample.py::{name}" for name in ("test_mended[1]", "test_mended[2]", "TestClass::test_mended")]
    slow.passed_before()
    with slow.PASSED.open("a") as file:
        file.write(f"{good[0]}\n")
    for _ in range(2):
        found = slow.run("rest", 1)
        assert found["passed"] == 3
        assert found["failed"] == [f"tests.test_sample::{name}" for name in ("test_broken", "test_ends")]
        assert slow.passed_before() == dict.fromkeys(good, "one")
    monkeypatch.setattr(slow, "tested_commit", lambda: "two")
    assert slow.run("rest", 1, keep=True)["earlier"] == {"one": 3}
    slow.PASSED.write_text(f"two\n{good[0]}\tone\n{good[1]}\n")
    assert slow.passed_before() == {good[0]: "one", good[1]: "two"}
    monkeypatch.setattr(slow, "tested_commit", lambda: "three")
    assert slow.passed_before(keep=True) == {good[0]: "one", good[1]: "two"}
    assert slow.passed_before() == {good[0]: "one", good[1]: "two"}, "they are kept on this commit"
    monkeypatch.setattr(slow, "tested_commit", lambda: "four")
    assert slow.passed_before() == {}
    monkeypatch.setattr(slow, "tested_commit", lambda: "four+")
    slow.PASSED.write_text(f"four+\n{good[0]}\n")
    assert slow.passed_before(keep=True) == {}, "the checkout may have changed since"


def test_a_record_is_as_old_as_the_first_of_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "commits_since", {"now": 2, "before": 30}.get)
    record: dict[str, Any] = {"commit": "now", "pieces": {"rest": {}, "parity": {"earlier": {"before": 5}}}}
    assert slow.oldest_of(record) == 30
    record["pieces"]["rest"]["earlier"] = {"never heard of": 1}
    assert slow.oldest_of(record) is None


@pytest.mark.wide
def test_what_failed_runs_again_and_the_record_says_with_which_commit_it_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with a test that passes by now, one that still fails, and one in a class."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sample.py").write_text(SAMPLE)
    monkeypatch.setattr(slow, "ROOT", tmp_path)
    monkeypatch.setattr(slow, "RECORD", tmp_path / "slow.json")
    monkeypatch.setattr(slow, "tested_commit", lambda: "two")
    names = ["tests.test_sample::test_mended[1]", "tests.test_sample.TestClass::test_mended"]
    failed = {"exit_status": 1, "passed": 4, "failed": names}
    never = [f"tests.test_sample::test_{name}" for name in ("broken", "ends", "skipped")]
    still = {"exit_status": 1, "passed": 0, "failed": never}
    slow.RECORD.write_text(json.dumps({"commit": "one", "pieces": {"parity": failed, "rest": still}}))
    assert slow.mend() == still["failed"]
    record = json.loads(slow.RECORD.read_text())
    assert record["commit"] == "one"
    mended = {"exit_status": 0, "passed": 6, "failed": [], "mended": dict.fromkeys(names, "two")}
    assert record["pieces"] == {"parity": mended, "rest": still}
    slow.RECORD.write_text(json.dumps({"pieces": {"parity": mended}}))
    assert slow.mend() == [], "where nothing failed, nothing runs"
    with pytest.raises(SystemExit, match="no such file"):
        slow.node_of("tests.test_gone::test")


def test_age_and_failures_of_a_record_are_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    good: dict[str, Any] = {"exit_status": 0, "failed": []}
    monkeypatch.setattr(slow, "PIECES", {"parity": (), "rest": ()})
    assert slow.complaints({"pieces": {"parity": good, "rest": good | {"exit_status": 5}}}, slow.LIMIT_COMMITS) == []
    age, missing = slow.complaints({"pieces": {"parity": good}}, 201)
    assert age == "it is 201 commits old, 200 are allowed"
    assert missing == "did not run: rest"
    bad = {"parity": good | {"exit_status": 1, "failed": ["a::b", "a::c"]}, "rest": good | {"exit_status": 3}}
    assert slow.complaints({"pieces": bad}, 0) == ["parity: failed a::b, a::c", "rest: ended with status 3"]
    assert slow.complaints({"pieces": bad}, 0, but_for=["a::b"])[0] == "parity: failed a::c"
    assert slow.complaints({"pieces": bad | {"rest": good}}, 0, but_for=["a::b", "a::c"]) == []


def test_commits_are_counted_where_history_tells() -> None:
    if slow.commits_since("HEAD") is None:
        pytest.skip("not a checkout of git")
    assert slow.commits_since("HEAD") == slow.commits_since("HEAD+") == 0
    assert slow.commits_since("0123456789012345678901234567890123456789") is None


@pytest.mark.slow
def test_the_record_is_recent_and_nothing_failed(request: pytest.FixtureRequest) -> None:
    """A release is not made on old results. Its own failure does not count, or it would fail in the next run, too.

    Slow, although it takes no time: the record is old between two runs of ``.ci/slow``, and no change is to blame.
    """
    record = json.loads(slow.RECORD.read_text())
    commits = slow.oldest_of(record)
    if commits is None:
        pytest.skip(f"the history does not tell how old {record['commit']} is")
    itself = f"{__name__}::{request.node.name}"
    assert slow.complaints(record, commits, but_for=[itself]) == []


def test_an_unknown_piece_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.slow", "speed"], cwd=slow.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Got ['speed'], but the pieces are parity, parallel" in done.stderr
