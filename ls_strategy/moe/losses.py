"""Losses of routers, and how they reach the loss of the training step without global state.

A layer leaves its weighted losses with its router, and `moe_losses` takes them all::

    loss = cross_entropy(self(x), y) + moe_losses(self)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ls_strategy.errors import StateError

MOST_LEFT = 32
"""Losses of one layer that may wait to be taken: each holds its forward's graph."""


def balance_loss(probabilities: Tensor, chosen: Tensor, k: int = 1) -> Tensor:
    """``E * sum(me * ce) / k``, which is 1 for even loads; its gradient reaches the probabilities.

    Switch (arXiv:2101.03961, equation 4) with ``k=1``; GShard (arXiv:2006.16668, section 2.2) counts the first choice
    of two, DeepSpeed all choices of more.

    Args:
        probabilities: ``(S, E)``; ``me`` is their mean over tokens.
        chosen: ``(E,)``, the pairs per expert that count; ``ce`` is ``chosen / S``.
        k: pairs per token that count.
    """
    tokens, num_experts = probabilities.shape
    share = chosen.to(probabilities.dtype) / max(tokens, 1)
    return (probabilities.sum(0) / max(tokens, 1) * share).sum() * (num_experts / k)


def z_loss(logits: Tensor) -> Tensor:
    """``mean(logsumexp(logits) ** 2)`` over ``(S, E)``: keeps logits small (ST-MoE, arXiv:2202.08906, equation 5)."""
    return logits.logsumexp(-1).square().sum() / max(len(logits), 1)


class LossKeeper:
    """What a module that leaves losses for `moe_losses` is beside an ``nn.Module``."""

    def __init__(self) -> None:
        """Nothing is left."""
        self._left: list[Tensor] = []

    def leave(self, loss: Tensor) -> None:
        """Keep a loss, ``()``, with its graph.

        Raises:
            StateError: nobody takes them.
        """
        if len(self._left) >= MOST_LEFT:
            raise StateError(
                f"{len(self._left)} losses of one MoE layer wait and none was taken; each keeps the activations of its "
                "forward alive. Add moe_losses(self) to the loss of every training step, or build the layer with "
                "balance_loss=0 and z_loss=0."
            )
        self._left.append(loss)

    def take(self) -> list[Tensor]:
        """All losses since the last call."""
        left, self._left = self._left, []
        return left


def moe_losses(model: nn.Module) -> Tensor:
    """Sum, ``()``, of the balance and z losses of all forwards in training since the last call; 0 if there are none.

    Exact under activation checkpointing, but for ``use_reentrant=True`` of torch, whose forwards have no gradients and
    leave no loss.

    Args:
        model: holds the MoE layers. What other layers left stays.
    """
    losses = [loss for m in model.modules() if isinstance(m, LossKeeper) for loss in m.take()]
    if losses:
        device = losses[0].device
        return torch.stack([loss.to(device) for loss in losses]).sum()
    parameter = next(model.parameters(), None)
    return torch.zeros((), device=None if parameter is None else parameter.device)
