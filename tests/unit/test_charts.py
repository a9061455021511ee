"""Which scalars become charts, and their units."""

from __future__ import annotations

import pytest

from ls_strategy.charts import Charts, unit_for


@pytest.mark.parametrize(
    ("nbytes", "name"),
    [(0, "kib"), (984_000, "kib"), (1 << 20, "mib"), ((1 << 30) - 1, "mib"), (1 << 30, "gib"), (1 << 45, "gib")],
)
def test_an_amount_has_a_unit_that_it_holds_at_least_once(nbytes: int, name: str) -> None:
    unit = unit_for(nbytes)
    assert unit.name == name
    assert name == "kib" or nbytes / unit.nbytes >= 1


def test_a_chart_begins_with_the_first_number_that_is_not_0_and_then_goes_on() -> None:
    charts = Charts(always=["skipped"])
    assert charts.of({"copies": 0.0, "sent": 1.0, "skipped": 0.0}) == {"sent": 1.0, "skipped": 0.0}
    assert charts.of({"copies": 2.0, "sent": 0.0}) == {"copies": 2.0, "sent": 0.0}
    assert charts.of({"copies": 0.0, "sent": 0.0}) == {"copies": 0.0, "sent": 0.0}
    assert Charts().of({"copies": 0.0}) == {}  # another fit begins with no chart


def test_a_number_that_is_not_one_has_a_chart() -> None:
    assert Charts().of({"grad_norm": float("nan")}).keys() == {"grad_norm"}
