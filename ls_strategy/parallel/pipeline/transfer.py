"""What passes from one stage to the next: activations, and a scalar beside them if there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ls_strategy.errors import StateError

SIDE = -1
"""Place of the side loss in a `StageTransfer`: it is no argument of a block."""


@dataclass(frozen=True)
class StageTransfer:
    """What one stage gives the next: the tensors among the arguments of the next block, by place."""

    tensors: dict[int, Tensor]
    """By place among all leaves of the arguments, in their order; then the side loss, where there is one."""

    leaves: int
    """Leaves of the arguments, tensors or not."""

    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)
    """Filled by the stage that gets it: placeholders with what was received for them, by the placeholder's id. Later
    blocks may be given the same placeholder, and activation checkpointing gives it to them again."""


@dataclass(frozen=True, kw_only=True)
class SideLoss:
    """A scalar that goes along the pipeline beside the activations: auxiliary losses of layers on earlier stages.

    ::

        stage 0    give() = a ──> a ──> stage 1    give() = b ──> a + b ──> last stage    receive(a + b)

    Gradients of the sum come back with those of the activations.
    """

    give: Callable[[], Tensor | None]
    """Called after every forward of a stage but the last, in evaluation, too: the sum for this micro-batch of this
    stage, a floating-point tensor ``()``; None where the stage has nothing to add. For micro-batches of the same shapes
    always one or the other. What a recomputed forward leaves behind must not be in it."""

    receive: Callable[[Tensor | None], None]
    """Called in every forward of the last stage, after its last block and before the code that follows: the sum over
    all other stages, or None where all gave None. What the last stage's own layers have to add is not in it."""


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def alias(tensor: Tensor) -> Tensor:
    """The same memory, as the output of an operation if it requires grad: unlike a leaf, it may be changed in place."""
    return _Alias.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[return-value]


def side_of(received: StageTransfer | None, side: SideLoss | None) -> Tensor | None:
    """What earlier stages gave.

    Raises:
        StateError: there is something, and nobody here who takes it.
    """
    tensor = None if received is None else received.tensors.get(SIDE)
    if tensor is None:
        return None
    if side is None:
        raise StateError("an earlier stage sends a side loss, and this rank has no SideLoss: give all ranks one.")
    return alias(tensor)


def add_side(transfer: StageTransfer, received: Tensor | None, side: SideLoss | None) -> None:
    """Add what this stage gives to what earlier ones gave, for the next stage.

    Raises:
        StateError: it is no scalar.
    """
    if side is None:
        return
    own = side.give()
    if own is not None and (own.dim() or not own.is_floating_point()):
        raise StateError(
            f"SideLoss.give() returned a tensor of shape {tuple(own.shape)} and {own.dtype}: it must be a floating-"
            "point scalar, the sum over the layers of the stage, or None."
        )
    parts = [part for part in (received, own) if part is not None]
    if parts:
        transfer.tensors[SIDE] = sum(parts[1:], parts[0])
