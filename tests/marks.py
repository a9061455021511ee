"""Marks of single parameters."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Parameters of a test with which the default run leaves it out: others cover the same code."""
    return pytest.param(*values, marks=pytest.mark.slow)
