"""Type hints as objects, also where some names are imported for type checkers only."""

from __future__ import annotations

import builtins
import inspect
import sys
from functools import cache
from typing import Any

__all__ = ["Unknown", "hints_of"]


@cache
def hints_of(owner: Any) -> dict[str, Any]:
    """Return the type hints of a function or class; a name that only type checkers import counts as ``Any``."""
    owner = inspect.unwrap(owner)
    found: dict[str, Any] = {}
    for each in reversed(owner.__mro__) if isinstance(owner, type) else (owner,):
        space = _Lenient(vars(sys.modules[each.__module__]))
        for name, hint in inspect.get_annotations(each).items():
            found[name] = eval(hint, {}, space) if isinstance(hint, str) else hint
    return found


class _Lenient(dict[str, Any]):
    """A namespace in which unknown names are `Unknown`."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Unknown)


class _AnyName(type):
    """Makes ``name.attribute`` and ``name[...]`` of an unknown name unknown as well."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, _: Any) -> Any:
        return cls


class Unknown(metaclass=_AnyName):
    """Stands for a name that only type checkers import: every value except None fits."""
