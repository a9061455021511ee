"""``Fabric(precision=...)`` for `ZeROFabricStrategy`: autocast, dtypes of inputs and outputs, loss scale."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy.lightning.precision import ZeROPrecision


class ZeROFabricPrecision(ZeROPrecision):
    """Precision plugin of `ZeROFabricStrategy`, which creates it from ``Fabric(precision=...)``.

    Pass one explicitly (``Fabric(plugins=ZeROFabricPrecision("16-mixed"))``) only to run fp16 on the CPU, where Fabric
    turns the string ``16-mixed`` into ``bf16-mixed``.
    """

    _next: nn.Module | None = None
    """The module that a Fabric is setting up. Its parameters are moved by the engine, one unit at a time."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert what a module holds besides parameters and buffers; `Fabric.setup` calls it first."""
        self._next = module
        return super().convert_module(module)

    def sets_up(self, module: nn.Module) -> bool:
        """Return whether ``module`` is the one that a Fabric is setting up. True only once per set-up."""
        found, self._next = self._next is module, None
        return found

    @override
    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs to the parameters' dtype, to fp32 under autocast."""
        dtype = torch.float32 if self.policy.autocast is not None else self.policy.cast
        return data if dtype is None else _cast(data, dtype)

    @override
    def convert_output(self, data: Any) -> Any:
        """Cast floating-point outputs to torch's default dtype, unless they have it anyway."""
        plain = self.policy.autocast is None and self.policy.cast is None
        return data if plain else _cast(data, torch.get_default_dtype())

    @override
    def pre_backward(self, tensor: Tensor, module: nn.Module | None) -> None:  # type: ignore[override]
        """Do nothing: there are no hooks of a LightningModule here."""

    @override
    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Scale the loss and run the backward pass."""
        scaler = None if self.engine is None else self.engine.scaler
        (tensor if scaler is None else tensor * scaler.scale).backward(*args, **kwargs)

    @override
    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> None:  # type: ignore[override]
        """Do nothing: there are no hooks of a LightningModule here."""

    @override
    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step what the strategy has not set up."""
        return optimizer.step(**kwargs)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
