"""Exchanges rows of tokens between ranks: to their experts and back.

::

    (S, h) ─gather─► (P, h) ─exchange─► (R, h) ─by expert─► experts ─by rank─► (R, h) ─exchange─► (P, h) ─sum─► (S, h)

P pairs of token and expert leave a rank and R arrive. Ranks exchange exactly these rows, without padding.
`ls_strategy.ops.permute` has the part that happens within a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ls_strategy.distributed.axis import Axis, PendingExchange, WithAdjoint


class _PermuteRows(torch.autograd.Function):
    """Permutes rows; ``inverse`` is the inverse of ``index``. Multiplies gradients by ``scale``."""

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


class TokenExchange:
    """An all-to-all of rows with separate start and finish, in forward and in backward.

    ::

        forward    start: begin to send ── other computation ── finish: wait
        backward   start: wait          ── its backward      ── finish: begin to send

    Autograd runs ready nodes in the reverse order of their creation. So the backward of what was computed between start
    and finish also runs between the two.
    """

    def __init__(self, axis: Axis, sends: Sequence[int], receives: Sequence[int]) -> None:
        """``sends`` and ``receives``: number of rows for and from each rank."""
        self.axis = axis
        self.sends = list(sends)
        self.receives = list(receives)
        self.pending: PendingExchange | None = None
        self.arriving: Tensor | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Begin to send rows ``(sum(sends), h)``, ordered by rank. Collective.

        Returns:
            The argument for `finish`; not readable before that.
        """
        return _Start.apply(rows, self)  # type: ignore[no-any-return]

    def finish(self, started: Tensor) -> Tensor:
        """Wait for the rows of the other ranks, ``(sum(receives), h)``, ordered by rank. Collective."""
        return _Finish.apply(started, self)  # type: ignore[no-any-return]

    def reversed(self) -> TokenExchange:
        """Return the exchange in the opposite direction."""
        return TokenExchange(self.axis, self.receives, self.sends)

    def begin(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Begin to send. Returns the buffer that is filled by the time `wait` returns."""
        rows = rows.contiguous()
        self.arriving = rows.new_empty(sum(receives), rows.shape[-1])
        self.pending = self.axis.start_all_to_all(rows.split(sends), self.arriving.split(receives))
        return self.arriving

    def wait(self) -> Tensor:
        """Wait for the rows and return them."""
        assert self.pending is not None
        assert self.arriving is not None
        self.pending.wait()
        arrived, self.pending, self.arriving = self.arriving, None, None
        return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows, exchange.sends, exchange.receives)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _sent: Tensor) -> Any:  # type: ignore[override]
        return ctx.exchange.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return started.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        exchange: TokenExchange = ctx.exchange
        exchange.begin(grad, exchange.receives, exchange.sends)
        return grad, None  # only the shape counts: the backward of start returns the rows that arrive


def exchange_counts(counts: Tensor, axis: Axis) -> tuple[list[list[int]], list[list[int]]]:
    """Send every rank the number of rows for each of its experts. Collective; waits for the device once.

    Args:
        counts: ``(E,)`` int64, this rank's pairs per expert.
        axis: Rank r has the experts from ``r * E / size``.

    Returns:
        The rows to send, by rank and that rank's expert, and the rows to receive, by rank and this rank's expert.
    """
    parts = counts.view(axis.size, -1)
    arrived = torch.empty_like(parts)
    axis.start_all_to_all(list(parts), list(arrived), "counts").wait()
    both: list[list[list[int]]] = torch.stack([parts, arrived]).tolist()
    return both[0], both[1]


def by_expert(
    rows: Tensor, received: list[list[int]], gradient_scale: float = 1.0
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Reorder rows from rank-major to expert-major order. Also returns the function that reverses the order.

    Does not wait for the device.

    Args:
        rows: ``(R, h)``, ordered by rank and then by expert.
        received: Rows by rank and expert.
        gradient_scale: Factor for all gradients between the two functions, so for the experts' parameters. The
            gradients of the rows themselves are not scaled.
    """
    owners = torch.tensor([j for counts in received for j in range(len(counts))]).to(rows.device, non_blocking=True)
    lengths = torch.tensor([n for counts in received for n in counts]).to(rows.device, non_blocking=True)
    index = owners.repeat_interleave(lengths, output_size=len(rows)).argsort(stable=True)
    inverse = torch.empty_like(index)
    inverse[index] = torch.arange(len(index), device=index.device)

    def by_rank(out: Tensor) -> Tensor:
        return _PermuteRows.apply(out, inverse, index, gradient_scale)  # type: ignore[no-any-return]

    return _PermuteRows.apply(rows, index, inverse, 1 / gradient_scale), by_rank  # type: ignore[return-value]


def even_sizes(tokens: int, ranks: int) -> list[int]:
    """Return the number of tokens of each rank, as equal as possible.

    >>> even_sizes(5, 3)
    [2, 2, 1]
    """
    low, more = divmod(tokens, ranks)
    return [low + (r < more) for r in range(ranks)]


def shard_tokens(rows: Tensor, axis: Axis) -> Tensor:
    """Return this rank's rows of ``(S, ...)`` that are replicated over the axis. Collective in backward."""
    return WithAdjoint.apply(rows, *_take_and_gather(axis, len(rows)))  # type: ignore[no-any-return]


def gather_tokens(rows: Tensor, axis: Axis, tokens: int) -> Tensor:
    """Gather the ``tokens`` rows that `shard_tokens` distributed. Collective."""
    take, gather = _take_and_gather(axis, tokens)
    return WithAdjoint.apply(rows, gather, take)  # type: ignore[no-any-return]


def _take_and_gather(axis: Axis, tokens: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return what takes this rank's rows of a replicated tensor, and its adjoint, which gathers those of all ranks."""
    sizes = even_sizes(tokens, axis.size)

    def take(rows: Tensor) -> Tensor:
        return rows.narrow(0, sum(sizes[: axis.rank]), sizes[axis.rank]).clone(memory_format=torch.contiguous_format)

    return take, lambda rows: axis.all_gather(rows, 0, sizes)
