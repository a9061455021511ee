"""A unit's flat buffers: where parameters, masters and gradients of its parameters live.

::

    full    | a | b | c      |....|     compute dtype, what the forward reads; at stage 3 only while gathered
    master      | b | c  |              master dtype, this rank's shard (stage 0: everything); the optimizer's view
    shard       | b | c  |              compute dtype; only at stage 3 and where the masters rest on another tier
    grad    | a | b | c      |....|     this rank's gradients: resident (stages 0, 1) or only during backward (2, 3)
    averages    | b | c  |              over ranks, this rank's shard; stage 0 averages ``grad`` in place

``full`` and ``grad`` are on the device. ``master``, ``shard`` and ``averages`` rest on the tier that the plan gave
them; on the NVMe tier there is no tensor between two uses, and ``master`` is a placeholder that reads as NaN.
In fp32, ``master`` is a slice of ``full`` wherever both are on the device: there is no second copy.
A parameter keeps its identity and its shape. While its unit is released it points at a NaN, and whoever touches it has
it gathered first (`ls_strategy.zero.parameters`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ls_strategy import spans
from ls_strategy._compat import storage_users, version_of
from ls_strategy.errors import StateError
from ls_strategy.tiers.link import DONE, Arrival, host_empty
from ls_strategy.tiers.stream import Ticket
from ls_strategy.zero.averages import Averages
from ls_strategy.zero.buffer import FlatBuffer
from ls_strategy.zero.parameters import Absent, Present, bind_home, grad_of, point, set_grad, unnoticed
from ls_strategy.zero.writes import take_writes


class GathersOnDemand(Protocol):
    """Who gathers buffers for those that touch their parameters."""

    def touch(self, flat: Flat) -> None:
        """Bring the values into memory, and keep them until `touched`. Collective."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether it lies in the memory of parameters."""
        ...

    def note_memory(self, flat: Flat) -> None:
        """A buffer has other memory from now on."""
        ...

    def touched(self, flat: Flat) -> None:
        """They are not needed any more."""
        ...

    def is_collected(self) -> bool:
        """Whether a state dict is being put together, by hooks that bring the values in their own way."""
        ...

    def saving(self) -> AbstractContextManager[Any]:
        """Around an operation on them: what autograd saves is found again after they were let go."""
        ...


class ShowsGradients(Protocol):
    """Who says what ``p.grad`` is after backward."""

    def read(self, flat: Flat, index: int) -> Tensor | None:
        """``p.grad``. Collective."""
        ...

    def write(self, flat: Flat, index: int, value: Tensor | None) -> None:
        """``p.grad = value``. Collective."""
        ...


