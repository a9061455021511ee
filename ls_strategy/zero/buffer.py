"""The memory of a flat buffer: master weights and this rank's gradients, see `ls_strategy.zero.units`."""

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
    """A save in the background that still has to read the states of a flat buffer."""

    def release(self) -> None:
        """Copy what was not read yet, and return when the states may change."""
        ...


class FlatBuffer:
    """Master weights and local gradients of a flat buffer. `ls_strategy.zero.units.Flat` adds the parameters."""

    hold: Holding | None = None
    """A save in flight that still has to read the states."""

    may_be_written = False
    """Whether user code has accessed the parameters' memory since `bind`, see `ls_strategy.zero.writes`."""

    was_written = False
    """Whether tensor versions show a write to a parameter since the last step."""

    gathered_on_demand = False
    """Stage 3: gathered because a parameter was used outside the unit's own module."""

    viewed_shard: Tensor | None = None
    """Stage 3: a copy of this rank's shard of a released buffer that keeps its memory, because a view of it exists."""

    is_viewed = False
    """Stage 3: whether such a view exists or existed."""

    hidden = False
    """Stages 0 to 2: new values are in flight, and any use of a parameter waits for them."""

    users = 0
    """Operations in progress that use the gathered parameters."""

    grad_scale = 1.0
    """Factor in this rank's gradients, in ``grad`` or ``p.grad``; see `Averages.scale`."""

    average_dtype: torch.dtype
    """Dtype of averaged gradients."""

    recorded_versions: list[tuple[int, int]]
    """Version and address of every parameter at the last `record_versions`."""

    data_views: dict[int, list[weakref.ref[Tensor]]]
    """Tensors that ``param.data`` returned, by parameter: views of its slot."""

    outdated_views: list[tuple[weakref.ref[Tensor], int]]
    """Those of `data_views` that have shown outdated values since the step, with their versions at that time."""

    _adopted: dict[int, Tensor]
    """Stage 0: tensors that user code assigned to ``p.grad``, by parameter; they use the memory of the slot."""

    _own_references: int
    """References to the memory of ``full`` while user code has no view of it."""

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
        """Record the arguments; `Flat.load` allocates the buffers.

        Args:
            plan: layout, dtypes and tiers.
            params: parameters in the order of the plan's slots.
            policy: which states are sharded.
            comm: ranks over which they are sharded.
            rest: storage on the tiers; without it everything is on the device.
            axis: tensor- or expert-parallel ranks, which hold other parts or copies of the parameters.
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
        """Range of the buffer whose gradients this rank averages and, from stage 1 on, steps."""
        self.stepped = self.owned if policy.optimizer else (0, layout.numel)
        self.pieces: tuple[Piece, ...] = layout.pieces(*self.stepped)
        self.full: Tensor
        self.views: list[Tensor]
        self.master: Tensor
        self.shard: Tensor | None = None
        self.updating: Ticket | None = None
        """The update of this buffer's states that is in flight."""
        self.arriving: Arrival | None = None
        """New parameters in flight to the device."""
        self.updated_early = False
        """Whether the current backward pass has already updated this buffer."""
        self.publish_due = False
        """Whether new weights still have to be sent to the other ranks."""
        self._refresh_due = False
        """Whether the masters are newer than this rank's shard of the parameters."""
        self.waited_s = 0.0
        """Seconds that the training thread has waited for updates and for gradients to reach their tier."""
        self.reading: Future[Arrival] | None = None
        """This rank's shard of the parameters, in flight from its tier."""
        self.is_gathered = True
        self.gathering: PendingGather | None = None
        self._start_without_gradients(len(params))

    def _start_without_gradients(self, count: int) -> None:
        self.grad: Tensor | None = None
        self.grad_views: list[Tensor] = []
        self.reducing: PendingReduce | None = None
        self.gathering_grads: PendingGather | None = None
        self.filled = [False] * count
        """Stages 2 and 3: which slots of ``grad`` hold a gradient."""
        self.sent_mask = [False] * count
        """Stages 0 and 1: which parameters had a gradient when the buffer was sent."""
        self.local_grad_mask = [False] * count
        """Which parameters got a gradient on this rank since the last `zero_grad`."""
        self.dirty = False
        """Whether this rank has gradients that were not sent yet."""

    @property
    def name(self) -> str:
        """Return the name of the first parameter."""
        return self.layout.slots[0].name if self.layout.slots else ""

    @property
    def stepped_numel(self) -> int:
        """Return the number of elements in ``stepped``."""
        return self.stepped[1] - self.stepped[0]

    @property
    def counted(self) -> bool:
        """Whether this rank counts these parameters in norms and saves them.

        It is the first rank that holds them, along its axis and over the pipeline stages.
        """
        return self.axis.rank % self.plan.copies == 0 and not self.plan.replica

    @property
    def optimizer_tier(self) -> TierName:
        """Return the tier of masters and optimizer states."""
        return self.plan.optimizer_tier

    @property
    def param_tier(self) -> TierName:
        """Return the tier of this rank's shard of the parameters (stage 3)."""
        return self.plan.param_tier

    @property
    def gradient_tier(self) -> TierName:
        """Return the tier of averaged gradients between backward and step."""
        return self.plan.gradient_tier

    @property
    def has_own_shard(self) -> bool:
        """Whether that shard is stored in addition to the masters (stage 3)."""
        return self.plan.has_own_shard(self.policy)

    def split(self, buffer: Tensor) -> list[Tensor]:
        """Return one view per parameter of a buffer with this layout."""
        return [buffer[s.offset : s.end].view(s.shape) for s in self.layout.slots]

    # masters ---------------------------------------------------------------------------------------------------------

    def read_master(self) -> Tensor:
        """Return this rank's master weights, ``(stepped,)``: the tensor itself, or a copy from the NVMe tier."""
        self.wait_updated()
        return self.master if self.optimizer_tier != "nvme" else self.rest.read("master")

    def master_range(self, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of this rank's master weights: a view, or a copy from the NVMe tier.

        Any thread may call this while no update is in flight.
        """
        if self.optimizer_tier != "nvme":
            return self.master.detach()[start:stop]
        out = torch.empty(stop - start, dtype=self.master_dtype)
        self.rest.read_into("master", out, start)
        return out

    def before_change(self) -> None:
        """Let a save in flight copy masters and optimizer states that are about to change."""
        hold = self.hold
        if hold is not None:
            hold.release()

    def write_master(self, start: int, values: Tensor) -> None:
        """Replace master weights from element ``start`` of this rank's range on. `refresh` updates the parameters."""
        self.wait_updated()
        self.before_change()
        if self.optimizer_tier == "nvme":
            self.rest.write("master", start, values.to(self.master_dtype))
        else:
            self.master.detach()[start : start + values.numel()].copy_(values)

    def full_master(self) -> Tensor:
        """Return the master weights of all ranks, ``(numel,)``; read-only at stage 0. Collective."""
        mine = self.read_master()
        if not self.policy.optimizer:
            return mine
        return self.gather_shards(mine.dtype, mine)

    def gather_shards(
        self, dtype: torch.dtype, mine: Tensor | Callable[[Tensor], Any], out: Tensor | None = None
    ) -> Tensor:
        """Gather values with this buffer's layout from the shards of all ranks, ``(numel,)``. Collective.

        Args:
            dtype: dtype of the values.
            mine: this rank's shard, or a function that writes it into the tensor that it gets.
            out: tensor for the result, ``(numel,)``.
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
        """Set whether the next gather copies the masters to this rank's shard of the parameters first."""
        self._refresh_due = due

    def refresh_if_due(self) -> None:
        """Call `refresh` if `require_refresh` asked for it."""
        if self._refresh_due:
            self._refresh_due = False
            self.refresh()

    def refresh(self) -> None:
        """Copy this rank's masters to its shard of the parameters. Not collective."""
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
        """Whether the masters are a slice of ``full``, so that no copy into it is needed."""
        return self.master.untyped_storage().data_ptr() == self.full.untyped_storage().data_ptr() != 0

    @property
    def master_is_complete(self) -> bool:
        """Whether the masters are ``full`` itself, so that a step changes the parameters at once."""
        return self.master_is_slice and not self.policy.optimizer

    def wait_updated(self) -> None:
        """Wait for the update in flight, if any, that reads or writes this buffer's states."""
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
        """Handle the end of an update of these states."""

    def record_versions(self) -> None:
        """Record versions and addresses, from which `ls_strategy.zero.writes` detects later writes."""
        with unnoticed():
            self.recorded_versions = [(p._version, p.data_ptr()) for p in self.params]
        self.may_be_written = False

    # gradients -------------------------------------------------------------------------------------------------------

    @property
    def has_other_views(self) -> bool:
        """Whether user code has a view of ``full``. Only valid if the masters are not a slice of it."""
        own = self._own_references if self.is_gathered else self._own_references - len(self.params)
        return storage_users(self.full) > own

    def hold_grad_buffer(self, dtype: torch.dtype) -> None:
        """Allocate the buffer for this rank's gradients if there is none, with zeros between the slots."""
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
        """Take over gradients in ``p.grad`` from an earlier engine (stages 0 and 1). The step averages them again.

        Args:
            scales: loss scale of each gradient, by ``id`` of the parameter.
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

    def rescale_grads(self, scale: float) -> None:
        """Multiply the gradients so far such that their loss scale is ``scale``, as that of the next ones."""
        factor, self.grad_scale = scale / self.grad_scale, scale
        if factor == 1.0:
            return
        here = [v for v, filled in zip(self.grad_views, self.filled, strict=False) if filled]
        for grad in [*here, *map(grad_of, self.params)]:
            if grad is not None:
                grad.detach().mul_(factor)

    def take_replaced(self, index: int) -> bool:
        """Copy a tensor that user code assigned to ``p.grad`` into its slot. Return whether ``p.grad`` is None.

        At stage 0 the tensor stays ``p.grad``, as in plain torch, and uses the slot's memory until `give_back_grads`.
        """
        grad, view = grad_of(self.params[index]), self.grad_views[index]
        self._restore_view(index)
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

    def _restore_view(self, index: int) -> None:
        """Copy values back that user code has moved to other memory (``p.grad.data = other``)."""
        assert self.grad is not None
        view, slot = self.grad_views[index], self.layout.slots[index]
        if view.numel() and view.data_ptr() != self.grad.data_ptr() + slot.offset * self.grad.element_size():
            here = self.grad[slot.offset : slot.end].view(slot.shape)
            here.copy_(view)
            view.data = here

    def has_adopted(self, index: int, grad: Tensor) -> bool:
        """Whether ``grad`` uses the slot's memory. Another tensor that did gets memory of its own."""
        adopted = self._adopted.get(index)
        if adopted is None:
            return False
        if adopted is grad and grad.data_ptr() == self.grad_views[index].data_ptr():
            return True
        self.give_back_grads([index])
        return False

    def _can_be_adopted(self, grad: Tensor, view: Tensor) -> bool:
        """Whether ``grad`` can use the slot's memory: not if it is another slot's."""
        same_kind = type(grad) is Tensor and grad.dtype == view.dtype and grad.device == view.device
        return same_kind and not grad.requires_grad and storage_key(grad) != storage_key(view)

    def give_back_grads(self, indices: Iterable[int]) -> None:
        """Move adopted tensors out of their slots, with their current values."""
        for i in indices:
            grad = self._adopted.pop(i, None)
            if grad is not None and grad.data_ptr() == self.grad_views[i].data_ptr():
                grad.data = grad.detach().clone()

    def show_grad(self, index: int) -> None:
        """Make the slot the parameter's ``grad``, which may be fp32 where the parameter is not.

        Call it after autograd has produced the gradient: within one backward pass autograd accumulates (tied weights)
        in the parameter's dtype, as at the stages that keep no ``p.grad``.
        """
        param, view = self.params[index], self.grad_views[index]
        if param.grad_dtype != view.dtype:  # type: ignore[attr-defined]
            set_grad(param, None)
            param.grad_dtype = view.dtype  # type: ignore[attr-defined]
        set_grad(param, self._adopted.get(index, view))

    def has_other_gradients(self, than: int) -> bool:
        """Whether this rank has gradients other than the one that parameter ``than`` has just got."""
        others = any(grad_of(p) is not None for i, p in enumerate(self.params) if i != than)
        added = bool(self.grad_views) and grad_of(self.params[than]) is self.grad_views[than]
        return others or added or any(self.filled) or self.reducing is not None

    def drop_grad_buffer(self) -> None:
        """Return the buffer to the pool after its gradients were reduced (stages 2 and 3)."""
        assert self.grad is not None
        self.comm.pool.give([self.grad])
        self.grad = None
        self.grad_views = []

    def widen_grads(self) -> None:
        """Convert the buffer to fp32, to accumulate further micro-batches (stages 0 and 1).

        The first backward fills a buffer in the parameters' dtype, so only runs that accumulate allocate fp32.
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
