"""What layers with experts have in common, whoever routes: tokens to their experts and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.moe.dispatch import (
    Exchange,
    by_expert,
    exchange_counts,
    join_parts,
    take_part,
)
from ls_strategy.moe.router import Routing
from ls_strategy.moe.statistics import MoEStatistics
from ls_strategy.ops.permute import combine, permute, sort_by_expert


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that a layer works with."""

    experts: Axis
    """Rank r holds the experts from ``r * E / size``."""

    replicas: Axis | None = None
    """Ranks that get the same tokens, of which each dispatches a part."""

    gradient_scale: float = 1.0
    """Factor of the gradients of the experts' parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """Itself: process groups cannot be copied."""
        return self


class SparseLayer(nn.Module):
    """A layer of which every token uses some experts.

    ``experts`` holds parameters whose first dimension is that of the experts here, and is called with rows ordered by
    expert and the rows of each; see `Experts`.
    """

    experts: nn.Module
    num_experts: int
    """Over all ranks."""

    parallel: ExpertParallel | None = None
    """Ranks that hold the other experts; see `apply_expert_parallel`."""

    def shard(self, parallel: ExpertParallel) -> None:
        """Learn which ranks to work with; the experts' parameters are divided by the caller."""
        self.parallel = parallel

    def statistics(self) -> MoEStatistics:
        """Of the forwards in training since `reset_statistics`, on this rank; does not wait for the device."""
        raise NotImplementedError

    def reset_statistics(self) -> None:
        """Begin anew."""
        raise NotImplementedError

    def spread(
        self, tokens: Tensor, routing: Routing, meanwhile: Callable[[], None], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Weighted sums of what the tokens' experts compute. Collective over the ranks of ``parallel``.

        Args:
            tokens: ``(S, hidden)``.
            routing: of all S.
            meanwhile: is called while rows travel.
            dtype: of the result; what the experts return without.

        Returns:
            ``(S, hidden)``.
        """
        replicas = None if self.parallel is None else self.parallel.replicas
        if replicas is None:
            return self._dispatched(tokens, routing, meanwhile, dtype)
        mine = Routing(
            take_part(routing.experts, replicas),
            take_part(routing.weights, replicas),
            None if routing.kept is None else take_part(routing.kept, replicas),
        )
        out = self._dispatched(take_part(tokens, replicas), mine, meanwhile, dtype)
        return join_parts(out, replicas, len(tokens))

    def _dispatched(
        self, tokens: Tensor, routing: Routing, meanwhile: Callable[[], None], dtype: torch.dtype | None
    ) -> Tensor:
        order, counts = sort_by_expert(routing.experts, routing.kept, self.num_experts)
        axis = None if self.parallel is None or self.parallel.experts.size == 1 else self.parallel.experts
        travels_in = self.experts.input_dtype(tokens)  # type: ignore[operator]
        rows = permute(tokens.to(travels_in), order, routing.experts.shape[1])
        if axis is None:
            lengths: list[int] = counts.tolist()
            meanwhile()
            out = self.experts(rows, lengths)
            return combine(out if dtype is None else out.to(dtype), order, routing.weights)
        scale = 1.0 if self.parallel is None else self.parallel.gradient_scale
        send, receive = exchange_counts(counts, axis)
        there = Exchange(axis, [sum(n) for n in send], [sum(n) for n in receive])
        started = there.start(rows)
        meanwhile()
        rows, by_rank = by_expert(there.finish(started), receive, scale)
        out = by_rank(self.experts(rows, [sum(n) for n in zip(*receive, strict=True)]))
        back = there.reversed()
        mine = back.finish(back.start(out))
        return combine(mine if dtype is None else mine.to(dtype), order, routing.weights)
