"""The record of Lightning's own tests: nothing in it is unexplained, and the documents say what it says."""

from __future__ import annotations

import json
import re

from tests.lightning_suite import EXPECTED, REASONS, RECORD, ROOT, STRATEGIES, expected, summary


def test_nothing_fails_but_for_a_reason() -> None:
    record = json.loads(RECORD.read_text())
    assert record["summary"] == summary(record["tests"])
    reasons = {f"expected: {reason}" for reason in REASONS}
    for strategy in record["summary"].keys() & set(STRATEGIES):
        assert record["summary"][strategy].keys() <= {"passed", "skipped"} | reasons, strategy


def test_the_documents_have_the_numbers_of_the_record() -> None:
    found = json.loads(RECORD.read_text())["summary"]
    rows = dict(
        re.findall(r"^\| `(zero\w+)` (\|[\d| ]+\|)$", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    )
    assert rows.keys() == found.keys() - {"ddp"}
    for strategy in rows:
        counts = [found[strategy].get(name, 0) for name in ("passed", *(f"expected: {reason}" for reason in REASONS))]
        assert rows[strategy] == f"| {' | '.join(map(str, [sum(counts), *counts]))} |", strategy


def test_a_test_that_fails_for_another_reason_than_the_expected_one_is_unexplained() -> None:
    for name, reason in EXPECTED.items():
        for sign in REASONS[reason][1]:
            assert expected(f"module.py::{name}", f"E  {sign}: ...") == reason
        assert expected(f"module.py::{name}", "another error") is None
    assert expected("module.py::test_of_something_else", "call_count") is None
