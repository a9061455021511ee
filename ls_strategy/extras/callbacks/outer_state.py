"""Global weights and outer momentum of islands in checkpoints: full tensors by parameter name, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ls_strategy.checkpoint.full import full_state_dict, masters_from_state_dict
from ls_strategy.extras.islands.outer import Place, Shard, flats_of, full_range
from ls_strategy.host.pytorch import pl
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.zero.flat.flat_buffer import FlatBuffer

_VALUES = {"diloco_weights": "weights", "diloco_momentum": "momentum"}
"""Entries of a checkpoint, and the attributes of `Shard` that they hold."""

KEYS = ("diloco", *_VALUES)


def collect(
    strategy: ZeROStrategy, module: pl.LightningModule, shards: Mapping[Place, Shard]
) -> dict[str, dict[str, Any]]:
    """Return the entries of a checkpoint. Collective."""
    flats = flats_of(strategy.require_engine())
    return {
        key: _named(strategy, module, [full_range(flats[p], getattr(s, each)).clone() for p, s in shards.items()])
        for key, each in _VALUES.items()
    }


def _named(strategy: ZeROStrategy, module: pl.LightningModule, values: list[Tensor]) -> dict[str, Any]:
    """Return values of the masters that train by parameter name. Collective."""
    engine = strategy.require_engine()
    training = {id(p) for flat in engine.stepper.flats_that_train for p in flat.params}
    names = {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in training}
    raw = {name: value for name, value in strategy.raw_state_dict().items() if name in names}
    if strategy.collection is not None:
        return strategy.collection.weights(raw, values)
    others = dict(zip(engine.stepper.flats_that_train, values, strict=True))
    return full_state_dict(raw, engine.units, engine.mesh, others=others)


def load(
    saved: Mapping[str, Any],
    module: pl.LightningModule,
    flats: Mapping[Place, FlatBuffer],
    shards: Mapping[Place, Shard],
    places: list[Place],
) -> None:
    """Fill the shards of these buffers, as far as the checkpoint has all of their parameters. Not collective."""
    names = {id(p): n for n, p in module.named_parameters()}
    for place in places:
        flat, shard = flats[place], shards[place]
        if not all(names[id(p)] in saved["diloco_weights"] for p in flat.params):
            continue
        for key, each in _VALUES.items():
            target: Tensor = getattr(shard, each)
            value = torch.zeros(flat.stepped_numel, dtype=target.dtype)
            masters_from_state_dict(module, saved[key], [flat], [value])
            target.copy_(value if flat.policy.optimizer else value[slice(*flat.owned)])
