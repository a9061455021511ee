"""How the blocks of a model come to rest: filled, prepared, packed and written one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ls_strategy.errors import PlanError
from ls_strategy.inference.blocks import BlockModules
from ls_strategy.inference.fill import Filler
from ls_strategy.inference.placeholder import FloatingTarget, Target, targets_of
from ls_strategy.inference.storage import Extent, Resting, pack
from ls_strategy.tiers.link import trim_heap


@dataclass
class BlockPreparation:
    """What happens to a block before it rests."""

    shared: set[int]
    filler: Filler | None
    prepare: Callable[[str, nn.Module], None] | None


@dataclass
class Block:
    """A block at rest, or at work."""

    index: int
    name: str
    targets: list[Target]
    slots: list[Extent]
    nbytes: int
    nothing: list[Tensor] = field(init=False)
    """What floating-point tensors read as while they are away, one element each; where reading that is free."""

    _values: dict[int, list[Tensor]] = field(default_factory=dict)
    """What its targets show, for each buffer that it has been in, by the buffer's address."""

    def __post_init__(self) -> None:
        """Note what must stay no number."""
        found = {id(t.nothing): t.nothing for t in self.targets if isinstance(t, FloatingTarget)}
        self.nothing = [t for t in found.values() if t.device.type == "cpu" and t.dtype.itemsize > 1]

    def show(self, data: Tensor) -> None:
        """Point the tensors at its bytes."""
        values = self._values.get(data.data_ptr())
        if values is None:
            pairs = zip(self.targets, self.slots, strict=True)
            values = self._values[data.data_ptr()] = [t.prepare(s.view(data)) for t, s in pairs]
        for target, value in zip(self.targets, values, strict=True):
            target.show(value)

    def hide(self) -> None:
        """Let go of them."""
        for target in self.targets:
            target.hide()

    def keep(self, data: Tensor) -> None:
        """Show copies, each tensor with memory of its own: it is not to be hidden again."""
        for target, slot in zip(self.targets, self.slots, strict=True):
            target.show(target.prepare(slot.view(data).clone()))

    def changed(self) -> str | None:
        """Name of a tensor that somebody has written to, or moved."""
        found = next((target.name for target in self.targets if target.changed()), None)
        if found is None and self.nothing:  # ``.data`` keeps no count of changes
            found = next((f"a weight of {self.name}" for one in self.nothing if not one.isnan()), None)
        return found

    def forget(self) -> None:
        """The buffers are to be freed."""
        self._values.clear()


def store_blocks(
    model: nn.Module, units: Sequence[BlockModules], resting: Resting, preparation: BlockPreparation
) -> list[Block]:
    """Fill what is on meta and let every block rest, in order of registration, which random weights are drawn in."""
    device, host = resting.device, torch.device("cpu")
    of_block = {id(m): unit for unit in units for root in unit.modules.values() for m in root.modules()}
    done: dict[int, Block] = {}
    for name, module in model.named_modules():
        unit = of_block.get(id(module))
        if unit is None:
            if preparation.filler is not None:
                preparation.filler.fill(name, module, device)
        elif unit.index not in done:
            done[unit.index] = _store_block(unit, resting, preparation, host)
    _move_rest(model, device)
    return [done[unit.index] for unit in units]


def _store_block(unit: BlockModules, resting: Resting, preparation: BlockPreparation, host: torch.device) -> Block:
    for root, block in unit.modules.items():
        if preparation.filler is not None:
            for path, module in block.named_modules():
                preparation.filler.fill(f"{root}.{path}" if path else root, module, host)
        if preparation.prepare is not None:
            preparation.prepare(root, block)
    targets, values = targets_of(unit.modules, resting.device, preparation.shared)
    slots, nbytes = pack(values)
    if nbytes > resting.sizes[unit.index]:
        raise PlanError(
            f"prepare made block {unit.name!r} larger: {nbytes} bytes, and {resting.sizes[unit.index]} are reserved. "
            "Convert it to the larger dtype before stream_blocks()."
        )
    resting.write(unit.index, slots, values)
    result = Block(unit.index, unit.name, targets, slots, nbytes)
    result.hide()
    del values
    trim_heap()  # what the next block is filled in would not fit into the holes that this one leaves
    return result


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Bring what stays to the device; what is away is said to be there already."""
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.device != device:
                p.data = p.data.to(device)
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, key, buffer.to(device))
