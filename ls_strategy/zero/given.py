"""What ``state_dict()`` has given away at stage 3: writes to it count, as if it were the parameters' own memory.

In plain torch a state dict shows the parameters themselves, and averages of weights are often kept by writing to its
values. Here its values are copies. Until the next boundary (the end of a hook, a step) each rank takes what was written
to them, of its own shard; one that lives on is a snapshot, and a write to it is an error. Nothing is sent.

While training runs, boundaries are near, and copies are held until then. After that a copy counts only if its owner
holds it until somebody uses the model again: nothing of the model's size is kept for who may never come back.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ls_strategy._compat import version_of
from ls_strategy.errors import StateError
from ls_strategy.zero.writes import take_elements

if TYPE_CHECKING:
    from ls_strategy.zero.units import Flat


_OURS = 2
"""References to a tensor that only a `_Copy` holds, while they are counted."""


@dataclass
class _Copy:
    """A parameter's values, in full, that somebody has got."""

    flat: Flat
    index: int
    values: weakref.ref[Tensor]
    held: Tensor | None
    """The same, kept from being dropped with what was written there."""

    version: int
    mine: Tensor
    """This rank's part of them, as it was."""


class Given:
    """The copies that state dicts of one model have given away."""

    def __init__(self) -> None:
        """None yet."""
        self.training = True
        """Whether boundaries are to come."""
        self._fresh: list[_Copy] = []
        self._old: list[tuple[str, weakref.ref[Tensor], int]] = []

    def add(self, flat: Flat, index: int, values: Tensor) -> None:
        """Somebody gets ``values`` of a parameter, on the CPU."""
        if flat.layout.slots[index].part is None:
            held, mine = values if self.training else None, _part(flat, index, values).clone()
            self._fresh.append(_Copy(flat, index, weakref.ref(values), held, version_of(values), mine))

    def drop(self) -> None:
        """Take what was written to copies that nobody else holds any more, and let go of them. Not collective."""
        alive = []
        for copy in self._fresh:
            if copy.held is not None and sys.getrefcount(copy.held) <= _OURS:
                _take(copy, copy.held)
            elif copy.values() is not None:
                alive.append(copy)
        self._fresh = alive

    def take_writes(self) -> None:
        """Take what was written since the last boundary. Not collective.

        Raises:
            StateError: something was written to values that are older than that.
        """
        fresh, self._fresh = self._fresh, []
        for copy in fresh:
            values = copy.values()
            if values is not None:
                _take(copy, values)
                self._old.append((copy.flat.layout.slots[copy.index].name, copy.values, version_of(values)))
        if self._old:
            self._check_old()

    def _check_old(self) -> None:
        alive = []
        for name, reference, version in self._old:
            values = reference()
            if values is None:
                continue
            if version_of(values) != version:
                self._old = []
                raise StateError(
                    f"what state_dict() returned for {name!r} was written to later than in the hook that asked for it: "
                    "at stage 3 it is a copy of that moment, where plain torch shows the parameter itself. Write to "
                    "the parameter, or keep a copy of your own: {k: v.clone() for k, v in module.state_dict().items()}."
                )
            alive.append((name, reference, version))
        self._old = alive


def _part(flat: Flat, index: int, values: Tensor) -> Tensor:
    piece = flat.pieces[index]
    return values.detach().reshape(-1)[piece.param_start : piece.param_start + piece.numel]


def _take(copy: _Copy, values: Tensor) -> None:
    """Not collective: every rank has the values in full, and takes its own part."""
    flat, now = copy.flat, _part(copy.flat, copy.index, values)
    taken = take_elements(flat, flat.pieces[copy.index].start, now, copy.mine)
    if not taken and version_of(values) == copy.version:
        return
    if flat.is_gathered:
        slot = flat.layout.slots[copy.index]
        flat.full[slot.offset : slot.end].copy_(values.detach().reshape(-1))
        flat.look()
