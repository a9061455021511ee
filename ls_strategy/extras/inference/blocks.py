"""Find the blocks of a model that are streamed, and the tensors that stay because several blocks share them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ls_strategy.blocks import repeated_blocks
from ls_strategy.errors import PlanError
from ls_strategy.extras.inference.placeholder import own_tensors


@dataclass(frozen=True)
class BlockModules:
    """One unit of streaming: a block, or several modules outside of the blocks that share their weights."""

    index: int
    modules: dict[str, nn.Module]  # modules by their name in the model
    stack: str

    @property
    def name(self) -> str:
        """Name of the first module."""
        return next(iter(self.modules))


def streamed_modules(model: nn.Module, given: Sequence[nn.Module] | None, *, stream_all: bool) -> list[BlockModules]:
    """Return the units of streaming in the order in which they are expected to run.

    Args:
        model: the model.
        given: the blocks. None: the children of every module list whose children have submodules.
        stream_all: also stream the leaf modules outside of the blocks.

    Raises:
        PlanError: no blocks were found, a block is not part of the model, or a block is inside another one.
    """
    names = {id(module): name for name, module in model.named_modules()}
    stacks = repeated_blocks(model) if given is None else {"": list(given)}
    found = [({names.get(id(m), ""): m}, stack) for stack, modules in stacks.items() for m in dict.fromkeys(modules)]
    _check_given([module for group, _ in found for module in group.values()], names)
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no list of blocks to stream (an nn.ModuleList or nn.Sequential whose children "
            "have submodules). Set blocks=[...]."
        )
    if stream_all:
        inside = {id(m) for group, _ in found for block in group.values() for m in block.modules()}
        position = {name: i for i, name in enumerate(names.values())}
        found += [(group, "") for group in _leaves(model, inside)]
        found.sort(key=lambda group: position[next(iter(group[0]))])
    return [BlockModules(i, modules, stack) for i, (modules, stack) in enumerate(found)]


def _check_given(blocks: Sequence[nn.Module], names: Mapping[int, str]) -> None:
    below = {id(m): block for block in blocks for m in block.modules() if m is not block}
    for block in blocks:
        if id(block) not in names:
            raise PlanError(
                f"Got a {type(block).__name__} in blocks, but it is not a module of the model. Give its own modules."
            )
        if id(block) in below:
            raise PlanError(
                f"Got block {names[id(block)]!r}, but it is inside {names[id(below[id(block)])]!r}, so both would load "
                "the same weights. Give blocks that do not contain each other."
            )


def _leaves(model: nn.Module, inside: set[int]) -> list[dict[str, nn.Module]]:
    """Return the leaf modules outside of the blocks whose parameters no block has, grouped by tied weights."""
    in_blocks = {id(p) for m in model.modules() if id(m) in inside for p in m.parameters(recurse=False)}
    groups: dict[int, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        mine = [id(p) for p in module.parameters(recurse=False)]
        leaf = name and id(module) not in inside and not any(True for _ in module.children())
        if not leaf or not mine or set(mine) & in_blocks:
            continue
        merged: dict[str, nn.Module] = {}
        for group in {id(groups[p]): groups[p] for p in mine if p in groups}.values():
            merged |= group
        merged[name] = module
        for p in (p for m in merged.values() for p in m.parameters(recurse=False)):
            groups[id(p)] = merged
    return list({id(group): group for group in groups.values()}.values())


def followers(units: Sequence[BlockModules]) -> list[int]:
    """Return for each unit the one that is expected to run next, until the model has shown another order.

    The last unit is followed by the next token, which starts again with the last stack: in an encoder-decoder model,
    the decoder.
    """
    result = [unit.index + 1 for unit in units]
    last = units[-1].stack
    result[-1] = next(unit.index for unit in units if unit.stack == last) if last else 0
    return result


def with_own_weights(model: nn.Module, units: Sequence[BlockModules]) -> tuple[list[BlockModules], set[int]]:
    """Return the units that have unshared weights, and the ``id`` of every tensor that several units share.

    Shared tensors belong to several units, or to a unit and a module outside of all units. They stay on the device.

    Raises:
        PlanError: no unit has weights of its own.
    """
    roots = {id(root): unit.index for unit in units for root in unit.modules.values()}
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for module, owner in _owned(model, roots, -1):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            owners[id(tensor)].add(owner)
    shared = {key for key, of in owners.items() if len(of) > 1}
    own = [u for u in units if any(list(own_tensors(name, m, shared)) for name, m in u.modules.items())]
    if not own:
        raise PlanError(
            f"Got {len(units)} blocks of {type(model).__name__}, but they share all their weights with other modules, "
            "which need them all the time. There is nothing to stream."
        )
    return [replace(unit, index=i) for i, unit in enumerate(own)], shared


def _owned(module: nn.Module, roots: Mapping[int, int], owner: int) -> Iterator[tuple[nn.Module, int]]:
    """Yield every module with the index of the unit that contains it, once per unit; -1 outside of all units."""
    owner = roots.get(id(module), owner)
    yield module, owner
    for child in module.children():
        yield from _owned(child, roots, owner)
