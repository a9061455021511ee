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

import logging
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ls_strategy import device as dev
from ls_strategy import spans
from ls_strategy._torch import refuse_views, set_versions, storage_key
from ls_strategy.distributed.comm import PendingGather
from ls_strategy.distributed.wire_format import FORMATS, WireFormat
from ls_strategy.errors import StateError
from ls_strategy.tiers import TIERS
from ls_strategy.tiers.arrival import Arrival
from ls_strategy.tiers.stream import Ticket
from ls_strategy.zero.flat.averages import Averages, averages_of
from ls_strategy.zero.flat.flat_states import FlatStates
from ls_strategy.zero.flat.hpz_copy import Secondary
from ls_strategy.zero.flat.initial import full_values, shard_values
from ls_strategy.zero.flat.local_gradients import LocalGradients
from ls_strategy.zero.flat.parameters import (
    ResidentParameter,
    ShardedParameter,
    bind_home,
    grad_of,
    point,
    set_grad,
    unnoticed,
)
from ls_strategy.zero.flat.states import ParameterState, UpdateState
from ls_strategy.zero.flat.writes import UserWrites
from ls_strategy.zero.wire import Wire

_log = logging.getLogger("ls_strategy.zero")

RELEASED_VERSIONS = 1 << 16
"""What is added to the versions of parameters while they are released: more than a step writes to one."""


class ReturnedCopies(Protocol):
    """The copies that state dicts have returned."""

    returned: bool
    """Whether one was returned since the last boundary, on all ranks."""

    @property
    def fresh(self) -> Collection[object]:
        """Those that user code may write to, as if they were the parameters."""
        ...


class GathersOnDemand(Protocol):
    """Gathers buffers whose parameters are used while they are released."""

    @property
    def state_dict_copies(self) -> ReturnedCopies:
        """The copies that state dicts of the model have returned."""
        ...

    def touch(self, flat: FlatBuffer) -> None:
        """Gather the parameters, and keep them until `touched`. Collective."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a view of a flat buffer."""
        ...

    def note_memory(self, flat: FlatBuffer) -> None:
        """Record that ``flat.full`` was reallocated."""

    def touched(self, flat: FlatBuffer) -> None:
        """Allow the buffer to be released again."""

    def take_copies_early(self, flat: FlatBuffer | None = None) -> None:
        """Take writes to the copies of state dicts before something reads the parameters of a buffer, or of all."""

    def is_collecting(self) -> bool:
        """Return whether a state dict is being collected, for which hooks fetch the values."""
        ...

    def stand_in(self, flat: FlatBuffer, index: int) -> Tensor:
        """Return what stands for a released parameter in a state dict until hooks fetch the values."""
        ...

    def saving(self) -> AbstractContextManager[Any]:
        """Wrap an operation on gathered parameters: autograd gathers again what it saved of them."""
        ...


class ShowsGradients(Protocol):
    """Provides ``p.grad`` after backward."""

    def read(self, flat: FlatBuffer, index: int) -> Tensor | None:
        """Return ``p.grad``. Collective."""

    def write(self, flat: FlatBuffer, index: int, value: Tensor | None) -> None:
        """Set ``p.grad``. Collective."""


