"""Frozen parameters of an optimizer that begin to train.

They have neither gradients nor optimizer states, see `FlatPlan.unfrozen`. What happens when one is unfrozen::

    unfreeze     on this rank: the buffer gets masters and states like those that train
    admit        on all ranks: its gradients are sent in backward from now on

The forward and the backward look at ``requires_grad``, as user code has set it on all ranks, and admit. A gradient that
comes without that is sent by the step, which agrees on it first. States that are loaded only unfreeze: a rank may have
none of them. A buffer that trains once stays so, also if it is frozen again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ls_strategy.zero.events import StepEvents
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import unnoticed
from ls_strategy.zero.flat.state_store import StateStore
from ls_strategy.zero.flat.units import Unit
from ls_strategy.zero.step.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from ls_strategy.zero.setup.shard import ShardedModel  # the floor above


class Unfreezing:
    """Lets the frozen buffers of one model train."""

    def __init__(self, model: ShardedModel, events: StepEvents) -> None:
        """Begin without optimizers; `add` them in order. Where nothing is frozen, no event of a step comes here."""
        self._model = model
        self._optimizers: list[ShardedOptimizer] = []
        self._frozen: list[tuple[Unit, FlatBuffer]] = [(u, f) for u in model.units for f in u.flats if f.is_frozen]
        self.on_admitted: list[Callable[[list[FlatBuffer]], None]] = []
        """Called with the buffers that begin to train, on all ranks."""
        model.reducer.admit = self.admit
        begins = (events.on_step_begin, events.on_backward_begin) if self._frozen else ()
        self._unsubscribe = [event.subscribe(self.follow) for event in begins]

    def add(self, sharded: ShardedOptimizer) -> None:
        """Inform an optimizer, and be informed by it about states that are loaded."""
        self._optimizers.append(sharded)
        sharded.states.unfreeze = self.unfreeze

    def follow(self) -> None:
        """Admit the buffers with a parameter that was unfrozen. All ranks must have unfrozen the same ones."""
        with unnoticed():
            due = [flat for _, flat in self._frozen if any(p.requires_grad for p in flat.params)]
        if due:
            self.admit(due)

    def admit(self, flats: Iterable[FlatBuffer]) -> None:
        """Send the gradients of frozen buffers from now on. All ranks must do so at the same time."""
        chosen = set(map(id, flats))
        admitted = [(unit, flat) for unit, flat in self._frozen if id(flat) in chosen]
        if not admitted:
            return
        self._frozen = [(unit, flat) for unit, flat in self._frozen if id(flat) not in chosen]
        while self._unsubscribe and not self._frozen:
            self._unsubscribe.pop()()
        self.unfreeze(flat for _, flat in admitted)
        for unit, flat in admitted:
            unit.admit(flat)
        self._model.reducer.reorder(self._model.units)
        for call in self.on_admitted:
            call([flat for _, flat in admitted])

    def unfreeze(self, flats: Iterable[FlatBuffer]) -> None:
        """Give buffers the states of those that train, unless they have them. Not collective."""
        chosen = {id(flat) for flat in flats if not flat.trainable}
        due = {number: flat for number, flat in enumerate(self._model.flats) if id(flat) in chosen}
        if not due:
            return
        plans = {number: flat.plan.unfrozen for number, flat in due.items() if flat.plan.unfrozen is not None}
        optimizers = [sharded.optimizer for sharded in self._optimizers]
        stores = self._model.offload.stores_of_unfrozen(plans, self._model.policy, optimizers)
        for number, flat in due.items():
            _move(flat, stores[number])
            for sharded in self._optimizers:
                if flat in sharded.flats:
                    sharded.follow(flat)


def _move(flat: FlatBuffer, store: StateStore) -> None:
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
