"""Check that all weights belong to the same step."""

from __future__ import annotations

from collections.abc import Iterable

from ls_strategy.errors import StateError
from ls_strategy.zero.flat.units import Flat


def require_one_step(flats: Iterable[Flat], *, torn: bool, failure: BaseException | None) -> None:
    """Refuse to return weights if only some of them have taken the last step. Not collective.

    Raises:
        StateError: an exception ended a backward pass after it had begun to update, or an update failed.
    """
    if failure is not None:
        raise StateError(
            f"the update of offloaded states failed ({type(failure).__name__}: {failure}) after some units had "
            "been updated, so these weights do not belong to one step. Resume from the last checkpoint."
        ) from failure
    if torn or any(flat.updated_early or flat.directed_early for flat in flats):
        raise StateError(
            "an exception ended a backward pass after some units had been updated, so these weights do not belong to "
            "one step. Resume from the last checkpoint. Set sharding.overlap_step=False on the strategy to begin "
            "updates only when backward is over."
        )
