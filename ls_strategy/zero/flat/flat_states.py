"""The states of a flat buffer on this rank: where they are stored, and what is in flight from and to them.

This is what a plan says of one buffer, this rank's masters and its shard of the parameters, and the two state machines
of `ls_strategy.zero.flat.states`. `FlatBuffer` gathers and releases the full parameters. What only reads and changes
states (averaged gradients, user code's writes) knows no more than this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ls_strategy.config import TierName
from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import Comm, PendingGather
from ls_strategy.errors import StateError
from ls_strategy.layout import Piece
from ls_strategy.ops.split_master import SplitMaster
from ls_strategy.plan import FlatPlan
from ls_strategy.precision import at_least_fp32
from ls_strategy.tiers import TIERS
from ls_strategy.tiers.arrival import Arrival
from ls_strategy.tiers.stream import Ticket
from ls_strategy.zero.flat.local_gradients import LocalGradients, slot_views
from ls_strategy.zero.flat.state_store import StateStore
from ls_strategy.zero.flat.states import EARLY, FOLLOWS, ParameterState, UpdateState, not_next
from ls_strategy.zero_stages import StagePolicy


def states_offloaded(kinds: str) -> StateError:
    """Return the error for using states that `StateOffload.offload` has offloaded."""
    return StateError(
        f"the {kinds} of the model were used after strategy.offload_states() had moved them off the device. Call "
        "strategy.reload_states() on every rank first."
    )


class PendingSave(Protocol):
    """A save in the background that still has to read the states of a flat buffer."""

    def release(self) -> None:
        """Copy what was not read yet, and return when the states may change."""


class FlatStates:
    """The states of one flat buffer, and the phases that its parameters and its update are in."""

    # More than 20 public members: many are constants of the plan, which all parts of a step read. This is also the one
    # place where the phases of a parameter (released, reading, gathering, gathered, updating, publishing) change.

    hold: PendingSave | None = None
    """A save in flight that still has to read the states."""

    master_is_shown = False
    """Whether user code has views of the masters: the optimizer's groups hold them."""

    offloaded: frozenset[str] = frozenset()
    """The kinds of states that are offloaded for a while (`ls_strategy.zero.state_offload`)."""

    state = ParameterState.GATHERED
    """Where the parameters have their values."""

    is_gathered = True
    """Whether the parameters point at ``full``. Follows from `state`."""

    is_fetched = True
    """Whether the buffer is gathered, in ``full`` or in 16 bits. Follows from `state`."""

    gathered_on_demand = False
    """Stage 3: gathered because a parameter was used outside the unit's own module. Follows from `state`."""

    hidden = False
    """Stages 0 to 2: new values are in flight, and any use of a parameter waits for them. Follows from `state`."""

    full: Tensor
    """The parameters, ``(numel,)``, on the device. At stage 3 it has memory only while gathered."""

    views: list[Tensor]
    """One view of ``full`` per parameter."""

    master: Tensor
    """This rank's master weights, ``(stepped,)``; a placeholder on the NVMe tier."""

    shard: Tensor | None = None
    """Stage 3: this rank's shard of the parameters in memory, if it is stored in addition to the masters."""

    gathering: PendingGather | None = None
    """The all-gather into ``full`` in flight."""

    updating: Ticket | None = None
    """The update of this buffer's states that is in flight."""

    arriving: Arrival | None = None
    """New parameters in flight to the device."""

    update = UpdateState.NONE
    """What has been done with the gradients before, or after, the optimizer's own step."""

    publish_due = False
    """Whether new weights still have to be sent to the other ranks."""

    _refresh_due = False
    """Whether the masters are newer than this rank's shard of the parameters."""

    waited_s = 0.0
    """Seconds that the training thread has waited for updates and for gradients to reach their tier."""

    _lent: Tensor | None = None
    """Memory of averaged gradients that the update in flight reads. It is this buffer's again when it has ended."""

    local: LocalGradients
    """This rank's own gradients."""

    average_dtype: torch.dtype
    """Dtype of averaged gradients."""

    def __init__(
        self,
        plan: FlatPlan,
        params: list[nn.Parameter],
        *,
        policy: StagePolicy,
        comm: Comm,
        store: StateStore | None = None,
        axis: Axis | None = None,
        node: Comm | None = None,
    ) -> None:
        """Record the arguments; `FlatBuffer.load` allocates the buffers.

        Args:
            plan: layout, dtypes and tiers.
            params: parameters in the order of the layout's slots.
            policy: which states are sharded.
            comm: ranks over which they are sharded.
            store: of the states on their tiers; without it everything is on the device.
            axis: tensor- or expert-parallel ranks, which hold other parts or copies of the parameters.
            node: ranks that share a second copy of sharded parameters, see `Secondary`. None: there is none.
        """
        layout = plan.layout
        self.name = layout.slots[0].name if layout.slots else ""
        """Name of the first parameter."""
        self.policy = policy
        """Which states of this buffer are sharded."""
        self.resident = not policy.parameters and plan.quantized is None
        """Whether ``full`` stays in memory between uses. Otherwise units are gathered and released."""
        self.follow(plan, store or StateStore())
        self.has_optimizer = bool(plan.owners)
        """Whether the parameters are in an optimizer, also if they are frozen."""
        self.is_frozen = plan.unfrozen is not None
        """Whether they are, and no gradients are sent until `Unit.admit`; the same on all ranks."""
        self.average_dtype = at_least_fp32((plan.unfrozen or plan).master_dtype)
        if not self.has_optimizer:
            self.average_dtype = torch.float32
        self.layout = layout
        self._sizes = layout.sizes
        self.dtype = plan.dtype
        self.params = params
        self.nonempty_params = [p for p, slot in zip(params, layout.slots, strict=True) if slot.numel]
        """Those with elements: a backward pass waits for the gradients of these."""
        self.optimizer_index = plan.optimizer
        self.comm = comm
        self.axis = axis or Axis("tensor")
        self._node = node
        self.reduces_alone = self.axis.rank % plan.copies == 0 and not plan.replica
        """Whether no rank before this one reduces the same gradients. Ranks along its axis and over the pipeline stages
        count. Other groups of ranks do not: they have other batches."""
        self.counted = self.reduces_alone and comm.replica == 0
        """Whether this rank counts these parameters in norms and saves them: the first rank that holds them, along its
        axis, over the pipeline stages, and over the groups of ranks."""
        self.owned = layout.shard_range(comm.rank)
        """Range of the buffer whose gradients this rank averages and, from stage 1 on, steps."""
        self.stepped = self.owned if policy.optimizer else (0, layout.numel)
        self.stepped_numel = self.stepped[1] - self.stepped[0]
        """Number of elements in ``stepped``."""
        self.pieces: tuple[Piece, ...] = layout.pieces(*self.stepped)

    def follow(self, plan: FlatPlan, store: StateStore) -> None:
        """Take tiers and dtype of the states from a plan. ``store`` stores them."""
        self.plan, self.store = plan, store
        self.trainable = plan.trainable
        """Whether an optimizer updates the buffer. If not, it has neither gradients nor optimizer states."""
        self.optimizer_tier: TierName = plan.optimizer_tier
        """Tier of masters and optimizer states."""
        self.param_tier: TierName = plan.param_tier
        """Stage 3: tier of this rank's shard of the parameters."""
        self.reads_shard = plan.param_tier != "device"
        """Stage 3: whether that shard is read from another tier than the device."""
        self.averages_on_device = plan.gradient_tier == "device"
        """Whether averaged gradients stay on the device between backward and step."""
        self.steps_in_background = plan.optimizer_tier != "device"
        """Whether updates of the masters run beside other work, as their states are not on the device."""
        self.states_in_memory = TIERS[plan.optimizer_tier].resident
        """Whether masters and optimizer states are tensors. Otherwise `store` has them in chunks."""
        self.has_own_shard = plan.has_own_shard(self.policy)
        """Stage 3: whether that shard is stored in addition to the masters."""
        self.master_dtype = plan.master_dtype
        self.gradient_dtype = plan.gradient_dtype
        """Dtype in which this rank's gradients are sent."""

    def admit(self) -> None:
        """Send gradients from now on, although the parameters were frozen. All ranks must do so at the same time."""
        self.is_frozen = False

    def split(self, buffer: Tensor) -> list[Tensor]:
        """Return one view per parameter of a buffer with this layout."""
        return slot_views(self.layout, buffer)

    def require_here(self, kind: str) -> None:
        """Refuse to use states of a kind that `StateOffload.offload` has offloaded.

        Raises:
            StateError: with the cure.
        """
        if kind in self.offloaded:
            raise states_offloaded(kind)

    # masters ---------------------------------------------------------------------------------------------------------

    def read_master(self) -> Tensor:
        """Return this rank's master weights, ``(stepped,)``: the tensor itself, or a copy from the NVMe tier."""
        self.require_here("masters")
        self.wait_updated()
        return self.store.read("master")

    def master_range(self, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of this rank's master weights: a view, or a copy from the NVMe tier.

        Any thread may call this while no update is in flight.
        """
        self.require_here("masters")
        return self.store.view("master", start, stop)

    def masters_of(self, start: int, stop: int, held: Mapping[str, Tensor]) -> Tensor | SplitMaster:
        """Return what an update of elements ``[start, stop)`` changes; ``held`` has what is not in memory, by name."""
        master = held.get("master")
        return self.master.detach()[start:stop] if master is None else master

    def masters_in_memory(self) -> list[Tensor]:
        """Return the tensors that hold the masters, or what stands for them."""
        return [self.master]

    def watch(self) -> None:
        """Prepare for writes of user code that may come from now on without another trace."""

    def take_in_place(self, *, detected: bool) -> bool:
        """Let masters that are the parameters follow a possible write; return whether this rank's changed.

        ``detected``: there was a write to a parameter of the buffer.
        """
        return detected

    def writing(self) -> AbstractContextManager[None]:
        """Wrap writes of user code that are announced."""
        return nullcontext()

    def before_change(self) -> None:
        """Let a save in flight copy masters and optimizer states that are about to change."""
        hold = self.hold
        if hold is not None:
            hold.release()

    def write_master(self, start: int, values: Tensor) -> None:
        """Replace master weights from element ``start`` of this rank's range on. `refresh` updates the parameters."""
        self.require_here("masters")
        self.wait_updated()
        self.before_change()
        self.store.write("master", start, values.to(self.master_dtype))

    def full_master(self) -> Tensor:
        """Return the master weights of all ranks, ``(numel,)``; read-only at stage 0. Collective.

        Raises:
            StateError: backward has updated them, but not yet all others.
        """
        self.refuse_half_updated()
        mine = self.read_master()
        if not self.policy.optimizer:
            return mine
        return self.gather_shards(mine.dtype, mine)

    def refuse_half_updated(self) -> None:
        """Refuse to read weights between their update in backward and the step.

        Raises:
            StateError: with the cure.
        """
        if self.update is UpdateState.UPDATED_EARLY:
            raise self.read_again()

    def read_again(self) -> StateError:
        """Return the error for that."""
        return StateError(
            f"a parameter in the buffer of {self.name!r} is read again in the backward pass that has already "
            "updated it. Set sharding.overlap_step=False on the strategy."
        )

    def gather_shards(
        self, dtype: torch.dtype, mine: Tensor | Callable[[Tensor], Any], out: Tensor | None = None
    ) -> Tensor:
        """Gather values with this buffer's layout from the shards of all ranks, ``(numel,)``. Collective.

        ``mine`` is this rank's shard, or a function that writes it into the tensor that it gets.
        """
        full = torch.zeros(self.layout.numel, dtype=dtype, device=self.full.device) if out is None else out
        shard = full[slice(*self.owned)]
        if isinstance(mine, Tensor):
            shard.copy_(mine)
        else:
            mine(shard)
        self.comm.all_gather(full, self.name, self.layout.sizes).wait()
        return full

    def gathered_shard(self, master: Tensor) -> Tensor:
        """Return what a gather has put into this rank's range of ``full``; ``master`` has this rank's masters."""
        source = master if self.shard is None else self.shard
        return source.to(device=self.full.device, dtype=self.full.dtype)

    def require_refresh(self, due: bool = True) -> None:
        """Record new masters, on all ranks. ``due``: the next gather copies them to the shard of parameters first."""
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
            self.store.write("param", 0, mine.to(self.dtype))
        else:
            self.full[slice(*self.stepped)].copy_(mine)

    @property
    def master_is_slice(self) -> bool:
        """Return whether the masters are a slice of ``full``, so that no copy into it is needed."""
        if self.policy.parameters:
            return False
        return self.master.untyped_storage().data_ptr() == self.full.untyped_storage().data_ptr() != 0

    @property
    def master_is_private(self) -> bool:
        """Return whether user code has no view of the masters, so that `before_change` precedes all changes of them."""
        if not self.states_in_memory:
            return True
        return not self.master_is_shown and (self.steps_in_background or not self.master_is_slice)

    def wait_updated(self) -> None:
        """Wait for the update in flight, if any, that reads or writes this buffer's states."""
        if self.updating is not None:
            started = time.perf_counter()
            self.updating.wait()
            self.updating = None
            self.waited_s += time.perf_counter() - started
            if self._lent is not None:
                self.store.ring.give([self._lent])
                self._lent = None
        if self.arriving is not None:
            self.arriving.wait_on_device()
            self.arriving = None

    def place(self, mine: Tensor) -> None:
        """Store this rank's initial values on the tiers of masters and parameters."""
        one_copy = self.policy.parameters or self.dtype == self.master_dtype or not self.policy.optimizer
        first = mine if self.steps_in_background or one_copy else mine.clone()
        self.master = self.store.create("master", self.optimizer_tier, first, self.master_dtype)
        if self.has_own_shard:
            self.store.create("param", self.param_tier, mine, self.dtype)
            self.shard = self.store.in_memory("param")

    def written(self, indices: Iterable[int]) -> None:
        """Refuse backward passes through forwards of before that used parameters which user code has written to."""

    def show_stored(self) -> None:
        """Show what the parameters have become of values that were just written to them, if it differs."""

    def update_secondary(self) -> None:
        """Copy user code's writes to ``full`` into its second copy. Not collective: all ranks write the same."""

    # what is in flight -----------------------------------------------------------------------------------------------

    def begin_update(self, updating: Ticket | None) -> None:
        """Record an update of these states that runs in the background; None: it runs on this thread."""
        self.updating = updating

    def begin_arrival(self, arriving: Arrival) -> None:
        """Record new parameters on their way to the device, after those of before. Any thread of an update may call."""
        if self.arriving is not None:  # another chunk
            arriving.follow(self.arriving)
        self.arriving = arriving

    def give_up(self) -> None:
        """Forget the operations in flight, which have failed."""
        self.store.give_up()
        self.updating = self.arriving = None
        self._move_update(UpdateState.NONE)
        self.publish_due = False

    def begin_early_directions(self) -> None:
        """Record that split steps of this buffer's tensors have begun while backward still runs."""
        self._move_update(UpdateState.DIRECTED_EARLY)

    def end_early(self) -> None:
        """Forget what the backward pass has begun: the step has followed, or never will."""
        if self.update in EARLY:
            self._move_update(UpdateState.NONE)

    def owe_gather(self) -> None:
        """Record that new weights have still to be sent to the other ranks."""
        self.publish_due = True

    def end_owing(self) -> None:
        """Record that they are being sent, or that the ranks compute with the old ones for another step."""
        self.publish_due = False

    def count_wait(self, seconds: float) -> None:
        """Add to the time that the training thread has waited for updates and gradients."""
        self.waited_s += seconds

    def lend(self, averages: Tensor) -> None:
        """Leave averaged gradients to the update that has begun. Their memory returns to its pool when it has ended."""
        self._lent = averages

    def _move_update(self, to: UpdateState) -> None:
        if to not in FOLLOWS[self.update]:
            raise not_next(self.update, to, self.name)
        self.update = to

    def _move(self, to: ParameterState) -> None:
        if to not in FOLLOWS[self.state]:
            raise not_next(self.state, to, self.name)
        self.state = to
        self.is_fetched = to is not ParameterState.RELEASED
        self.is_gathered = to not in (ParameterState.RELEASED, ParameterState.CAST)
        self.gathered_on_demand = to is ParameterState.ON_DEMAND
        self.hidden = to is ParameterState.AWAITED
