"""Rows of tokens on their way between ranks, to their experts and back.

::

    (S, h) ─gather─► (P, h) ─exchange─► (R, h) ─by expert─► experts ─by rank─► (R, h) ─exchange─► (P, h) ─sum─► (S, h)

P pairs of token and expert leave a rank, R arrive; ranks send each other as many rows as there are, no more. Nothing is
padded. What happens on one rank is in `ls_strategy.ops.permute`; here is what happens between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ls_strategy.distributed.axis import Axis, PendingExchange


class _Permute(torch.autograd.Function):
    """Rows in another order; ``inverse`` undoes it. Gradients are multiplied by ``scale`` on the way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, scale: float) -> Tensor:
        ctx.index, ctx.inverse, ctx.scale = index, inverse, scale
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        result = grad.index_select(0, ctx.inverse)
        return result if ctx.scale == 1 else result.mul_(ctx.scale), None, None, None


# --- between ranks ---------------------------------------------------------------------------------------------------


class Exchange:
    """Rows of one forward on their way between ranks, started and finished apart, forward and backward.

    ::

        forward    start: begin to send ── something else ── finish: wait
        backward   start: wait          ── its backward   ── finish: begin to send

    Autograd runs the nodes that are ready in the reverse order of their creation, so the backward of what was computed
    between start and finish runs between the two as well.
    """

    def __init__(self, axis: Axis, sends: Sequence[int], receives: Sequence[int]) -> None:
        """Rows that go to each rank, and that come from each."""
        self.axis = axis
        self.sends = list(sends)
        self.receives = list(receives)
        self.pending: PendingExchange | None = None
        self.arriving: Tensor | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Begin to send rows ``(sum(sends), h)``, ordered by rank. Collective.

        Returns:
            For `finish`, and not to be read before.
        """
        return _Start.apply(rows, self)  # type: ignore[no-any-return]

    def finish(self, started: Tensor) -> Tensor:
        """Wait for the rows of the other ranks, ``(sum(receives), h)``, ordered by rank. Collective."""
        return _Finish.apply(started, self)  # type: ignore[no-any-return]

    def reversed(self) -> Exchange:
        """The way back."""
        return Exchange(self.axis, self.receives, self.sends)

    def begin(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Begin to send; the buffer that fills up until `wait`."""
        rows = rows.contiguous()
        self.arriving = rows.new_empty(sum(receives), rows.shape[-1])
        self.pending = self.axis.start_all_to_all(rows.split(sends), self.arriving.split(receives))
        return self.arriving

    def wait(self) -> Tensor:
        """What arrived."""
        assert self.pending is not None
        assert self.arriving is not None
        self.pending.wait()
        arrived, self.pending, self.arriving = self.arriving, None, None
        return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows, exchange.sends, exchange.receives)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _sent: Tensor) -> Any:  # type: ignore[override]
        return ctx.exchange.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return started.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        exchange: Exchange = ctx.exchange
        exchange.begin(grad, exchange.receives, exchange.sends)
        return grad, None  # of the right shape; what start returns is what has arrived by then


def exchange_counts(counts: Tensor, axis: Axis) -> tuple[list[list[int]], list[list[int]]]:
    """Tell every rank how many rows it gets for each of its experts. Collective; waits for the device, once.

    Args:
        counts: ``(E,)`` int64: this rank's pairs per expert.
        axis: rank r has the experts from ``r * E / size``.

    Returns:
        Rows to send, by rank and expert of that rank; and to receive, by rank and expert of this rank.
    """
    parts = counts.view(axis.size, -1)
    arrived = torch.empty_like(parts)
    axis.start_all_to_all(list(parts), list(arrived), "counts").wait()
    both: list[list[list[int]]] = torch.stack([parts, arrived]).tolist()
    return both[0], both[1]


def by_expert(
    rows: Tensor, received: list[list[int]], gradient_scale: float = 1.0
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Rows that arrived ordered by rank and then expert, ordered by expert alone, and the way back.

    Args:
        rows: ``(R, h)``.
        received: rows by rank and expert.
        gradient_scale: factor of all gradients between the two, so of those of the experts' parameters, but not of the
            rows'.
    """
    owner = torch.tensor([j for counts in received for j in range(len(counts))])
    lengths = torch.tensor([n for counts in received for n in counts])
    index = owner.repeat_interleave(lengths).argsort(stable=True).to(rows.device)
    inverse = torch.empty_like(index)
    inverse[index] = torch.arange(len(index), device=index.device)

    def by_rank(out: Tensor) -> Tensor:
        return _Permute.apply(out, inverse, index, gradient_scale)  # type: ignore[no-any-return]

    return _Permute.apply(rows, index, inverse, 1 / gradient_scale), by_rank  # type: ignore[return-value]


class _Part(torch.autograd.Function):
    """This rank's rows of what all ranks of an axis have alike; backward joins."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, sizes: list[int]) -> Tensor:
        ctx.axis, ctx.sizes = axis, sizes
        return rows.narrow(0, sum(sizes[: axis.rank]), sizes[axis.rank]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Join.apply(grad, ctx.axis, ctx.sizes), None, None


class _Join(torch.autograd.Function):
    """All ranks' rows, for what they compute alike; backward takes this rank's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, sizes: list[int]) -> Tensor:
        ctx.axis, ctx.sizes = axis, sizes
        return axis.all_gather(rows, 0, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Part.apply(grad, ctx.axis, ctx.sizes), None, None


def even_sizes(tokens: int, ranks: int) -> list[int]:
    """Tokens of each rank, as equal as they can be.

    >>> even_sizes(5, 3)
    [2, 2, 1]
    """
    low, more = divmod(tokens, ranks)
    return [low + (r < more) for r in range(ranks)]


def take_part(rows: Tensor, axis: Axis) -> Tensor:
    """This rank's share of rows ``(S, ...)`` that all ranks of the axis have alike. Collective in backward."""
    return _Part.apply(rows, axis, even_sizes(len(rows), axis.size))  # type: ignore[no-any-return]


def join_parts(rows: Tensor, axis: Axis, tokens: int) -> Tensor:
    """The ``tokens`` rows of which `take_part` gave each rank a share. Collective."""
    return _Join.apply(rows, axis, even_sizes(tokens, axis.size))  # type: ignore[no-any-return]
