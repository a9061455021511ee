"""Which modules of a model are streamed together, and which tensors stay because several of them have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ls_strategy.blocks import repeated_blocks
from ls_strategy.errors import PlanError
from ls_strategy.inference.placeholder import own_tensors


@dataclass(frozen=True)
class BlockModules:
    """What comes and goes together: one block, or modules outside of blocks that share their weights."""

    index: int
    modules: dict[str, nn.Module]
    """By name in the model."""

    stack: str
    """Name of the list that the block is in."""

    @property
    def name(self) -> str:
        """Of the first module."""
        return next(iter(self.modules))


def streamed_modules(model: nn.Module, given: Sequence[nn.Module] | None, *, stream_all: bool) -> list[BlockModules]:
    """The blocks, in the order in which they are expected to run.

    Args:
        model: the model.
        given: the blocks. None: the children of all lists of modules that have modules of their own.
        stream_all: the leaves outside of them, too.

    Raises:
        PlanError: there are none; or one is not of the model, or inside another.
    """
    names = {id(module): name for name, module in model.named_modules()}
    stacks = repeated_blocks(model) if given is None else {"": list(given)}
    found = [({names.get(id(m), ""): m}, stack) for stack, modules in stacks.items() for m in dict.fromkeys(modules)]
    _check_given([module for group, _ in found for module in group.values()], names)
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no list of blocks (nn.ModuleList or nn.Sequential of modules with modules of "
            "their own) to stream. Name them: blocks=[...]."
        )
    if stream_all:
        inside = {id(m) for group, _ in found for block in group.values() for m in block.modules()}
        found = _in_order(found + [(group, "") for group in _leaves(model, inside)], names)
    return [BlockModules(i, modules, stack) for i, (modules, stack) in enumerate(found)]


def _check_given(blocks: Sequence[nn.Module], names: Mapping[int, str]) -> None:
    below = {id(m): block for block in blocks for m in block.modules() if m is not block}
    for block in blocks:
        if id(block) not in names:
            raise PlanError(f"blocks: a {type(block).__name__} is no module of the model. Give modules inside it.")
        if id(block) in below:
            raise PlanError(
                f"blocks: {names[id(block)]!r} is inside {names[id(below[id(block)])]!r}, so that both would bring the "
                "same weights. Give blocks that are side by side."
            )


def _in_order(
    found: list[tuple[dict[str, nn.Module], str]], names: dict[int, str]
) -> list[tuple[dict[str, nn.Module], str]]:
    position = {name: i for i, name in enumerate(names.values())}
    return sorted(found, key=lambda group: position[next(iter(group[0]))])


def _leaves(model: nn.Module, inside: set[int]) -> list[dict[str, nn.Module]]:
    """Modules outside of blocks without children and with parameters that no block has; tied ones together."""
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
    """Of each block the one that is expected after it, until the model has shown otherwise.

    After the last one begins the next token, which runs the last stack again: of encoder and decoder, the decoder.
    """
    result = [unit.index + 1 for unit in units]
    last = units[-1].stack
    result[-1] = next(unit.index for unit in units if unit.stack == last) if last else 0
    return result


def with_own_weights(model: nn.Module, units: Sequence[BlockModules]) -> tuple[list[BlockModules], set[int]]:
    """The blocks that have weights which nothing else has, and the ``id`` of all tensors that are shared.

    Shared are those that several blocks have, or a block and a module outside of all: they stay.

    Raises:
        PlanError: no block has weights of its own.
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
            f"the {len(units)} blocks of {type(model).__name__} have no weights of their own: all are shared with "
            "other modules, and would be needed all the time. There is nothing to stream."
        )
    return [replace(unit, index=i) for i, unit in enumerate(own)], shared


def _owned(module: nn.Module, roots: Mapping[int, int], owner: int) -> Iterator[tuple[nn.Module, int]]:
    """Every module with the number of the block that it is in, as often as it is in one; -1 outside."""
    owner = roots.get(id(module), owner)
    yield module, owner
    for child in module.children():
        yield from _owned(child, roots, owner)