class Flat(FlatBuffer):
    """One flat buffer: the parameters of a unit that share an optimizer and a dtype."""

    averages: Averages
    """Gradients averaged over ranks."""

    on_demand: GathersOnDemand | None = None
    """Asked when somebody touches a parameter that is elsewhere."""

    gradients: ShowsGradients | None = None
    """Asked when somebody looks at ``p.grad``; without, that is what autograd has put there."""

    def load(self, values: list[Tensor], device: torch.device) -> None:
        """Take the parameters' original values; rank 0's are taken by all. Collective.

        Args:
            values: one tensor per parameter, its shape, any dtype and device: masters come from these.
            device: where the buffers live.
        """
        self.averages = Averages(self)
        layout, dtype, master_dtype = self.layout, self.dtype, self.master_dtype
        whole = self._new_whole(device)
        for view, value in zip(self.split(whole), values, strict=True):
            view.copy_(value.detach())
        self.comm.broadcast_(whole)
        if self.policy.parameters:
            self.full = torch.empty(layout.numel, dtype=dtype, device=device)
        else:
            self.full = whole if dtype == master_dtype else whole.to(dtype)
        self._place(whole[slice(*self.stepped)])
        self.average_dtype = torch.promote_types(torch.float32, master_dtype) if self.trainable else torch.float32
        self.views = self.split(self.full)
        self._switched = [p for p in self.params if bind_home(p, self)]
        self._index = {id(p): i for i, p in enumerate(self.params)}
        self._adopted, self.handed_out, self.outdated = {}, {}, []
        # One element per parameter, so that its address still tells which parameter it is (checkpoint.py asks).
        nothing = float("nan") if dtype.is_floating_point else 0
        self._released = torch.full((len(self.params),), nothing, device=device, dtype=dtype)
        self.bind()
        self._holders = storage_users(self.full)
        if self.policy.parameters:
            self.release()

    def _new_whole(self, device: torch.device) -> Tensor:
        numel, dtype = self.layout.numel, self.master_dtype
        if device.type == "cpu" and self.rest.tiers:
            return host_empty(numel, dtype, device).zero_()
        return torch.zeros(numel, dtype=dtype, device=device)

    def _place(self, mine: Tensor) -> None:
        """Put this rank's original values where masters and parameters rest."""
        policy, rest, tier = self.policy, self.rest, self.optimizer_tier
        one_copy = not policy.parameters and (self.dtype == self.master_dtype or not policy.optimizer)
        if tier == "device":
            self.master = mine if one_copy else mine.clone()
        elif rest.is_resident("master"):
            self.master = rest.resident(tier, "master", mine.numel(), self.master_dtype).copy_(mine)
        else:
            rest.write("master", 0, mine)
            nothing = float("nan") if mine.dtype.is_floating_point else 0
            self.master = torch.full((1,), nothing, dtype=self.master_dtype).expand(mine.numel())
        if self.has_own_shard:
            if rest.is_resident("param"):
                self.shard = rest.resident(self.param_tier, "param", mine.numel(), self.dtype).copy_(mine)
            else:
                rest.write("param", 0, mine.to(self.dtype))

    # masters ---------------------------------------------------------------------------------------------------------

    # updates under way -----------------------------------------------------------------------------------------------

    def _on_updated(self) -> None:
        self.averages.take_back()

    def begin_early_update(self, updating: Ticket) -> None:
        """The averages, complete, are on their way into the update while backward still runs."""
        self.updating = updating
        self.updated_early = True
        self.averages.let_go()

    def begin_delayed_update(self, updating: Ticket) -> None:
        """The update runs while the next step computes with the old parameters, and fills averages of its own."""
        self.updating = updating
        self.averages.let_go()

    def give_up(self) -> None:
        """Wait for nothing any more: what was under way has failed."""
        self.gathering = self.updating = self.arriving = self.reading = self.averages.landing = None
        self.updated_early = self.publish_due = False

    # parameters ------------------------------------------------------------------------------------------------------

    def bind(self, *, lend: bool = False) -> None:
        """Point every parameter at its slot. ``lend``: and let whoever touches one go on asking."""
        with unnoticed():
            for p, view in zip(self.params, self.views, strict=True):
                point(p, view)
        self._switch(Absent if lend else Present)
        self.is_gathered = True
        self.lent = lend
        self.look()

    def _switch(self, to: type[nn.Parameter]) -> None:
        for p in self._switched:
            p.__class__ = to

    def take_writes(self) -> bool:
        """Take what was written to the parameters, see `ls_strategy.zero.writes`. Not collective."""
        return take_writes(self)

    def hide(self) -> None:
        """Stages 0 to 2: new values are on their way."""
        self._switch(Absent)
        self.hidden = True

    @property
    def is_on_its_way(self) -> bool:
        """Whether new values are to be waited for."""
        pending = (self.gathering, self.updating, self.arriving)
        return self.publish_due or any(p is not None for p in pending)

    def touch(self) -> None:
        """Somebody is about to use a parameter. Collective."""
        if self.on_demand is None:
            raise StateError(
                f"{self.name!r} is read while its unit is not gathered, and training has ended on this rank, so that "
                "the other ranks' shards cannot be had. Read it inside the fit, or from a checkpoint."
            )
        self.on_demand.touch(self)

    def touched(self) -> None:
        """Somebody has used it."""
        if self.on_demand is not None:
            self.on_demand.touched(self)

    def read_grad(self, param: nn.Parameter) -> Tensor | None:
        """``param.grad``. Collective."""
        if self.gradients is None:
            return grad_of(param)
        return self.gradients.read(self, self._index[id(param)])

    def write_grad(self, param: nn.Parameter, value: Tensor | None) -> None:
        """``param.grad = value``. Collective."""
        if self.gradients is None:
            set_grad(param, value)
        else:
            self.gradients.write(self, self._index[id(param)], value)

    def hand_out(self, param: nn.Parameter, values: Tensor) -> None:
        """Somebody has asked for ``param.data``."""
        alive = [r for r in self.handed_out.get(self._index[id(param)], ()) if r() is not None]
        self.handed_out[self._index[id(param)]] = [*alive, weakref.ref(values)]

    def apart(self, value: Tensor) -> Tensor:
        """A copy, if it lies in the memory of parameters."""
        return value.detach().clone() if self.on_demand is not None and self.on_demand.holds(value) else value

    @property
    def is_seen(self) -> bool:
        """Whether somebody keeps what ``param.data`` gave."""
        return any(r() is not None for references in self.handed_out.values() for r in references)

    def is_collected(self) -> bool:
        """Whether the parameters are only being listed."""
        return self.on_demand is not None and self.on_demand.is_collected()

    def saving(self) -> AbstractContextManager[Any]:
        """Around that use."""
        return nullcontext() if self.on_demand is None else self.on_demand.saving()

    def start_gather(self) -> None:
        """Bring the newest parameters of all ranks into ``full``; `finish_gather` waits. Collective."""
        self.wait_updated()
        self.publish_due = False
        lo, hi = self.stepped
        self.refresh_if_due()
        if self.policy.parameters:
            if self.updated_early:
                raise StateError(
                    f"a parameter of {self.layout.slots[0].name!r} and its neighbours is read again in the backward "
                    "pass that has already updated it. Set sharding.overlap_step=False on the strategy."
                )
            if torch.jit.is_tracing():
                raise StateError(
                    f"{self.name!r} is sharded (stage 3), and a graph that is traced (torch.jit.trace, torch.onnx, "
                    "add_graph) would hold its place, not its values. Trace a copy, which has full weights: "
                    "copy.deepcopy(module), made on all ranks."
                )
            self.take_writes()
            self.kept, self.outdated = None, []
            self.start_read()
            if self.full.untyped_storage().size() == 0:
                self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self._bring(self.full[lo:hi])
        elif self.optimizer_tier == "device" and not self.master_is_slice:
            self.full[lo:hi].copy_(self.master)
        if self.policy.optimizer:
            self.gathering = self.comm.all_gather(self.full, self.name, self.layout.sizes)

    @property
    def _reads_ahead(self) -> bool:
        """Whether this rank's part of the parameters comes from another place, beside the training thread."""
        return self.param_tier != "device" and (self.param_tier, self.full.device.type) != ("cpu", "cpu")

    def exchange_master(self, other: Tensor) -> None:
        """Swap the contents of the master shard with ``other``, of the same shape; parameters follow when published."""
        mine = self.read_master().detach().clone()
        self.write_master(0, other)
        other.copy_(mine)
        self.require_refresh(self.optimizer_tier != "device" or self.has_own_shard)

    def start_read(self) -> None:
        """Stage 3: begin to bring this rank's part of the parameters. Not collective, does not wait."""
        if not self._reads_ahead or self.is_gathered or self.gathering is not None or self.reading is not None:
            return
        self.refresh_if_due()
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        out, updating, after = self.full[slice(*self.stepped)], self.updating, self.rest.link.mark()

        def read() -> Arrival:
            if updating is not None:
                updating.wait()
            name = "param" if self.has_own_shard else "master"
            if not self.rest.is_resident(name):
                self.rest.read_into(name, out)
                return DONE
            source = self.master if self.shard is None else self.shard
            if source.dtype != out.dtype:  # cast on the host, so that half the bytes cross the bus
                source = host_empty(out.numel(), out.dtype, out.device).copy_(source)
            return self.rest.link.to_device(out, source, after)

        self.reading = self.rest.in_background(read)

    def _bring(self, out: Tensor) -> None:
        """Stage 3: this rank's part of the parameters, from where it rests."""
        if self.reading is None:
            out.copy_(self.master if self.shard is None else self.shard)
            return
        with spans.waiting(spans.COPY):
            arrival = self.reading.result()
        arrival.wait_on_device()
        self.reading = None

    def finish_gather(self, *, lend: bool = False) -> None:
        """Wait until the parameters may be read. ``lend``: for somebody's touch."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
        if not self.is_gathered:
            self.bind(lend=lend)
        elif (self.hidden or self.lent) and not lend:
            self.reveal()

    def reveal(self) -> None:
        """The parameters have their values, and nobody needs to ask for them."""
        self._switch(Present)
        self.is_viewed |= self.lent and self.is_held
        self.lent = False
        if self.hidden:
            self.hidden = False
            if self.outdated:
                self.take_writes()
                self.outdated = []
            self.look()

    def release(self) -> None:
        """Stage 3: give the full buffer's memory back, unless somebody has a view of it. Parameters keep shape."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
        if self.reading is not None:
            self.reading.result()
            self.reading = None
        keep = self.is_viewed = (self.lent or self.is_viewed) and self.is_held
        with unnoticed():
            for i, (p, slot) in enumerate(zip(self.params, self.layout.slots, strict=True)):
                point(p, self._released[i].expand(slot.shape))
        self._switch(Absent)
        self.is_gathered = self.lent = False
        if keep:
            self.kept = self.full[slice(*self.stepped)].clone()
        else:
            self._free()

    def _free(self) -> None:
        """Give the memory of ``full`` back; to who has made a NumPy array of it, which fixes its size, for good."""
        if not self.full.untyped_storage().resizable():
            self.full = torch.empty_like(self.full)
            self.views = self.split(self.full)
            self._holders = storage_users(self.full) + len(self.params)
            if self.on_demand is not None:
                self.on_demand.note_memory(self)
        self.full.untyped_storage().resize_(0)

    def outdate_views(self) -> None:
        """Stage 3: the masters are newer than what somebody's view of a released buffer shows."""
        if self.kept is not None:
            self.kept = None
            self.full.fill_(float("nan"))
            self.note_outdated()

    def note_outdated(self) -> None:
        """What ``param.data`` gave does not show the parameters for now."""
        handed = [r for references in self.handed_out.values() for r in references]
        self.outdated = [(r, version_of(values)) for r in handed if (values := r()) is not None]

    def forget_views(self) -> None:
        """Stage 3: nobody has a view any more."""
        self.kept, self.is_viewed = None, False
        self._free()

    # gradients -------------------------------------------------------------------------------------------------------


