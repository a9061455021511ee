"""Move and convert what a module holds besides parameters, by the same calls as under DDP.

DDPStrategy calls ``module.to(device)``, which reaches ``self.device``, the states of metrics, and every child with a
``to`` or an ``_apply`` of its own. The same calls are made here, so that they reach the same code. The one invariant:
they leave every parameter as it is, because the engine copies the parameters into its flat buffers one unit at a time.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from ls_strategy.lightning._private import note_module_dtype
from ls_strategy.zero.flat.parameters import grad_of, unnoticed

_CONVERSIONS = frozenset(getattr(Tensor, name) for name in ("to", "cuda", "cpu", "double", "float", "half", "bfloat16"))
"""What ``module.to()`` and the like call on every tensor of a module."""


class _Leaving(TorchFunctionMode):
    """Makes conversions of some tensors return the tensor itself."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self._kept = {id(tensor): tensor for tensor in kept}

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CONVERSIONS and (id(args[0]) in self._kept or args[0].is_meta):
            return args[0]
        return func(*args, **(kwargs or {}))


def _parameters_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters with their gradients; a conversion of the module would replace both."""
    params = list(module.parameters())
    return [*params, *(grad for p in params if (grad := grad_of(p)) is not None)]


def move(module: nn.Module, device: torch.device) -> None:
    """Call ``module.to(device)``. Parameters stay where they are; so does what is on meta. Not collective."""
    with unnoticed(), _Leaving(_parameters_of(module)):
        module.to(device)


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Call ``module.double()``, ``half()`` or ``bfloat16()``. Parameters and buffers keep their dtypes. Not collective.

    The engine converts those, with the exceptions that the options name. The states of metrics keep their dtype, which
    torchmetrics sees to in these calls: a count in 16 bits would stop at 256.
    """
    name = {torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16"}[dtype]
    with unnoticed(), _Leaving([*_parameters_of(module), *module.buffers()]):
        getattr(module, name)()
    note_module_dtype(module, dtype)  # `LightningModule` has no `bfloat16` of its own


class MetricsOnHost(TorchFunctionMode):
    """Gives the states of metrics that are built on the meta device memory and values, on the CPU.

    Nothing fills them later, since they are neither parameters nor buffers; and torch adds numbers to a scalar without
    values and says nothing, so that a metric would count in vain. Enter it inside ``torch.device("meta")``.
    """

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import Metric  # Lightning's own dependency

        self._metric = Metric

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(isinstance(a, Tensor) for a in args) and self._is_for_a_metric():
            with torch.device("cpu"):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _is_for_a_metric(self) -> bool:
        """Return whether the innermost module whose code runs is a metric.

        A network inside a metric is built in the same way as any other.
        """
        frame = sys._getframe(2)
        for _ in range(_DEPTH):
            if frame is None:
                return False
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                return isinstance(owner, self._metric)
            frame = frame.f_back
        return False


_DEPTH = 12
"""Frames between a module's code and a call of torch: `torch.nn.init` has two, libraries have a few more."""
