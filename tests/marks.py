"""Marks of single parameters, and few cases that stand for a product of settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

LEFT_OUT = ("wide", "slow", "gpu", "gpus", "slurm")
"""What the default run leaves out: ``addopts`` in pyproject.toml."""

DEFAULT = pytest.StashKey[dict[str, bool]]()
"""In pytest's configuration: every test that was collected, and whether it is in the default selection."""


def slow(*values: Any) -> Any:
    """Parameters of a test with which the default run leaves it out: others cover the same code."""
    return pytest.param(*values, marks=pytest.mark.slow)


def wide(*values: Any, **options: Any) -> Any:
    """Parameters of a test with which it is wide: others make the same claim in the default run."""
    return pytest.param(*values, marks=pytest.mark.wide, **options)


def in_turn(cases: Sequence[Any], options: Mapping[str, Any], first: int = 0) -> list[Any]:
    """Parameters ``(case, options)``: every case with one option in turn and, marked slow, with all of them.

    Neighbours in ``cases`` get other options, so that the default run has each option with some case. The first case
    gets the option of number ``first``: of many lists of which the default run has only the first case, each should
    begin with another.
    """
    names = list(options)
    found = []
    for i, case in enumerate(cases, first):
        name = names[i % len(names)]
        found.append(pytest.param(case, {name: options[name]}, id=case.__name__))
        found.append(pytest.param(case, dict(options), id=f"{case.__name__}, all", marks=pytest.mark.slow))
    return found


def few_or_all(few: Any, all_: Any) -> list[Any]:
    """Parameters of a test that trains many cases in one start of the ranks: few of them, and, marked wide, all."""
    return [pytest.param(few, id="few"), wide(all_, id="all")]


def covering(
    axes: Mapping[str, Sequence[Any]],
    together: int = 2,
    allowed: Callable[[dict[str, Any]], bool] = lambda row: True,
) -> list[dict[str, Any]]:
    """Return rows of the product of ``axes``, so many that every two values of two axes meet in one of them.

    The row that has most of what is still missing comes next, the first of these in the order of the product: the same
    axes make the same rows everywhere. The whole product is looked at, so it should have thousands of rows at most.

    Args:
        axes: values by name of the axis; they need not be hashable.
        together: of how many axes the values meet: 1 for every value once, 2 for every pair.
        allowed: whether a row may be taken. What no allowed row has is not asked for.
    """
    places = [range(len(values)) for values in axes.values()]
    met: dict[tuple[int, ...], set[Any]] = {}
    for places_of_row in itertools.product(*places):
        if allowed(_row(axes, places_of_row)):
            met[places_of_row] = set(itertools.combinations(enumerate(places_of_row), together))
    left: set[Any] = set().union(*met.values())
    chosen = []
    while left:
        best = max(met, key=lambda places_of_row: len(met[places_of_row] & left))
        chosen.append(_row(axes, best))
        left -= met[best]
    return chosen


def _row(axes: Mapping[str, Sequence[Any]], places: Sequence[int]) -> dict[str, Any]:
    return {name: values[at] for (name, values), at in zip(axes.items(), places, strict=True)}
