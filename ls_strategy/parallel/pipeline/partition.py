"""Model partitioning: the stack of blocks, its split into stages, and which rank holds each parameter.

::

    embedding ─ block 0 ─ block 1 ─ ... ─ block 11 ─ norm ─ head
    └──── stage 0 ────────────┘ └─ 1 ─┘ └──── stage 2 ─────────┘

Parameters outside of the blocks belong to the first stage if they are used before the blocks, and to the last stage if
they are used after them. A module's own parameters come before those of its submodules, whatever the order in which
they were assigned. So for a parameter beside the blocks (a class token, a logit scale) the order does not say where it
is used: it belongs to both stages, unless a dry run has seen its use. A parameter that several stages use (also tied
embeddings) exists on each of them: `StagePartition.tied` lists it, and its gradients must be summed over those ranks
once per step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ls_strategy._torch import is_compiled, uncompiled
from ls_strategy.blocks import outermost
from ls_strategy.errors import PlanError
from ls_strategy.parallel.pipeline.balance import balance


@dataclass(frozen=True)
class Tied:
    """A parameter that several stages use."""

    names: tuple[str, ...]
    """All its names in the model."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Usage:
    """Observations of a dry run of the user's function, see `trace.observe`: FLOPs, and where parameters are used."""

    flops: tuple[int, ...]
    """FLOPs of the forward of every block."""

    flops_before: int
    flops_after: int
    before: frozenset[str]
    """Parameters used before the blocks."""

    after: frozenset[str]
    """Parameters used after the blocks, or between two of them."""


@dataclass(frozen=True)
class StagePartition:
    """The partition of a model into stages."""

    blocks: tuple[str, ...]
    """Name of every block of the stack."""

    bounds: tuple[int, ...]
    """Stage ``s`` holds ``blocks[bounds[s]:bounds[s + 1]]``."""

    rank_of: tuple[int, ...]
    """Rank of every stage."""

    stages_of: Mapping[str, tuple[int, ...]]
    """Stages of every parameter, by name. A tied parameter has an entry for each of its names."""

    tied: tuple[Tied, ...]
    numel: tuple[int, ...]
    """Parameter elements of every stage. Tied parameters count on each of theirs."""

    weights: tuple[float, ...]
    """Weight of every block in the balance."""

    method: str
    """Method that gave the weights, see `weigh`."""

    def names_of(self, rank: int) -> frozenset[str]:
        """Return the names of the parameters that ``rank`` holds."""
        mine = {s for s, r in enumerate(self.rank_of) if r == rank}
        return frozenset(name for name, stages in self.stages_of.items() if mine.intersection(stages))

    def table(self) -> str:
        """Return one line per stage: rank, blocks, parameters, and shares of parameters and of the balanced weight."""
        total, load = sum(self.numel) or 1, sum(self.weights) or 1
        lines = [f"stage  rank  blocks                                    parameters   share  balanced: {self.method}"]
        for s, (rank, numel) in enumerate(zip(self.rank_of, self.numel, strict=True)):
            first, last = self.blocks[self.bounds[s]], self.blocks[self.bounds[s + 1] - 1]
            blocks = first if first == last else f"{first} .. {last}"
            part = sum(self.weights[self.bounds[s] : self.bounds[s + 1]]) / load
            lines.append(f"{s:5d}  {rank:4d}  {blocks:40s}  {numel:>10,d}  {numel / total:6.1%}  {part:8.1%}")
        lines += [f"{' = '.join(tied.names)}: on stages {', '.join(map(str, tied.stages))}" for tied in self.tied]
        return "\n".join(lines)


# --- the stack -------------------------------------------------------------------------------------------------------


def find_row(model: nn.Module, least: int, stack: str | None = None) -> dict[str, nn.Module]:
    """Return the list of modules that is partitioned, by name.

    Args:
        model: Has ``to_layers()`` (itself, or a child), which returns its layers in order, modules and functions; or
            has a ModuleList or Sequential of them.
        least: Number of stages. Shorter lists are not considered.
        stack: Name of the ModuleList or Sequential. None: ``to_layers()``, or else the longest one that is not inside
            another one.

    Raises:
        PlanError: There is no such list, it is too short, or two have the same length.
    """
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    if stack is not None:
        return _checked(_named_stack(model, stack), least)
    for owner in (model, *model.children()):
        layers_of: Any = getattr(owner, "to_layers", None)
        if callable(layers_of):
            modules = [layer for layer in cast("list[Any]", layers_of()) if isinstance(layer, nn.Module)]
            unknown = [type(m).__name__ for m in modules if id(m) not in names]
            if unknown:
                raise PlanError(
                    f"to_layers() returns a {unknown[0]}, not a submodule of {type(model).__name__}. Register it."
                )
            return _checked([(names[id(m)], m) for m in modules], least)
    return _checked(_longest(model, least), least)


