"""One step of one virtual rank: its view of the buffers, whether it counts in metrics, and its loss."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ls_strategy.errors import StateError
from ls_strategy.host.pytorch import pl
from ls_strategy.lightning._private import metric_snapshot


class Buffers:
    """Buffers of a module, as every virtual rank sees them."""

    def __init__(self, module: pl.LightningModule, views: dict[int, list[Tensor]]) -> None:
        self._buffers = list(module.buffers())
        self._views = views
        self._before: list[Tensor] = []
        self._first: list[Tensor] | None = None

    def begin(self) -> None:
        """Note the values that all virtual ranks without a view of their own begin with."""
        self._before = self._copy()

    def show(self, rank: int | None) -> None:
        """Give the buffers the values of a virtual rank."""
        self._set(self._before if rank is None else self._views.get(rank, self._before))

    def keep(self, rank: int | None) -> None:
        """Note the values that a virtual rank's step has left."""
        if rank is not None:
            self._views[rank] = self._copy()
            self._first = self._views[rank] if self._first is None else self._first

    def end(self, *, forget: bool) -> None:
        """Leave the values of this process's first virtual rank; ``forget`` those of the others."""
        if self._first is not None:
            self._set(self._first)
        if forget:
            self._views.clear()

    def _copy(self) -> list[Tensor]:
        return [b.detach().clone() for b in self._buffers]

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)


@contextmanager
def counting_metrics(module: pl.LightningModule, *, counts: bool) -> Generator[None, None, None]:
    """Let metrics count what a step gives them, or not: a rank without a virtual rank only takes part in gathers."""
    restore = None if counts else metric_snapshot(module)
    yield
    if restore is not None:
        restore()


class _Carry(torch.autograd.Function):
    """A loss whose value is another one's."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def loss_of(output: Any, rank: int | None) -> Tensor:
    """Return the loss in what ``training_step`` has returned for a virtual rank; None: for none of them.

    Raises:
        StateError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise StateError(
            f"training_step returned {type(loss).__name__} as the loss of virtual rank {rank}, but with "
            "parallel.virtual_ranks every step has a loss. Return a tensor, or a dict with one under 'loss'."
        )
    return loss


def with_loss(output: Any, loss: Tensor) -> Any:
    """Return the output of the first virtual rank with the graph of the last one, whose loss is ``loss``."""
    first = output["loss"] if isinstance(output, Mapping) else output
    if loss is first:
        return output
    carried = _Carry.apply(loss, first.detach())
    return {**output, "loss": carried} if isinstance(output, Mapping) else carried
