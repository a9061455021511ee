"""What this package hangs on other people's objects, and copies of these are to lack: see `ls_strategy.zero.copies`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Method", "Transient"]


class Transient:
    """A hook of a module, or an attribute of an object, that copies and pickles of it lack."""

    def plain(self) -> Any:
        """What a copy has in place of an attribute; None: nothing, and so what its class has."""
        return None


class Method(Transient):
    """Stands in for a method on one object. A copy of the object has the method of its class."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Put it on ``owner``; ``call`` gets the owner, then the arguments."""
        self._owner = weakref.ref(owner)
        self._name = name
        self._call = call
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the method does."""
        return self._call(self._owner(), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Where a class copies its ``__dict__`` by itself."""
        owner = self._owner()
        return functools.partial, (getattr(type(owner), self._name), owner)

    def remove(self) -> None:
        """Take it off, unless somebody else has put something in its place."""
        owner = self._owner()
        if owner is not None and vars(owner).get(self._name) is self:
            del vars(owner)[self._name]
