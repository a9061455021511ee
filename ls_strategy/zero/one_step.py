"""Weights that all belong to the same step, or an error."""

from __future__ import annotations

from collections.abc import Iterable

from ls_strategy.errors import StateError
from ls_strategy.zero.units import Flat


def require_one_step(flats: Iterable[Flat], *, torn: bool, failure: BaseException | None) -> None:
    """Refuse to hand out weights of which some have taken a step that the others have not. Not collective.

    Args:
        flats: of the engine.
        torn: an exception ended a backward pass that had begun to update.
        failure: what an update of offloaded states failed with.

    Raises:
        StateError: an exception ended a backward pass that had begun to update, or an update failed.
    """
    if failure is not None:
        raise StateError(
            f"the update of offloaded states failed ({type(failure).__name__}: {failure}) after some units had "
            "been updated, so these weights belong to no step. Resume from the last checkpoint."
        ) from failure
    if torn or any(flat.updated_early for flat in flats):
        raise StateError(
            "an exception ended a backward pass after some units had been updated, so these weights belong to no "
            "step. Resume from the last checkpoint; with sharding.overlap_step=False on the strategy, updates "
            "begin only when backward is over."
        )
