"""Store the blocks of a model: each is filled, prepared, packed and written in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ls_strategy._torch import allow_data_on
from ls_strategy.errors import PlanError
from ls_strategy.extras.inference.blocks import BlockModules
from ls_strategy.extras.inference.fill import Filler
from ls_strategy.extras.inference.placeholder import FloatingTarget, Target, targets_of
from ls_strategy.extras.inference.storage import Extent, StoredBlocks, pack
from ls_strategy.tiers.link import trim_heap


@dataclass
class BlockPreparation:
    """Steps that prepare a block before it is stored: fill its weights, then change them, for example quantize."""

    shared: set[int]
    filler: Filler | None
    prepare: Callable[[str, nn.Module], None] | None


@dataclass
class Block:
    """A streamed block, stored or loaded."""

    index: int
    name: str
    targets: list[Target]
    slots: list[Extent]
    nbytes: int
    nans: list[Tensor] = field(init=False)
    """The NaN elements that the floating-point tensors show, on the CPU, where checking them is free."""

    _values: dict[int, list[Tensor]] = field(default_factory=dict)
    """What its targets show, by the address of the buffer."""

    def __post_init__(self) -> None:
        """Collect the NaN elements."""
        found = {id(t.nan): t.nan for t in self.targets if isinstance(t, FloatingTarget)}
        self.nans = [t for t in found.values() if t.device.type == "cpu" and t.dtype.itemsize > 1]

    def show(self, data: Tensor) -> None:
        """Point the tensors at the block's bytes."""
        values = self._values.get(data.data_ptr())
        if values is None:
            pairs = zip(self.targets, self.slots, strict=True)
            values = self._values[data.data_ptr()] = [t.prepare(s.view(data)) for t, s in pairs]
        for target, value in zip(self.targets, values, strict=True):
            target.show(value)

    def hide(self) -> None:
        """Release the bytes."""
        for target in self.targets:
            target.hide()

    def keep(self, data: Tensor) -> None:
        """Show copies, each with its own memory. The block must not be hidden again."""
        for target, slot in zip(self.targets, self.slots, strict=True):
            target.show(target.prepare(slot.view(data).clone()))

    def changed(self) -> str | None:
        """Return the name of a tensor that was modified or replaced; None if there is none."""
        found = next((target.name for target in self.targets if target.changed()), None)
        if found is None and self.nans:  # writing to ``.data`` does not change a tensor's version
            found = next((f"a weight of {self.name}" for one in self.nans if not one.isnan()), None)
        return found

    def forget(self) -> None:
        """Drop the views of buffers that are about to be freed."""
        self._values.clear()


def store_blocks(
    model: nn.Module, units: Sequence[BlockModules], storage: StoredBlocks, preparation: BlockPreparation
) -> list[Block]:
    """Fill meta tensors and store every block, in the order of registration, in which random weights are drawn."""
    device, host = storage.device, torch.device("cpu")
    of_block = {id(m): unit for unit in units for root in unit.modules.values() for m in root.modules()}
    done: dict[int, Block] = {}
    for name, module in model.named_modules():
        unit = of_block.get(id(module))
        if unit is None:
            if preparation.filler is not None:
                preparation.filler.fill(name, module, device)
        elif unit.index not in done:
            done[unit.index] = _store_block(unit, storage, preparation, host)
    _move_rest(model, device)
    return [done[unit.index] for unit in units]


def _store_block(unit: BlockModules, storage: StoredBlocks, preparation: BlockPreparation, host: torch.device) -> Block:
    for root, block in unit.modules.items():
        if preparation.filler is not None:
            for path, module in block.named_modules():
                preparation.filler.fill(f"{root}.{path}" if path else root, module, host)
        if preparation.prepare is not None:
            preparation.prepare(root, block)
    targets, values = targets_of(unit.modules, storage.device, preparation.shared)
    slots, nbytes = pack(values)
    if nbytes > storage.sizes[unit.index]:
        raise PlanError(
            f"prepare made block {unit.name!r} larger: {nbytes} bytes, but {storage.sizes[unit.index]} are reserved. "
            "Convert it to the larger dtype before stream_blocks()."
        )
    storage.write(unit.index, slots, values)
    result = Block(unit.index, unit.name, targets, slots, nbytes)
    result.hide()
    del values
    trim_heap()  # memory for the next block would not fit into the holes that this one leaves
    return result


def _move_rest(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.device != device:
                allow_data_on(p, device)
                p.data = p.data.to(device)
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device != device:
                module._buffers[key] = buffer.detach().to(device)  # one that is an nn.Parameter stays a buffer