def _named_stack(model: nn.Module, stack: str) -> list[tuple[str, nn.Module]]:
    try:
        container = model.get_submodule(stack)
    except AttributeError:
        container = None
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        found = ", ".join(repr(name) for name, _ in _candidates(model, 2)) or "none"
        raise PlanError(
            f"Got parallel.pipeline.blocks={stack!r}, which is not a ModuleList or Sequential of the model. Choose one "
            f"of: {found}."
        )
    return _members(stack, container)


def _members(name: str, container: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (f"{name}.{child}" if name else child, module)
        for child, module in container._modules.items()
        if module is not None
    ]


def _candidates(model: nn.Module, least: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield lists of ``least`` modules or more that are not inside another one."""
    return outermost(model, lambda module: isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= least)


def _longest(model: nn.Module, least: int) -> list[tuple[str, nn.Module]]:
    found = sorted(_candidates(model, max(least, 2)), key=lambda pair: -len(pair[1]))  # type: ignore[arg-type]
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no ModuleList or Sequential of {least} modules or more to split into {least} "
            "stages. Add a method to_layers() that returns its layers in order, or use fewer stages."
        )
    if len(found) > 1 and len(found[0][1]) == len(found[1][1]):  # type: ignore[arg-type]
        raise PlanError(
            f"{found[0][0]!r} and {found[1][0]!r} have {len(found[0][1])} modules each. "  # type: ignore[arg-type]
            "Choose the one to partition (parallel.pipeline.blocks=...), or add to_layers() to the model."
        )
    return _members(*found[0])


def _checked(members: Sequence[tuple[str, nn.Module]], least: int) -> dict[str, nn.Module]:
    if len(members) < least:
        raise PlanError(f"{len(members)} blocks are too few for {least} stages. Use fewer stages, or smaller blocks.")
    first: dict[int, str] = {}
    for name, module in members:
        if id(module) in first:
            raise PlanError(
                f"{first[id(module)]!r} and {name!r} are one module, which cannot be on two stages. Use two modules."
            )
        first[id(module)] = name
    return dict(members)


def names_above(blocks: Iterable[str]) -> list[str]:
    """Return the names of all modules that contain blocks, outermost first. The name of the model itself is empty.

    >>> names_above(["net.blocks.0", "net.blocks.1"])
    ['', 'net', 'net.blocks']
    """
    return sorted({"", *(name[:i] for name in blocks for i, letter in enumerate(name) if letter == ".")})


def _refuse_compiled(model: nn.Module, blocks: Iterable[str]) -> None:
    for name in names_above(blocks):
        module = model.get_submodule(name)
        if is_compiled(module):
            raise PlanError(
                f"{name or type(uncompiled(module)).__name__!r} is compiled together with its blocks, but a pipeline "
                "calls the blocks one by one. Compile the blocks instead: for block in blocks: block.compile()."
            )


# --- weights ---------------------------------------------------------------------------------------------------------


def weigh(
    blocks: Mapping[str, nn.Module], method: str, outside: tuple[float, float], usage: Usage | None
) -> list[float]:
    """Return the weight of every block in the balance.

    Args:
        blocks: Blocks by name.
        method: ``uniform``, ``parameters``, ``flops`` (of the forward; requires ``usage``), or ``type:regex``: blocks
            with a matching class name count 1, others 0, as in DeepSpeed.
        outside: Parameter elements before and after the blocks. They count with the first and the last block.
        usage: Result of a dry run.

    Raises:
        PlanError: The method is unknown, or no class matches.
    """
    kinds = [type(block).__name__ for block in blocks.values()]
    before, after = outside
    if method == "uniform":
        return [1.0] * len(blocks)
    if method == "parameters":
        weights = [float(sum(p.numel() for p in block.parameters())) for block in blocks.values()]
    elif method == "flops":
        if usage is None:
            raise PlanError("method='flops' requires a dry run. Pass usage=observe(model, blocks, step, micro_batch).")
        weights, before, after = [float(n) for n in usage.flops], usage.flops_before, usage.flops_after
    elif method.startswith("type:"):
        pattern = re.compile(method[len("type:") :], re.IGNORECASE)
        weights = [float(bool(pattern.search(kind))) for kind in kinds]
        if not any(weights):
            raise PlanError(
                f"Got method={method!r}, which matches no class of the blocks: {', '.join(sorted(set(kinds)))}."
            )
        return weights
    else:
        raise PlanError(f"Got method={method!r}, but it must be uniform, parameters, flops or type:regex.")
    weights[0] += before
    weights[-1] += after
    return weights


# --- the partition ---------------------------------------------------------------------------------------------------


def make_cut(
    model: nn.Module,
    rank_of: Sequence[int],
    *,
    method: str = "parameters",
    stack: str | None = None,
    usage: Usage | None = None,
) -> StagePartition:
    """Partition the model into ``len(rank_of)`` stages. Returns the same on every rank.

    Args:
        model: The full model, on any device, also meta.
        rank_of: Rank of every stage, see `schedules.place`.
        method: See `weigh`.
        stack: See `find_row`.
        usage: Result of a dry run (`trace.observe`). Without it, parameters of modules registered before the blocks
            count as used before them, those registered after the blocks as used after them, and parameters of modules
            that contain the blocks as used before and after them.

    Raises:
        PlanError: The model cannot be partitioned this way.
    """
    stages = len(rank_of)
    blocks = find_row(model, stages, stack)
    _refuse_compiled(model, blocks)
    ends = _ends(model, blocks, usage)
    numel = {name: p.numel() for name, p in model.named_parameters()}
    outside = tuple(float(sum(numel.get(name, 0) for name, end in ends.items() if e in end)) for e in (0, 1))
    weights = weigh(blocks, method, (outside[0], outside[1]), usage)
    bounds = balance(weights, stages)
    stages_of, tied = _stages_of(model, blocks, ends, bounds, rank_of)
    sizes = tuple(sum(n for name, n in numel.items() if s in stages_of[name]) for s in range(stages))
    return StagePartition(
        tuple(blocks), bounds, tuple(rank_of), stages_of, tied, sizes, tuple(weights), method
    )  # fmt: skip


def _ends(model: nn.Module, blocks: Mapping[str, nn.Module], usage: Usage | None) -> dict[str, frozenset[int]]:
    """Return for every parameter outside of the blocks 0 if it is used before them, 1 if after, or both, by name."""
    in_blocks = {id(p) for block in blocks.values() for p in block.parameters()}
    prefixes = tuple(f"{name}." for name in blocks)
    in_or_after_blocks = False
    beside = {id(p) for name in names_above(blocks) for p in model.get_submodule(name).parameters(recurse=False)}
    result: dict[str, frozenset[int]] = {}
    # Parameters are in the order of modules. Without parameters in the blocks, the order says nothing: all count as 0.
    order = list(model.named_parameters(remove_duplicate=False))
    has_any = any(name.startswith(prefixes) for name, _ in order)
    for name, parameter in order:
        in_or_after_blocks = in_or_after_blocks or name.startswith(prefixes)
        if id(parameter) in in_blocks and name.startswith(prefixes):
            continue
        registered = frozenset((0, 1)) if id(parameter) in beside else frozenset((int(in_or_after_blocks and has_any),))
        seen = usage and frozenset(end for end, names in enumerate((usage.before, usage.after)) if name in names)
        result[name] = seen or registered
    return result


def _stages_of(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    ends: Mapping[str, frozenset[int]],
    bounds: Sequence[int],
    rank_of: Sequence[int],
) -> tuple[dict[str, tuple[int, ...]], tuple[Tied, ...]]:
    last = len(bounds) - 2
    stage_of_block = {name: s for s in range(last + 1) for name in list(blocks)[bounds[s] : bounds[s + 1]]}
    names: dict[int, list[str]] = {}
    stages: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        mine = stages.setdefault(id(parameter), set())
        if name in ends:
            mine.update(last if end else 0 for end in ends[name])
        else:
            mine.add(next(s for block, s in stage_of_block.items() if name.startswith(f"{block}.")))
    by_name = {name: tuple(sorted(stages[key])) for key, group in names.items() for name in group}
    tied = tuple(
        Tied(tuple(group), by_name[group[0]], tuple(sorted({rank_of[s] for s in stages[key]})))
        for key, group in names.items()
        if len(stages[key]) > 1
    )
    return by_name, tied


def keep_own(model: nn.Module, cut: StagePartition, rank: int) -> None:
    """Replace the parameters that ``rank`` does not hold with meta parameters of the same names and shapes.

    Buffers of absent blocks move to meta too; others stay. Tied parameters stay tied.
    """
    held = cut.names_of(rank)
    replaced: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for child, parameter in module._parameters.items():
            name = f"{prefix}.{child}" if prefix else child
            if parameter is None or name in held:
                continue
            if id(parameter) not in replaced:
                empty = torch.empty_like(parameter, device="meta", requires_grad=False)
                replaced[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                vars(replaced[id(parameter)]).update(vars(parameter))  # also that its values are in a file
            module._parameters[child] = replaced[id(parameter)]
    absent = (s for s, r in enumerate(cut.rank_of) if r != rank)
    for name in (name for s in absent for name in cut.blocks[cut.bounds[s] : cut.bounds[s + 1]]):
        for module in model.get_submodule(name).modules():
            for child, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[child] = torch.empty_like(buffer, device="meta")


Step = Callable[[Any], Any]
"""The user's function: maps a micro-batch to its loss, or to a mapping with "loss"."""
