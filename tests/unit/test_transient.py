"""What stands in for methods of other people's objects: it calls what it replaces, and puts it back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from ls_strategy.transient import Method


class Part(nn.Module):
    def greet(self, name: str) -> str:
        return f"class {name}"


def _own(name: str) -> str:
    return f"own {name}"


def _louder(method: Method, *args: Any) -> str:
    return method.original(*args) + "!"


@pytest.mark.parametrize("own", [False, True])
def test_it_stands_in_for_the_method_of_the_class_or_the_objects_own_and_puts_it_back(own: bool) -> None:
    part = Part()
    if own:
        part.greet = _own  # type: ignore[method-assign]
    method = Method(part, "greet", _louder)
    assert part.greet("a") == ("own a!" if own else "class a!")
    assert method.replaces(Part.greet) is not own
    assert method.plain() is (_own if own else None)
    if own:  # one that replaces another one calls and puts back what was there first
        method = Method(part, "greet", _louder)
        assert part.greet("a") == "own a!"
    method.remove()
    assert vars(part).get("greet") is (_own if own else None)


def test_what_wraps_it_stays_and_still_reaches_it() -> None:
    part = Part()
    method = Method(part, "greet", _louder)
    inner = part.greet
    part.greet = lambda name: inner(name) + "?"  # type: ignore[method-assign]
    assert part.greet("a") == "class a!?"
    method.remove()
    assert part.greet("a") == "class a!?"


def test_a_copy_by_dict_has_what_it_stands_in_for() -> None:
    part = Part()
    Method(part, "greet", _louder)
    assert copy.copy(vars(part)["greet"])("a") == "class a"
