"""Free the device's memory of model states between two steps; `ls_strategy.zero.away` does the work."""

from __future__ import annotations

from collections.abc import Collection

from ls_strategy.engine import Engine


def offload_states(engine: Engine, kinds: Collection[str]) -> int:
    """Free the device's memory of states and return its bytes; see `Away.give`. Collective.

    What was given before is given again. ``engine.away.take_back()`` ends it.
    """
    kinds = engine.away.kinds.union(kinds)
    engine.away.take_back()
    engine.reducer.finish_in_flight()
    engine.wait()
    for flat in engine.flats:
        flat.averages.wait()
    return engine.away.give(kinds, {flat.comm.pool for flat in engine.flats} | {engine.comm.pool})
