"""Select the optimizers that are updated by a fused operation, in one pass over memory, instead of their own ``step``.

Hyper-parameters are read from the user's optimizer at every step, and its state keeps torch's names. Only the
arithmetic is replaced, and only for classes where the result is known bit for bit. A subclass, or an option without a
fused form (``amsgrad``, ``capturable``, ``differentiable``), keeps its own ``step``. So does an optimizer that selects
a kernel of torch: ``foreach=True`` and ``fused=False`` always, ``fused=True`` if its states are on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.ops import update as ops
from ls_strategy.ops.lion import Lion
from ls_strategy.ops.moments import Moment
from ls_strategy.ops.split_master import SplitMaster
from ls_strategy.optimizers.muon import Muon


@dataclass(frozen=True)
class Kernel:
    """A fused update. It is stateless: the optimizer's state is passed in."""

    operation: str
    """Function of `ls_strategy.ops.update`. It takes parameter, moments and gradient in order, the others by name."""

    states: Mapping[str, bool]
    """Names of the element-wise states; True for those that may be negative."""

    numbers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Hyper-parameters of a group, except ``betas``, which every kernel with ``exp_avg`` has."""

    decoupled: bool | None = None
    """Whether weight decay is decoupled, if the group does not say so; None if the operation takes no such argument."""

    step: Literal["step", "first"] | None = "step"
    """The operation's argument for the number of the current step: the number, whether it is the first, or none."""

    counts_steps: bool = True
    """Whether the state holds the number of steps under ``step``, a ``()`` fp32 tensor."""

    def moments(self, group: dict[str, Any]) -> Mapping[str, bool]:
        """Return the names of a group's element-wise states; True for those that may be negative."""
        return {} if "momentum" in self.numbers and not group["momentum"] else self.states

    def settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the group's current hyper-parameters as plain numbers."""
        settings: dict[str, Any] = {k: float(group[k]) for k in self.numbers} | {k: bool(group[k]) for k in self.flags}
        if "exp_avg" in self.states:
            settings["beta1"], settings["beta2"] = map(float, group["betas"])
        if self.decoupled is not None:
            settings["decoupled"] = bool(group.get("decoupled_weight_decay", self.decoupled))
        return settings

    def update(
        self,
        param: Tensor | SplitMaster,
        moments: Mapping[str, Moment],
        grad: Tensor,
        step: int,
        settings: dict[str, Any],
        **factors: Any,
    ) -> None:
        """Update ``param`` and ``moments`` in place; `ls_strategy.ops.update` documents tensors and factors."""
        if self.step is not None:
            factors[self.step] = step if self.step == "step" else step == 1
        in_order = (moments.get(name) for name in self.states)
        getattr(ops, self.operation)(param, *in_order, grad, **settings, **factors)


_ADAMW = Kernel(
    "adamw_",
    {"exp_avg": True, "exp_avg_sq": False},
    numbers=("lr", "eps", "weight_decay"),
    flags=("maximize",),
    decoupled=True,
)
_KERNELS: dict[type[Optimizer], Kernel] = {
    torch.optim.AdamW: _ADAMW,
    torch.optim.Adam: replace(_ADAMW, decoupled=False),
    torch.optim.SGD: Kernel(
        "sgd_",
        {"momentum_buffer": True},
        numbers=("lr", "momentum", "dampening", "weight_decay"),
        flags=("nesterov", "maximize"),
        step="first",
        counts_steps=False,
    ),
    torch.optim.Adagrad: Kernel(
        "adagrad_", {"sum": False}, numbers=("lr", "lr_decay", "eps", "weight_decay"), flags=("maximize",)
    ),
    Lion: Kernel("lion_", {"exp_avg": True}, numbers=("lr", "weight_decay"), step=None, counts_steps=False),
}

_IN_MUON = replace(_ADAMW, flags=())
"""Of the groups that `ls_strategy.Muon` updates as AdamW does."""

FUSED_NAMES = tuple(cls.__name__ for cls in _KERNELS)
"""Names of the classes with a fused update, for messages."""

_OWN_STEP = ("amsgrad", "capturable", "differentiable", "foreach")
"""Options that select arithmetic or an implementation of torch."""


def kernel_for(optimizer: Optimizer) -> Kernel | None:
    """Return the fused update of an optimizer, or None if its own ``step`` has to run."""
    kernel = _KERNELS.get(type(optimizer))
    if kernel is None:
        return None
    for group in optimizer.param_groups:
        if any(group.get(option) for option in _OWN_STEP) or group.get("fused") is False:
            return None
    return kernel


def kernels_of(optimizer: Optimizer) -> tuple[Kernel | None, ...]:
    """Return the fused update of every group, or None where the optimizer's own ``step`` has to run."""
    kernel = kernel_for(optimizer)
    if type(optimizer) is Muon:
        return tuple(None if group["use_muon"] else _IN_MUON for group in optimizer.param_groups)
    return tuple(kernel for _ in optimizer.param_groups)
