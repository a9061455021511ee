"""A buffer of frozen parameters begins to train: its masters move to the tier and dtype of those that train."""

from __future__ import annotations

from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.state_store import StateStore


def unfreeze(flat: FlatBuffer, store: StateStore) -> None:
    """Give a buffer the states that ``flat.plan.unfrozen`` plans, in ``store``. Not collective.

    Raises:
        StateError: the states are offloaded between two steps.
    """
    plan, old = flat.plan.unfrozen, flat.store
    assert plan is not None
    if flat.reading is not None:
        flat.reading.result()  # it reads the masters of before
    flat.before_change()
    mine = flat.read_master()
    before = (flat.master_dtype, flat.steps_in_background, flat.has_own_shard)
    flat.follow(plan, store)
    store.keep(old)
    if before == (flat.master_dtype, flat.steps_in_background, flat.has_own_shard) == (flat.dtype, False, False):
        return
    device = mine.device if flat.steps_in_background else flat.full.device
    flat.place(mine.detach().to(device, flat.master_dtype))
    old.drop("master")