class FlatBuffer(FlatStates):
    """One flat buffer: the parameters of a unit that share an optimizer and a dtype."""

    # It implements `Home`, and so has eight public members for the parameters.

    averages: Averages
    """Gradients averaged over ranks."""

    writes: UserWrites
    """User code's views of the buffer, and its writes to the parameters."""

    on_demand: GathersOnDemand | None = None
    """Gathers the buffer when a parameter is used while it is released. None once training has ended."""

    gradients: ShowsGradients | None = None
    """Provides ``p.grad``. None: it is what autograd has put there."""

    reading: Future[Arrival] | None = None
    """This rank's shard of the parameters, in flight from its tier."""

    users = 0
    """Operations in progress that use the gathered parameters."""

    secondary: Secondary | None = None
    """A second copy of sharded parameters, inside the node."""

    wire: Wire | None = None
    """Stage 3: what gathers fill instead of ``full``, if the parameters are not sent as they are."""

    encodes = True
    """Whether shards are encoded before they are sent, and not stored in the format in which they are."""

    reports_uses = False
    """Whether uses of parameters that user code may have gathered are reported to `touch`, see `report_uses`."""

    _versions_away: list[int]
    """Versions of the parameters when they were released; meanwhile they have others."""

    _rounding_warned = False
    """Whether user code was warned that what it writes is rounded."""

    @property
    def encoded_wire(self) -> Wire | None:
        """Return the wire of the next gather, or of the one in flight or in ``full``. None: it is in place."""
        wire = self.wire
        return None if wire is None or wire.exact or (wire.keeps and self.is_gathered) else wire

    @property
    def gathers_exactly(self) -> bool:
        """Return whether gathers in 16 bits have ended, so that its own module has gathered the buffer in fp32."""
        return False

    def gather_exactly(self) -> None:
        """Let the next gather bring the parameters as they are: it is for user code. On all ranks."""
        if self.wire is not None and self.wire.encodes and self.reading is None:
            self.wire.exact = True

    def refuse_tracing(self) -> NoReturn:
        """Refuse to gather while a graph is traced.

        Raises:
            StateError: always.
        """
        why = "sharded (stage 3)" if self.plan.quantized is None else f"stored as {self.plan.quantized}"
        raise StateError(
            f"{self.name!r} is {why}, and a graph that is traced (torch.jit.trace, torch.onnx, add_graph) would record "
            "a placeholder instead of its values. Trace a copy with full weights: copy.deepcopy(module), made on all "
            "ranks."
        )

    def rounded(self, values: Tensor) -> Tensor:
        """Return what the parameters become when ``values``, of a parameter from its start on, are written to them."""
        return values

    # new values ------------------------------------------------------------------------------------------------------

    def require_refresh(self, due: bool = True) -> None:
        """Record new masters, on all ranks. The next gather is over all of them."""
        super().require_refresh(due)
        self.outdate_secondary()

    def exchange_master(self, other: Tensor) -> None:
        """Swap the master shard with ``other``, of the same shape. Publishing updates the parameters."""
        mine = self.read_master().detach().clone()
        self.replace_master(other)
        other.copy_(mine)

    def replace_master(self, values: Tensor) -> None:
        """Replace the master shard by ``values``, of the same shape. Publishing updates the parameters."""
        self.write_master(0, values)
        self.outdate_casts()
        self.require_refresh(self.steps_in_background or self.has_own_shard)

    def outdate_casts(self) -> None:
        """Refuse backward passes through forwards of before, which used the parameters in 16 bits."""

    def write_fetched(self, start: int, values: Tensor) -> None:
        """Write ``values`` to what was gathered, from element ``start`` of the buffer on; the masters have them."""
        stop = start + values.numel()
        if self.is_gathered:
            self.full[start:stop].copy_(self.rounded(values))

    def gathered_shard(self, master: Tensor) -> Tensor:
        """Return what a gather has put into this rank's range of ``full``; ``master`` has this rank's masters."""
        sent, wire = super().gathered_shard(master), self.encoded_wire
        return sent if wire is None or not wire.encodes else wire.form.rounded(sent)

    @property
    def has_secondary(self) -> bool:
        """Return whether the next gather uses the second copy inside the node."""
        if self.secondary is None or not self.secondary.is_current:
            return False
        return self.on_demand is None or not self.on_demand.state_dict_copies.returned

    def outdate_secondary(self) -> None:
        """Let the next gather be over all ranks. Every rank must do so at the same time."""
        if self.secondary is not None:
            self.secondary.outdate()

    def update_secondary(self) -> None:
        """Copy user code's writes to ``full`` into the second copy. Not collective: all ranks write the same."""
        if self.secondary is not None and self.secondary.is_current:
            self.secondary.written(self.full if self.wire is None else self.wire.encoded(self.full))

    def take_written_copy(self, index: int, values: Tensor, *, counted: bool) -> None:
        """Take new values of a parameter that were written to a copy in a state dict. Not collective.

        Args:
            index: of the parameter.
            values: ``(numel,)``; the masters and this rank's shard have them.
            counted: whether the copy's version shows the write. Then autograd refuses what it has saved of the
                parameter, as in plain torch, where a state dict has the parameter's own memory.
        """
        if self.gathering is not None:
            self.finish_gather()
        self.write_fetched(self.layout.slots[index].offset, values)
        if self._versions_away:
            versions = list(self._versions_away)
            versions[index] += counted
            self._versions_away = versions
        else:
            viewed = self.writes.may_be_written
            with unnoticed():
                increment_version(self.params[index] if counted else ())
            self.writes.record()
            if viewed:
                self.writes.note_access()
        self.written([index])

    # allocation ------------------------------------------------------------------------------------------------------

    def load(self, values: list[Tensor], device: torch.device) -> None:
        """Allocate the buffers, and fill them with rank 0's parameter values or from files. Collective.

        Args:
            values: one tensor per parameter, of its shape, in any dtype and on any device, or lazy. Masters start from
                these.
            device: device of the buffers.
        """
        self.averages = averages_of(self)
        self._fill(values, device)
        self.wire = self._make_wire(device)
        if self._node is not None and self.policy.parameters:
            self.secondary = Secondary(self._node)
        self.local = LocalGradients(
            self.params,
            self.layout,
            policy=self.policy,
            pool=self.comm.pool,
            device=device,
            average_dtype=self.average_dtype,
        )
        self._cut()
        self._versions_away = []
        self._switched = [p for p in self.params if bind_home(p, self)]
        self._index = {id(p): i for i, p in enumerate(self.params)}
        self.writes = UserWrites(self)
        # One element per parameter: `places_of` recognizes a released parameter by its address.
        placeholder = float("nan") if self.dtype.is_floating_point else 0
        released = torch.full((len(self.params),), placeholder, device=device, dtype=self.dtype)
        self._released = [nan.expand(slot.shape) for nan, slot in zip(released, self.layout.slots, strict=True)]
        """What each parameter points at while its unit is released."""
        self._full_key = storage_key(self.full)
        self._refusal = (
            f"a view of a parameter in the buffer of {self.name!r} was kept from its module's forward, and used while "
            "the parameter is released. Take the view where it is used, as in module.weight[0]: that gathers the "
            "parameter. Or keep module.weight.detach()[0], the memory of which stays."
        )
        self.bind()
        self.writes.count_references(bound=True)
        if not self.resident:
            self.release()

    def _cut(self) -> None:
        """Make the views of ``full``, which last as long as it does."""
        self.views = self.split(self.full)
        self._own_slice = self.full[slice(*self.stepped)]

    @property
    def _wire_format(self) -> WireFormat | None:
        sent_as = self.plan.quantized or self.plan.gathered_as
        return FORMATS[sent_as] if sent_as is not None and self.policy.parameters else None

    def _make_wire(self, device: torch.device) -> Wire | None:
        form = self._wire_format
        if form is None:
            return None
        return Wire(
            form, self.layout, self.stepped,
            dtype=self.dtype, device=device, pool=self.comm.pool, encodes=self.encodes,
        )  # fmt: skip

    def _fill(self, values: list[Tensor], device: torch.device) -> None:
        """Allocate ``full``, and store the initial values. Collective."""
        if self.policy.parameters:
            self.place(shard_values(self, values, device))
            self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=device)
        else:
            full = full_values(self, values, device)
            self.full = full if self.dtype == self.master_dtype else full.to(self.dtype)
            self.place(full[slice(*self.stepped)])

    # updates in flight -----------------------------------------------------------------------------------------------

    def allows_early_update(self) -> bool:
        """Return whether an update may begin although backward still runs. Not collective: ranks may differ.

        Below stage 3, split masters are completed by the parameters, so their update changes what backward reads. By
        then the backward of the unit is over, and has freed what autograd had saved; so whatever still refers to the
        memory (another use of a weight, a graph that is kept, a view of user code) may read it, and the update waits.
        Other masters that are parameters are referred to at all times.
        """
        if self.policy.parameters or not self.master_is_slice:
            return True
        if self.plan.split_masters is None or len(self._switched) < len(self.params):  # of other libraries' classes
            return False
        self.take_writes()
        return not self.writes.has_memory_views

    def begin_early_update(self, updating: Ticket | None) -> None:
        """Record an update that has taken the complete averages while backward still runs.

        If it changes parameters that backward could read, any use of one until the step is an error.
        """
        self.begin_update(updating)
        self._move_update(UpdateState.UPDATED_EARLY)
        self.averages.hand_to_update()
        if not self.policy.parameters and self.master_is_slice:
            self.hide()
            with unnoticed():
                for p in self.params:
                    increment_version(p)  # autograd refuses what it has saved without another reference
            self.writes.record()

    def begin_delayed_update(self, updating: Ticket) -> None:
        """Record an update that runs while the next step computes with the old parameters."""
        self.begin_update(updating)
        self._move_update(UpdateState.DELAYED)
        self.averages.hand_to_update()

    def go_on_with_old(self) -> None:
        """Let the next step compute with the parameters as they are: a delayed update replaces them after it."""
        self.end_owing()
        self._reveal()

    def give_up(self) -> None:
        """Forget the operations in flight, which have failed."""
        super().give_up()
        self.gathering = self.reading = None
        self.averages.give_up()

    # use by user code ------------------------------------------------------------------------------------------------

    def show_by(self, *, on_demand: GathersOnDemand | None = None, gradients: ShowsGradients | None = None) -> None:
        """Let ``on_demand`` gather the buffer when user code uses a parameter, or ``gradients`` provide ``p.grad``."""
        self.on_demand = on_demand or self.on_demand
        self.gradients = gradients or self.gradients

    def end_showing(self) -> None:
        """End what `show_by` has begun: training is over."""
        self.on_demand = self.gradients = None

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

    def note_view(self, values: Tensor) -> None:
        """Record a tensor that ``param.detach()`` returned."""
        self.writes.note_view(values)

    def unshared(self, value: Tensor) -> Tensor:
        """Return ``value``, or a copy if it is a view of a flat buffer."""
        return value.detach().clone() if self.on_demand is not None and self.on_demand.holds(value) else value

    def cast_of(self, param: nn.Parameter) -> Tensor | None:
        """Return a parameter as autocast would cast it now, if it was gathered so. Otherwise None."""
        return None

    def is_collecting(self) -> bool:
        """Return whether a state dict is being collected, for which hooks fetch the values."""
        return self.on_demand is not None and self.on_demand.is_collecting()

    def stand_in(self, param: nn.Parameter) -> Tensor:
        """Return what stands for a released parameter in a state dict until hooks fetch the values."""
        assert self.on_demand is not None
        return self.on_demand.stand_in(self, self._index[id(param)])

    def saving(self) -> AbstractContextManager[Any]:
        """Wrap an operation between `touch` and `touched`."""
        return nullcontext() if self.on_demand is None else self.on_demand.saving()

    def take_writes(self) -> bool:
        """Copy user code's writes into the masters, see `UserWrites.take`. Not collective."""
        changed = self.writes.take()
        if changed and self.encoded_wire is not None:
            self._warn_of_rounding()
        return changed

    def _warn_of_rounding(self) -> None:
        if not self._rounding_warned and self.comm.rank == 0 and self._wire_format is not None:
            _log.warning(
                "%s",
                f"a weight of the buffer of {self.name!r} was written to where it is rounded to "
                f"{self._wire_format.name}, so what was written is kept and its precision is that. Write outside of "
                "the module's own forward, or leave sharding.quantized_gathers out.",
            )
            self._rounding_warned = True

    # gathering and releasing -----------------------------------------------------------------------------------------

    def report_uses(self) -> None:
        """Report uses of gathered parameters to `touch`, too: state dicts have copies that may be written to first."""
        self.reports_uses = not self.resident
        if self.reports_uses and self.state is ParameterState.GATHERED:
            self._switch(ShardedParameter)

    def end_reporting_uses(self) -> None:
        """End what `report_uses` has begun."""
        self.reports_uses = False
        if self.state is ParameterState.GATHERED:
            self._switch(ResidentParameter)

    def bind(self, *, on_demand: bool = False) -> None:
        """Point every parameter at its slot. ``on_demand``: every further use is reported to `touch`."""
        with unnoticed():
            for p, view in zip(self.params, self.views, strict=True):
                point(p, view)
            versions, self._versions_away = self._versions_away, []
            if versions:
                set_versions(tuple(self.params), tuple(versions))
        self._switch(ShardedParameter if on_demand else ResidentParameter)
        self._move(ParameterState.ON_DEMAND if on_demand else ParameterState.GATHERED)
        self.writes.record(versions or None)

    @property
    def is_in_use(self) -> bool:
        """Stage 3: whether its own module, or the step, has gathered the buffer, and will release it."""
        return self.is_fetched and not self.gathered_on_demand

    def _switch(self, to: type[nn.Parameter]) -> None:
        for p in self._switched:
            p.__class__ = to

    def hide(self) -> None:
        """Make every use of a parameter wait for values in flight (stages 0 to 2)."""
        if self.state is ParameterState.ON_DEMAND:
            self.writes.note_memory_views()
        self._switch(ShardedParameter)
        self._move(ParameterState.AWAITED)

    @property
    def is_arriving(self) -> bool:
        """Return whether new values are in flight, or still have to be sent."""
        pending = (self.gathering, self.updating, self.arriving)
        return self.publish_due or pending != (None, None, None)

    def start_gather(self) -> None:
        """Start gathering the newest parameters into ``full``. `finish_gather` waits. Collective."""
        if self.offloaded:
            self.require_here("parameters")
        if self.updating is not None or self.arriving is not None:
            self.wait_updated()
        if self.update is UpdateState.DELAYED:
            self._move_update(UpdateState.NONE)
        if self.publish_due:
            self.end_owing()
        if self._refresh_due:
            self.refresh_if_due()
        if self.policy.parameters:
            self._gather_shards()
            return
        if not self.steps_in_background and not self.master_is_slice:
            self._own_slice.copy_(self.master)
        if self.policy.optimizer:
            self.gathering = self.comm.all_gather(self.full, self.name, self._sizes, self._own_slice)

    def _gather_shards(self) -> None:
        """Start gathering sharded parameters, from where they are nearest (stage 3). Collective."""
        if self.update is UpdateState.UPDATED_EARLY:
            raise self.read_again()
        if torch.jit.is_tracing():
            self.refuse_tracing()
        self.writes.begin_gather()
        wire = self.wire
        if self.secondary is not None and self.has_secondary and not (wire is not None and wire.exact):
            target = self.full if wire is None else wire.values
            self.comm.pool.allocate(target)
            self.gathering = self.secondary.start(target, self.name)
            return
        if self.reads_shard:
            self.start_read()
        if wire is None or wire.exact:
            self.comm.pool.allocate(self.full)
            self._load_shard(self._own_slice)
            self.gathering = self.comm.all_gather(self.full, self.name, self._sizes, self._own_slice)
        else:
            self._load_shard(wire.own_part())
            wire.encode_own_part()
            self.gathering = self.comm.all_gather(wire.values, self.name, wire.sizes)

    @property
    def _reads_ahead(self) -> bool:
        """Return whether this rank's shard of the parameters is read from its tier in the background."""
        return self.reads_shard and not (TIERS[self.param_tier].resident and dev.is_host(self.full.device))

    def start_read(self) -> None:
        """Start reading this rank's shard of the parameters from its tier (stage 3). Not collective."""
        if not self._reads_ahead or self.gathering is not None or self.reading is not None:
            return
        if self.is_gathered or (self.is_fetched and self.encoded_wire is not None):
            return
        if self.has_secondary:
            return
        self.refresh_if_due()
        updating, after = self.updating, self.store.link.mark()
        wire = self.encoded_wire
        if wire is None:
            self.comm.pool.allocate(self.full)
        outs = [self._own_slice if wire is None else wire.own_part()]

        def read() -> Arrival:
            # The thread may have this function for a moment after its result is known. A view of the parameters that
            # it still held would be taken for the user's, at the cost of a comparison.
            out = outs.pop()
            if updating is not None:
                updating.wait()
            return self.store.read_to_device("param" if self.has_own_shard else "master", out, after)

        self.reading = self.store.in_background(read)

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
        if self.offloaded:
            self.require_here("parameters")
        if self.hidden and self.update is UpdateState.UPDATED_EARLY:
            raise self.read_again()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            if self.wire is None and self.secondary is not None:
                self.secondary.arrived(self.full)
            elif self.wire is not None and not self.wire.exact:
                if self.secondary is not None:
                    self.secondary.arrived(self.wire.values)
                if not self.wire.keeps:
                    self.wire.decode(self.full)
        if not self.is_gathered:
            self.bind(on_demand=on_demand)
        elif (self.hidden or self.gathered_on_demand) and not on_demand:
            self._reveal()

    def _begin_gather(self, gathering: PendingGather) -> None:
        self.gathering = gathering

    def _end_gather(self) -> bool:
        """Wait for the gather in flight; return whether there was one."""
        if self.gathering is None:
            return False
        self.gathering.wait()
        self.gathering = None
        return True

    def _reveal(self) -> None:
        """Make the parameters ordinary tensors: their values have arrived."""
        self._switch(ShardedParameter if self.reports_uses and self.users else ResidentParameter)
        before = self.state
        if before is ParameterState.ON_DEMAND:
            self.writes.note_memory_views()
        self._move(ParameterState.GATHERED)
        if before is ParameterState.AWAITED:
            self.writes.end_outdated()
            self.writes.record()
            if self.writes.may_be_written:
                self.writes.note_access()

    def release(self, to: ParameterState = ParameterState.RELEASED) -> None:
        """Free the full buffer, unless user code has a view of it (stage 3). The parameters keep their shapes.

        ``to``: the next state. What was gathered in 16 bits stays for `ParameterState.CAST`.
        """
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            if self.secondary is not None:
                self.secondary.dropped()
        if self.reading is not None:
            self._end_read()
        keeps_memory = self.writes.begin_release()
        with unnoticed():
            for p, placeholder in zip(self.params, self._released, strict=True):
                point(p, placeholder)
            if not self._versions_away and self.params:
                # Autograd refuses what it has saved of them: their memory may be that of a gather in flight.
                self._versions_away = [p._version for p in self.params]
                set_versions(tuple(self.params), tuple([v + RELEASED_VERSIONS for v in self._versions_away]))
        self._switch(ShardedParameter)
        self._move(to)
        if not keeps_memory:
            self._free()
        if self.wire is not None and to is ParameterState.RELEASED:
            self.wire.release()

    def _end_read(self) -> None:
        """Wait for the shard that is being read, and do not use it."""
        assert self.reading is not None
        self.reading.result().wait_on_device()
        self.reading = None

    def release_on_demand(self) -> None:
        """Release what was gathered on demand. What its own module has gathered in 16 bits stays."""
        self.release()

    def release_cast(self) -> None:
        """Free what was gathered in 16 bits, if user code keeps the parameters in fp32."""

    def _free(self) -> None:
        """Free the memory of ``full``. A NumPy array made of it fixes its size; then ``full`` gets a new storage."""
        storage = self.full.untyped_storage()
        if not storage.resizable():
            self.full = torch.empty_like(self.full)
            self._cut()
            self.writes.count_references(bound=False)
            self._full_key = storage_key(self.full)
            if self.on_demand is not None:
                self.on_demand.note_memory(self)
            storage = self.full.untyped_storage()
        if storage.nbytes():
            storage.resize_(0)
            refuse_views(self._full_key, self._refusal)
        if self.steps_in_background:  # who keeps the states there wants the memory
            self.store.link.freed(self.layout.numel * self.dtype.itemsize)

    def free_if_not_viewed(self) -> None:
        """Free a released buffer that kept its memory for views which do not exist any more (stage 3)."""
        if self.writes.forget_memory():
            self._free()
