"""Copies that ``state_dict()`` has returned at stage 3: writes to them count as writes to the parameters.

In plain torch a state dict contains the parameters' own memory, and code that averages weights often writes to it. Here
its values are copies. Until the next boundary (the end of a hook, a step) each rank takes writes to its own shard of
them. A copy that outlives the boundary is a snapshot, and a write to it is an error. Nothing is sent.

What reads parameters before the boundary takes writes first. Those through ``.data`` and NumPy do not count in a
tensor's version, so copies of what is read are compared with the values that were returned: this rank's shard of them,
and all of them while their buffer is gathered.

While training runs, copies are referenced until the next boundary, which is near. After training they are not, so that
no memory of the model's size stays: writes to a copy count only if user code keeps it until the model is used again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ls_strategy._torch import storage_users, version_of
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.writes import bits, differing, take_elements

if TYPE_CHECKING:
    from ls_strategy.zero.flat.flat_buffer import FlatBuffer


_SAMPLE = 64
"""Elements by which a later write to a snapshot is noticed if its version does not show it."""


@dataclass
class _Copy:
    """The full values of a parameter that a state dict has returned."""

    flat: FlatBuffer
    index: int
    returned: weakref.ref[Tensor]
    held: Tensor | None
    """A view of the same memory, so that writes to it are not lost."""

    users: int
    """References to the memory while user code has none."""

    version: int
    base: Tensor
    """A copy of the values as the masters have them: this rank's shard, or all of them."""

    @property
    def is_full(self) -> bool:
        """Whether all values are compared."""
        return self.base.numel() == self.flat.layout.slots[self.index].numel

    @property
    def values(self) -> Tensor | None:
        """The values, None if user code has dropped them and they are not held."""
        return self.returned() if self.held is None else self.held

    @property
    def is_dropped(self) -> bool:
        """Whether nobody can write to the values any more."""
        return self.returned() is None if self.held is None else storage_users(self.held) <= self.users

    def is_written(self) -> bool:
        """Return whether they were written to since writes were taken: counted anywhere, or to this rank's shard."""
        values = self.values
        if values is None:
            return False
        now = values.reshape(-1) if self.is_full else self.shard_of(values)
        return version_of(values) != self.version or not torch.equal(bits(now), bits(self.base))

    def shard_of(self, values: Tensor) -> Tensor:
        """Return this rank's shard of all values."""
        piece = self.flat.pieces[self.index]
        return values.reshape(-1)[piece.param_start : piece.param_start + piece.numel]

    def record(self, values: Tensor) -> None:
        """Compare with ``values`` from now on."""
        self.version = version_of(values)
        self.base = (values.reshape(-1) if _is_gathered(self.flat) else self.shard_of(values)).clone()

    def take(self) -> None:
        """Take writes, after writes to parameters. Not collective: all ranks have full values."""
        values, flat = self.values, self.flat
        if values is None or not self.is_written():
            return
        counted = version_of(values) != self.version
        before = self.shard_of(self.base) if self.is_full else self.base
        take_elements(flat, flat.pieces[self.index].start, self.shard_of(values), before)
        flat.take_written_copy(self.index, self._merged(values.reshape(-1)), counted=counted)
        self.record(values)

    def _merged(self, values: Tensor) -> Tensor:
        """Return ``values``; where they are as before, what user code has written to the gathered parameter itself."""
        if not self.is_full or not self.flat.is_gathered:
            return values
        slot = self.flat.layout.slots[self.index]
        now = self.flat.full[slot.offset : slot.end].detach().to(values)
        return torch.where(differing(values, self.base), values, now)


@dataclass
class _Snapshot:
    """What a state dict has returned in an earlier hook."""

    name: str
    values: weakref.ref[Tensor]
    version: int
    sample: Tensor
    """A few of its elements."""


class StateDictCopies:
    """The copies that state dicts of one model have returned."""

    def __init__(self) -> None:
        """Begin without copies."""
        self.training = True
        """Whether training runs, so that a boundary follows soon."""
        self.returned = False
        """Whether a state dict was returned since the last boundary: the same on all ranks."""
        self.fresh: list[_Copy] = []
        """Since the last boundary."""
        self.old: list[_Snapshot] = []
        """From before it."""

    def add(self, flat: FlatBuffer, index: int, values: Tensor) -> None:
        """Record that a state dict returns ``values`` of a parameter, on the CPU."""
        if flat.layout.slots[index].part is None:
            users, held = storage_users(values), values.detach() if self.training else None
            copy = _Copy(flat, index, weakref.ref(values), held, users, 0, values)
            copy.record(values)
            self.fresh.append(copy)

    def drop(self) -> None:
        """Drop copies that user code has dropped, after their writes were taken. Not collective."""
        self.fresh = [copy for copy in self.fresh if not copy.is_dropped or copy.is_written()]

    def expect_gather(self, flat: FlatBuffer) -> None:
        """Compare all values of the copies of a buffer that is gathered next; writes to them were taken."""
        self.drop()
        for copy in self.fresh:
            values = copy.values
            if copy.flat is flat and not copy.is_full and values is not None:
                copy.base = values.reshape(-1).clone()
            elif copy.flat is not flat and copy.is_full and not _is_gathered(copy.flat):
                copy.base = copy.shard_of(copy.base).clone()

    def written(self, flat: FlatBuffer | None = None) -> list[_Copy]:
        """Return copies of this hook, of one buffer or of all, that were written to since writes to them were taken."""
        return [copy for copy in self.fresh if (flat is None or copy.flat is flat) and copy.is_written()]

    @staticmethod
    def take_early(copies: list[_Copy]) -> None:
        """Take writes to copies of this hook, as something is about to read the parameters. Not collective."""
        for copy in copies:
            copy.take()

    def take_writes(self) -> None:
        """Take the writes since the last boundary. Not collective.

        Raises:
            StateError: a copy from before that boundary was written to.
        """
        fresh, self.fresh, self.returned = self.fresh, [], False
        for copy in fresh:
            copy.take()
            values = copy.returned()
            if values is not None:
                name = copy.flat.layout.slots[copy.index].name
                self.old.append(_Snapshot(name, copy.returned, version_of(values), _sample_of(values)))
        alive = []
        for snapshot in self.old:
            values = snapshot.values()
            if values is None:
                continue
            if version_of(values) != snapshot.version or not torch.equal(_sample_of(values), snapshot.sample):
                self.old = []
                raise StateError(
                    f"what state_dict() returned for {snapshot.name!r} was written to later than in the hook that "
                    "called it: at stage 3 it is a copy of that moment, while plain torch returns the parameter's own "
                    "memory. Write to the parameter, or keep a copy: {k: v.clone() for k, v in "
                    "module.state_dict().items()}."
                )
            alive.append(snapshot)
        self.old = alive


def _is_gathered(flat: FlatBuffer) -> bool:
    return flat.is_fetched or flat.gathering is not None


def _sample_of(values: Tensor) -> Tensor:
    """Return bits of some elements, in a copy."""
    flat = values.detach().reshape(-1)
    return bits(flat[:: max(flat.numel() // _SAMPLE, 1)]).clone()
