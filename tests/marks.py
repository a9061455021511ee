"""Marks of single parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Parameters of a test with which the default run leaves it out: others cover the same code."""
    return pytest.param(*values, marks=pytest.mark.slow)


def in_turn(cases: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """Parameters ``(case, options)``: every case with two options in turn and, marked slow, with all of them.

    Neighbours in ``cases`` get other options, so that the default run has each option with many cases.
    """
    names = list(options)
    found = []
    for i, case in enumerate(cases):
        two = names[i % len(names)], names[(i + len(names) // 2) % len(names)]
        found.append(pytest.param(case, {name: options[name] for name in two}, id=case.__name__))
        found.append(pytest.param(case, dict(options), id=f"{case.__name__}, all", marks=pytest.mark.slow))
    return found
