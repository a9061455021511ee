"""What a step sends does not change unnoticed: twenty configurations against the record of their collectives.

Where a change is meant, ``python -m tests.golden.steps --collectives`` writes the record anew, and its difference says
what was added and what has gone.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden.steps import COLLECTIVES, GOLDEN, record, summary

OFTEN = {"stage 2", "stage 3", "host", "replicas"}
"""In the default run."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.wide) for name in GOLDEN]
)
def test_collectives_are_those_of_the_record(name: str) -> None:
    record_of: dict[str, dict[str, Any]] = json.loads(COLLECTIVES.read_text())
    assert list(record_of) == list(GOLDEN)
    known, now = record_of[name], summary(record([name])[name])
    before, after = known["rank 0"], now["rank 0"]
    differ = [
        f"{x}: {before.get(x, 0)} -> {after.get(x, 0)}" for x in {**before, **after} if before.get(x) != after.get(x)
    ]
    assert before == after, f"collectives of rank 0 in the record and now: {differ}"
    assert now["order"] == known["order"], "the same collectives as in the record, in another order (by rank)"
