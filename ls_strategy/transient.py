"""What this package hangs on other people's objects, and copies of these are to lack: see `ls_strategy.zero.copies`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from typing_extensions import override

__all__ = ["Method", "Transient"]


class Transient:
    """A hook of a module, or an attribute of an object, that copies and pickles of it lack."""

    def plain(self) -> Any:
        """What a copy has in place of an attribute; None: nothing, and so what its class has."""
        return None


class Method(Transient):
    """Stands in for a method on one object. A copy of the object has what it stands in for."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Put it on ``owner``; ``call`` gets this object, then the arguments."""
        self._owner = weakref.ref(owner)
        self._name = name
        self._call = call
        before = vars(owner).get(name)
        self._own = before._own if isinstance(before, Method) else before
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the method does."""
        return self._call(self, *args, **kwargs)

    @property
    def owner(self) -> Any:
        """The object."""
        return self._owner()

    @property
    def original(self) -> Callable[..., Any]:
        """What it stands in for: the object's own, if somebody has put one there, or that of its class."""
        if self._own is not None:
            return self._own
        return functools.partial(getattr(type(self.owner), self._name), self.owner)

    def replaces(self, function: Callable[..., Any]) -> bool:
        """Whether it stands in for ``function`` of a class, and not for an override."""
        return self._own is None and getattr(type(self.owner), self._name) is function

    @override
    def plain(self) -> Any:
        return self._own

    def __reduce__(self) -> tuple[Any, ...]:
        """Where a class copies its ``__dict__`` by itself."""
        return functools.partial, (self.original,)

    def remove(self) -> None:
        """Take it off, unless somebody else has put something in its place."""
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is not self:
            return
        if self._own is None:
            del vars(owner)[self._name]
        else:
            vars(owner)[self._name] = self._own
