"""One step of one virtual rank: its view of the buffers, whether it counts in metrics, and its loss."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy._torch import version_of
from ls_strategy.errors import StateError
from ls_strategy.host.pytorch import pl
from ls_strategy.lightning._private import metric_snapshot


class Buffers:
    """Buffers of a module, as every virtual rank of this process sees them.

    Between two batches the module has those of the first one. Hooks run once per process, so what user code writes to a
    buffer there is what all of them see.
    """

    def __init__(self, module: pl.LightningModule, first: int) -> None:
        """See what the module has. ``first``: the first virtual rank of this process."""
        self._module, self._first = module, first
        self._places: list[tuple[nn.Module, str]] = []
        self._before: list[Tensor | None] = []
        self._views: dict[int, list[Tensor | None]] = {}
        """By virtual rank, since the last synchronizing step."""
        self._left: list[tuple[Tensor | None, int]] = []
        """Every buffer and its version, as the last batch has left it."""

    def begin(self) -> None:
        """Begin a batch: note the values that virtual ranks without a view of their own begin with."""
        places: dict[Any, tuple[nn.Module, str]] = {}
        for module in self._module.modules():
            for name, buffer in module._buffers.items():
                places[(id(module), name) if buffer is None else id(buffer)] = module, name
        self._places = list(places.values())
        self._before = self._copy()
        if len(self._left) != len(self._places):
            self._views.clear()
        for number, (now, left) in enumerate(zip(self._stamps(), self._left, strict=False)):
            if now[0] is not left[0] or now[1] != left[1]:
                for view in self._views.values():
                    view[number] = self._before[number]

    def show(self, rank: int | None) -> None:
        """Give the buffers the values of a virtual rank."""
        self._set(self._before if rank is None else self._views.get(rank, self._before))

    def keep(self, rank: int | None) -> None:
        """Note the values that a virtual rank's step has left."""
        if rank is not None:
            self._views[rank] = self._copy()

    def end(self, *, forget: bool) -> None:
        """Leave the values of this process's first virtual rank; ``forget`` those of the others."""
        if self._first in self._views:
            self._set(self._views[self._first])
        if forget:
            self._views.clear()
        self._left = self._stamps()

    def _now(self) -> list[Tensor | None]:
        # A step may have put another tensor there, or None.
        return [getattr(module, name, None) for module, name in self._places]

    def _stamps(self) -> list[tuple[Tensor | None, int]]:
        return [(b, -1 if b is None or b.is_inference() else version_of(b)) for b in self._now()]

    def _copy(self) -> list[Tensor | None]:
        return [None if b is None else b.detach().clone() for b in self._now()]

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor | None]) -> None:
        for (module, name), buffer, value in zip(self._places, self._now(), values, strict=True):
            if buffer is None or value is None:
                setattr(module, name, None if value is None else value.clone())
                continue
            fixed = buffer.is_inference() and not torch.is_inference_mode_enabled()
            if fixed or buffer.shape != value.shape or buffer.dtype != value.dtype:
                setattr(module, name, value.clone())
            else:
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
