"""Collect what one pipeline stage sends to the next: activations, and optionally a scalar side loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ls_strategy.errors import StateError

SIDE = -1
"""Position of the side loss in a `StageTransfer`: it is not an argument of a block."""


@dataclass(frozen=True)
class StageTransfer:
    """The tensors among the arguments of the next stage's first block."""

    tensors: dict[int, Tensor]
    """Tensors by position among all leaves of the arguments, in order; then the side loss, if any."""

    leaves: int
    """Number of leaves of the arguments, tensors or not."""

    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)
    """Placeholders and what was received for them, by the placeholder's id. Filled by the receiving stage.

    Later blocks may get the same placeholder, and so may recomputed blocks.
    """


@dataclass(frozen=True, kw_only=True)
class SideLoss:
    """A scalar that is sent along with the activations: auxiliary losses of layers on earlier stages.

    ::

        stage 0    give() = a ──> a ──> stage 1    give() = b ──> a + b ──> last stage    receive(a + b)

    Gradients of the sum return with those of the activations.
    """

    give: Callable[[], Tensor | None]
    """Called after every forward of a stage but the last, also in evaluation.

    Returns this stage's sum for the micro-batch, a floating-point tensor ``()``, or None if the stage adds nothing. For
    micro-batches of the same shapes it must always be one or the other. Losses of recomputed forwards must not be
    included.
    """

    receive: Callable[[Tensor | None], None]
    """Called in every forward of the last stage, after its last block and before the code that follows.

    Gets the sum over all other stages, or None if all gave None. Losses of the last stage's own layers are not
    included.
    """


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def alias(tensor: Tensor) -> Tensor:
    """Return the same memory as a non-leaf tensor if it requires grad: unlike a leaf, it may be changed in place."""
    return _Alias.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[return-value]


def side_of(received: StageTransfer | None, side: SideLoss | None) -> Tensor | None:
    """Return the side loss of earlier stages.

    Raises:
        StateError: There is one, but this rank has no `SideLoss`.
    """
    tensor = None if received is None else received.tensors.get(SIDE)
    if tensor is None:
        return None
    if side is None:
        raise StateError("an earlier stage sends a side loss, but this rank has no SideLoss. Set one on all ranks.")
    return alias(tensor)


def add_side(transfer: StageTransfer, received: Tensor | None, side: SideLoss | None) -> None:
    """Add this stage's side loss to that of earlier stages, in the transfer to the next stage.

    Raises:
        StateError: It is not a scalar.
    """
    if side is None:
        return
    own = side.give()
    if own is not None and (own.dim() or not own.is_floating_point()):
        raise StateError(
            f"SideLoss.give() returned a tensor of shape {tuple(own.shape)} and {own.dtype}, but it must return a "
            "floating-point scalar, the sum over the layers of the stage, or None."
        )
    parts = [part for part in (received, own) if part is not None]
    if parts:
        transfer.tensors[SIDE] = sum(parts[1:], parts[0])
