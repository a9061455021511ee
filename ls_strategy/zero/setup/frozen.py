"""Select the frozen weights that are stored in 4 or 8 bits (``precision.frozen``). No tensor is read.

As in QLoRA, these are the weights of all linear layers except output heads. Embeddings, norms, biases, routers and
convolutions keep their precision, and so do adapters, which may become trainable again.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from ls_strategy.blocks import CONTAINERS, is_linear
from ls_strategy.config import PrecisionConfig
from ls_strategy.errors import PlanError
from ls_strategy.moe.experts import StackedParameters
from ls_strategy.zero.flat.parameters import home_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_HEADS = frozenset(("lm_head", "embed_out", "output_projection"))
"""Names of output heads. Others are found by their place: after the blocks."""

_ROUTERS = frozenset(("gate", "router", "classifier", "shared_expert_gate"))
"""Names of layers that choose experts, in a module with experts."""


def quantized_params(
    model: nn.Module,
    options: PrecisionConfig,
    owned: Collection[int],
    kept: Collection[int],
    cast: torch.dtype | None = None,
) -> set[int]:
    """Return ``id`` of the parameters that ``options.frozen`` quantizes.

    Args:
        model: the full model.
        options: the group ``precision``.
        owned: ``id`` of parameters of optimizers.
        kept: ``id`` of parameters that stay in fp32.
        cast: the dtype to which all other parameters are cast, if any.

    Raises:
        PlanError: nothing can be quantized, or a name in ``options.frozen_except`` matches no module.
    """
    if options.frozen is None:
        return set()
    modules = {_plain(name): module for name, module in model.named_modules()}
    inside = _keeping_precision(modules, options.frozen_except, "precision.frozen_except")
    owners = Counter(id(p) for m in modules.values() for p in m.parameters(recurse=False))
    chosen = {
        id(p)
        for m in modules.values()
        if id(m) not in inside
        for p in _matrices(m)
        if not p.requires_grad
        and id(p) not in owned
        and id(p) not in kept
        and owners[id(p)] == 1
        and p.is_floating_point()
        and (cast or p.dtype) in _DTYPES
        and p.numel()
    }
    # Nothing may be left when all became trainable during a fit; and an evaluation needs no frozen weights.
    if not chosen and owned and all(home_of(p) is None for p in model.parameters()):
        raise PlanError(
            f"Got precision.frozen={options.frozen!r}, but the model has no linear layer with a frozen weight in fp32, "
            "bf16 or fp16, outside of output heads and precision.frozen_except. Freeze the weights before they are "
            "sharded, in __init__ or configure_model (weight.requires_grad_(False), or an adapter of PEFT), and give "
            "the optimizer only the trainable ones; or leave precision.frozen out."
        )
    return chosen


def linear_layers(model: nn.Module, skip: Sequence[str], option: str) -> dict[str, nn.Module]:
    """Return the linear layers whose products may be rounded, by name: no output heads, routers and adapters.

    Args:
        model: the full model.
        skip: names of modules that are left out with all that they contain, as in ``precision.frozen_except``.
        option: the option with these names, for the message.

    Raises:
        PlanError: a name in ``skip`` matches no module.
    """
    modules = {_plain(name): module for name, module in model.named_modules()}
    kept = _keeping_precision(modules, skip, option)
    return {name: m for name, m in modules.items() if is_linear(m) and id(m) not in kept}


def _keeping_precision(modules: dict[str, nn.Module], skip: Sequence[str], option: str) -> set[int]:
    skipped: list[nn.Module] = []
    for pattern in skip:
        found = [m for name, m in modules.items() if fnmatch.fnmatchcase(f".{name}", f"*.{pattern}")]
        if not found:
            linear = (n for n, m in modules.items() if is_linear(m))
            raise PlanError(
                f"Got {option}={list(skip)}, but no module has the name {pattern!r} or a name that ends so, such as "
                f"{next(linear, 'layers.0.up')!r}. Correct it, or leave it out."
            )
        skipped += found
    return {id(m) for module in skipped for m in module.modules()} | set(_not_quantized(modules))


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module that are matrices of a linear map."""
    own = dict(module.named_parameters(recurse=False))
    if is_linear(module):
        yield own["weight"]
    elif isinstance(module, nn.MultiheadAttention):
        yield from (p for name, p in own.items() if name.endswith("proj_weight"))
    elif isinstance(module, StackedParameters) or type(module).__name__.endswith("Experts"):
        yield from (p for p in own.values() if p.dim() > 2)


def _not_quantized(modules: dict[str, nn.Module]) -> Iterator[int]:
    """Yield ``id`` of linear layers that keep their precision: heads, routers, and adapters with all they contain."""
    containers = _block_containers(modules)
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        for adapters in _adapters_of(module):
            yield from (id(m) for m in adapters.modules())
        heads = _output_embeddings(module)
        if heads is not None:
            yield id(heads)
        if not is_linear(module):
            continue
        routes = last in _ROUTERS and any("expert" in key for key, _ in modules[parent].named_children())
        if last in _HEADS or routes or _follows_blocks(name, modules, containers):
            yield id(module)


def _adapters_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a layer that hold adapters of PEFT."""
    for attribute in getattr(module, "adapter_layer_names", ()):
        found = getattr(module, attribute, None)
        if isinstance(found, nn.Module):
            yield found


def adapter_params(model: nn.Module) -> set[int]:
    """Return ``id`` of the parameters of adapters of PEFT, active or not."""
    return {id(p) for module in model.modules() for each in _adapters_of(module) for p in each.parameters()}


def _output_embeddings(module: nn.Module) -> nn.Module | None:
    """Return the head of a model of transformers."""
    get = getattr(type(module), "get_output_embeddings", None)
    if get is None:
        return None
    try:
        found = get(module)
    except (AttributeError, NotImplementedError):  # a base class of models without a head
        return None
    return found if isinstance(found, nn.Module) else None


def _block_containers(modules: dict[str, nn.Module]) -> set[str]:
    """Return the names of the outermost containers of blocks: of children that have children."""
    found = [
        name
        for name, module in modules.items()
        if isinstance(module, CONTAINERS) and any(any(True for _ in child.children()) for child in module.children())
    ]
    return {
        name
        for name in found
        if not any(name != other and name.startswith(f"{other}." if other else "") for other in found)
    }


def _follows_blocks(name: str, modules: dict[str, nn.Module], containers: set[str]) -> bool:
    """Return whether a layer, or a module around it, comes after blocks.

    That is after a sibling with blocks, or after the blocks themselves.
    """
    parts = name.split(".")
    for depth in range(len(parts)):
        parent, own = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
        among_blocks = parent in containers
        if among_blocks and own != name:
            return False  # part of a block
        if not among_blocks and _contains(own, containers):
            continue
        for key, sibling in modules[parent].named_children():
            path = f"{parent}.{key}" if parent else key
            if path == own:
                return False
            if any(True for _ in sibling.children()) if among_blocks else _contains(path, containers):
                return True
    return False


def _contains(path: str, containers: set[str]) -> bool:
    return any(f"{container}.".startswith(f"{path}.") for container in containers)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
