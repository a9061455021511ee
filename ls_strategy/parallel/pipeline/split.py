"""Backward in two parts: first the gradients of the inputs, which another rank waits for, then those of the weights.

::

    output ── n3 ── n2 ── n1 ── input        n1, n2, n3: nodes of the graph that lead to an input
               │     │     │
               W3    W2    W1                weights branch off from them

The first part runs backward from the output to the inputs only, and saves the gradients that arrive at every node from
which weights branch off. The second part runs each of these nodes again, for its weights only. The operations, and so
the results, are those of one full backward. The graph and its saved tensors live until the second part.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241. Unlike torch's own implementation, gradients
reach the parameters through autograd, so that hooks on them run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Group:
    """Weights, and the nodes from which they branch off."""

    weights: dict[Node, Tensor] = field(default_factory=dict)
    sources: dict[Node, tuple[Tensor | None, ...] | None] = field(default_factory=dict)
    """The gradients that arrived at each node. None: none arrived, or the node is a root that leads to no input."""

    roots: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    """Roots that lead to no input and so did not run in the first part, with their gradients."""


class WeightBackward:
    """The second part. Runs once."""

    def __init__(self, groups: list[_Group], roots: Sequence[GradientEdge]) -> None:
        self._groups = groups
        self._roots = list(roots)  # keeps the graph alive: the node of a `torch.autograd.Function` alone does not

    def run(self) -> None:
        """Add to the gradients of the weights."""
        for group in self._groups:
            _run_group(group)
        self._groups = []
        self._roots = []


def backward_inputs(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightBackward]:
    """Return the gradients of ``inputs``, and the remaining work for the weights.

    Args:
        roots: Edges of the outputs.
        gradients: Gradients of the outputs.
        inputs: Leaves that require grad.
    """
    targets = {get_gradient_edge(t).node for t in inputs}
    order = _children_first([edge.node for edge in roots])
    leads: set[Node] = set()
    for node in order:
        if node in targets or any(child in leads for child in _children(node)):
            leads.add(node)
    groups = _groups_of(order, leads, targets, [edge.node for edge in roots])
    handles = [
        node.register_prehook(_Keep(group, node)) for group in groups for node in group.sources if node not in targets
    ]
    try:
        found = (
            torch.autograd.grad(list(roots), list(inputs), list(gradients), retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
            if inputs and any(edge.node in leads for edge in roots)
            else (None,) * len(inputs)
        )
    finally:
        for handle in handles:
            handle.remove()
    _add_roots(groups, leads, roots, gradients)
    return list(found), WeightBackward(groups, roots)


class _Keep:
    """Saves the gradients that arrive at a node."""

    def __init__(self, group: _Group, node: Node) -> None:
        self._sources = group.sources
        self._node = node

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._sources[self._node] = gradients


class _Replace:
    """Gives a node the gradients of the first part, whatever another source of its group adds."""

    def __init__(self, gradients: tuple[Tensor | None, ...]) -> None:
        self._gradients = gradients

    def __call__(self, _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return self._gradients


def _children(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Return every node under ``roots``, each after its children."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child in _children(node) if child not in seen)
    return order


def _groups_of(order: list[Node], leads: set[Node], targets: set[Node], roots: list[Node]) -> list[_Group]:
    """Group weights by the nodes from which they branch off. Groups that share a node or a weight are merged."""
    weights_under: dict[Node, frozenset[Node]] = {}
    for node in order:
        if node not in leads:
            own = frozenset((node,)) if getattr(node, "variable", None) is not None else frozenset()
            weights_under[node] = own.union(*(weights_under[child] for child in _children(node)))
    groups: dict[Node, _Group] = {}
    sources = [node for node in order if node in leads and node not in targets]
    for source in [*sources, *(root for root in roots if root not in leads)]:
        if source in leads:
            weights = frozenset[Node]().union(*(weights_under[c] for c in _children(source) if c not in leads))
        else:
            weights = weights_under[source]
        if not weights:
            continue
        merged = _Group({w: w.variable for w in weights}, {source: None})  # type: ignore[attr-defined]
        for other in {id(groups[w]): groups[w] for w in weights if w in groups}.values():
            merged.weights |= other.weights
            merged.sources |= other.sources
        groups |= dict.fromkeys(merged.weights, merged)
    return list({id(group): group for group in groups.values()}.values())


def _add_roots(
    groups: list[_Group], leads: set[Node], roots: Sequence[GradientEdge], gradients: Sequence[Tensor]
) -> None:
    for edge, gradient in zip(roots, gradients, strict=True):
        for group in groups:
            if edge.node in group.sources and edge.node not in leads:
                group.roots.append((edge, gradient))


def _run_group(group: _Group) -> None:
    arrived = {node: gradients for node, gradients in group.sources.items() if gradients is not None}
    pairs = [
        (GradientEdge(node, i), gradient)
        for node, gradients in arrived.items()
        for i, gradient in enumerate(gradients)
        if gradient is not None
    ]
    pairs += group.roots
    if not pairs:
        return
    handles = []
    if len(arrived) > 1:
        handles = [node.register_prehook(_Replace(gradients)) for node, gradients in arrived.items()]
    try:
        edges, gradients = zip(*pairs, strict=True)
        # Several sources: the backward of one passes nodes that other groups still need.
        kept = len(arrived) > 1
        torch.autograd.backward(edges, gradients, inputs=list(group.weights.values()), retain_graph=kept)
    finally:
        for handle in handles:
            handle.remove()
