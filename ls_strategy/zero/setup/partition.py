"""Partition the parameters of a model into units. No tensor is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

from ls_strategy.blocks import container_children, instances


@dataclass
class UnitSpec:
    """Parameters that are gathered, reduced and stepped together, under their names in the model."""

    name: str
    modules: list[nn.Module]
    """Modules with a forward that needs the unit: the block, or the modules that own a root unit's parameters."""

    is_root: bool
    """Whether no block owns the parameters, so that the unit stays gathered from its first use until the step."""

    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)


def partition(
    model: nn.Module,
    block_classes: tuple[str, ...],
    min_unit_numel: int,
    absent: Collection[int] = (),
) -> list[UnitSpec]:
    """Partition a model into units, in order of registration.

    Every instance of ``block_classes`` is a unit. Without ``block_classes``, every child of a ``ModuleList`` or
    ``Sequential`` is one (also of nested containers), and every MoE layer outside of them. The other parameters go to
    root units: those outside of blocks, shared between blocks, or in blocks below ``min_unit_numel`` elements. There is
    one root unit for each range between blocks, so that gradients of an output head are reduced while the blocks still
    run backward.

    Args:
        model: the model.
        block_classes: class names of the blocks.
        min_unit_numel: minimum elements of a block's unit.
        absent: ``id`` of parameters that another pipeline stage holds.

    Raises:
        PlanError: a name in ``block_classes`` matches no module.
    """
    blocks = dict(
        instances(model, block_classes, option="sharding.block_classes") if block_classes else container_children(model)
    )
    owners: defaultdict[int, set[str]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for block_name, block in blocks.items():
        params = list(block.parameters())
        sizes[block_name] = sum(p.numel() for p in params)
        for p in params:
            owners[id(p)].add(block_name)
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for p in module.parameters(recurse=False):
                owners[id(p)].add("")  # used outside of all blocks, and perhaps inside one
    units: list[UnitSpec] = []
    by_name: dict[str, UnitSpec] = {}
    open_root: UnitSpec | None = None
    for name, param in ((n, p) for n, p in model.named_parameters() if id(p) not in absent):
        owner = owners[id(param)]
        block_name = next(iter(owner)) if len(owner) == 1 else ""
        if block_name and sizes[block_name] >= max(min_unit_numel, 1):
            if block_name not in by_name:
                by_name[block_name] = UnitSpec(block_name, [blocks[block_name]], is_root=False)
                units.append(by_name[block_name])
                open_root = None
            by_name[block_name].params.append((name, param))
            continue
        if open_root is None:
            open_root = UnitSpec(f"root.{sum(u.is_root for u in units)}", [], is_root=True)
            units.append(open_root)
        open_root.params.append((name, param))
    _attach_root_modules(model, units)
    return units


def _attach_root_modules(model: nn.Module, units: list[UnitSpec]) -> None:
    """Attach to each root unit the modules that own one of its parameters directly; their forward gathers it."""
    unit_of = {id(p): unit for unit in units if unit.is_root for _, p in unit.params}
    for module in model.modules():
        found: list[UnitSpec] = []
        for p in module.parameters(recurse=False):
            unit = unit_of.get(id(p))
            if unit is not None and unit not in found:
                found.append(unit)
        for unit in found:
            unit.modules.append(module)
