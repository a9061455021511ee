"""Averaged gradients by the names of their parameters: in full, unit by unit, or their norms from the shards.

Both are legal between a backward and the next ``zero_grad``. Loss scale and clipping that the update was left to apply
are applied to what is returned, and to nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy.engine import Engine
from ls_strategy.errors import ConfigError
from ls_strategy.zero.parts import full_of
from ls_strategy.zero.step.current import CurrentGradients, current_gradients


def full_gradients(engine: Engine, wanted: Collection[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full gradient of parameters, one flat buffer in memory at a time. Collective over all ranks.

    Args:
        engine: the engine that holds the parameters.
        wanted: ``id`` of the parameters. None: all.

    Raises:
        StateError: there are no gradients.
    """
    for current in current_gradients(engine.stepper):
        chosen = _chosen(current, wanted)
        if chosen:
            yield from _full(current, chosen)


def _full(current: CurrentGradients, chosen: list[int]) -> Iterator[tuple[str, Tensor]]:
    flat = current.flat
    # At stage 0 every rank has the averages, and they stay those of the step.
    buffer = flat.averages.tensor().clone() if flat.averages.in_place else flat.averages.gather()
    buffer.mul_(current.factor_on(buffer.device))
    for i in chosen:
        slot = flat.layout.slots[i]
        yield slot.name, full_of(buffer[slot.offset : slot.end].view(slot.shape), slot.part, flat.axis)


def grad_norms(engine: Engine, wanted: Collection[int] | None = None, norm_type: float = 2.0) -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, ``()`` by name, on every rank. Gathers nothing. Collective.

    They are fp32, or fp64 where the parameters are.

    Traffic:
        one all-reduce of a number per parameter; in a pipeline also the names.

    Raises:
        ConfigError: ``norm_type`` is not positive.
        StateError: there are no gradients.
    """
    if not norm_type > 0:
        raise ConfigError(f"Got norm_type={norm_type}, but it must be positive or float('inf'). Set norm_type=2.")
    found = {
        current.flat.layout.slots[i].name: (current, i)
        for current in current_gradients(engine.stepper)
        for i in _chosen(current, wanted)
    }
    dtypes: dict[str, torch.dtype] = {}
    for part in engine.mesh.pipeline.exchange_objects({name: c.flat.average_dtype for name, (c, _) in found.items()}):
        dtypes |= part
    names = list(dtypes)
    device = engine.device
    local = torch.zeros(len(names), dtype=torch.float64, device=device)
    for number, name in enumerate(names):
        if name in found and found[name][0].flat.counted:
            local[number] = _power_of_shard(*found[name], norm_type).to(device)
    largest = math.isinf(norm_type)
    total = engine.mesh.world.reduce_numbers(local, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    norms = (total if largest else total.pow(1.0 / norm_type)).unbind()
    return {name: norm.to(dtypes[name]) for name, norm in zip(names, norms, strict=True)}


def _chosen(current: CurrentGradients, wanted: Collection[int] | None) -> list[int]:
    params = zip(current.flat.params, current.used, strict=True)
    return [i for i, (p, used) in enumerate(params) if used and (wanted is None or id(p) in wanted)]


def _power_of_shard(current: CurrentGradients, i: int, norm_type: float) -> Tensor:
    """Return the sum of powers, or the maximum, of one parameter's elements that this rank averages, ``()`` fp64."""
    flat = current.flat
    piece = flat.layout.pieces(*flat.owned)[i]
    if not piece.numel or not flat.averages.hold_values:
        return torch.zeros((), dtype=torch.float64)
    values = flat.averages.owned(piece.start, piece.stop).double()
    values = values * current.factor_on(values.device)
    norm = torch.linalg.vector_norm(values, norm_type)
    return norm if math.isinf(norm_type) else norm.pow(norm_type)
