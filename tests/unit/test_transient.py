"""What stands in for methods of other people's objects: it calls what it replaces, and puts it back."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ls_strategy.transient import Method


class Part(nn.Module):
    def greet(self, name: str) -> str:
        return f"class {name}"


def _own(name: str) -> str:
    return f"own {name}"


def _louder(method: Method, *args: Any) -> str:
    return method.original(*args) + "!"


def test_it_stands_in_for_the_method_of_the_class() -> None:
    part = Part()
    method = Method(part, "greet", _louder)
    assert part.greet("a") == "class a!"
    assert method.replaces(Part.greet)
    assert method.plain() is None
    method.remove()
    assert "greet" not in vars(part)


def test_it_stands_in_for_the_objects_own_and_puts_it_back() -> None:
    part = Part()
    part.greet = _own  # type: ignore[method-assign]
    method = Method(part, "greet", _louder)
    assert part.greet("a") == "own a!"
    assert not method.replaces(Part.greet)
    assert method.plain() is _own
    method.remove()
    assert vars(part)["greet"] is _own


def test_one_that_replaces_another_one_calls_and_puts_back_what_was_there_first() -> None:
    part = Part()
    part.greet = _own  # type: ignore[method-assign]
    Method(part, "greet", _louder)
    second = Method(part, "greet", _louder)
    assert part.greet("a") == "own a!"
    second.remove()
    assert vars(part)["greet"] is _own


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
