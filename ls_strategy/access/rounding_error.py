"""Measure the relative error that quantized all-gathers add to the parameters, and reductions to the gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy.engine import Engine
from ls_strategy.errors import StateError


def gather_error(engine: Engine) -> float:
    """Return the relative change of the weights by rounding: the norm of the change over that of the weights.

    Collective.

    Raises:
        StateError: weights are not rounded.
    """
    if engine.config.sharding.quantized_gathers is None:
        raise StateError(
            "gather_error() was called, but parameters are gathered as they are, so nothing is rounded. Set "
            'sharding.quantized_gathers="int8" on the strategy.'
        )
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for flat in engine.flats:
        if flat.counted and flat.wire is not None and flat.wire.encodes:
            own = flat.read_master().detach().to(device=flat.full.device, dtype=flat.dtype)
            change = flat.wire.form.rounded(own).double() - own.double()
            sums += torch.stack([change.square().sum(), own.double().square().sum()])
    return _relative(engine, sums)


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
    return _relative(engine, engine.reducer.rounding.take(engine.device))


def _relative(engine: Engine, sums: Tensor) -> float:
    change, full = engine.mesh.world.reduce_numbers(sums, dist.ReduceOp.SUM).tolist()
    return (change / full) ** 0.5 if full else 0.0
