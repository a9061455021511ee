"""Which optimizers of the user are updated in one pass over memory, by a fused operation instead of their own ``step``.

The user's object stays the only place where learning rate, betas and the like are read, at the step; its state is
read and written in torch's own names. What is taken over is the arithmetic, and only for classes whose arithmetic is
known to the last rounding: a subclass, or an option without a fused form (``amsgrad``, ``capturable``,
``differentiable``), keeps its own ``step``. So does an optimizer that names a kernel of torch's: ``foreach=True`` and
``fused=False`` always, ``fused=True`` where its states are on the device.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.ops import update as ops
from ls_strategy.ops.lion import Lion
from ls_strategy.ops.moments import Moment


class Kernel(Protocol):
    """A fused update. Stateless: what an optimizer remembers is handed in."""

    counts_steps: bool
    """Whether the state holds the number of steps under ``step``, a ``()`` fp32 tensor."""

    def moments(self, group: dict[str, Any]) -> dict[str, bool]:
        """Names of the element-wise states of a parameter group; True for those that may be negative."""
        ...

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group's hyper-parameters as they are now, as plain numbers."""
        ...

    def update(
        self,
        param: Tensor,
        moments: dict[str, Moment],
        grad: Tensor,
        step: int,
        settings: dict[str, Any],
        **factors: Any,
    ) -> None:
        """Update ``param`` and ``moments`` in place.

        Args:
            param: ``(n,)``, fp32.
            moments: by name, each ``(n,)``.
            grad: ``(n,)``, fp32, bf16 or fp16.
            step: number of this step, from 1.
            settings: from `settings`.
            factors: ``unscale``, ``clip``, ``out``, ``seed``, ``offset``, see `ls_strategy.ops.update`.
        """
        ...


class _Adam:
    counts_steps = True

    def moments(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"exp_avg": True, "exp_avg_sq": False}

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "decoupled": bool(group.get("decoupled_weight_decay", self._decoupled)),
            "maximize": bool(group["maximize"]),
        }

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled

    def update(
        self,
        param: Tensor,
        moments: dict[str, Moment],
        grad: Tensor,
        step: int,
        settings: dict[str, Any],
        **factors: Any,
    ) -> None:
        ops.adamw_(param, moments["exp_avg"], moments["exp_avg_sq"], grad, step=step, **settings, **factors)


class _SGD:
    counts_steps = False

    def moments(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"momentum_buffer": True} if group["momentum"] else {}

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        numbers = {k: float(group[k]) for k in ("lr", "momentum", "dampening", "weight_decay")}
        return {**numbers, "nesterov": bool(group["nesterov"]), "maximize": bool(group["maximize"])}

    def update(
        self,
        param: Tensor,
        moments: dict[str, Moment],
        grad: Tensor,
        step: int,
        settings: dict[str, Any],
        **factors: Any,
    ) -> None:
        ops.sgd_(param, moments.get("momentum_buffer"), grad, first=step == 1, **settings, **factors)


class _Adagrad:
    counts_steps = True

    def moments(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"sum": False}

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        numbers = {k: float(group[k]) for k in ("lr", "lr_decay", "eps", "weight_decay")}
        return {**numbers, "maximize": bool(group["maximize"])}

    def update(
        self,
        param: Tensor,
        moments: dict[str, Moment],
        grad: Tensor,
        step: int,
        settings: dict[str, Any],
        **factors: Any,
    ) -> None:
        ops.adagrad_(param, moments["sum"], grad, step=step, **settings, **factors)


class _Lion:
    counts_steps = False

    def moments(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"exp_avg": True}

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "weight_decay": float(group["weight_decay"]),
        }

    def update(
        self,
        param: Tensor,
        moments: dict[str, Moment],
        grad: Tensor,
        step: int,
        settings: dict[str, Any],
        **factors: Any,
    ) -> None:
        ops.lion_(param, moments["exp_avg"], grad, **settings, **factors)


_KERNELS: dict[type[Optimizer], Kernel] = {
    torch.optim.AdamW: _Adam(decoupled=True),
    torch.optim.Adam: _Adam(decoupled=False),
    torch.optim.SGD: _SGD(),
    torch.optim.Adagrad: _Adagrad(),
    Lion: _Lion(),
}

FUSED_NAMES = tuple(cls.__name__ for cls in _KERNELS)
"""Classes with a fused update, for messages."""

_OWN_STEP = ("amsgrad", "capturable", "differentiable", "foreach")
"""Options that ask for arithmetic, or for an implementation, of torch's own."""


def kernel_for(optimizer: Optimizer) -> Kernel | None:
    """The fused update of an optimizer, None where its own ``step`` has to run."""
    kernel = _KERNELS.get(type(optimizer))
    if kernel is None:
        return None
    for group in optimizer.param_groups:
        if any(group.get(option) for option in _OWN_STEP) or group.get("fused") is False:
            return None
    return kernel
