"""Measure the relative error that quantized all-gathers add to the parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ls_strategy.engine import Engine
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.packed import PackedFlat


def gather_error(engine: Engine) -> float:
    """Return the relative change of the weights by rounding: the norm of the change over that of the weights.

    Collective.

    Raises:
        StateError: weights are not rounded.
    """
    packed = [flat for flat in engine.flats if isinstance(flat, PackedFlat)]
    if engine.config.sharding.quantized_gathers is None:
        raise StateError(
            "gather_error() was called, but parameters are gathered as they are, so nothing is rounded. Set "
            'sharding.quantized_gathers="int8" on the strategy.'
        )
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for flat in packed:
        if flat.counted:
            sums += flat.gather_error()
    change, full = engine.mesh.world.reduce_numbers(sums, dist.ReduceOp.SUM).tolist()
    return (change / full) ** 0.5 if full else 0.0
