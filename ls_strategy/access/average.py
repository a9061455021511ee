"""Exchange the trainable weights with others, such as their average, and back."""

from __future__ import annotations

from torch import Tensor

from ls_strategy.engine import Engine


def exchange_masters(engine: Engine, others: list[Tensor], *, publish: bool) -> None:
    """Swap the contents of `Engine.trainable_masters` with ``others`` in place. A second call restores them.

    Args:
        engine: the engine that holds them.
        others: one tensor of the same shape per master.
        publish: update the module's parameters too. Collective then.
    """
    engine.wait()
    flats = engine.stepper.flats_that_train
    for flat, other in zip(flats, others, strict=True):
        flat.exchange_master(other)
    if publish and engine.policy.parameters:
        engine.gatherer.release_all()
    elif publish:
        engine.gatherer.publish(flats)
        engine.wait()
