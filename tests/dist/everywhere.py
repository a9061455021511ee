"""What every rank has after a run is one and the same model: no part missing, no two copies that differ in a bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ls_strategy.checkpoint.reshard import Source
from ls_strategy.engine import Engine
from ls_strategy.layout import flat_range_to_boxes
from ls_strategy.zero.parts import part_of


class Held(NamedTuple):
    """A rectangular part of a value, as one rank has it."""

    name: str
    kind: str
    """``master``, or the name of a moment."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor


def sent_mask(engine: Engine) -> Iterator[Held]:
    """Masters and moments of this rank, also copies of what others have. Not collective."""
    stores = {id(s.flat): s for state in engine.optimizers for s in state.sharded.states.store}
    for flat in engine.flats:
        flat.wait_updated()
        kinds: dict[str, Tensor] = {"master": flat.read_master().detach()}
        if id(flat) in stores:
            store = stores[id(flat)]
            kinds |= {name: store.read(name, dtype) for name, dtype in store.dtypes().items()}
        for i, (slot, piece) in enumerate(zip(flat.layout.slots, flat.pieces, strict=True)):
            for kind, values in kinds.items():
                mine = values[piece.start : piece.stop]
                source = Source(flat, i, lambda a, b, mine=mine: mine[a:b])
                for box in flat_range_to_boxes(slot.shape, piece.param_start, piece.param_start + piece.numel):
                    start = box.start - piece.param_start
                    for offsets, part in source.placed(box, mine[start : start + box.numel]):
                        yield Held(slot.name, kind, slot.full_shape, offsets, part.cpu().clone())


def put_together(parts: list[list[Held]]) -> dict[tuple[str, str], Tensor]:
    """Full values by name and kind, in fp64, of what all ranks hold; NaN where none has anything.

    Raises:
        AssertionError: two ranks differ where both have something.
    """
    full: dict[tuple[str, str], Tensor] = {}
    for rank, held in enumerate(parts):
        for name, kind, shape, offsets, values in held:
            whole = full.setdefault((name, kind), torch.full(shape, torch.nan, dtype=torch.float64))
            region = whole[tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))]
            known = ~region.isnan()
            assert torch.equal(region[known], values.double()[known]), f"rank {rank} has another {kind} of {name}"
            region.copy_(values)
    return full


@torch.no_grad()
def check_every_rank(strategy: Any, weights: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """Compare what all ranks have with each other and with ``weights``, and parameters with masters. Collective.

    Args:
        strategy: after the run.
        weights: full ones in master precision, on rank 0; others are not looked at.

    Returns:
        what `put_together` gives, on every rank.
    """
    engine: Engine = strategy.require_engine()
    full = put_together(engine.mesh.world.exchange_objects(list(sent_mask(engine))))
    for (name, kind), value in full.items():
        if kind == "master":
            assert not value.isnan().any(), f"no rank has all of {name}"
            if engine.mesh.world.rank == 0 and name in weights:
                assert torch.equal(value, weights[name].cpu().double()), f"the state dict has another {name}"
    with strategy.gathered_parameters():
        for flat in engine.flats:
            for parameter, slot in zip(flat.params, flat.layout.slots, strict=True):
                expected = full[slot.name, "master"].to(parameter.dtype) if slot.numel else parameter
                if slot.part is not None and slot.numel:
                    expected = part_of(expected, slot.part)
                assert torch.equal(parameter.detach().cpu(), expected.cpu()), f"{slot.name} is not what its master says"
    return full
