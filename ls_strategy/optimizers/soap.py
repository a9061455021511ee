"""SOAP: Adam in the basis in which the gradient's second moments over rows and over columns are diagonal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ls_strategy.checked import Range, above, at_least, checked
from ls_strategy.optimizers.layerwise import Layerwise


class SOAP(Layerwise):
    """Adam in the eigenbasis of Shampoo's two preconditioners of a matrix.

    Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321, algorithm 3. The bases begin as
    the eigenvectors of the first step's preconditioners, and follow by one step of the power method and a QR
    decomposition every ``frequency`` steps (algorithm 4). A dimension above ``max_dim`` is not rotated, and vectors are
    stepped by Adam. A tensor with more than two dimensions is a matrix of its first dimension and all others.

    States of an ``(m, n)`` matrix: two moments of its shape, and two matrices each of ``(m, m)`` and ``(n, n)``. Above
    stage 0, one rank has them.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: of the moments; the second one also of the preconditioners.
        eps: added to the square root of the second moment.
        weight_decay: decoupled.
        frequency: steps between two updates of the bases.
        max_dim: the largest dimension that is rotated.

    Raises:
        ConfigError: a value is out of range.
    """

    @checked(
        lr=at_least(0), betas=Range(least=0, below=1), eps=above(0), weight_decay=at_least(0), frequency=at_least(1),
        max_dim=at_least(1),
    )  # fmt: skip
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        frequency: int = 10,
        max_dim: int = 10_000,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "frequency": frequency}
        super().__init__(params, {**defaults, "max_dim": max_dim})

    @staticmethod
    def tensor_cost(group: dict[str, Any], shape: tuple[int, ...]) -> float:
        """Return about the multiplications of one tensor's update."""
        if len(shape) < 2:
            return float(math.prod(shape))
        rows, columns = shape[0], math.prod(shape[1:])
        sides = [n for n in (rows, columns) if n <= group["max_dim"]]
        return float(rows * columns + sum(6 * n * rows * columns + 3 * n**3 / group["frequency"] for n in sides))

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        matrix = grad.reshape(grad.shape[0], -1) if grad.dim() > 1 else grad
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        self._follow(state, matrix, group)
        bases = (state.get("left_basis"), state.get("right_basis"))
        first = state["exp_avg"].lerp_(grad, 1 - beta1).reshape(matrix.shape)
        second = state["exp_avg_sq"].view(matrix.shape)
        rotated = _rotated(matrix, bases)
        second.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        update = _rotated(first, bases) / (1 - beta1**step)
        update.div_((second / (1 - beta2**step)).sqrt_().add_(group["eps"]))
        lr = float(group["lr"])
        p.mul_(1 - lr * group["weight_decay"])
        p.sub_(_rotated(update, bases, back=True).view(p.shape), alpha=lr)

    @staticmethod
    def _follow(state: dict[str, Any], matrix: Tensor, group: dict[str, Any]) -> None:
        """Update the preconditioners with this gradient, and the bases when they are due."""
        beta2 = group["betas"][1]
        for side, product in (("left", lambda: matrix @ matrix.mT), ("right", lambda: matrix.mT @ matrix)):
            if matrix.dim() < 2 or matrix.shape[0 if side == "left" else 1] > group["max_dim"]:
                continue
            if side not in state:
                state[side] = product()
                state[f"{side}_basis"] = torch.linalg.eigh(state[side])[1].contiguous()
                continue
            state[side].lerp_(product(), 1 - beta2)
            if (int(state["step"]) - 1) % group["frequency"] == 0:
                state[f"{side}_basis"] = torch.linalg.qr(state[side] @ state[f"{side}_basis"])[0].contiguous()


def _rotated(matrix: Tensor, bases: tuple[Tensor | None, Tensor | None], *, back: bool = False) -> Tensor:
    """Return the matrix in the bases, or from there in its own; None is no rotation."""
    left, right = bases
    if left is not None:
        matrix = (left if back else left.mT) @ matrix
    if right is not None:
        matrix = matrix @ (right.mT if back else right)
    return matrix
