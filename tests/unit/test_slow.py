"""`.ci/slow`: its pieces leave nothing out, and its record says what ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import slow

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure message="1 != 2"/></testcase>
<testcase classname="tests.a" name="broken"><error message="no fixture"/></testcase>
<testcase classname="tests.a" name="left"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


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


def test_an_unknown_piece_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.slow", "speed"], cwd=slow.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Got ['speed'], but the pieces are parity, parallel" in done.stderr
