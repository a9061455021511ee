"""From what the user built to what a unit's buffers take: meta tensors get memory, one unit at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy._compat import tree_map
from ls_strategy.errors import PlanError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def materialize(model: nn.Module, params: list[nn.Parameter], device: torch.device) -> None:
    """Give meta parameters memory and values: every module that owns one runs its ``reset_parameters()``.

    Parameters keep their identity, so that an optimizer built before still holds them.

    Raises:
        PlanError: a module owns meta tensors and has no ``reset_parameters``.
    """
    wanted = {id(p) for p in params if p.is_meta}
    if not wanted:
        return
    for name, module in model.named_modules():
        if any(id(p) in wanted for p in module.parameters(recurse=False)):
            _materialize_module(name, module, device)


def materialize_buffers(model: nn.Module, device: torch.device) -> None:
    """The same for modules whose buffers are on meta and that own no parameters."""
    for name, module in model.named_modules():
        if any(b.is_meta for b in module.buffers(recurse=False)):
            _materialize_module(name, module, device)


def _materialize_module(name: str, module: nn.Module, device: torch.device) -> None:
    if not callable(getattr(module, "reset_parameters", None)):
        raise PlanError(
            f"module {name!r} ({type(module).__name__}) was built without memory (configure_model runs on the meta "
            "device at stage 3) and has no reset_parameters() to fill its parameters and buffers. Add that method, or "
            "build the module in configure_model under `with torch.device('cpu'):`."
        )
    for p in module.parameters(recurse=False):
        if p.is_meta:
            real = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, real)
    for key, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            setattr(module, key, torch.empty_like(buffer, device=device))
    with torch.no_grad():
        module.reset_parameters()  # type: ignore[operator]


def place_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype, keep: set[int]) -> None:
    """Move buffers to ``device`` and floating ones to ``dtype``, but those of modules in ``keep`` (by id)."""
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            to = dtype if buffer.is_floating_point() and id(module) not in keep else buffer.dtype
            setattr(module, key, buffer.to(device=device, dtype=to))


def fp32_modules(model: nn.Module, class_names: tuple[str, ...]) -> list[nn.Module]:
    """Modules that keep fp32 parameters in the 16-bit modes: batch norms, and instances of the named classes.

    Raises:
        PlanError: a name matches no module.
    """
    names = {type(m).__name__ for m in model.modules()}
    missing = sorted(set(class_names) - names)
    if missing:
        raise PlanError(
            f"fp32_modules={list(class_names)}: no module of class {', '.join(missing)} in the model. "
            f"Its classes are {', '.join(sorted(names))}."
        )
    return [m for m in model.modules() if isinstance(m, _BATCH_NORMS) or type(m).__name__ in class_names]


class Fp32Boundary:
    """Casts what enters a module to fp32 and what leaves it back, so that fp32 parameters meet fp32 activations.

    Batch norms need none: torch runs them on 16-bit inputs with fp32 parameters.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Attach to ``module``; ``dtype`` is the one outside."""
        self.dtype = dtype
        self._handles = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave),
        ]

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda t: _cast(t, self.dtype, torch.float32), (args, kwargs))

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        return tree_map(lambda t: _cast(t, torch.float32, self.dtype), output)

    def remove(self) -> None:
        """Detach."""
        for handle in self._handles:
            handle.remove()


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    return value.to(target) if isinstance(value, Tensor) and value.dtype == source else value
