"""Losses of routers, and their way into the loss of the training step without global state.

A layer stores its weighted losses in its router, and `moe_losses` takes them all::

    loss = cross_entropy(self(x), y) + moe_losses(self)

Reentrant checkpointing runs the forward without gradients, and recomputes it in backward. There `moe_losses` gets the
value alone, as a leaf; backward gives the leaf the gradient of the training step's loss before it reaches the
checkpoint, whose recomputation then passes it on to the router::

    forward     leaf = value of the losses                      no graph
    backward    leaf.grad = d loss / d losses                   the sum with the leaf is younger than the checkpoint
    recompute   gradient of the logits += leaf.grad * d losses / d logits
"""

from __future__ import annotations

import weakref

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
        self._owed: list[weakref.ref[Tensor]] = []
        """Leaves whose gradient a recomputation has to pass on, as long as a graph has them."""
        self._not_passed_on: list[Tensor] = []
        """Leaves with a gradient that no recomputation has passed on yet."""

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

    def leave_value(self, loss: Tensor) -> None:
        """Store the value of a loss, ``()``, whose graph exists only when backward recomputes this forward.

        Raises:
            StateError: backward has not recomputed an earlier one, whose losses are part of a loss.
        """
        if self._not_passed_on:
            self._not_passed_on.clear()
            raise StateError(
                "losses of an MoE layer in torch.utils.checkpoint(use_reentrant=True) were part of the loss, but "
                "backward has not recomputed the layer, so its router got no gradient of them: its output is not part "
                "of that loss, or its input requires no gradient. Use use_reentrant=False."
            )
        leaf = loss.detach().clone().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._note_gradient)
        self.leave(leaf)
        self._owed = [*(ref for ref in self._owed if ref() is not None), weakref.ref(leaf)]

    def _note_gradient(self, leaf: Tensor) -> None:
        if not any(each is leaf for each in self._not_passed_on):
            self._not_passed_on.append(leaf)

    def pass_on(self, loss: Tensor, logits: Tensor) -> None:
        """Add the gradient of a loss that `leave_value` has stored to that of the logits. Called in a recomputation.

        Args:
            loss: ``()``, recomputed, with its graph.
            logits: the tensor in this graph through which the gradient of the layer's output flows as well.

        Raises:
            StateError: it is not known which forward this is, or the loss got no gradient before.
        """
        leaves = [leaf for ref in self._owed if (leaf := ref()) is not None]
        if not leaves:
            return  # nothing was done with the value
        if len(leaves) > 1:
            leaves = [leaf for leaf in leaves if torch.equal(leaf.detach(), loss.detach())]
        if len(leaves) != 1 or leaves[0].grad is None:
            raise StateError(
                "an MoE layer in torch.utils.checkpoint(use_reentrant=True) is recomputed, but "
                f"{'its losses have no gradient' if leaves else 'the forward that it belongs to is not known'}. Add "
                "moe_losses(self) to the loss of the same forward, or use use_reentrant=False."
            )
        self._owed = [ref for ref in self._owed if ref() is not leaves[0]]
        self._not_passed_on = [leaf for leaf in self._not_passed_on if leaf is not leaves[0]]
        (gradient,) = torch.autograd.grad(loss, logits, leaves[0].grad, retain_graph=True)
        logits.register_hook(gradient.add)

    def take(self) -> list[Tensor]:
        """Return all losses since the last call."""
        left, self._pending = self._pending, []
        return left


def moe_losses(model: nn.Module) -> Tensor:
    """Return the sum, ``()``, of the balance and z losses of all training forwards since the last call, or 0.

    Exact under activation checkpointing. With torch's ``use_reentrant=True`` the losses have to be part of the loss
    whose backward recomputes the layers.

    Args:
        model: The model that holds the MoE layers. Losses of other layers stay pending.
    """
    losses = [loss for m in model.modules() if isinstance(m, LossKeeper) for loss in m.take()]
    if losses:
        device = losses[0].device
        return torch.stack([loss.to(device) for loss in losses]).sum()
    parameter = next(model.parameters(), None)
    return torch.zeros((), device=None if parameter is None else parameter.device)
