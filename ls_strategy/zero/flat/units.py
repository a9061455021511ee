"""The flat buffers of a unit, which hold its parameters, master weights and gradients.

::

    full    | a | b | c      |....|     compute dtype, read by the forward; at stage 3 only while gathered
    master      | b | c  |              master dtype, this rank's shard (stage 0: everything), stepped by the optimizer
    shard       | b | c  |              compute dtype; only at stage 3, if the masters are on another tier
    grad    | a | b | c      |....|     this rank's gradients: resident (stages 0, 1) or only during backward (2, 3)
    averages    | b | c  |              averaged gradients, this rank's shard; stage 0 averages ``grad`` in place

``full`` and ``grad`` are on the device. ``master``, ``shard`` and ``averages`` are stored on the tier that the plan
assigns; on the NVMe tier they are tensors only while in use, and ``master`` is a placeholder that reads as NaN.
In fp32, ``master`` is a slice of ``full`` if both are on the device.
A parameter object keeps its identity and its shape. While its unit is released it points at a NaN, and any use gathers
it first (`ls_strategy.zero.flat.parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ls_strategy import device as dev
from ls_strategy import spans
from ls_strategy.errors import StateError
from ls_strategy.tiers.arrival import Arrival
from ls_strategy.tiers.stream import Ticket
from ls_strategy.zero.flat.averages import Averages
from ls_strategy.zero.flat.buffer import FlatBuffer
from ls_strategy.zero.flat.initial import full_values, shard_values
from ls_strategy.zero.flat.local_gradients import LocalGradients
from ls_strategy.zero.flat.parameters import Absent, Present, bind_home, grad_of, point, set_grad, unnoticed
from ls_strategy.zero.flat.released import Released
from ls_strategy.zero.flat.writes import UserWrites


class GathersOnDemand(Protocol):
    """Gathers buffers whose parameters are used while they are released."""

    def touch(self, flat: Flat) -> None:
        """Gather the parameters, and keep them until `touched`. Collective."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a view of a flat buffer."""
        ...

    def note_memory(self, flat: Flat) -> None:
        """Record that ``flat.full`` was reallocated."""

    def touched(self, flat: Flat) -> None:
        """Allow the buffer to be released again."""

    def is_collecting(self) -> bool:
        """Return whether a state dict is being collected, for which hooks fetch the values."""
        ...

    def saving(self) -> AbstractContextManager[Any]:
        """Wrap an operation on gathered parameters: autograd gathers again what it saved of them."""
        ...


class ShowsGradients(Protocol):
    """Provides ``p.grad`` after backward."""

    def read(self, flat: Flat, index: int) -> Tensor | None:
        """Return ``p.grad``. Collective."""

    def write(self, flat: Flat, index: int, value: Tensor | None) -> None:
        """Set ``p.grad``. Collective."""


