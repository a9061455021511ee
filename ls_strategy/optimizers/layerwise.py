"""LAMB and LARS: the rate of every tensor follows from its norm and that of its update, for large batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.checked import Range, above, at_least, checked


class Layerwise(Optimizer):
    """Steps every tensor by itself."""

    whole_tensors = True
    """A norm is of the whole tensor."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(Layerwise):
    """Adam with decoupled weight decay, and updates as large as a tensor's norm says.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, arXiv:1904.00962,
    algorithm 2.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: of the moments.
        eps: added to the square root of the second moment.
        weight_decay: decoupled, and part of the update whose norm counts.
        max_ratio: limit of the norm of a tensor over that of its update.
        min_ratio: the smallest value of it.

    Raises:
        ConfigError: a value is out of range.
    """

    @checked(
        lr=at_least(0), betas=Range(least=0, below=1), eps=above(0), weight_decay=at_least(0), max_ratio=above(0),
        min_ratio=at_least(0),
    )  # fmt: skip
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        max_ratio: float = 10.0,
        min_ratio: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "max_ratio": max_ratio, "min_ratio": min_ratio})

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        first = state["exp_avg"].lerp_(grad, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = torch.div(first / (1 - beta1**step), update, out=update).add_(p, alpha=group["weight_decay"])
        ratio = _ratio(p, update).clamp_(group["min_ratio"], group["max_ratio"])
        p.sub_(update.mul_(ratio), alpha=float(group["lr"]))


class Lars(Layerwise):
    """SGD with momentum, and a rate for every tensor from its norm and that of its gradient.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888, algorithm 1.

    Args:
        params: parameters, or groups of them. Give biases and norms to a group with ``trust_coefficient=0``, which
            steps them as SGD does.
        lr: learning rate.
        momentum: share of the old momentum in the new one.
        weight_decay: added to the gradient.
        trust_coefficient: how much of its own norm a tensor may change by in a step with rate 1.

    Raises:
        ConfigError: a value is out of range.
    """

    @checked(lr=at_least(0), momentum=Range(least=0, below=1), weight_decay=at_least(0), trust_coefficient=at_least(0))
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 1e-3,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "trust_coefficient": trust_coefficient})

    @staticmethod
    def whole_tensors(group: dict[str, Any]) -> bool:  # type: ignore[override]
        """Return whether a group's rates depend on norms, so that its tensors must be stepped unsharded."""
        return group["trust_coefficient"] > 0

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        decayed = grad.add(p, alpha=group["weight_decay"])
        if group["trust_coefficient"] > 0:
            decay = group["weight_decay"] * torch.linalg.vector_norm(p)
            bound = torch.linalg.vector_norm(grad) + decay
            decayed.mul_(_quotient(group["trust_coefficient"] * torch.linalg.vector_norm(p), bound))
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        step = state["momentum_buffer"].mul_(group["momentum"]).add_(decayed, alpha=float(group["lr"]))
        p.sub_(step)


def _ratio(p: Tensor, update: Tensor) -> Tensor:
    return _quotient(torch.linalg.vector_norm(p), torch.linalg.vector_norm(update))


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """Return the quotient, or 1 if either number is 0: a tensor of zeros could not change otherwise."""
    return torch.where((above > 0) & (below > 0), above / below, torch.ones_like(above))
