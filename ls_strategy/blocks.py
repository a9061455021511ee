"""Find the blocks of a model. Only this file searches containers of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ls_strategy._torch import uncompiled
from ls_strategy.errors import PlanError
from ls_strategy.moe.sparse import SparseLayer

CONTAINERS = (nn.ModuleList, nn.Sequential)


def container_children(
    module: nn.Module, closed: tuple[type[nn.Module], ...] = (SparseLayer,)
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of all containers, also nested ones, with names and in order of registration.

    A child that is registered in several places, such as ``self.model.layers`` and ``self.layers``, is yielded once,
    under the first of its names.

    Args:
        module: the model.
        closed: classes that are yielded wherever they are, and not searched. The experts of an MoE layer are not
            blocks, since they are not called as modules.
    """
    seen: set[int] = set()
    for name, child in _container_children(module, closed, ""):
        if id(uncompiled(child)) not in seen:
            seen.add(id(uncompiled(child)))
            yield name, child


def _container_children(
    module: nn.Module, closed: tuple[type[nn.Module], ...], prefix: str
) -> Iterator[tuple[str, nn.Module]]:
    inside_container = isinstance(module, CONTAINERS) and bool(prefix)
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        if isinstance(child, closed) or (inside_container and not isinstance(child, CONTAINERS)):
            yield name, child
        else:
            yield from _container_children(child, closed, f"{name}.")


def counters_of(model: nn.Module) -> Callable[[], None]:
    """Return a function that undoes what a forward counts: numbers and texts in attributes of modules and classes."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    kinds = {kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    before = [(owner, _plain_attributes(owner)) for owner in (*model.modules(), *kinds)]

    def restore() -> None:
        for owner, attributes in before:
            base: Any = type if isinstance(owner, type) else object
            now = _plain_attributes(owner)
            for name in now.keys() - attributes.keys():
                base.__delattr__(owner, name)
            for name, value in attributes.items():
                if name not in now or now[name] != value:
                    base.__setattr__(owner, name, value)

    return restore


def _plain_attributes(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if type(value) in _PLAIN}


_PLAIN = (int, float, complex, bool, str, type(None))


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is, by its name, transformers' Conv1D: a linear layer with a weight ``(in, out)``."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an `nn.Linear` or transformers' Conv1D."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_block(module: nn.Module) -> bool:
    """Return whether a container's child has parameters and submodules.

    A single layer between activations is not a block.
    """
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def repeated_blocks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the blocks of a model, by the name of their container."""
    stacks: dict[str, list[nn.Module]] = {}
    for name, module in container_children(model):
        if is_block(module):
            stacks.setdefault(name.rpartition(".")[0], []).append(module)
    return stacks


def outermost(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the wanted modules that are not inside another one, with names and in order of registration."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if wanted(module) and id(module) not in inside:
            inside.update(map(id, module.modules()))
            yield name, module


def instances(
    model: nn.Module, classes: tuple[str, ...], *, option: str, class_of: Callable[[nn.Module], type] = type
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model's outermost submodules of the named classes, with their names.

    Args:
        model: the model.
        classes: names of classes, with or without their Python module.
        option: the option with these names, for the message.
        class_of: returns a module's class.

    Raises:
        PlanError: a name matches no module.
    """
    missing = set(classes)

    def matches(module: nn.Module) -> bool:
        cls = class_of(module)
        matched = {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"} & set(classes)
        missing.difference_update(matched)
        return bool(matched) and module is not model

    yield from outermost(model, matches)
    if missing:
        present = ", ".join(sorted({class_of(m).__name__ for m in model.modules()}))
        raise PlanError(
            f"Got {option}={list(classes)}, but the model has no module of class {', '.join(sorted(missing))} among "
            f"{present}. Name some of these, or leave {option} out for the children of every ModuleList and Sequential."
        )
