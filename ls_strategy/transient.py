"""Hooks and methods that this package attaches to user objects and that copies must not have.

`ls_strategy.zero.user_code.copies` removes them from copies and pickles.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

from typing_extensions import override

__all__ = ["Forward", "Method", "Transient"]


class Transient:
    """A hook of a module, or an attribute of an object, that its copies and pickles do not have."""

    def plain(self) -> Any:
        """Return what a copy has instead of this attribute; None removes it, so that the class's own applies."""
        return None


class Method(Transient):
    """Replaces a method on one object. A copy of the object has the original method."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Attach to ``owner``; ``call`` gets this object, then the arguments."""
        self._owner = weakref.ref(owner)
        self._name = name
        self._call = call
        before = vars(owner).get(name)
        self._own = before._own if isinstance(before, Method) else before
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement."""
        return self._call(self, *args, **kwargs)

    @property
    def owner(self) -> Any:
        """The object whose method is replaced."""
        return self._owner()

    @property
    def original(self) -> Callable[..., Any]:
        """The replaced method: the object's own if it had one, else its class's."""
        if self._own is not None:
            return self._own
        return functools.partial(getattr(type(self.owner), self._name), self.owner)

    @property
    def has_own(self) -> bool:
        """Return whether the object had a method of its own before, in addition to its class's."""
        return self._own is not None

    def replaces(self, function: Callable[..., Any]) -> bool:
        """Return whether the replaced method is ``function`` of a class, and not an override."""
        return self._own is None and getattr(type(self.owner), self._name) is function

    @override
    def plain(self) -> Any:
        return self._own

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the original method, for classes that copy their ``__dict__`` themselves."""
        return functools.partial, (self.original,)

    def remove(self) -> None:
        """Restore the original method, unless something else has replaced this one."""
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is not self:
            return
        if self._own is None:
            del vars(owner)[self._name]
        else:
            vars(owner)[self._name] = self._own


class Forward(Transient):
    """Replaces the forward of a module, whose copies and pickles have the original one. Subclasses are called."""

    def __init__(self, module: Any) -> None:
        self.__wrapped__ = module.forward  # where `inspect.signature` looks
        self._module = module
        self._own = vars(module).get("forward")
        module.forward = self

    @override
    def plain(self) -> Any:
        return self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the forward of the module's class."""
        return getattr, (self._module, "forward")

    def remove(self) -> None:
        """Restore the original forward, unless other code has replaced this one, and calls it. Idempotent."""
        if vars(self._module).get("forward") is not self:
            return
        if self._own is None:
            del self._module.forward
        else:
            self._module.forward = self._own