class Flat(FlatBuffer):
    """One flat buffer: the parameters of a unit that share an optimizer and a dtype."""

    # More than 20 public members: this is the one place where the phases of a parameter (released, reading, gathering,
    # gathered, updating, publishing) change, and `Home`, which has eight of the members, is implemented.

    averages: Averages
    """Gradients averaged over ranks."""

    writes: UserWrites
    """User code's views of the buffer, and its writes to the parameters."""

    on_demand: GathersOnDemand | None = None
    """Gathers the buffer when a parameter is used while it is released. None once training has ended."""

    gradients: ShowsGradients | None = None
    """Provides ``p.grad``. None: it is what autograd has put there."""

    def load(self, values: list[Tensor], device: torch.device) -> None:
        """Allocate the buffers, and fill them with rank 0's parameter values or from files. Collective.

        Args:
            values: one tensor per parameter, of its shape, in any dtype and on any device, or lazy. Masters start from
                these.
            device: device of the buffers.
        """
        self.averages = Averages(self)
        self._fill(values, device)
        self.local = LocalGradients(
            self.params,
            self.layout,
            policy=self.policy,
            pool=self.comm.pool,
            device=device,
            average_dtype=self.average_dtype,
        )
        self.views = self.split(self.full)
        self._switched = [p for p in self.params if bind_home(p, self)]
        self._index = {id(p): i for i, p in enumerate(self.params)}
        self.writes = UserWrites(self)
        # One element per parameter: `places_of` recognizes a released parameter by its address.
        placeholder = float("nan") if self.dtype.is_floating_point else 0
        released = torch.full((len(self.params),), placeholder, device=device, dtype=self.dtype)
        self._released = [nan.expand(slot.shape) for nan, slot in zip(released, self.layout.slots, strict=True)]
        """What each parameter points at while its unit is released."""
        self.bind()
        self.writes.count_references(bound=True)
        if not self.resident:
            self.release()

    def _fill(self, values: list[Tensor], device: torch.device) -> None:
        """Allocate ``full``, and store the initial values. Collective."""
        if self.policy.parameters:
            self.place(shard_values(self, values, device))
            self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=device)
        else:
            full = full_values(self, values, device)
            self.full = full if self.dtype == self.master_dtype else full.to(self.dtype)
            self.place(full[slice(*self.stepped)])

    def place(self, mine: Tensor) -> None:
        """Store this rank's initial values on the tiers of masters and parameters."""
        policy, storage, tier = self.policy, self.storage, self.optimizer_tier
        one_copy = policy.parameters or self.dtype == self.master_dtype or not policy.optimizer
        if tier == "device":
            self.master = mine if one_copy else mine.clone()
        elif storage.is_resident("master"):
            self.master = storage.resident(tier, "master", mine.numel(), self.master_dtype).copy_(mine)
        else:
            storage.write("master", 0, mine)
            placeholder = float("nan") if mine.dtype.is_floating_point else 0
            self.master = torch.full((1,), placeholder, dtype=self.master_dtype).expand(mine.numel())
        if self.has_own_shard:
            if storage.is_resident("param"):
                self.shard = storage.resident(self.param_tier, "param", mine.numel(), self.dtype).copy_(mine)
            else:
                storage.write("param", 0, mine.to(self.dtype))

    # updates in flight -----------------------------------------------------------------------------------------------

    def _on_updated(self) -> None:
        self.averages.reclaim()

    def begin_early_update(self, updating: Ticket) -> None:
        """Record an update that has taken the complete averages while backward still runs."""
        self.updating = updating
        self.updated_early = True
        self.averages.hand_to_update()

    def begin_delayed_update(self, updating: Ticket) -> None:
        """Record an update that runs while the next step computes with the old parameters."""
        self.updating = updating
        self.held_back = True
        self.averages.hand_to_update()

    def go_on_with_old(self) -> None:
        """Let the next step compute with the parameters as they are: a delayed update replaces them after it."""
        self.publish_due = False
        self._reveal()

    def give_up(self) -> None:
        """Forget the operations in flight, which have failed."""
        self.storage.give_up()
        self.gathering = self.updating = self.arriving = self.reading = self.averages.landing = None
        self.updated_early = self.directed_early = self.held_back = self.publish_due = False

    # parameters ------------------------------------------------------------------------------------------------------

    def bind(self, *, on_demand: bool = False) -> None:
        """Point every parameter at its slot. ``on_demand``: every further use is reported to `touch`."""
        with unnoticed():
            for p, view in zip(self.params, self.views, strict=True):
                point(p, view)
        self._switch(Absent if on_demand else Present)
        self.is_gathered = True
        self.gathered_on_demand = on_demand
        self.writes.record()

    @property
    def is_in_use(self) -> bool:
        """Stage 3: whether its own module, or the step, has gathered the buffer, and will release it."""
        return self.is_gathered and not self.gathered_on_demand

    def _switch(self, to: type[nn.Parameter]) -> None:
        for p in self._switched:
            p.__class__ = to

    def take_writes(self) -> bool:
        """Copy user code's writes into the masters, see `UserWrites.take`. Not collective."""
        return self.writes.take()

    def hide(self) -> None:
        """Make every use of a parameter wait for values in flight (stages 0 to 2)."""
        self._switch(Absent)
        self.hidden = True

    @property
    def is_arriving(self) -> bool:
        """Return whether new values are in flight, or still have to be sent."""
        pending = (self.gathering, self.updating, self.arriving)
        return self.publish_due or any(p is not None for p in pending)

    def touch(self) -> None:
        """Gather the parameters for one operation, or wait for them. Collective."""
        self.require_here("parameters")
        if self.on_demand is None:
            raise StateError(
                f"{self.name!r} was read while its unit was not gathered, and training has ended on this rank, so that "
                "the other ranks' shards cannot be gathered. Read it inside the fit, or from a checkpoint."
            )
        self.on_demand.touch(self)

    def touched(self) -> None:
        """End the operation that `touch` began."""
        if self.on_demand is not None:
            self.on_demand.touched(self)

    def read_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return ``param.grad``. Collective."""
        self.require_here("gradients")
        if self.gradients is None:
            return grad_of(param)
        return self.gradients.read(self, self._index[id(param)])

    def write_grad(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Set ``param.grad``. Collective."""
        self.require_here("gradients")
        if self.gradients is None:
            set_grad(param, value)
        else:
            self.gradients.write(self, self._index[id(param)], value)

    def note_data_view(self, param: nn.Parameter, values: Tensor) -> None:
        """Record a tensor that ``param.data`` returned."""
        self.writes.note_data_view(self._index[id(param)], values)

    def unshared(self, value: Tensor) -> Tensor:
        """Return ``value``, or a copy if it is a view of a flat buffer."""
        return value.detach().clone() if self.on_demand is not None and self.on_demand.holds(value) else value

    def is_collecting(self) -> bool:
        """Return whether a state dict is being collected, for which hooks fetch the values."""
        return self.on_demand is not None and self.on_demand.is_collecting()

    def stand_in(self, param: nn.Parameter) -> Tensor:
        """Return what stands for a released parameter in a state dict until hooks fetch the values."""
        return Released(self, self._index[id(param)], self.dtype)

    def saving(self) -> AbstractContextManager[Any]:
        """Wrap an operation between `touch` and `touched`."""
        return nullcontext() if self.on_demand is None else self.on_demand.saving()

    def start_gather(self) -> None:
        """Start gathering the newest parameters into ``full``. `finish_gather` waits. Collective."""
        self.require_here("parameters")
        self.wait_updated()
        self.held_back = self.publish_due = False
        self.refresh_if_due()
        if self.policy.parameters:
            if self.updated_early:
                raise StateError(
                    f"a parameter in the buffer of {self.name!r} is read again in the backward pass that has already "
                    "updated it. Set sharding.overlap_step=False on the strategy."
                )
            self.refuse_tracing()
            self.writes.begin_gather()
            self.gathering = self._gather_in_node()
            if self.gathering is not None:
                return
            self.start_read()
            self._load_shard(self.own_part())
            self.pack_own_part()
        elif self.optimizer_tier == "device" and not self.master_is_slice:
            self.full[slice(*self.stepped)].copy_(self.master)
        if self.policy.optimizer:
            self.gathering = self.comm.all_gather(self.wire, self.name, self.wire_sizes)

    @property
    def _reads_ahead(self) -> bool:
        """Return whether this rank's shard of the parameters is read from its tier in the background."""
        return self.param_tier != "device" and not (self.param_tier == "cpu" and dev.is_host(self.full.device))

    def start_read(self) -> None:
        """Start reading this rank's shard of the parameters from its tier (stage 3). Not collective."""
        if not self._reads_ahead or self.is_gathered or self.gathering is not None or self.reading is not None:
            return
        if self.has_secondary:
            return
        self.refresh_if_due()
        updating, after = self.updating, self.storage.link.mark()
        outs = [self.own_part()]

        def read() -> Arrival:
            # The thread may have this function for a moment after its result is known. A view of the parameters that
            # it still held would be taken for the user's, at the cost of a comparison.
            out = outs.pop()
            if updating is not None:
                updating.wait()
            name = "param" if self.has_own_shard else "master"
            if not self.storage.is_resident(name):
                return self.storage.read_to_device(name, out, after)
            source = self.master if self.shard is None else self.shard
            if source.dtype != out.dtype:  # cast on the host, so that half the bytes cross the bus
                return self.storage.link.staged_to_device(out, lambda host: host.copy_(source), after)
            return self.storage.link.to_device(out, source, after)

        self.reading = self.storage.in_background(read)

    def _load_shard(self, out: Tensor) -> None:
        """Copy this rank's shard of the parameters into ``out`` (stage 3)."""
        if self.reading is None:
            out.copy_(self.master if self.shard is None else self.shard)
            return
        with spans.waiting(spans.COPY):
            arrival = self.reading.result()
        arrival.wait_on_device()
        self.reading = None

    def finish_gather(self, *, on_demand: bool = False) -> None:
        """Wait until the parameters can be read. ``on_demand``: they were gathered for `touch`."""
        self.require_here("parameters")
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            self._arrived()
        if not self.is_gathered:
            self.bind(on_demand=on_demand)
        elif (self.hidden or self.gathered_on_demand) and not on_demand:
            self._reveal()

    def _reveal(self) -> None:
        """Make the parameters ordinary tensors: their values have arrived."""
        self._switch(Present)
        if self.gathered_on_demand:
            self.writes.note_memory_views()
        self.gathered_on_demand = False
        if self.hidden:
            self.hidden = False
            self.writes.end_outdated()
            self.writes.record()

    def release(self) -> None:
        """Free the full buffer, unless user code has a view of it (stage 3). The parameters keep their shapes."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            if self.secondary is not None:
                self.secondary.dropped()
        if self.reading is not None:
            self.reading.result()
            self.reading = None
        keeps_memory = self.writes.begin_release()
        with unnoticed():
            for p, placeholder in zip(self.params, self._released, strict=True):
                point(p, placeholder)
        self._switch(Absent)
        self.is_gathered = self.gathered_on_demand = False
        if not keeps_memory:
            self._free()

    def _free(self) -> None:
        """Free the memory of ``full``. A NumPy array made of it fixes its size; then ``full`` gets a new storage."""
        if not self.full.untyped_storage().resizable():
            self.full = torch.empty_like(self.full)
            self.views = self.split(self.full)
            self.writes.count_references(bound=False)
            if self.on_demand is not None:
                self.on_demand.note_memory(self)
        self.full.untyped_storage().resize_(0)
        if self.optimizer_tier != "device":  # who keeps the states there wants the memory
            self.storage.link.freed(self.layout.numel * self.dtype.itemsize)

    def free_if_not_viewed(self) -> None:
        """Free a released buffer that kept its memory for views which do not exist any more (stage 3)."""
        if self.writes.forget_memory():
            self._free()


class Unit:
    """The flat buffers that are gathered and reduced together."""

    def __init__(self, name: str, modules: list[nn.Module], flats: list[Flat], *, is_root: bool) -> None:
        """Group ``flats``, whose parameters are used by ``modules``. A root unit stays gathered for a full step."""
        self.name = name
        self.modules = modules
        self.flats = flats
        self.is_root = is_root
        self.trainable_flats = [f for f in flats if f.trainable]
        self.waiting_for = 0
        """Gradients that are missing in this backward pass."""
        self.launched = False
        self.open_backwards = 0
        """Calls of the unit's modules that are in backward. Only the methods below change it."""
        self._unclosable_backwards = 0
        """Those of them for which no gradient of an input marks the end."""
        self.pinned = False
        """Whether the unit stays gathered until the backward pass is over, because no earlier event marks its end."""

    def admit(self, flat: Flat) -> None:
        """Send the gradients of a frozen buffer from now on. All ranks must do so at the same time."""
        flat.is_frozen = False
        self.trainable_flats = [f for f in self.flats if f.has_optimizer and not f.is_frozen]

    def begin_call(self, *, closable: bool) -> None:
        """Begin the backward of a call. ``closable``: a gradient of its inputs marks the end."""
        self.open_backwards += 1
        self._unclosable_backwards += not closable

    def end_call(self) -> bool:
        """End the backward of a call. Return whether no other one is open."""
        self.open_backwards = max(self.open_backwards - 1, 0)
        return self.open_backwards == 0

    def end_unclosable(self) -> bool:
        """End all calls that are not closable: all gradients are there. Return whether no call is open."""
        self.open_backwards = max(self.open_backwards - self._unclosable_backwards, 0)
        self._unclosable_backwards = 0
        return self.open_backwards == 0

    def pin(self) -> None:
        """Stay gathered until `unpin`."""
        self.pinned = True

    def unpin(self) -> None:
        """End the backward pass or the step: no call is open, and the unit may be released."""
        self.open_backwards = self._unclosable_backwards = 0
        self.pinned = False


def places_of(state: Mapping[str, Any], units: list[Unit]) -> dict[str, tuple[Flat, int]]:
    """Map the keys of ``module.state_dict()`` that are parameters of the units to ``(flat, slot)``. Not collective.

    Entries are recognized by address, whatever their key. A released parameter has a unique address too.
    """
    flats = [flat for unit in units for flat in unit.flats]
    shown = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.numel()}
    stand_ins = {k: (v.flat, v.slot) for k, v in shown.items() if isinstance(v, Released) and v.held is None}
    with unnoticed():
        found = {p.data_ptr(): (flat, i) for flat in flats for i, p in enumerate(flat.params) if p.numel()}
        tensors = {k: v.data_ptr() for k, v in shown.items() if not isinstance(v, Released)}
    at = {key: found[address] for key, address in tensors.items() if address in found} | stand_ins
    return {key: at[key] for key in shown if key in at}
