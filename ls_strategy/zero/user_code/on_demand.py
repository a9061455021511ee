"""Gather buffers on demand: when a parameter is used outside the module that owns it.

Only the last `KEPT` of these buffers stay gathered while others are used, and none when the step goes on. So reading a
model from end to end takes the memory of `KEPT` buffers. Autograd saves a reference to a position in such a buffer, and
backward gathers it again. A buffer that user code has a view of keeps its memory until the view is freed, and writes to
the view count. After a step such a view shows NaN until the buffer is gathered again, because its values are outdated.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ls_strategy._torch import (
    VersionedTensor,
    current_backward_pass,
    current_transform,
    outside_transforms,
    storage_key,
)
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.released import Released
from ls_strategy.zero.flat.units import Unit
from ls_strategy.zero.user_code.state_dict_copies import StateDictCopies

KEPT = 2
"""Buffers that stay gathered when another one is used: one to read a model in order, two to compare neighbours."""


@dataclass
class _Saved:
    """A tensor that autograd saved, as a position in a flat buffer."""

    flat: FlatBuffer
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class _Opened:
    """An open `OnDemandGather.all_gathered`."""

    flats: frozenset[int]
    """``id`` of the buffers that it holds."""

    written: bool = False
    """Whether this rank's shard of them may have changed while no context inside this one held the buffer."""


