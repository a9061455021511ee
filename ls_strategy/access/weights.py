"""A bounded stream of full weights: what ``module.state_dict()`` has, one unit at a time.

Memory: at most two flat buffers of the dtype asked, the one that is gathered and the one that the loop still looks at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy.engine import Engine
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.units import places_of
from ls_strategy.zero.parts import full_of


@dataclass(frozen=True)
class _StateDictTensor:
    """One tensor of the state dict, with all its names; tied parameters have several."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def full_weights(engine: Engine, module: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full tensors of ``module.state_dict()`` on every rank, in the order of the units. Collective.

    Args:
        engine: the engine that holds the parameters.
        module: the engine's model or a part of it; names begin there.
        dtype: of floating-point parameters. None: the one that the forward reads.

    Traffic:
        one all-gather per flat buffer at stage 3, and at stages 1 and 2 for a dtype other than the forward's; in a
        pipeline one broadcast per tensor.

    Raises:
        StateError: only some weights have taken the last step, or they are offloaded.
    """
    engine.check_complete()
    engine.wait()
    here = _Weights(engine, module, dtype)
    pipeline = engine.mesh.pipeline
    if pipeline.world_size == 1:
        for entry, value in here.stream(None):
            yield from ((name, value) for name in entry.names)
        return
    stages: list[list[_StateDictTensor]] = pipeline.exchange_objects(here.entries())
    seen: set[str] = set()
    for stage, entries in enumerate(stages):
        fresh = [entry for entry in entries if seen.isdisjoint(entry.names)]  # tied parameters are on two stages
        seen.update(name for entry in fresh for name in entry.names)
        if stage == pipeline.rank:
            tensors = (value for _, value in here.stream({entry.names for entry in fresh}))
        else:
            tensors = (torch.empty(e.shape, dtype=e.dtype, device=engine.device) for e in fresh)
        for entry, value in zip(fresh, tensors, strict=True):
            value = value.to(engine.device).contiguous()
            pipeline.broadcast_(value.view(-1), stage)
            yield from ((name, value) for name in entry.names)


class _Weights:
    """The tensors of a state dict that this rank can provide, by flat buffer."""

    def __init__(self, engine: Engine, module: nn.Module, dtype: torch.dtype | None) -> None:
        with engine.raw_states():
            raw: dict[str, Any] = module.state_dict()
        self._dtype = dtype
        places = places_of(raw, engine.units)
        names: dict[tuple[int, int], list[str]] = {}
        for name, (flat, i) in places.items():
            names.setdefault((id(flat), i), []).append(name)
        self._slots = [
            (flat, {i: tuple(names[id(flat), i]) for i in range(len(flat.params)) if (id(flat), i) in names})
            for flat in engine.flats
        ]
        # Buffers, and parameters that the engine does not hold. What is on meta is on another pipeline stage.
        self._others = {
            name: value
            for name, value in raw.items()
            if name not in places and isinstance(value, Tensor) and not value.is_meta
        }

    def entries(self) -> list[_StateDictTensor]:
        """Return what `stream` yields, without the tensors. Not collective."""
        found = [
            _StateDictTensor(names, tuple(flat.layout.slots[i].full_shape), self._dtype_of(flat))
            for flat, slots in self._slots
            for i, names in slots.items()
        ]
        return found + [_StateDictTensor((name,), tuple(v.shape), v.dtype) for name, v in self._others.items()]

    def stream(self, wanted: Collection[tuple[str, ...]] | None) -> Iterator[tuple[_StateDictTensor, Tensor]]:
        """Yield the tensors with these names (None: all), as copies. Collective over the ranks with these layers."""
        for flat, slots in self._slots:
            chosen = {i: names for i, names in slots.items() if wanted is None or names in wanted}
            if chosen:
                yield from self._of(flat, chosen)
        for name, value in self._others.items():
            if wanted is None or (name,) in wanted:
                yield _StateDictTensor((name,), tuple(value.shape), value.dtype), value.detach().clone()

    def _of(self, flat: FlatBuffer, chosen: dict[int, tuple[str, ...]]) -> Iterator[tuple[_StateDictTensor, Tensor]]:
        dtype = self._dtype_of(flat)
        buffer, is_copy = _full(flat, dtype)
        for i, names in chosen.items():
            slot = flat.layout.slots[i]
            value = full_of(buffer[slot.offset : slot.end].view(slot.shape), slot.part, flat.axis)
            yield _StateDictTensor(names, tuple(value.shape), dtype), value if is_copy else value.to(dtype, copy=True)

    def _dtype_of(self, flat: FlatBuffer) -> torch.dtype:
        return flat.dtype if self._dtype is None or not flat.dtype.is_floating_point else self._dtype


def _full(flat: FlatBuffer, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """Return a full buffer, and whether it is a copy, of ``dtype``. Collective, unless every rank has the values."""
    if dtype == flat.dtype and flat.is_gathered:
        return flat.full.detach(), False
    if not flat.policy.optimizer:
        return flat.read_master().detach(), False
    flat.refuse_half_updated()
    flat.refresh_if_due()
    name = "param" if dtype == flat.dtype and flat.has_own_shard else "master"
    if not flat.store.is_resident(name):
        flat.wait_updated()
        return flat.gather_shards(dtype, partial(flat.store.read_into, name)), True
    mine = flat.shard if name == "param" and flat.shard is not None else flat.read_master()
    return flat.gather_shards(dtype, mine.detach()), True
