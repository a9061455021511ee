"""Gather, prefetch and release parameters during the passes (stage 3), and publish them after a step (stages 1 and 2).

Stage 3, forward of unit k (backward runs the same in the other direction)::

    compute       | k           | k+1         | k+2
    gather        | k+1         | k+2         | ...          released: k after its forward, the root after the step
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.states import UpdateState
from ls_strategy.zero.flat.units import Unit


class Gatherer:
    """Gathers, prefetches, releases and publishes the units of one model.

    The planner runs `fetch`, `release` and the like on its simulated buffers, too: see
    `ls_strategy.extras.planner.buffers`.
    """

    def __init__(self, units: list[Unit], *, sharded: bool, prefetch_units: int) -> None:
        """``sharded``: parameters are sharded (stage 3). Otherwise they are published, and quantized ones released."""
        self.units = units
        self.sharded = sharded
        self.releases = sharded or any(not flat.resident for unit in units for flat in unit.flats)
        """Whether some buffers are released between their uses: all at stage 3, below only the quantized ones."""
        self.prefetch_units = prefetch_units
        self._reads_ahead = any(flat.reads_shard for unit in units for flat in unit.flats)
        """Whether shards of parameters are on a tier from which they are read before they are gathered."""
        self._with_secondary = [f for unit in units for f in unit.flats if f.plan.node]
        """Buffers with a second copy per node."""
        self._order: list[Unit] = [u for u in units if not u.is_root]
        self._position = {id(u): i for i, u in enumerate(self._order)}
        self._seen: list[Unit] = []
        self._published = 0
        """Stages 0 to 2: number of blocks, in `_order`, whose new weights no longer have to be sent."""
        self.overlap = False
        """Let the next forward wait for new weights unit by unit. Set this only if nothing else reads them before."""
        self._waits_before_steps = False
        self.stepped: set[int] = set()
        """``id`` of the buffers that an optimizer has stepped since the step began (stage 3)."""

    # stage 3 ---------------------------------------------------------------------------------------------------------

    def start(self, unit: Unit) -> None:
        """Start gathering a released unit. Collective at stage 3."""
        for flat in unit.flats:
            if flat.on_demand is not None and flat.on_demand.state_dict_copies.fresh:
                flat.on_demand.take_copies_early(flat)
            if not flat.resident and not flat.is_fetched and flat.gathering is None:
                flat.start_gather()

    def fetch(self, unit: Unit, *, backward: bool = False) -> None:
        """Gather a unit, or wait for its new weights, and start on the next ones. Collective at stage 3."""
        if self.sharded and not self.is_kept(unit):
            self.start(unit)
            if not unit.is_root:
                if not backward:
                    self._seen.append(unit)
                i, order, ahead = self._position[id(unit)], self._order, self.prefetch_units + 1
                neighbours = order[max(i - ahead, 0) : i][::-1] if backward else order[i + 1 : i + 1 + ahead]
                for neighbour in neighbours[: self.prefetch_units]:
                    if all([flat.update is not UpdateState.UPDATED_EARLY for flat in neighbour.flats]):
                        self.start(neighbour)  # else its backward is over
                for neighbour in neighbours if self._reads_ahead else ():
                    self._read(neighbour)
        elif not self.sharded:
            self._start_due(unit)
            if self.releases:
                self.start(unit)
        for flat in unit.flats:
            flat.finish_gather()

    @staticmethod
    def fetch_exactly(unit: Unit) -> None:
        """Gather in fp32 what would be in 16 bits: transforms of `torch.func` need the parameters. Collective."""
        for flat in unit.flats:
            if flat.plan.cast_to is not None and not flat.resident and not flat.is_gathered:
                flat.gather_exactly()
                if flat.gathering is None:
                    flat.start_gather()
                flat.finish_gather()

    @staticmethod
    def is_kept(unit: Unit) -> bool:
        """Return whether the forward of a unit sends nothing.

        It sends nothing if user code holds the unit (`Engine.gathered`), or if the unit is replicated. Then nothing is
        prefetched either, because ranks may run such a forward a different number of times.
        """
        return all([flat.resident or (flat.is_fetched and flat.users) for flat in unit.flats])

    @contextmanager
    def keeping(self, flats: list[FlatBuffer]) -> Iterator[None]:
        """Release at the end what forwards inside have left gathered, because user code holds ``flats``."""
        wanted = set(map(id, flats))
        ours = [u for u in self.units if any(id(f) in wanted and not f.is_in_use for f in u.flats)]
        try:
            yield
        finally:
            for unit in ours:
                if not unit.open_backwards:
                    self.release(unit)

    @staticmethod
    def _read(unit: Unit) -> None:
        """Start reading this rank's shard from its tier, one unit before it is gathered. Not collective."""
        for flat in unit.flats:
            flat.start_read()

    def release(self, unit: Unit, *, stepped: bool = False, kept: bool = False) -> None:
        """Free a unit's full parameters, unless they are resident or pinned, after taking writes to them.

        Args:
            unit: the unit.
            stepped: the masters are newer than the gathered parameters, so writes are not taken.
            kept: free also what user code holds, because it is outdated. The next use gathers it again.
        """
        if self.releases and not unit.pinned:
            for flat in unit.flats:
                if flat.resident or (flat.users and not (kept or stepped)):
                    flat.release_cast()
                    continue
                if not stepped:
                    flat.take_writes()
                if flat.is_fetched or flat.gathering is not None or flat.reading is not None:
                    flat.release()

    def forward_order(self) -> list[Unit]:
        """Return the units in the order in which the next forward needs them: root units first."""
        return [*(u for u in self.units if u.is_root), *self._order]

    def is_last(self, unit: Unit) -> bool:
        """Return whether the backward pass starts with this unit, so that releasing it now would gather it twice."""
        return bool(self._order) and self._order[-1] is unit

    def end_forward(self) -> None:
        """Prefetch in the order of the last forward from now on.

        Every rank runs the same modules in the same order, because a forward is collective at stage 3.
        """
        seen = list(dict.fromkeys(self._seen))
        self._seen.clear()
        if len(seen) == len(self._order) and seen != self._order:
            self._order, self._published = seen, 0
            self._position = {id(u): i for i, u in enumerate(seen)}

    def fetch_root(self) -> None:
        """Gather the root units, the parameters of which may be used anywhere in a step. Collective at stage 3."""
        self.stepped.clear()
        for flat in self._with_secondary:
            flat.outdate_secondary()
        roots = [u for u in self.units if u.is_root]
        for unit in roots if self.sharded else ():
            self.start(unit)
        if self.sharded and self.prefetch_units:
            for unit in self._order[:1]:
                self.start(unit)
            for unit in self._order[1:2] if self._reads_ahead else ():
                self._read(unit)
        for unit in self.forward_order() if self._waits_before_steps else roots:
            self.fetch(unit)

    def fetch_root_again(self) -> None:
        """Gather what a step of another optimizer has released of the root units. Collective at stage 3.

        Backward may come from a forward before that step, as in a GAN whose losses share a batch of fakes. What was
        stepped is left out, so that autograd refuses what it has saved of it. At stages 1 and 2 autograd has saved the
        memory where new weights arrive: all of them have to be there, as all are under DDP.
        """
        if not self.sharded:
            self.finish_all()
            return
        flats = [f for u in self.units if u.is_root for f in u.flats]
        released = [f for f in flats if not f.resident and not f.is_fetched and id(f) not in self.stepped]
        for flat in released:
            if flat.gathering is None:
                flat.start_gather()
        for flat in released:
            flat.finish_gather()

    def wait_before_steps(self) -> None:
        """Let new weights of all units arrive before a step from now on, and now (stages 0 to 2).

        Collective if weights still have to be sent.
        """
        if not self.releases:
            self._waits_before_steps = True
            self.finish_all()

    def release_all(self, *, stepped: bool = False) -> None:
        """Release all units that are gathered or in flight. ``stepped``: as in `release`."""
        for unit in self.units:
            if unit.pinned:
                unit.unpin()
            self.release(unit, stepped=stepped, kept=True)
        for flat in self._with_secondary:
            flat.outdate_secondary()
        self._seen.clear()

    def outdate(self, flats: list[FlatBuffer]) -> None:
        """Outdate parameters that the optimizer steps, so that hooks after it read new ones. Not collective."""
        self.stepped.update(map(id, flats))
        for flat in flats:
            by_fused_update = flat.steps_in_background and flat.averages.folds_factors
            if not by_fused_update and (flat.steps_in_background or flat.has_own_shard):
                flat.require_refresh()  # the optimizer's own step updates the masters only
            if self.sharded:
                if flat.plan.node:
                    flat.outdate_secondary()
                if flat.plan.cast_to is not None:
                    flat.outdate_casts()
                if flat.is_fetched:
                    flat.release()
                flat.writes.outdate_memory()
            elif flat.policy.optimizer or not flat.master_is_slice:  # else the step changes the parameters at once
                flat.owe_gather()
                self._published = 0
                flat.hide()

    def end_step(self, flats: list[FlatBuffer], *, lazily: bool = False) -> None:
        """Release everything after ``flats`` were stepped (stage 3), or `publish` them. Collective."""
        if self.sharded:
            self.release_all(stepped=True)
        else:
            self.publish(flats, lazily=lazily)
            if self.releases:
                self.release_all()
        if not self.overlap:
            self.finish_all()

    # stages 0 to 2 ---------------------------------------------------------------------------------------------------

    def publish(self, flats: list[FlatBuffer], *, lazily: bool = False) -> None:
        """Start sending the new weights of ``flats`` after a step. Each unit's forward waits for its own. Collective.

        ``lazily``: updates are still in flight, so a unit's weights are sent when it or the unit before it runs.
        """
        self._published = 0
        for flat in flats:
            if flat.gathering is not None:
                flat.finish_gather()
            if lazily:
                flat.owe_gather()
            else:
                flat.start_gather()
            if flat.is_arriving and not lazily and flat.writes.is_viewed:  # a view can be used at any time
                flat.finish_gather()
            elif flat.is_arriving:
                flat.writes.mark_outdated()
                flat.hide()

    def _start_due(self, unit: Unit) -> None:
        """Send the weights that a unit waits for, and of blocks all earlier ones, in the same order on all ranks."""
        due = [unit]
        if not unit.is_root:
            stop = self._position[id(unit)] + self.prefetch_units + 1
            due = self._order[self._published : stop]
            self._published = max(self._published, stop)
        for each in due:
            for flat in each.flats:
                if flat.publish_due:
                    flat.start_gather()

    def finish_all(self) -> None:
        """Wait for every update and gather in flight."""
        for unit in self.units:
            for flat in unit.flats:
                if flat.updating is not None or flat.arriving is not None:
                    flat.wait_updated()
                if flat.publish_due:
                    flat.start_gather()
        for unit in self.units:
            for flat in unit.flats:
                if flat.gathering is not None or flat.hidden:
                    flat.finish_gather()
