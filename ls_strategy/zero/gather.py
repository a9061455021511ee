"""When parameters are brought together and let go: gather with prefetch (stage 3), publish after a step (stages 1, 2).

Stage 3, forward of unit k (backward runs the same in the other direction)::

    compute       | k           | k+1         | k+2
    gather        | k+1         | k+2         | ...          released: k after its forward, the root after the step
"""

from __future__ import annotations

from ls_strategy.zero.units import Flat, Unit


class Gatherer:
    """Fetches, prefetches, releases and publishes the units of one model."""

    def __init__(self, units: list[Unit], *, sharded: bool, prefetch_units: int) -> None:
        """``sharded``: parameters are sharded (stage 3); otherwise units are resident and only published."""
        self.units = units
        self.sharded = sharded
        self.prefetch_units = prefetch_units
        self._order: list[Unit] = [u for u in units if not u.is_root]
        self._position = {id(u): i for i, u in enumerate(self._order)}
        self._seen: list[Unit] = []

    # stage 3 ---------------------------------------------------------------------------------------------------------

    def start(self, unit: Unit) -> None:
        """Start gathering a released unit. Collective."""
        for flat in unit.flats:
            if not flat.is_gathered and flat.gathering is None:
                flat.start_gather()

    def fetch(self, unit: Unit, *, backward: bool = False) -> None:
        """Make a unit readable, and start on the ones that will be needed next. Collective at stage 3."""
        if self.sharded:
            self.start(unit)
            if not unit.is_root:
                if not backward:
                    self._seen.append(unit)
                direction = -1 if backward else 1
                for neighbour in self._neighbours(unit, direction, self.prefetch_units):
                    if not any(flat.updated_early for flat in neighbour.flats):  # else its backward has no need of it
                        self.start(neighbour)
                for neighbour in self._neighbours(unit, direction, self.prefetch_units + 1):
                    self._read(neighbour)
        else:
            self._start_due(unit)
        for flat in unit.flats:
            flat.finish_gather()

    def _neighbours(self, unit: Unit, direction: int, distance: int) -> list[Unit]:
        i = self._position[id(unit)]
        return [
            self._order[j]
            for j in range(i + direction, i + direction * (distance + 1), direction)
            if 0 <= j < len(self._order)
        ]

    @staticmethod
    def _read(unit: Unit) -> None:
        """Begin to bring this rank's part from the drive, one unit before it is gathered. Not collective."""
        for flat in unit.flats:
            flat.start_read()

    def release(self, unit: Unit, *, stepped: bool = False) -> None:
        """Stage 3: let a unit's full parameters go, unless it is pinned; what was written there is taken.

        Args:
            unit: the unit.
            stepped: the masters are newer than what is gathered.
        """
        if self.sharded and not unit.pinned:
            for flat in unit.flats:
                if not stepped:
                    flat.take_writes()
                if flat.is_gathered or flat.gathering is not None or flat.reading is not None:
                    flat.release()

    def forward_order(self) -> list[Unit]:
        """Units in the order in which the next forward needs them: what may be used anywhere comes first."""
        return [*(u for u in self.units if u.is_root), *self._order]

    def is_last(self, unit: Unit) -> bool:
        """Whether the backward pass starts with this unit, so that releasing it now would gather it twice."""
        return bool(self._order) and self._order[-1] is unit

    def end_forward(self) -> None:
        """Adopt the order in which the forward really ran, for the next prefetch.

        Every rank runs the same modules in the same order (a forward is collective at stage 3), so all adopt the same.
        """
        seen = list(dict.fromkeys(self._seen))
        self._seen.clear()
        if len(seen) == len(self._order) and seen != self._order:
            self._order = seen
            self._position = {id(u): i for i, u in enumerate(seen)}

    def fetch_root(self) -> None:
        """Gather every root unit: their parameters may be used anywhere in a step. Collective at stage 3."""
        roots = [u for u in self.units if u.is_root]
        for unit in roots:
            if self.sharded:
                self.start(unit)
        if self.sharded and self._order and self.prefetch_units:
            self.start(self._order[0])
            for unit in self._order[1:2]:
                self._read(unit)
        for unit in roots:
            self.fetch(unit)

    def release_all(self, *, stepped: bool = False) -> None:
        """Stage 3: let everything go that is gathered, or on its way. ``stepped``: as in `release`."""
        for unit in self.units:
            unit.unpin()
            self.release(unit, stepped=stepped)
        self._seen.clear()

    def outdate(self, flats: list[Flat]) -> None:
        """The optimizer is stepping these: hooks that run after its step find what it makes. Not collective."""
        for flat in flats:
            if self.sharded:
                if flat.is_gathered:
                    flat.release()
                flat.outdate_views()
            elif not flat.master_is_complete:
                flat.publish_due = True
                flat.hide()

    # stages 0 to 2 ---------------------------------------------------------------------------------------------------

    def publish(self, flats: list[Flat], *, lazily: bool = False) -> None:
        """After a step: start sending the new weights to all; each unit's forward waits for its own. Collective.

        Args:
            flats: those that were stepped, in order of the units.
            lazily: updates are still under way: send a unit's weights when they are needed, the next unit's with them.
        """
        for flat in flats:
            if flat.gathering is not None:
                flat.finish_gather()
            if lazily:
                flat.publish_due = True
            else:
                flat.start_gather()
            if flat.is_on_its_way and not lazily and flat.is_seen:  # and may be read or written to at any time
                flat.finish_gather()
            elif flat.is_on_its_way:
                flat.note_outdated()
                flat.hide()

    def _start_due(self, unit: Unit) -> None:
        """Send what a unit waits for; of blocks always the first that are due, so that all ranks keep to one order."""
        due = [unit]
        if not unit.is_root:
            due = self._order[: self._position[id(unit)] + self.prefetch_units + 1]
        for one in due:
            for flat in one.flats:
                if flat.publish_due:
                    flat.start_gather()

    def finish_all(self) -> None:
        """Wait for every update and gather under way. Stage 3 keeps only what was complete or asked for."""
        for unit in self.units:
            for flat in unit.flats:
                flat.wait_updated()
                if flat.publish_due:
                    flat.start_gather()
        for unit in self.units:
            for flat in unit.flats:
                if flat.gathering is not None or flat.hidden:
                    flat.finish_gather()
