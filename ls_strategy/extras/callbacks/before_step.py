"""What a step changes besides parameters and optimizer states, to be put back if the step is left out."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from copy import copy as shallow_copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy.checkpoint.random import RandomStream
from ls_strategy.host.pytorch import pl
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.moe.router import RoutingAccounts
from ls_strategy.optimizers.qk_clip import QKClip

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
    return value.clone() if isinstance(value, Tensor) else shallow_copy(value)


class BeforeStep:
    """Buffers, random states, loads of experts and logits of QK clips, as they were before a step.

    Buffers are copied in every step, because writes through ``.data`` cannot be noticed.
    """

    def __init__(self, strategy: ZeROStrategy, module: nn.Module) -> None:
        self._strategy = strategy
        self._parts = list(module.modules())  # once: walking through a large model takes milliseconds
        self._routers = [part for part in self._parts if isinstance(part, RoutingAccounts)]
        self._clips = [part for part in self._parts if isinstance(part, QKClip)]
        self._random = RandomStream()
        self._draw_again: Callable[[], None] | None = None
        # Where a buffer is, its name, the buffer, and a copy of it.
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        self._loads: list[tuple[RoutingAccounts, Tensor | None]] = []
        self._logits: list[tuple[QKClip, Tensor | None]] = []
        self.take()

    def take(self) -> None:
        """Take the states of now. Not collective."""
        virtual = self._strategy.virtual
        self._draw_again = None if virtual is None else virtual.random.mark()
        self._random.take()
        earlier = {id(buffer): copy for *_, buffer, copy in self._buffers}
        self._buffers = [
            (part._buffers, name, buffer, _copied(buffer, earlier.pop(id(buffer), None)))
            for part in self._parts
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._loads = [(router, router.counts.loads) for router in self._routers]
        self._logits = [(clip, clip.max_logits) for clip in self._clips]

    @torch.no_grad()
    def put_back(self) -> None:
        """Put them back. Not collective."""
        for buffers, name, buffer, copy in self._buffers:
            buffers[name] = buffer
            buffer.copy_(copy)
        for router, loads in self._loads:
            router.counts.loads = loads
        for clip, logits in self._logits:
            clip.max_logits = logits
        self._random.put()
        if self._draw_again is not None:
            self._draw_again()


def _copied(buffer: Tensor, copy: Tensor | None) -> Tensor:
    """Return a copy of a buffer, in the memory of an earlier copy of it if that fits."""
    if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype or copy.device != buffer.device:
        return buffer.detach().clone()
    return copy.copy_(buffer.detach())
