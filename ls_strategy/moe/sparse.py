"""Base of all layers with experts: sends tokens to their experts and back, whatever the router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.moe.dispatch import TokenExchange, by_expert, exchange_counts, gather_tokens, shard_tokens
from ls_strategy.moe.router import Routing
from ls_strategy.moe.statistics import Counts, MoEStatistics
from ls_strategy.ops.permute import combine, permute, sort_by_expert

T = TypeVar("T")


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that a layer communicates with."""

    experts: Axis
    """Rank r holds the experts from ``r * E / size``."""

    replicas: Axis | None = None
    """Ranks that get the same tokens. Each dispatches a part of them."""

    gradient_scale: float = 1.0
    """Factor for the gradients of the experts' parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Return the same object: process groups cannot be copied."""
        return self


class SparseLayer(nn.Module):
    """A layer in which every token uses some of the experts.

    The first dimension of all parameters of ``experts`` is that of the local experts. ``experts`` is called with rows
    ordered by expert and the number of rows of each; see `Experts`.
    """

    experts: nn.Module
    num_experts: int
    """Number of experts over all ranks."""

    parallel: ExpertParallel | None = None
    """Ranks that hold the other experts; see `apply_expert_parallel`."""

    counts: Counts

    def shard(self, parallel: ExpertParallel) -> None:
        """Set the ranks to communicate with. The caller shards the experts' parameters."""
        self.parallel = parallel

    def statistics(self) -> MoEStatistics:
        """Return this rank's statistics of training forwards since `reset_statistics`. Does not wait for the device."""
        return self.counts.statistics(next(self.parameters()).device)

    def reset_statistics(self) -> None:
        """Start new statistics."""
        self.counts.reset()

    def sorted_pairs(self, routing: Routing) -> tuple[Tensor, Tensor]:  # the planner replaces these three
        """Return the kept pairs, sorted by expert, and their number for each expert; see `sort_by_expert`."""
        return sort_by_expert(routing.experts, routing.kept, self.num_experts)

    def row_counts(self, order: Tensor, counts: Tensor) -> list[int]:
        """Return the rows of each expert, of the kept pairs ``order``. Waits for the device once."""
        return counts.tolist()

    def exchanged_counts(self, order: Tensor, counts: Tensor, axis: Axis) -> tuple[list[list[int]], list[list[int]]]:
        """Return the rows of `exchange_counts`. Collective; waits for the device once."""
        return exchange_counts(counts, axis)

    def dispatch(
        self, tokens: Tensor, routing: Routing, meanwhile: Callable[[], T], dtype: torch.dtype | None = None
    ) -> tuple[Tensor, T]:
        """Return the weighted sums of the outputs of each token's experts. Collective over the ranks of ``parallel``.

        Args:
            tokens: ``(S, hidden)``.
            routing: Choices of all S tokens.
            meanwhile: Called while rows are in flight.
            dtype: Dtype of the result. None: that of the experts' output.

        Returns:
            ``(S, hidden)``, and the result of ``meanwhile``.
        """
        replicas = None if self.parallel is None else self.parallel.replicas
        if replicas is None:
            return self._dispatch_local(tokens, routing, meanwhile, dtype)
        own = Routing(
            shard_tokens(routing.experts, replicas),
            shard_tokens(routing.weights, replicas),
            None if routing.kept is None else shard_tokens(routing.kept, replicas),
        )
        out, result = self._dispatch_local(shard_tokens(tokens, replicas), own, meanwhile, dtype)
        return gather_tokens(out, replicas, len(tokens)), result

    def _dispatch_local(
        self, tokens: Tensor, routing: Routing, meanwhile: Callable[[], T], dtype: torch.dtype | None
    ) -> tuple[Tensor, T]:
        order, counts = self.sorted_pairs(routing)
        axis = None if self.parallel is None or self.parallel.experts.size == 1 else self.parallel.experts
        row_dtype = self.experts.input_dtype(tokens)  # type: ignore[operator]
        rows = permute(tokens.to(row_dtype), order, routing.experts.shape[1])
        if axis is None:
            lengths = self.row_counts(order, counts)
            result = meanwhile()
            out = self.experts(rows, lengths)
            return combine(out if dtype is None else out.to(dtype), order, routing.weights), result
        scale = 1.0 if self.parallel is None else self.parallel.gradient_scale
        send, receive = self.exchanged_counts(order, counts, axis)
        outgoing = TokenExchange(axis, [sum(n) for n in send], [sum(n) for n in receive])
        started = outgoing.start(rows)
        result = meanwhile()
        rows, by_rank = by_expert(outgoing.finish(started), receive, scale)
        out = by_rank(self.experts(rows, [sum(n) for n in zip(*receive, strict=True)]))
        returning = outgoing.reversed()
        own = returning.finish(returning.start(out))
        return combine(own if dtype is None else own.to(dtype), order, routing.weights), result
