"""Layers with experts on tensors without values: which rows every expert gets, where no router can say.

All experts get equally many pairs of token and expert, up to their capacity. So a rank keeps as many rows as it does in
training where nothing is dropped, and at least as many otherwise: a router that prefers experts drops more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ls_strategy.moe.router import Routing, RoutingAccounts
from ls_strategy.moe.sparse import SparseLayer
from ls_strategy.ops.permute import sort_by_expert


def balance_experts(model: nn.Module) -> None:
    """Let all layers with experts count equal numbers of rows, by attributes of the layers."""
    for layer in model.modules():
        if isinstance(layer, SparseLayer):
            _balance(layer)


def _balance(layer: SparseLayer) -> None:
    def sorted_pairs(routing: Routing) -> tuple[Tensor, Tensor]:
        order, counts = sort_by_expert(routing.experts, None, layer.num_experts)
        return order[: _kept(layer, routing)], counts

    layer.sorted_pairs = sorted_pairs  # type: ignore[method-assign]
    layer.row_counts = lambda order, _counts: _equal(len(order), layer.num_experts)  # type: ignore[method-assign]

    def exchanged(order: Tensor, _counts: Tensor, axis: Any) -> tuple[list[list[int]], list[list[int]]]:
        each = _equal(len(order), layer.num_experts)
        own = layer.num_experts // axis.size
        send = [each[r * own : (r + 1) * own] for r in range(axis.size)]
        return send, [send[axis.rank]] * axis.size

    layer.exchanged_counts = exchanged  # type: ignore[method-assign]


def _kept(layer: SparseLayer, routing: Routing) -> int:
    """Return the most pairs of this rank's tokens that can be kept."""
    pairs = routing.experts.numel()
    if routing.kept is None:
        return pairs
    router = next(m for m in layer.modules() if isinstance(m, RoutingAccounts) and m.counts is layer.counts)
    replicas = None if layer.parallel is None else layer.parallel.replicas
    ranks = 1 if replicas is None else replicas.size  # they share the tokens, and the capacity
    capacity = router.options.capacity(len(routing.experts) * ranks, training=layer.training)
    return min(pairs, -(-capacity * layer.num_experts // ranks))


def _equal(total: int, parts: int) -> list[int]:
    low, more = divmod(total, parts)
    return [low + (i < more) for i in range(parts)]
