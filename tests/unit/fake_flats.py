"""Flat buffers as checkpoints see them, without an engine: the layout, what this rank owns, and its master weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ls_strategy.checkpoint.reshard import Source
from ls_strategy.layout import FlatLayout

SHAPES = (("a", (3, 5)), ("b", (7,)), ("scalar", ()))
RANKS = 3


@dataclass
class FakeFlat:
    """One rank's view of a flat buffer."""

    layout: FlatLayout
    owned: tuple[int, int]
    master: Tensor
    optimizer_tier: str = "cpu"
    hold: Any = None
    counted: bool = True
    name: str = "a"

    @property
    def states_in_memory(self) -> bool:
        """Whether the states are tensors."""
        return self.optimizer_tier != "nvme"

    @property
    def steps_in_background(self) -> bool:
        """Whether they are not on the device."""
        return self.optimizer_tier != "device"

    @property
    def stepped(self) -> tuple[int, int]:
        """The range of the master weights."""
        return self.owned


def full_values() -> dict[str, Tensor]:
    """The parameters' values."""
    count = {name: torch.Size(shape).numel() for name, shape in SHAPES}
    return {name: torch.arange(float(count[name])).view(shape) + 1 for name, shape in SHAPES}


def fake_flats(tier: str = "cpu") -> list[FakeFlat]:
    """A buffer with these parameters, as each rank holds it."""
    layout = FlatLayout.pack(SHAPES, RANKS, align=4)
    buffer = torch.full((layout.numel,), float("nan"))
    for slot, value in zip(layout.slots, full_values().values(), strict=True):
        buffer[slot.offset : slot.end] = value.flatten()
    ranges = [layout.shard_range(rank) for rank in range(RANKS)]
    return [FakeFlat(layout, owned, buffer[slice(*owned)].clone(), tier) for owned in ranges]


def source_of(flat: FakeFlat, slot: int, *, guarded: bool = False) -> Source:
    """A master weight."""
    return Source(flat, slot, lambda start, stop: flat.master[start:stop], guarded=guarded)  # type: ignore[arg-type]
