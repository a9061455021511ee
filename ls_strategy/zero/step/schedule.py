"""Schedule the updates of a step: when each begins, and when the next forward receives the new parameters.

=============================  ==========================================  ===================================
states                         update                                      new parameters
=============================  ==========================================  ===================================
on the device                  in the optimizer's step                     sent at once (stages 1, 2)
on the device, ``early``       while backward runs, unit by unit           sent at once (stages 1, 2)
offloaded                      on the stream, in the next forward's order  sent when the forward needs the unit
offloaded, ``early``           begun while backward runs, unit by unit     sent when the forward needs the unit
offloaded, ``delayed``         on the stream, during the whole next step   sent at the end of the next step
offloaded, stepped whole       on the stream, but for what an owner does   sent when the forward needs the unit
                               (``early``: its first part in backward)
=============================  ==========================================  ===================================

All but ``delayed`` give the results of a sequential step. ``delayed`` (ZeRO-Offload, section 5.2) is used only if
``offload.delay_after`` is set.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import replace

from ls_strategy._torch import has_step_hooks
from ls_strategy.tiers.link import trim_heap
from ls_strategy.tiers.stream import Stream
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.states import EARLY, UpdateState
from ls_strategy.zero.passes.gather import Gatherer
from ls_strategy.zero.step.offload import Offload
from ls_strategy.zero.step.optimizer import ShardedOptimizer
from ls_strategy.zero.step.update import CopyOut, Update

_EARLY_UPDATES = 2
"""Updates in flight while backward runs. One more waits for the oldest, so that few averages are in memory."""


class UpdateSchedule:
    """Submits updates to the stream, and publishes their results through the gatherer."""

    def __init__(
        self, optimizers: list[ShardedOptimizer], gatherer: Gatherer, offload: Offload, *, owner: object
    ) -> None:
        """Start with no update in flight. ``owner``: the object with the engine's own step hooks."""
        self._owner = weakref.ref(owner)
        self._optimizers = optimizers
        self._gatherer = gatherer
        self._offload = offload
        self._steps_on_device_early = offload.config.sharding.overlap_step == "backward"
        self.applies = offload.config.offload.any_state or self._steps_on_device_early
        """Whether states are offloaded, or updated in backward. If not, the step runs its updates, and publishes."""

        self.offloads = offload.config.offload.optimizer is not None
        """Whether the optimizer's are, so that their updates are submitted."""

        self._early: deque[FlatBuffer] = deque()
        self._delayed: list[list[FlatBuffer]] = [[] for _ in optimizers]
        self._steps = [0 for _ in optimizers]

    def go_on_from(self, index: int, previous: UpdateSchedule, number: int) -> None:
        """Continue the step count of optimizer ``index`` from optimizer ``number`` of an earlier schedule."""
        self._steps[index] = previous._steps[number]

    # while backward runs ---------------------------------------------------------------------------------------------

    @property
    def allows_early(self) -> bool:
        """Return whether options and optimizers allow a unit's update before backward is over.

        States on the device are updated all at once, unless ``sharding.overlap_step`` is ``backward``: waiting for
        single gradients frees memory, but delays backward.
        """
        return self._offload.config.updates_in_backward and len(self._optimizers) == 1

    def begin_early(self, flat: FlatBuffer) -> None:
        """Begin the update of a buffer with complete averages while backward still runs. Not collective."""
        # Gradients in host memory are freed by the end of an update in the background.
        on_device = self._steps_on_device_early and flat.averages_on_device
        may_begin = (flat.steps_in_background or on_device) and flat.allows_early_update()
        update = self._optimizers[0].early_update(flat) if may_begin else None
        if update is None:
            self._optimizers[0].owner.begin_early(flat, self._offload.stream)
            flat.averages.spill()  # its update has to wait for the step
            return
        if not flat.steps_in_background:
            update.run()
            flat.begin_early_update(None)
            return
        if self._offload.streamed:
            update = replace(update, after=self._offload.link.mark(), streamed=True)
        # Below stage 3, parameters do not change until backward is over: something might still read them. Those that
        # complete their masters do, see `FlatBuffer.allows_early_update`.
        flat.begin_early_update(self._offload.stream.submit(update.jobs()))
        self._early.append(flat)
        while len(self._early) > _EARLY_UPDATES:
            self._early.popleft().wait_updated()

    def forget_early(self) -> None:
        """Forget the early updates, after an exception has ended the backward pass."""
        self._early.clear()
        for optimizer in self._optimizers:
            optimizer.owner.forget_early()

    # the step --------------------------------------------------------------------------------------------------------

    def begin_step(self, index: int) -> int:
        """Begin a step of optimizer ``index``; return its number, from 1. Collective if updates are delayed."""
        if self._delayed[index]:
            self.bring_in_delayed(index)
        self._steps[index] += 1
        return self._steps[index]

    def end_step(self, number: int) -> None:
        """Free host memory that no later step needs. ``number`` is that of the step, 0 if it was skipped."""
        if number == 1:
            trim_heap()  # of the first step's transient buffers, before long-lived ones fragment the heap
        stock = self._offload.link.stock
        if stock.total_bytes:
            stock.trim()

    def stream_of(self, index: int) -> Stream | None:
        """Return the stream that may go on after a step of optimizer ``index``; None: code after it reads weights."""
        hooked = has_step_hooks(self._optimizers[index].optimizer, besides=self._owner())
        return None if hooked else self._offload.stream

    def submit(self, index: int, updates: list[Update]) -> None:
        """Submit updates of offloaded states in the order the forward needs them; run those on the device now."""
        by_flat = {id(u.flat): u for u in self._prepared(index, updates)}
        for unit in self._gatherer.forward_order():
            for flat in unit.flats:
                if id(flat) in by_flat:
                    self._begin(index, flat, by_flat[id(flat)])
        optimizer = self._optimizers[index].optimizer
        if has_step_hooks(optimizer, besides=self._owner()):
            for update in updates:  # the user's hooks after the step read the new weights
                update.flat.wait_updated()

    def _prepared(self, index: int, updates: list[Update]) -> list[Update]:
        """Add to offloaded updates the clip factor, the mark of the device's work, and where they run."""
        if not updates:
            return updates
        after, delayed = self._offload.link.mark(), self._is_delayed(index)
        # Once, here: the stream's thread would wait for the device at every buffer.
        clip = None if updates[0].clip is None else updates[0].clip.cpu()
        streamed = self._offload.streamed
        return [
            replace(u, clip=clip, after=after, streamed=streamed, publish=u.publish and not delayed)
            if u.flat.steps_in_background else u
            for u in updates
        ]  # fmt: skip

    def _is_delayed(self, index: int) -> bool:
        delay = self._offload.config.offload.delay_after
        return delay is not None and self._steps[index] > delay and not self._optimizers[index].is_mixed

    def _begin(self, index: int, flat: FlatBuffer, update: Update) -> None:
        if not flat.steps_in_background:
            update.run()
            return
        ticket = self._offload.stream.submit(update.jobs())
        if self._is_delayed(index):
            flat.begin_delayed_update(ticket)
            self._delayed[index].append(flat)
        else:
            flat.begin_update(ticket)

    def bring_in_delayed(self, index: int) -> None:
        """Wait for the delayed updates of the previous step, and gather the parameters. Collective."""
        flats, self._delayed[index] = self._delayed[index], []
        for flat in flats:
            flat.wait_updated()
            flat.require_refresh()
            flat.start_gather()
        for flat in flats:
            flat.finish_gather()

    def _copy_out_early(self, index: int) -> None:
        """Copy early updates to the device after backward, in the order the forward needs them."""
        flats = [flat for unit in self._gatherer.forward_order() for flat in unit.flats]
        early = [
            f
            for f in flats
            if f.optimizer_index == index
            and f.update is UpdateState.UPDATED_EARLY
            and f.steps_in_background
            and not f.policy.parameters
            and f.plan.split_masters is None
        ]
        if early:
            after = self._offload.link.mark()
            for flat in early:
                flat.begin_update(self._offload.stream.submit([CopyOut(flat, after)]))

    def publish(self, index: int, flats: list[FlatBuffer]) -> None:
        """Publish the new weights of ``flats``. A unit that needs an update in flight waits for it."""
        if self._early:
            self._copy_out_early(index)
        for flat in flats:
            if flat.update in EARLY:
                flat.end_early()
        self._early.clear()
        for flat in self._delayed[index]:
            flat.go_on_with_old()
        self._gatherer.end_step([f for f in flats if f.update is not UpdateState.DELAYED], lazily=self.offloads)
