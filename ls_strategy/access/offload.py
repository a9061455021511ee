"""Free the device's memory of model states between two steps; `ls_strategy.zero.state_offload` does the work."""

from __future__ import annotations

from collections.abc import Collection

from ls_strategy.engine import Engine


def offload_states(engine: Engine, kinds: Collection[str]) -> int:
    """Free the device's memory of states and return its bytes; see `StateOffload.offload`. Collective.

    What was given before is given again. ``engine.state_offload.reload()`` ends it.
    """
    kinds = engine.state_offload.kinds.union(kinds)
    engine.state_offload.reload()
    engine.reducer.finish_in_flight()
    engine.wait()
    for flat in engine.flats:
        flat.averages.wait()
    return engine.state_offload.offload(kinds, engine.pools)