class OnDemandGather:
    """Gathers and releases buffers on demand. Uses are collective: the same on every rank, in the same order."""

    def __init__(self, flats: list[FlatBuffer], *, sharded: bool, units: Sequence[Unit] = ()) -> None:
        """``sharded``: parameters are sharded (stage 3). Otherwise a use of most only waits for values in flight."""
        self._flats = flats
        self._unit_of = {id(flat): unit for unit in units for flat in unit.flats}
        self._releases = sharded or any(not flat.resident for flat in flats)
        self._on_demand_flats: dict[int, FlatBuffer] = {}
        self._by_storage = {storage_key(flat.full): flat for flat in flats}
        self._collecting: FrameType | None = None
        self._opened: list[_Opened] = []
        """Open contexts, outermost first."""
        self.thread: int | None = None
        """The training thread, while it trains. Another thread would run collectives out of order."""

        self.state_dict_copies = StateDictCopies()
        """Copies that state dicts have returned (stage 3)."""
        for flat in flats:
            flat.show_by(on_demand=self)

    # called when parameters are used ---------------------------------------------------------------------------------

    def touch(self, flat: FlatBuffer) -> None:
        """Gather a buffer, and keep it until `touched`. Collective."""
        self.refuse_other_threads(flat.name)
        flat.require_here("parameters")
        if self.state_dict_copies.fresh:
            self.take_copies_early(flat)
        flat.users += 1
        inside = current_transform() is not None
        if flat.resident:
            with outside_transforms() if inside else nullcontext():
                flat.wait_updated()
                if flat.publish_due:
                    flat.start_gather()
                flat.finish_gather()
            return
        if inside and id(flat) in self._unit_of:
            with outside_transforms():  # in which autograd takes no hooks on what it saves
                self.begin(flat)
                flat.finish_gather()
                self._unit_of[id(flat)].pin()
            return
        if not flat.is_gathered:
            in_use = flat.is_in_use
            self.begin(flat)
            flat.finish_gather(on_demand=not (in_use and flat.gathers_exactly))
        if flat.gathered_on_demand:
            self._on_demand_flats.pop(id(flat), None)
            self._on_demand_flats[id(flat)] = flat

    def refuse_other_threads(self, name: str) -> None:
        """Refuse to use a parameter in another thread than the training thread. Not collective.

        Raises:
            StateError: the current thread is neither the training thread nor one of autograd's.
        """
        if self.thread not in (None, threading.get_ident()) and current_backward_pass() < 0:
            raise StateError(
                f"a parameter in the buffer of {name!r} was used by the thread {threading.current_thread().name!r} "
                "while another thread trains. Its values, or those of its gradient, are sharded or in flight, and the "
                "other ranks take part in gathering them only at one point of the training. Take a copy in a hook, "
                "and pass that to the thread."
            )

    def begin(self, flat: FlatBuffer) -> None:
        """Start gathering a buffer, without waiting. Collective."""
        if not flat.resident and not flat.is_gathered:
            if flat.gathering is None or flat.plan.cast_to is not None:
                flat.gather_exactly()
            if flat.gathering is None:
                flat.start_gather()

    def touched(self, flat: FlatBuffer) -> None:
        """End the use that `touch` began, and release all idle buffers but the last `KEPT`."""
        flat.users -= 1
        idle = [f for f in self._on_demand_flats.values() if f.users == 0]
        for other in idle[:-KEPT]:
            self._release(other)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a view of a flat buffer."""
        return storage_key(tensor) in self._by_storage

    def note_memory(self, flat: FlatBuffer) -> None:
        """Record that ``flat.full`` was reallocated."""
        self._by_storage = {key: each for key, each in self._by_storage.items() if each is not flat}
        self._by_storage[storage_key(flat.full)] = flat

    def saving(self) -> AbstractContextManager[Any]:
        """Wrap an operation on buffers gathered on demand: autograd gathers again what it saved of them."""
        if not self._releases or not torch.is_grad_enabled():
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> VersionedTensor | _Saved:
        flat = self._by_storage.get(storage_key(tensor))
        if flat is None or not flat.gathered_on_demand:
            return VersionedTensor(tensor)
        return _Saved(flat, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: VersionedTensor | _Saved) -> Tensor:
        if isinstance(saved, VersionedTensor):
            return saved.get()
        self.touch(saved.flat)
        values = saved.flat.full.as_strided(saved.size, saved.stride, saved.offset)
        self.touched(saved.flat)  # a buffer with a view keeps its memory
        return values

    # called by the engine --------------------------------------------------------------------------------------------

    def release_idle(self) -> None:
        """Release all idle buffers that were gathered on demand, after taking writes to them. Not collective."""
        for flat in list(self._on_demand_flats.values()):
            if flat.users == 0:
                self._release(flat)
        for flat in self._flats:
            if not flat.resident and flat.writes.keeps_memory:
                flat.free_if_not_viewed()

    def _release(self, flat: FlatBuffer) -> None:
        del self._on_demand_flats[id(flat)]
        if not flat.gathered_on_demand:
            return  # gathered by the unit's own module since
        flat.take_writes()
        flat.release_on_demand()

    @contextmanager
    def all_gathered(self, flats: list[FlatBuffer], world: Comm, *, modify: bool) -> Iterator[None]:
        """Keep all of ``flats`` gathered on every rank inside the context. Collective over ``world``.

        Contexts may be nested. A write belongs to the innermost one that holds the buffer.

        Raises:
            StateError: on every rank, if any rank has written to them without ``modify``.
        """
        self.take_copies_early()
        for flat in flats:
            self.begin(flat)
        for flat in flats:
            self._take(flat)  # written before, in a context around this one
            self.touch(flat)
        opened = _Opened(frozenset(map(id, flats)))
        self._opened.append(opened)
        with ExitStack() as announced:
            for flat in flats:
                announced.enter_context(flat.writing())
            try:
                yield
                for flat in flats:
                    self._take(flat)
                written = torch.tensor([opened.written], dtype=torch.uint8)
                if not modify and world.agree(written).item():
                    raise StateError(
                        "parameters were written to inside gathered_parameters(), which was opened for reading. Open "
                        "it with modify=True, on every rank, and write the same on all of them."
                    )
            finally:
                self._opened.remove(opened)
                for flat in flats:
                    self.touched(flat)
                self.write_back()

    def _take(self, flat: FlatBuffer) -> None:
        """Take writes to a buffer, for the innermost context that holds it. Not collective."""
        if flat.take_writes():
            self._note_written(flat)

    def _note_written(self, flat: FlatBuffer) -> None:
        for opened in reversed(self._opened):
            if id(flat) in opened.flats:
                opened.written = True
                return

    def write_back(self) -> None:
        """Take user code's writes to parameters and state dicts, and release what was gathered on demand.

        Not collective.
        """
        self.take_parameter_writes()
        returned = self.state_dict_copies.returned
        for flat in self._flats if returned else ():
            flat.end_reporting_uses()
            flat.outdate_secondary()  # it may lack what this hook has written to the copies
        if returned or self.state_dict_copies.old:
            self.state_dict_copies.take_writes()
        if self._releases:
            self.release_idle()

    def begin_returned(self) -> None:
        """Record that a state dict is about to return copies: uses of gathered parameters are reported from now on."""
        self.state_dict_copies.returned = True
        for flat in self._flats:
            flat.report_uses()

    def take_copies_early(self, flat: FlatBuffer | None = None) -> None:
        """Take writes to the copies of state dicts before something reads a buffer, or all. Not collective."""
        written = self.state_dict_copies.written(flat)
        if written:
            self.take_parameter_writes()
            self.state_dict_copies.take_early(written)
        if flat is not None:
            self.state_dict_copies.expect_gather(flat)

    def take_parameter_writes(self) -> None:
        """Copy writes to parameters into masters and shards. Not collective."""
        for flat in self._flats:
            if flat.take_writes():
                self._note_written(flat)

    # called while a state dict is collected --------------------------------------------------------------------------

    def collects(self, frame: FrameType | None) -> None:
        """Do not gather for ``detach`` while ``frame`` runs: it collects a state dict. None ends it."""
        self._collecting = frame

    def is_collecting(self) -> bool:
        """Return whether the frame given to `collects` is running."""
        if self._collecting is None:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame is self._collecting:
                return True
            frame = frame.f_back
        self._collecting = None  # it ended with an exception
        return False

    def stand_in(self, flat: FlatBuffer, index: int) -> Tensor:
        """Return what stands for a released parameter in a state dict until hooks fetch the values."""
        return Released(flat, index, flat.dtype)
