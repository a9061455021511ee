"""Buffers that are gathered because somebody touched a parameter outside the module that owns it.

Such a buffer is *lent*. Of all that are, the `KEPT` last stay while others are touched, the rest is released, and all
of them where the step goes on: a model that is read from end to end never takes more than these. What autograd saves of
a lent buffer it saves by its place in it, and has gathered again when backward needs it. A buffer of which somebody
keeps a view keeps its memory until the view is gone, and what is written there counts; after a step such a view shows
NaN until the buffer is gathered again, for its values are then no longer the parameter's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ls_strategy._compat import current_backward_pass, storage_key
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import StateError
from ls_strategy.zero.given import Given
from ls_strategy.zero.units import Flat

KEPT = 2
"""Lent buffers that stay when another one is touched: reading a model in order needs one, comparing neighbours two."""


@dataclass
class _Saved:
    """A tensor that autograd saved, by its place in a flat buffer."""

    flat: Flat
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class OnDemandGather:
    """Gathers and releases on touch. Touches are collective: every rank makes the same, in the same order."""

    def __init__(self, flats: list[Flat], *, sharded: bool) -> None:
        """``sharded``: parameters are sharded (stage 3); otherwise a touch only waits for values on their way."""
        self._flats = flats
        self._sharded = sharded
        self._on_demand_flats: dict[int, Flat] = {}
        self._by_storage = {storage_key(flat.full): flat for flat in flats}
        self._collecting: FrameType | None = None
        self.thread: int | None = None
        """The thread that trains, while it does: another one would exchange with other ranks at a moment of its own."""

        self.given = Given()
        """Copies that state dicts have given away (stage 3)."""
        for flat in flats:
            flat.on_demand = self

    # on behalf of whoever touches ------------------------------------------------------------------------------------

    def touch(self, flat: Flat) -> None:
        """Bring a buffer's values into memory, and keep them until `touched`. Collective."""
        self.refuse_other_threads(flat.name)
        flat.users += 1
        if not self._sharded:
            self._wait_for(flat)
            return
        if not flat.is_gathered:
            self.begin(flat)
            flat.finish_gather(lend=True)
        if flat.lent:
            self._on_demand_flats.pop(id(flat), None)
            self._on_demand_flats[id(flat)] = flat

    def refuse_other_threads(self, name: str) -> None:
        """Not collective.

        Raises:
            StateError: this is not the thread that trains, nor one of autograd's.
        """
        if self.thread not in (None, threading.get_ident()) and current_backward_pass() < 0:
            raise StateError(
                f"{name!r}, or a neighbour, was used by the thread {threading.current_thread().name!r} while another "
                "one trains. Its values, or its gradient's, are sharded or on their way, and the other ranks take "
                "part in fetching them at one point of the training only. Take a copy in a hook, and hand that to the "
                "thread."
            )

    def begin(self, flat: Flat) -> None:
        """Start what `touch` would wait for. Collective."""
        if self._sharded and not flat.is_gathered and flat.gathering is None:
            flat.start_gather()

    @staticmethod
    def _wait_for(flat: Flat) -> None:
        flat.wait_updated()
        if flat.publish_due:
            flat.start_gather()
        flat.finish_gather()

    def touched(self, flat: Flat) -> None:
        """The touch is over: those of before may go."""
        flat.users -= 1
        idle = [f for f in self._on_demand_flats.values() if f.users == 0]
        for other in idle[:-KEPT]:
            self._take_back(other)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it lies in the memory of parameters."""
        return storage_key(tensor) in self._by_storage

    def note_memory(self, flat: Flat) -> None:
        """A buffer has other memory from now on."""
        self._by_storage = {key: each for key, each in self._by_storage.items() if each is not flat}
        self._by_storage[storage_key(flat.full)] = flat

    def saving(self) -> AbstractContextManager[Any]:
        """Around an operation on lent buffers: what autograd saves of them is gathered again when it is needed."""
        if not self._sharded or not torch.is_grad_enabled():
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        flat = self._by_storage.get(storage_key(tensor))
        if flat is None or not flat.lent:
            return tensor
        return _Saved(flat, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.touch(saved.flat)
        values = saved.flat.full.as_strided(saved.size, saved.stride, saved.offset)
        self.touched(saved.flat)  # what is held is not given back
        return values

    # on behalf of the engine -----------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Release what is lent, with what was written there. Not collective."""
        for flat in list(self._on_demand_flats.values()):
            if flat.users == 0:
                self._take_back(flat)
        for flat in self._flats if self._sharded else ():
            if flat.is_viewed and not flat.is_gathered and flat.gathering is None and not flat.is_held:
                flat.forget_views()

    def _take_back(self, flat: Flat) -> None:
        del self._on_demand_flats[id(flat)]
        if not flat.lent:
            return  # the unit's own module has taken it over
        flat.take_writes()
        flat.release()

    @contextmanager
    def all_gathered(self, flats: list[Flat], world: Comm, *, modify: bool) -> Iterator[None]:
        """Inside, ``flats`` are in full on every rank, all at once. Collective.

        Args:
            flats: which.
            world: all ranks.
            modify: what is written inside counts. Otherwise it is an error.

        Raises:
            StateError: on every rank, if any has written without ``modify``.
        """
        for flat in flats:
            self.begin(flat)
        for flat in flats:
            self.touch(flat)
        try:
            yield
            written = torch.tensor([any([flat.take_writes() for flat in flats])], dtype=torch.uint8)
            if not modify and world.agree(written).item():
                raise StateError(
                    "parameters were written to inside gathered_parameters(), which was opened for reading. Open it "
                    "with modify=True, on every rank, and write the same on all of them."
                )
        finally:
            for flat in flats:
                self.touched(flat)
            self.write_back()

    def write_back(self) -> None:
        """Take what user code has written into parameters, and give back what was lent to it. Not collective."""
        self.take_writes()
        self.give_back()

    def take_writes(self) -> None:
        """What was written anywhere reaches masters and shards. Not collective."""
        self.given.take_writes()
        self.take_parameter_writes()

    def take_parameter_writes(self) -> None:
        """What was written to parameters so far does. Not collective."""
        for flat in self._flats:
            flat.take_writes()

    # while a state dict is collected ---------------------------------------------------------------------------------

    def collects(self, frame: FrameType | None) -> None:
        """While ``frame`` runs, parameters are only looked at, by who brings their values himself; None: it is over."""
        self._collecting = frame

    def is_collected(self) -> bool:
        """Whether that frame runs."""
        if self._collecting is None:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame is self._collecting:
                return True
            frame = frame.f_back
        self._collecting = None  # it ended with an exception
        return False
