"""Measure the relative error that quantized all-gathers add to the parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy.distributed.wire_format import WireFormat
from ls_strategy.engine import Engine
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_buffer import FlatBuffer


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
            sums += _error_of(flat, flat.wire.form)
    change, full = engine.mesh.world.reduce_numbers(sums, dist.ReduceOp.SUM).tolist()
    return (change / full) ** 0.5 if full else 0.0


def _error_of(flat: FlatBuffer, form: WireFormat) -> Tensor:
    """Return the sums of squares of what rounding changes and of the weights in this rank's shard, ``(2,)`` fp64.

    Not collective.
    """
    own = flat.read_master().detach().to(device=flat.full.device, dtype=flat.dtype)
    change = form.rounded(own).double() - own.double()
    return torch.stack([change.square().sum(), own.double().square().sum()])