class Unit:
    """Flat buffers that are gathered and reduced together."""

    def __init__(self, name: str, modules: list[nn.Module], flats: list[Flat], *, is_root: bool) -> None:
        """Group ``flats``."""
        self.name = name
        self.modules = modules
        self.flats = flats
        self.is_root = is_root
        self.trainable_flats = [f for f in flats if f.trainable]
        self.waiting_for = 0
        """Gradients still to come in this backward pass."""
        self.launched = False
        self.open_backwards = 0
        """Calls of the unit's modules whose backward has begun and not ended. Only the methods below write it."""
        self._unclosable_backwards = 0
        """Those among them whose end no input's gradient will tell."""
        self.pinned = False
        """Stay gathered until the backward pass is over: nothing tells earlier that it is safe to release."""

    def begin_call(self, *, closable: bool) -> None:
        """Note that the backward of a call begins. ``closable``: a gradient of its inputs will tell when it ends."""
        self.open_backwards += 1
        self._unclosable_backwards += not closable

    def end_call(self) -> bool:
        """Note that the backward of a call has ended; return whether no other one is open."""
        self.open_backwards = max(self.open_backwards - 1, 0)
        return self.open_backwards == 0

    def end_unclosable(self) -> bool:
        """Note that all gradients are there, so that no unclosable call is left; return whether no call is open."""
        self.open_backwards = max(self.open_backwards - self._unclosable_backwards, 0)
        self._unclosable_backwards = 0
        return self.open_backwards == 0

    def pin(self) -> None:
        """Stay gathered until `unpin`."""
        self.pinned = True

    def unpin(self) -> None:
        """Note that the backward pass, or the step, is over: no call is open, and the unit may be released."""
        self.open_backwards = self._unclosable_backwards = 0
        self.pinned = False


def places_of(state: Mapping[str, Any], units: list[Unit]) -> dict[str, tuple[Flat, int]]:
    """Which entries of ``module.state_dict()`` are parameters of the units: ``key -> (flat, slot)``. Not collective.

    By the address of their memory, which is a parameter's own also while it is released: under whatever key it stands.
    """
    flats = [flat for unit in units for flat in unit.flats]
    with unnoticed():
        found = {p.data_ptr(): (flat, i) for flat in flats for i, p in enumerate(flat.params) if p.numel()}
        tensors = {k: v.data_ptr() for k, v in state.items() if isinstance(v, Tensor) and v.numel()}
    return {key: found[address] for key, address in tensors.items() if address in found}
