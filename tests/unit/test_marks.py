"""Few cases that stand for a product of settings, and the marks of parameters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.marks import covering, few_or_all

AXES: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "tier": ["device", "cpu", "nvme"],
    "clip": [{}, {"norm": 1.0}],  # not hashable
    "accumulate": [1, 3],
}


def is_allowed(row: dict[str, Any]) -> bool:
    return row["stage"] > 0 or row["tier"] == "device"


def met(rows: list[dict[str, Any]], together: int) -> list[Any]:
    """What meets in the rows, each once, in an order of its own."""
    found = {str(some) for row in rows for some in itertools.combinations(row.items(), together)}
    return sorted(found)


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("allowed", [is_allowed, lambda row: True])
def test_what_meets_in_the_product_meets_in_a_row(together: int, allowed: Any) -> None:
    product = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    product = [row for row in product if allowed(row)]
    rows = covering(AXES, together, allowed)
    assert all(row in product for row in rows)
    assert met(rows, together) == met(product, together)
    assert rows == covering(AXES, together, allowed)


def test_rows_are_few() -> None:
    assert len(covering(AXES, 1)) == 4  # values of the longest axis
    assert len(covering(AXES)) <= 14  # of the 48; the two longest axes make 12
    assert covering({"stage": [0, 1]}, 2) == []  # there are no two axes


def test_nothing_that_is_allowed_is_no_row() -> None:
    assert covering(AXES, allowed=lambda row: False) == []


def test_the_default_run_has_the_few() -> None:
    few, everything = few_or_all([1], [1, 2, 3])
    assert (few.values, [m.name for m in few.marks]) == (([1],), [])
    assert (everything.values, [m.name for m in everything.marks]) == (([1, 2, 3],), ["wide"])
