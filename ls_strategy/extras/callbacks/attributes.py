"""What user code has set on a module: copied before a step that may run again, and put back."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy.host.pytorch import pl

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, set, list, deque)


class Attributes:
    """Attributes of a module and its parts that user code has set.

    They are numbers, strings, tensors, generators of random numbers, and flat containers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(part, _taken(part)) for part in module.modules()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give them the values that they had."""
        for part, kept in self._parts:
            own = vars(part)
            for name in [name for name in own if name not in kept and _is_kept(name, own[name])]:
                del own[name]
            for name, (value, content) in kept.items():
                put(own, name, value, content)

    def changes(self) -> Callable[[], None]:
        """Return a function that sets again what was set since, or whose content has changed."""
        changed = [
            (vars(part), name, value, content)
            for part, kept in self._parts
            for name, (value, content) in _taken(part).items()
            if name not in kept or kept[name][0] is not value or not _equal(kept[name][1], content)
        ]

        def put_again() -> None:
            with torch.no_grad():
                for each in changed:
                    put(*each)

        return put_again


def put(own: dict[str, Any], name: str, value: Any, content: Any) -> None:
    """Set an attribute to an object, and its content to what it was."""
    own[name] = value
    if isinstance(value, Tensor):
        value.copy_(content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif _is_numpy_generator(value):
        value.bit_generator.state = content
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(content)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(content)


def _equal(one: Any, other: Any) -> bool:
    """Compare what `_taken` has copied: containers by the objects in them."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return _equal([*one, *one.values()], [*other, *other.values()])
    if isinstance(one, (list, deque)):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return bool(one == other)


@cache
def _not_of_users() -> frozenset[str]:
    """Return the names of attributes that every module has."""
    return frozenset(vars(pl.LightningModule()))


def _is_kept(name: str, value: Any) -> bool:
    if name in _not_of_users():
        return False
    if isinstance(value, (torch.Generator, random.Random)) or _is_numpy_generator(value):
        return True
    plain_tensor = type(value) is Tensor and not value.requires_grad and value.is_contiguous()
    return (plain_tensor and not value.is_inference()) or type(value) in (*_PLAIN, *_CONTAINERS)


def _taken(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in vars(part).items():
        if _is_kept(name, value):
            found[name] = value, _content(value)
    return found


def _is_numpy_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator)


def _content(value: Any) -> Any:
    """Return a copy of a value, or the state of a generator."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if _is_numpy_generator(value):
        return value.bit_generator.state
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
