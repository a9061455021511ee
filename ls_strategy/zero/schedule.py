"""When the updates of a step begin, and when the next forward gets what they made.

=============================  ==========================================  ===================================
states                         update                                      new parameters
=============================  ==========================================  ===================================
on the device                  in `submit`, which the step calls           sent at once (stages 1, 2)
offloaded                      on the stream, in the next forward's order  sent when the forward needs the unit
offloaded, ``early``           begun while backward runs, unit by unit     likewise
offloaded, ``delayed``         on the stream, during the whole next step   sent at the end of the next step
=============================  ==========================================  ===================================

The numbers are those of a step that does one thing after the other; only ``delayed`` changes them (ZeRO-Offload,
section 5.2), and only where it was asked for.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import replace

from ls_strategy._compat import has_step_hooks
from ls_strategy.zero.gather import Gatherer
from ls_strategy.zero.offload import Offload
from ls_strategy.zero.optimizer import ShardedOptimizer
from ls_strategy.zero.units import Flat
from ls_strategy.zero.update import CopyOut, Update

_EARLY_UPDATES = 2
"""Updates under way while backward runs; with one more the oldest is waited for, so that few averages are in memory."""


class UpdateSchedule:
    """Hands updates to the stream, and their results to the gatherer."""

    def __init__(
        self, optimizers: list[ShardedOptimizer], gatherer: Gatherer, offload: Offload, *, owner: object
    ) -> None:
        """Nothing is under way. ``owner``: its methods among the optimizers' step hooks are not the user's."""
        self._owner = weakref.ref(owner)
        self._optimizers = optimizers
        self._gatherer = gatherer
        self._offload = offload
        self.overlap = False
        """Let the next forward wait for new weights unit by unit. Only where nothing else reads them in between."""

        self._early: deque[Flat] = deque()
        self._delayed: list[list[Flat]] = [[] for _ in optimizers]
        self._steps = [0 for _ in optimizers]

    def go_on_from(self, index: int, previous: UpdateSchedule, number: int) -> None:
        """Count the steps of optimizer ``index`` on from those of the earlier schedule's optimizer ``number``."""
        self._steps[index] = previous._steps[number]

    # while backward runs ---------------------------------------------------------------------------------------------

    @property
    def allows_early(self) -> bool:
        """Whether a unit may be updated before backward is over, as far as options and optimizers go.

        States on the device are updated all at once: to wait for single gradients would only hold backward up.
        """
        config = self._offload.config
        offloads = config.offload.optimizer is not None
        return offloads and len(self._optimizers) == 1 and config.offload.delay_after is None

    def begin_early(self, flat: Flat) -> None:
        """A buffer's averages are complete while backward still runs: begin its update. Not collective."""
        update = self._optimizers[0].early_update(flat)
        if update is None:
            self.postpone(flat)
            return
        # Parameters of the stages below 3 stay as they are until backward is over: something might still read them.
        flat.begin_early_update(self._offload.stream.submit(update.jobs()))
        self._early.append(flat)
        while len(self._early) > _EARLY_UPDATES:
            self._early.popleft().wait_updated()

    @staticmethod
    def postpone(flat: Flat) -> None:
        """A buffer's averages are complete, but its update has to wait for the step. Not collective."""
        flat.averages.spill()

    def forget_early(self) -> None:
        """An exception ended the backward pass."""
        self._early.clear()

    # the step --------------------------------------------------------------------------------------------------------

    def begin_step(self, index: int) -> int:
        """Optimizer ``index`` steps; returns the number of the step, from 1. Collective where updates are delayed."""
        self.bring_in_delayed(index)
        self._steps[index] += 1
        return self._steps[index]

    def submit(self, index: int, updates: list[Update]) -> None:
        """Updates of resident states run now; offloaded ones go to the stream, in the order the forward needs them."""
        by_flat = {id(u.flat): u for u in self._prepared(index, updates)}
        for unit in self._gatherer.forward_order():
            for flat in unit.flats:
                if id(flat) in by_flat:
                    self._begin(index, flat, by_flat[id(flat)])
        optimizer = self._optimizers[index].optimizer
        if has_step_hooks(optimizer, besides=self._owner()):
            for update in updates:  # the user's hooks after the step read the weights that it has made
                update.flat.wait_updated()

    def _prepared(self, index: int, updates: list[Update]) -> list[Update]:
        """With what offloaded updates need beside the averages."""
        after, delayed = self._offload.link.mark(), self._is_delayed(index)
        if not updates or self._offload.config.offload.optimizer is None:
            return updates
        # Once, here: the stream's thread would wait for the device at every buffer.
        clip = None if updates[0].clip is None else updates[0].clip.cpu()
        streamed, publish = self._offload.streamed, not delayed
        return [
            u if u.flat.optimizer_tier == "device"
            else replace(u, clip=clip, after=after, streamed=streamed, publish=publish)
            for u in updates
        ]  # fmt: skip

    def _is_delayed(self, index: int) -> bool:
        delay = self._offload.config.offload.delay_after
        return delay is not None and self._steps[index] > delay

    def _begin(self, index: int, flat: Flat, update: Update) -> None:
        if flat.optimizer_tier == "device":
            update.run()
            return
        ticket = self._offload.stream.submit(update.jobs())
        if self._is_delayed(index):
            flat.begin_delayed_update(ticket)
            self._delayed[index].append(flat)
        else:
            flat.updating = ticket

    def bring_in_delayed(self, index: int) -> None:
        """The updates of the step before are due: wait for them, and let the parameters follow. Collective."""
        flats, self._delayed[index] = self._delayed[index], []
        for flat in flats:
            flat.wait_updated()
            flat.require_refresh()
            flat.start_gather()
        for flat in flats:
            flat.finish_gather()

    def _copy_out_early(self, index: int) -> None:
        """Backward is over: what it has updated may reach the device, in the order in which the forward needs it."""
        after = self._offload.link.mark()
        for unit in self._gatherer.forward_order():
            for flat in unit.flats:
                if flat.optimizer_index == index and flat.updated_early and not flat.policy.parameters:
                    flat.updating = self._offload.stream.submit([CopyOut(flat, after)])

    @staticmethod
    def note_stepped(flats: list[Flat]) -> None:
        """Note that the optimizer steps masters of ``flats``. Not collective."""
        for flat in flats:
            brought_along = flat.optimizer_tier != "device" and flat.averages.folds_factors
            if not brought_along and (flat.optimizer_tier != "device" or flat.has_own_shard):
                flat.require_refresh()  # it steps the masters and nothing else

    def publish(self, index: int) -> None:
        """New weights to where they are read; updates that are under way are waited for when a unit needs them."""
        flats = self._optimizers[index].flats
        self._copy_out_early(index)
        for flat in flats:
            flat.updated_early = False
        self._early.clear()
        if self._gatherer.sharded:
            self._gatherer.release_all(stepped=True)
        else:
            held_back = {id(flat) for flat in self._delayed[index]}
            lazily = self._offload.config.offload.optimizer is not None
            self._gatherer.publish([f for f in flats if id(f) not in held_back], lazily=lazily)
        if not self.overlap:
            self._gatherer.finish_all()
