"""Measure the relative error that quantized reductions add to the gradients."""

from __future__ import annotations

import torch.distributed as dist

from ls_strategy.engine import Engine
from ls_strategy.errors import StateError


def gradient_error(engine: Engine) -> float:
    """Return the relative change of the averaged gradients by rounding since the last call, over all reductions.

    It is the norm of the errors of all messages over that of the sums, so errors count as independent of each other.
    Collective.

    Raises:
        StateError: gradients are not rounded.
    """
    if engine.config.sharding.quantized_gradients is None:
        raise StateError(
            "gradient_error() was called, but gradients are sent as they are, so nothing is rounded. Set "
            'sharding.quantized_gradients="int8" on the strategy.'
        )
    engine.reducer.finish_in_flight()
    sums = engine.reducer.rounding.take(engine.device)
    change, full = engine.mesh.world.reduce_numbers(sums, dist.ReduceOp.SUM).tolist()
    return (change / full) ** 0.5 if full else 0.0
