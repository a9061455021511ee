"""Losses of routers, and their way into the loss of the training step without global state.

A layer stores its weighted losses in its router, and `moe_losses` takes them all::

    loss = cross_entropy(self(x), y) + moe_losses(self)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ls_strategy.errors import StateError

MOST_LEFT = 32
"""Losses of one layer that may be pending: each keeps its forward's graph alive."""


def balance_loss(probabilities: Tensor, chosen: Tensor, k: int = 1) -> Tensor:
    """Return ``E * sum(me * ce) / k``, which is 1 for even loads. Its gradient reaches the probabilities.

    Switch (arXiv:2101.03961, equation 4) has ``k=1``. GShard (arXiv:2006.16668, section 2.2) counts the first choice of
    two, DeepSpeed all choices if there are more.

    Args:
        probabilities: ``(S, E)``; ``me`` is their mean over tokens.
        chosen: ``(E,)``, counted pairs per expert; ``ce`` is ``chosen / S``.
        k: Counted pairs per token.
    """
    tokens, num_experts = probabilities.shape
    share = chosen.to(probabilities.dtype) / max(tokens, 1)
    return (probabilities.sum(0) / max(tokens, 1) * share).sum() * (num_experts / k)


def z_loss(logits: Tensor) -> Tensor:
    """Return ``mean(logsumexp(logits) ** 2)`` over ``(S, E)``, to limit logits (ST-MoE, arXiv:2202.08906, eq. 5)."""
    return logits.logsumexp(-1).square().sum() / max(len(logits), 1)


class LossKeeper:
    """Mixin for modules that produce losses for `moe_losses`."""

    def __init__(self) -> None:
        self._pending: list[Tensor] = []

    def leave(self, loss: Tensor) -> None:
        """Store a loss, ``()``, with its graph.

        Raises:
            StateError: Too many losses are pending.
        """
        if len(self._pending) >= MOST_LEFT:
            raise StateError(
                f"{len(self._pending)} losses of one MoE layer are pending and none was taken; each keeps the "
                "activations of its forward alive. Add moe_losses(self) to the loss of every training step, or build "
                "the layer with balance_loss=0 and z_loss=0."
            )
        self._pending.append(loss)

    def take(self) -> list[Tensor]:
        """Return all losses since the last call."""
        left, self._pending = self._pending, []
        return left


def moe_losses(model: nn.Module) -> Tensor:
    """Return the sum, ``()``, of the balance and z losses of all training forwards since the last call, or 0.

    Exact under activation checkpointing, except with torch's ``use_reentrant=True``: its forwards have no gradients, so
    they produce no loss.

    Args:
        model: The model that holds the MoE layers. Losses of other layers stay pending.
    """
    losses = [loss for m in model.modules() if isinstance(m, LossKeeper) for loss in m.take()]
    if losses:
        device = losses[0].device
        return torch.stack([loss.to(device) for loss in losses]).sum()
    parameter = next(model.parameters(), None)
    return torch.zeros((), device=None if parameter is None else parameter.device)
