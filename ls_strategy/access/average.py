"""Exchange the trainable weights with others, such as their average, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ls_strategy.engine import Engine
from ls_strategy.zero.flat.flat_buffer import FlatBuffer


def exchange_masters(engine: Engine, others: list[Tensor]) -> None:
    """Swap the contents of `Engine.trainable_masters` with ``others`` in place, and update the parameters. Collective.

    A second call restores them.

    Args:
        engine: the engine that holds them.
        others: one tensor of the same shape per master.
    """
    engine.wait()
    flats = engine.stepper.flats_that_train
    for flat, other in zip(flats, others, strict=True):
        flat.exchange_master(other)
    _publish(engine, flats)


def write_masters(engine: Engine, flats: list[FlatBuffer], values: Sequence[Tensor]) -> None:
    """Replace the master weights of some buffers that train, and the module's parameters. Collective."""
    engine.wait()
    for flat, value in zip(flats, values, strict=True):
        flat.replace_master(value)
    _publish(engine, flats)


def _publish(engine: Engine, flats: list[FlatBuffer]) -> None:
    if engine.policy.parameters:
        engine.gatherer.release_all()
    else:
        engine.gatherer.publish(flats)
        engine.wait()
