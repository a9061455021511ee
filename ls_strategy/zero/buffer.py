"""The memory of a flat buffer: masters and this rank's gradients, see `ls_strategy.zero.units`."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ls_strategy._compat import storage_key, storage_users
from ls_strategy.config import TierName
from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import Comm, PendingGather, PendingReduce
from ls_strategy.layout import Piece
from ls_strategy.plan import FlatPlan
from ls_strategy.tiers.link import Arrival
from ls_strategy.tiers.stream import Ticket
from ls_strategy.zero.parameters import grad_of, set_grad, unnoticed
from ls_strategy.zero.storage import StateStorage
from ls_strategy.zero_stages import StagePolicy


class Holding(Protocol):
    """What keeps the states of a flat buffer from changing unnoticed."""

    def release(self) -> None:
        """Return when they may change."""
        ...


class FlatBuffer:
    """What a flat buffer is made of: masters, and this rank's gradients."""

    hold: Holding | None = None
    """Of a save under way that has still to read its states."""

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

    average_dtype: torch.dtype
    """Of averaged gradients."""

    seen: list[tuple[int, int]]
    """Version and address of every parameter when they were looked at last."""

    handed_out: dict[int, list[weakref.ref[Tensor]]]
    """What ``param.data`` gave, by parameter: views of its slot."""

    outdated: list[tuple[weakref.ref[Tensor], int]]
    """Those among them that do not show the parameters since the step, and their versions then."""

    _adopted: dict[int, Tensor]
    """Stage 0: tensors that user code made ``p.grad``."""

    _holders: int
    """Who uses the memory of ``full`` as long as nobody else has a view of it."""

    def __init__(
        self,
        plan: FlatPlan,
        params: list[nn.Parameter],
        *,
        policy: StagePolicy,
        comm: Comm,
        rest: StateStorage | None = None,
        axis: Axis | None = None,
    ) -> None:
        """Only records; `Flat.load` moves the values in.

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
        self.rest = rest or StateStorage()
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
        self._refresh_due = False
        """Whether the masters are newer than this rank's part of the parameters."""
        self.waited_s = 0.0
        """Seconds that the training thread has waited for updates, and for gradients to reach their tier."""
        self.reading: Future[Arrival] | None = None
        """This rank's part of the parameters, on its way from the drive."""
        self.is_gathered = True
        self.gathering: PendingGather | None = None
        self._start_without_gradients(len(params))

    def _start_without_gradients(self, count: int) -> None:
        self.grad: Tensor | None = None
        self.grad_views: list[Tensor] = []
        self.reducing: PendingReduce | None = None
        self.gathering_grads: PendingGather | None = None
        self.filled = [False] * count
        """Stages 2 and 3: which slots of ``grad`` hold something."""
        self.sent_mask = [False] * count
        """Stages 0 and 1: which parameters had a gradient when the buffer was sent."""
        self.local_grad_mask = [False] * count
        """Whether this rank produced a gradient of each parameter since the last `zero_grad`."""
        self.dirty = False
        """Whether this rank has gradients that no reduction has seen yet."""

    @property
    def name(self) -> str:
        """Of its first parameter."""
        return self.layout.slots[0].name if self.layout.slots else ""

    @property
    def stepped_numel(self) -> int:
        """Elements of ``stepped``."""
        return self.stepped[1] - self.stepped[0]

    @property
    def counted(self) -> bool:
        """Whether this rank is the first one, along its axis and of the pipeline's stages, that holds these.

        That one counts them in norms, and saves them.
        """
        return self.axis.rank % self.plan.copies == 0 and not self.plan.replica

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

    def split(self, buffer: Tensor) -> list[Tensor]:
        """Return a view per parameter of any buffer of this one's layout."""
        return [buffer[s.offset : s.end].view(s.shape) for s in self.layout.slots]

    # masters ---------------------------------------------------------------------------------------------------------

    def read_master(self) -> Tensor:
        """Master weights of this rank's range: the tensor itself, or a copy of what is on the drive. ``(stepped,)``."""
        self.wait_updated()
        return self.master if self.rest.is_resident("master") else self.rest.read("master")

    def master_range(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of this rank's master weights: a view, or a copy of what is on the drive.

        From any thread, while no update is under way.
        """
        if self.rest.is_resident("master"):
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
        if self.rest.is_resident("master"):
            self.master.detach()[start : start + values.numel()].copy_(values)
        else:
            self.rest.write("master", start, values.to(self.master_dtype))

    def full_master(self) -> Tensor:
        """Master weights of all ranks, ``(numel,)``; read-only where this rank has them all anyway. Collective."""
        mine = self.read_master()
        if not self.policy.optimizer:
            return mine
        return self.gather_shards(mine.dtype, mine)

    def gather_shards(
        self, dtype: torch.dtype, mine: Tensor | Callable[[Tensor], Any], out: Tensor | None = None
    ) -> Tensor:
        """Gather every rank's shard of any values of this buffer, ``(numel,)``. Collective.

        Args:
            dtype: of the values.
            mine: this rank's shard, or what writes it.
            out: where to put them.
        """
        full = torch.zeros(self.layout.numel, dtype=dtype, device=self.full.device) if out is None else out
        shard = full[slice(*self.owned)]
        if isinstance(mine, Tensor):
            shard.copy_(mine)
        else:
            mine(shard)
        self.comm.all_gather(full, self.name, self.layout.sizes).wait()
        return full

    def require_refresh(self, due: bool = True) -> None:
        """Note that the next gather has to copy the masters to this rank's part of the parameters, or need not."""
        self._refresh_due = due

    def refresh_if_due(self) -> None:
        """`refresh`, once for each `require_refresh`."""
        if self._refresh_due:
            self._refresh_due = False
            self.refresh()

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

    def wait_updated(self) -> None:
        """Wait until no update is under way that reads or writes this buffer's states."""
        if self.updating is not None:
            started = time.perf_counter()
            self.updating.wait()
            self.updating = None
            self.waited_s += time.perf_counter() - started
            self._on_updated()
        if self.arriving is not None:
            self.arriving.wait_on_device()
            self.arriving = None

    def _on_updated(self) -> None:
        """An update that read and wrote these states is done."""

    def look(self) -> None:
        """Note how the parameters are, so that `ls_strategy.zero.writes` sees what becomes of them."""
        with unnoticed():
            self.seen = [(p._version, p.data_ptr()) for p in self.params]
        self.may_be_written = False

    # gradients -------------------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether somebody else has a view of ``full``, where masters are elsewhere."""
        own = self._holders if self.is_gathered else self._holders - len(self.params)
        return storage_users(self.full) > own

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
        self.grad_views = self.split(self.grad)

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
        self.local_grad_mask = [g is not None for g in grads]
        for i, used in enumerate(self.local_grad_mask):
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
        if not self.policy.optimizer and self._can_be_adopted(grad, view):
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
        views = self.split(wide)
        for p, old, new in zip(self.params, self.grad_views, views, strict=True):
            held = grad_of(p)
            set_grad(p, None)
            p.grad_dtype = torch.float32  # type: ignore[attr-defined]
            if held is old:
                set_grad(p, new)
            elif held is not None:
                set_grad(p, held.float())
        self.grad, self.grad_views = wide, views
