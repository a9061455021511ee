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

import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ls_strategy import spans
from ls_strategy._compat import storage_key, storage_users, version_of
from ls_strategy.axis import Axis
from ls_strategy.comm import Comm, PendingGather, PendingReduce
from ls_strategy.config import TierName
from ls_strategy.errors import StateError
from ls_strategy.layout import Piece
from ls_strategy.plan import FlatPlan
from ls_strategy.tiers.link import DONE, Arrival, host_empty
from ls_strategy.tiers.stream import Ticket
from ls_strategy.zero.averages import Averages
from ls_strategy.zero.parameters import Absent, Present, grad_of, point, set_grad, settle, unnoticed
from ls_strategy.zero.rest import Rest
from ls_strategy.zero.writes import take_writes
from ls_strategy.zero_stages import StagePolicy


class Lends(Protocol):
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


class Holding(Protocol):
    """What keeps the states of a flat buffer from changing unnoticed."""

    def release(self) -> None:
        """Return when they may change."""
        ...


class Flat:
    """One flat buffer: the parameters of a unit that share an optimizer and a dtype."""

    hold: Holding | None = None
    """Of a save under way that has still to read its states."""

    lender: Lends | None = None
    """Asked when somebody touches a parameter that is elsewhere."""

    gradients: ShowsGradients | None = None
    """Asked when somebody looks at ``p.grad``; without, that is what autograd has put there."""

    may_be_written = False
    """Whether somebody has looked at the parameters' memory since `bind`, see `ls_strategy.zero.writes`."""

    was_written = False
    """Whether something was written since the last step, as far as versions tell."""

    lent = False
    """Stage 3: gathered for somebody's touch, not for the unit's own module."""

    kept: Tensor | None = None
    """Stage 3: this rank's part of a buffer that is released, and keeps its memory for somebody's view of it."""

    is_viewed = False
    """Stage 3: whether somebody has, or had, such a view."""

    hidden = False
    """Stages 0 to 2: new values are on their way; a touch waits for them."""

    users = 0
    """Touches that are not over."""

    grad_scale = 1.0
    """What this rank's gradients, in ``grad`` or ``p.grad``, are multiplied by; see `Averages.scale`."""

    def __init__(
        self,
        plan: FlatPlan,
        params: list[nn.Parameter],
        *,
        policy: StagePolicy,
        comm: Comm,
        rest: Rest | None = None,
        axis: Axis | None = None,
    ) -> None:
        """Only records; `load` moves the values in.

        Args:
            plan: what it is.
            params: in the order of the plan's slots.
            policy: what is sharded.
            comm: the ranks over which it is.
            rest: its place on the tiers; on the device without.
            axis: the tensor- or expert-parallel ranks, which hold other parts of the parameters, or copies.
        """
        layout = plan.layout
        self.plan = plan
        self.rest = rest or Rest()
        self.layout = layout
        self.dtype = plan.dtype
        self.master_dtype = plan.master_dtype
        self.params = params
        self.optimizer_index = plan.optimizer
        self.policy = policy
        self.comm = comm
        self.axis = axis or Axis("tensor")
        self.trainable = plan.trainable
        self.owned = layout.shard_range(comm.rank)
        """Range of the buffer whose gradients this rank averages, and from stage 1 on steps."""
        self.stepped = self.owned if policy.optimizer else (0, layout.numel)
        self.pieces: tuple[Piece, ...] = layout.pieces(*self.stepped)
        self.full: Tensor
        self.views: list[Tensor]
        self.master: Tensor
        self.shard: Tensor | None = None
        self.updating: Ticket | None = None
        """The update of this buffer's states that is under way on the stream."""
        self.arriving: Arrival | None = None
        """New parameters on their way to the device."""
        self.updated_early = False
        """Whether the backward pass under way has updated it already."""
        self.publish_due = False
        """Whether new weights wait to be sent to the other ranks."""
        self.refresh_due = False
        """Whether the masters are newer than this rank's part of the parameters."""
        self.waited_s = 0.0
        """Seconds that the training thread has waited for updates, and for gradients to reach their tier."""
        self.reading: Future[Arrival] | None = None
        """This rank's part of the parameters, on its way from the drive."""
        self.is_gathered = True
        self.gathering: PendingGather | None = None
        # gradients
        self.grad: Tensor | None = None
        self.grad_views: list[Tensor] = []
        self.reducing: PendingReduce | None = None
        self.gathering_grads: PendingGather | None = None
        self.filled = [False] * len(params)
        """Stages 2 and 3: which slots of ``grad`` hold something."""
        self.held_here = [False] * len(params)
        """Stages 0 and 1: which parameters had a gradient when the buffer was sent."""
        self.averages = Averages(self)
        self.used_here = [False] * len(params)
        """Whether this rank produced a gradient of each parameter since the last `zero_grad`."""
        self.dirty = False
        """Whether this rank has gradients that no reduction has seen yet."""

    @property
    def name(self) -> str:
        """Of its first parameter."""
        return self.layout.slots[0].name if self.layout.slots else ""

    @property
    def counted(self) -> bool:
        """Whether this rank is the first one, along its axis and of the pipeline's stages, that holds these.

        That one counts them in norms, and saves them.
        """
        return self.axis.rank % self.plan.copies == 0 and not self.plan.twin

    @property
    def optimizer_tier(self) -> TierName:
        """Where masters and optimizer states rest."""
        return self.plan.optimizer_tier

    @property
    def param_tier(self) -> TierName:
        """Stage 3: where this rank's part of the parameters rests."""
        return self.plan.param_tier

    @property
    def gradient_tier(self) -> TierName:
        """Where averaged gradients rest between backward and step."""
        return self.plan.gradient_tier

    @property
    def has_own_shard(self) -> bool:
        """Stage 3: whether that part is kept beside the masters."""
        return self.plan.has_own_shard(self.policy)

    def load(self, values: list[Tensor], device: torch.device) -> None:
        """Take the parameters' original values; rank 0's are taken by all. Collective.

        Args:
            values: one tensor per parameter, its shape, any dtype and device: masters come from these.
            device: where the buffers live.
        """
        layout, dtype, master_dtype = self.layout, self.dtype, self.master_dtype
        whole = self._new_whole(device)
        for slot, value in zip(layout.slots, values, strict=True):
            whole[slot.offset : slot.end].copy_(value.detach().reshape(-1))
        self.comm.broadcast_(whole)
        if self.policy.parameters:
            self.full = torch.empty(layout.numel, dtype=dtype, device=device)
        else:
            self.full = whole if dtype == master_dtype else whole.to(dtype)
        self._place(whole[slice(*self.stepped)])
        self.average_dtype = torch.promote_types(torch.float32, master_dtype) if self.trainable else torch.float32
        self.views = [self.full[s.offset : s.end].view(s.shape) for s in layout.slots]
        self._switched = [p for p in self.params if settle(p, self)]
        self._index = {id(p): i for i, p in enumerate(self.params)}
        self._adopted: dict[int, Tensor] = {}
        """Stage 0: tensors that user code made ``p.grad``."""
        self.handed_out: dict[int, list[weakref.ref[Tensor]]] = {}
        """What ``param.data`` gave, by parameter: views of its slot."""
        self.outdated: list[tuple[weakref.ref[Tensor], int]] = []
        """Those among them that do not show the parameters since the step, and their versions then."""
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
        elif tier == "cpu":
            self.master = rest.resident(tier, "master", mine.numel(), self.master_dtype).copy_(mine)
        else:
            rest.write("master", 0, mine)
            nothing = float("nan") if mine.dtype.is_floating_point else 0
            self.master = torch.full((1,), nothing, dtype=self.master_dtype).expand(mine.numel())
        if self.has_own_shard:
            if self.param_tier == "nvme":
                rest.write("param", 0, mine.to(self.dtype))
            else:
                self.shard = rest.resident(self.param_tier, "param", mine.numel(), self.dtype).copy_(mine)

    # masters ---------------------------------------------------------------------------------------------------------

    def read_master(self) -> Tensor:
        """Master weights of this rank's range: the tensor itself, or a copy of what is on the drive. ``(stepped,)``."""
        self.wait_updated()
        return self.master if self.optimizer_tier != "nvme" else self.rest.read("master")

    def master_range(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of this rank's master weights: a view, or a copy of what is on the drive.

        From any thread, while no update is under way.
        """
        if self.optimizer_tier != "nvme":
            return self.master.detach()[start:stop]
        out = torch.empty(stop - start, dtype=self.master_dtype)
        self.rest.read_into("master", out, start)
        return out

    def before_change(self) -> None:
        """Masters or optimizer states are about to change: a save that has not read them copies them aside first."""
        hold = self.hold
        if hold is not None:
            hold.release()

    def write_master(self, start: int, values: Tensor) -> None:
        """Replace master weights from element ``start`` of this rank's range on; `refresh` takes them further."""
        self.wait_updated()
        self.before_change()
        if self.optimizer_tier == "nvme":
            self.rest.write("master", start, values.to(self.master_dtype))
        else:
            self.master.detach()[start : start + values.numel()].copy_(values)

    def full_master(self) -> Tensor:
        """Master weights of all ranks, ``(numel,)``; read-only where this rank has them all anyway. Collective."""
        mine = self.read_master()
        if not self.policy.optimizer:
            return mine
        whole = torch.zeros(self.layout.numel, dtype=mine.dtype, device=self.full.device)
        whole[slice(*self.owned)].copy_(mine)
        self.comm.all_gather(whole, self.name, self.layout.sizes).wait()
        return whole

    def refresh(self) -> None:
        """Bring this rank's masters to where its part of the parameters rests. Not collective: the others' stay."""
        if self.master_is_slice or (self.policy.parameters and not self.has_own_shard):
            return
        mine = self.read_master()
        if self.shard is not None:
            self.shard.copy_(mine)
        elif self.policy.parameters:
            self.rest.write("param", 0, mine.to(self.dtype))
        else:
            self.full[slice(*self.stepped)].copy_(mine)

    @property
    def master_is_slice(self) -> bool:
        """Whether the master weights are a slice of ``full`` and need no copy into it."""
        return self.master.untyped_storage().data_ptr() == self.full.untyped_storage().data_ptr() != 0

    @property
    def master_is_complete(self) -> bool:
        """Whether this rank's masters are all of ``full``: who steps them changes the parameters at once."""
        return self.master_is_slice and not self.policy.optimizer

    # updates under way -----------------------------------------------------------------------------------------------

    def wait_updated(self) -> None:
        """Wait until no update is under way that reads or writes this buffer's states."""
        if self.updating is not None:
            started = time.perf_counter()
            self.updating.wait()
            self.updating = None
            self.waited_s += time.perf_counter() - started
            self.averages.take_back()
        if self.arriving is not None:
            self.arriving.wait_on_device()
            self.arriving = None

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

    def look(self) -> None:
        """Note how the parameters are, so that `ls_strategy.zero.writes` sees what becomes of them."""
        with unnoticed():
            self.seen = [(p._version, p.data_ptr()) for p in self.params]
        self.may_be_written = False

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

    @property
    def is_held(self) -> bool:
        """Whether somebody else has a view of ``full``, where masters are elsewhere."""
        own = self._holders if self.is_gathered else self._holders - len(self.params)
        return storage_users(self.full) > own

    def touch(self) -> None:
        """Somebody is about to use a parameter. Collective."""
        if self.lender is None:
            raise StateError(
                f"{self.name!r} is read while its unit is not gathered, and training has ended on this rank, so that "
                "the other ranks' shards cannot be had. Read it inside the fit, or from a checkpoint."
            )
        self.lender.touch(self)

    def touched(self) -> None:
        """Somebody has used it."""
        if self.lender is not None:
            self.lender.touched(self)

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
        return value.detach().clone() if self.lender is not None and self.lender.holds(value) else value

    @property
    def is_seen(self) -> bool:
        """Whether somebody keeps what ``param.data`` gave."""
        return any(r() is not None for references in self.handed_out.values() for r in references)

    def is_collected(self) -> bool:
        """Whether the parameters are only being listed."""
        return self.lender is not None and self.lender.is_collected()

    def saving(self) -> AbstractContextManager[Any]:
        """Around that use."""
        return nullcontext() if self.lender is None else self.lender.saving()

    def start_gather(self) -> None:
        """Bring the newest parameters of all ranks into ``full``; `finish_gather` waits. Collective."""
        self.wait_updated()
        self.publish_due = False
        lo, hi = self.stepped
        if self.refresh_due:
            self.refresh_due = False
            self.refresh()
        if self.policy.parameters:
            if self.updated_early:
                raise StateError(
                    f"a parameter of {self.layout.slots[0].name!r} and its neighbours is read again in the backward "
                    "pass that has already updated it. Set overlap_step=False on the strategy."
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
        return self.param_tier == "nvme" or (self.param_tier == "cpu" and self.full.device.type != "cpu")

    def start_read(self) -> None:
        """Stage 3: begin to bring this rank's part of the parameters. Not collective, does not wait."""
        if not self._reads_ahead or self.is_gathered or self.gathering is not None or self.reading is not None:
            return
        if self.refresh_due:
            self.refresh_due = False
            self.refresh()
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        out, updating, after = self.full[slice(*self.stepped)], self.updating, self.rest.link.mark()

        def read() -> Arrival:
            if updating is not None:
                updating.wait()
            if self.param_tier == "nvme":
                self.rest.read_into("param" if self.has_own_shard else "master", out)
                return DONE
            source = self.master if self.shard is None else self.shard
            if source.dtype != out.dtype:  # cast on the host, so that half the bytes cross the bus
                source = host_empty(out.numel(), out.dtype, out.device).copy_(source)
            return self.rest.link.to_device(out, source, after)

        self.reading = self.rest.beside(read)

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
            self.views = [self.full[s.offset : s.end].view(s.shape) for s in self.layout.slots]
            self._holders = storage_users(self.full) + len(self.params)
            if self.lender is not None:
                self.lender.note_memory(self)
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

    def hold_grad_buffer(self, dtype: torch.dtype) -> None:
        """Make sure there is a buffer for this rank's gradients, with zeros between the slots."""
        if self.grad is not None:
            return
        device = self.full.device
        if self.policy.gradients:
            self.grad = self.comm.pool.take(self.layout.numel, dtype, device)
            for lo, hi in self.layout.gaps():
                self.grad[lo:hi].zero_()
        else:
            self.grad = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        self.grad_views = [self.grad[s.offset : s.end].view(s.shape) for s in self.layout.slots]

    def take_held_grads(self, scales: Mapping[int, float]) -> None:
        """Stages 0 and 1: take what ``p.grad`` holds since an earlier engine; it is averaged again by the step.

        Args:
            scales: by ``id`` of the parameters, what their gradients were multiplied by.
        """
        grads = [grad_of(p) for p in self.params]
        held = [g for g in grads if g is not None]
        if not held:
            return
        self.grad_scale = next(scales[id(p)] for p, g in zip(self.params, grads, strict=True) if g is not None)
        self.hold_grad_buffer(held[0].dtype if self.policy.optimizer else self.average_dtype)
        self.used_here = [g is not None for g in grads]
        for i, used in enumerate(self.used_here):
            if used:
                self.take_replaced(i)
        self.dirty = True

    def carry(self, scale: float) -> None:
        """Gradients to come are multiplied by ``scale``: bring those that are here already to it."""
        factor, self.grad_scale = scale / self.grad_scale, scale
        if factor == 1.0:
            return
        here = [v for v, filled in zip(self.grad_views, self.filled, strict=False) if filled]
        for grad in [*here, *map(grad_of, self.params)]:
            if grad is not None:
                grad.detach().mul_(factor)

    def take_replaced(self, index: int) -> bool:
        """Take another tensor that ``p.grad`` was made. Returns whether it was made None.

        At stage 0 it stays ``p.grad``, as in plain torch: until `give_back_grads` its memory is that of the slot.
        """
        grad, view = grad_of(self.params[index]), self.grad_views[index]
        self._bring_back_view(index)
        if grad is None or grad is view or self.has_adopted(index, grad):
            if grad is None:
                self.give_back_grads([index])
            return grad is None
        view.copy_(grad)
        if self.averages.in_place and self._can_be_adopted(grad, view):
            grad.data = view
            self._adopted[index] = grad
        self.show_grad(index)
        return False

    def _bring_back_view(self, index: int) -> None:
        """User code may have given it other memory: ``p.grad.data = other``."""
        assert self.grad is not None
        view, slot = self.grad_views[index], self.layout.slots[index]
        if view.numel() and view.data_ptr() != self.grad.data_ptr() + slot.offset * self.grad.element_size():
            here = self.grad[slot.offset : slot.end].view(slot.shape)
            here.copy_(view)
            view.data = here

    def has_adopted(self, index: int, grad: Tensor) -> bool:
        """Whether ``grad`` is at the slot already; another tensor that was loses it."""
        adopted = self._adopted.get(index)
        if adopted is None:
            return False
        if adopted is grad and grad.data_ptr() == self.grad_views[index].data_ptr():
            return True
        self.give_back_grads([index])
        return False

    def _can_be_adopted(self, grad: Tensor, view: Tensor) -> bool:
        """Whether its memory can be the slot: not that of another slot's."""
        same_kind = type(grad) is Tensor and grad.dtype == view.dtype and grad.device == view.device
        return same_kind and not grad.requires_grad and storage_key(grad) != storage_key(view)

    def give_back_grads(self, indices: Iterable[int]) -> None:
        """Tensors that ``p.grad`` was made get memory of their own again, with the values of now."""
        for i in indices:
            grad = self._adopted.pop(i, None)
            if grad is not None and grad.data_ptr() == self.grad_views[i].data_ptr():
                grad.data = grad.detach().clone()

    def show_grad(self, index: int) -> None:
        """Make the slot the parameter's gradient, also where that is fp32 and the parameter is not.

        Not before a gradient has come: what autograd adds up within one backward pass (tied weights) it adds in the
        parameter's dtype, as at the stages that keep no ``p.grad``.
        """
        param, view = self.params[index], self.grad_views[index]
        if param.grad_dtype != view.dtype:  # type: ignore[attr-defined]
            set_grad(param, None)
            param.grad_dtype = view.dtype  # type: ignore[attr-defined]
        set_grad(param, self._adopted.get(index, view))

    def holds_gradients(self, besides: int) -> bool:
        """Whether this rank has gradients, not counting the one that parameter ``besides`` has just got."""
        others = any(grad_of(p) is not None for i, p in enumerate(self.params) if i != besides)
        added = bool(self.grad_views) and grad_of(self.params[besides]) is self.grad_views[besides]
        return others or added or any(self.filled) or self.reducing is not None

    def drop_grad_buffer(self) -> None:
        """Stages 2 and 3: the gradients were reduced, their buffer serves the next unit."""
        assert self.grad is not None
        self.comm.pool.give([self.grad])
        self.grad = None
        self.grad_views = []

    def widen_grads(self) -> None:
        """Stages 0 and 1: go on accumulating in fp32. Exact: fp32 holds every 16-bit value.

        The first backward fills a buffer in the parameters' dtype; only runs that accumulate pay for the wide one.
        """
        if self.grad is None or self.grad.dtype == torch.float32:
            return
        self.give_back_grads(list(self._adopted))
        wide = self.grad.float()
        views = [wide[s.offset : s.end].view(s.shape) for s in self.layout.slots]
        for p, old, new in zip(self.params, self.grad_views, views, strict=True):
            held = grad_of(p)
            set_grad(p, None)
            p.grad_dtype = torch.float32  # type: ignore[attr-defined]
            if held is old:
                set_grad(p, new)
            elif held is not None:
                set_grad(p, held.float())
        self.grad, self.grad_views = wide, views


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
        """Calls of the unit's modules whose backward has begun and not ended."""
        self.unclosable_backwards = 0
        """Those among them whose end no input's gradient will tell."""
        self.pinned = False
        """Stay gathered until the backward pass is over: nothing tells earlier that it is safe to let go."""


def places_of(state: Mapping[str, Any], units: list[Unit]) -> dict[str, tuple[Flat, int]]:
    """Which entries of ``module.state_dict()`` are parameters of the units: ``key -> (flat, slot)``. Not collective.

    By the address of their memory, which is a parameter's own also while it is released: under whatever key it stands.
    """
    flats = [flat for unit in units for flat in unit.flats]
    with unnoticed():
        found = {p.data_ptr(): (flat, i) for flat in flats for i, p in enumerate(flat.params) if p.numel()}
        tensors = {k: v.data_ptr() for k, v in state.items() if isinstance(v, Tensor) and v.numel()}
    return {key: found[address] for key, address in tensors.items() if address in found}
