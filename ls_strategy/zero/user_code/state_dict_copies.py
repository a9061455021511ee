"""Copies that ``state_dict()`` has returned at stage 3: writes to them count as writes to the parameters.

In plain torch a state dict contains the parameters' own memory, and code that averages weights often writes to it. Here
its values are copies. Until the next boundary (the end of a hook, a step) each rank takes writes to its own shard of
them. A copy that outlives the boundary is a snapshot, and a write to it is an error. Nothing is sent.

While training runs, copies are referenced until the next boundary, which is near. After training they are not, so that
no memory of the model's size stays: writes to a copy count only if user code keeps it until the model is used again.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ls_strategy._torch import version_of
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.writes import take_elements

if TYPE_CHECKING:
    from ls_strategy.zero.flat.flat_buffer import FlatBuffer


_OURS = 2
"""References to a tensor that only a `_Copy` holds, as ``sys.getrefcount`` counts them."""


@dataclass
class _Copy:
    """The full values of a parameter that a state dict has returned."""

    flat: FlatBuffer
    index: int
    values: weakref.ref[Tensor]
    held: Tensor | None
    """A strong reference to the same tensor, so that writes to it are not lost."""

    version: int
    mine: Tensor
    """A copy of this rank's shard of the values."""


class StateDictCopies:
    """The copies that state dicts of one model have returned."""

    def __init__(self) -> None:
        """Begin without copies."""
        self.training = True
        """Whether training runs, so that a boundary follows soon."""
        self.fresh: list[_Copy] = []
        """Since the last boundary."""
        self.old: list[tuple[str, weakref.ref[Tensor], int]] = []
        """From before it: name, values and their version."""

    def add(self, flat: FlatBuffer, index: int, values: Tensor) -> None:
        """Record that a state dict returns ``values`` of a parameter, on the CPU."""
        if flat.layout.slots[index].part is None:
            held, mine = values if self.training else None, _shard_of(flat, index, values).clone()
            self.fresh.append(_Copy(flat, index, weakref.ref(values), held, version_of(values), mine))

    def drop(self) -> None:
        """Take writes to copies that user code has dropped, and drop them here too. Not collective."""
        alive = []
        for copy in self.fresh:
            if copy.held is not None and sys.getrefcount(copy.held) <= _OURS:
                _take(copy, copy.held)
            elif copy.values() is not None:
                alive.append(copy)
        self.fresh = alive

    def are_written(self) -> bool:
        """Return whether a copy of this hook was written to since writes to it were taken."""
        alive = ((copy, copy.values()) for copy in self.fresh)
        return any(values is not None and version_of(values) != copy.version for copy, values in alive)

    def take_early(self) -> None:
        """Take writes to copies of this hook, as something is about to read the parameters. Not collective."""
        for copy in self.fresh:
            values = copy.values()
            if values is not None and version_of(values) != copy.version:
                _take(copy, values)
                copy.version, copy.mine = version_of(values), _shard_of(copy.flat, copy.index, values).clone()

    def take_writes(self) -> None:
        """Take the writes since the last boundary. Not collective.

        Raises:
            StateError: a copy from before that boundary was written to.
        """
        fresh, self.fresh = self.fresh, []
        for copy in fresh:
            values = copy.values()
            if values is not None:
                _take(copy, values)
                self.old.append((copy.flat.layout.slots[copy.index].name, copy.values, version_of(values)))
        if self.old:
            self._check_old()

    def _check_old(self) -> None:
        alive = []
        for name, reference, version in self.old:
            values = reference()
            if values is None:
                continue
            if version_of(values) != version:
                self.old = []
                raise StateError(
                    f"what state_dict() returned for {name!r} was written to later than in the hook that called it: at "
                    "stage 3 it is a copy of that moment, while plain torch returns the parameter's own memory. Write "
                    "to the parameter, or keep a copy: {k: v.clone() for k, v in module.state_dict().items()}."
                )
            alive.append((name, reference, version))
        self.old = alive


def _shard_of(flat: FlatBuffer, index: int, values: Tensor) -> Tensor:
    piece = flat.pieces[index]
    return values.detach().reshape(-1)[piece.param_start : piece.param_start + piece.numel]


def _take(copy: _Copy, values: Tensor) -> None:
    """Take writes to this rank's shard of a copy, after writes to parameters. Not collective: all have full values."""
    flat, now = copy.flat, _shard_of(copy.flat, copy.index, values)
    taken = take_elements(flat, flat.pieces[copy.index].start, now, copy.mine)
    if not taken and version_of(values) == copy.version:
        return
    if flat.is_gathered:
        slot = flat.layout.slots[copy.index]
        flat.full[slot.offset : slot.end].copy_(flat.rounded(values.detach().reshape(-1)))
    flat.note_written_copy(copy.index)
