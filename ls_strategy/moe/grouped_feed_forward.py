"""Two linear layers and what is between them, of all experts, on a CPU: a few experts at a time, from end to end.

What is between the layers is the widest part of the network. Taken whole, each step of it is a tensor of its own that
leaves the cache and whose memory the kernel hands out page by page: 22 ms for the gradient of a GELU on 4,096 x 1,024
fp32 elements, where arithmetic takes 4 (measured on one core of an EPYC). Taken in parts, it is made, used and freed in
the cache. The activation is not kept for backward but computed again, so a block keeps less as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ls_strategy.moe.grouped import autocast, multiply, outer, sums

PART_NUMEL = 1 << 19
"""Elements between the layers that are worked on at a time, if experts are small: 2 MiB in fp32."""


class Layer(NamedTuple):
    """Stacked linear layers."""

    weight: Tensor
    """``(G, out, in)``."""

    bias: Tensor | None
    """``(G, out)``."""


Between = Callable[..., Tensor]
"""From the results of the first layers, ``(rows, f)`` each, to ``(rows, f)``; element by element, nothing random."""


def grouped_feed_forward(
    x: Tensor, first: Sequence[Layer], between: Between, last: Layer, counts: Sequence[int]
) -> Tensor:
    """``last(between(*(layer(x) for layer in first)))`` with the weights of each row's group.

    Args:
        x: ``(T, in)`` on a CPU, ordered by group.
        first: layers from ``in`` to ``f``: one, or two where the first gates the second.
        between: see `Between`.
        last: layer from ``f`` to ``out``.
        counts: rows of each group; 0 is fine, and then the gradients of the group's weights are 0.

    Returns:
        ``(T, out)``, of the dtype that ``nn.Linear`` would give it, also under autocast.
    """
    if len(counts) != len(last.weight) or sum(counts) != len(x):
        groups, rows = len(last.weight), len(x)
        raise ValueError(f"{len(counts)} groups of {sum(counts)} rows in all: got {groups} weights, {rows} rows")
    flat = [t for layer in (last, *first) for t in layer]
    x, *flat = autocast(x, *flat)  # type: ignore[assignment]
    with torch.autocast(x.device.type, enabled=False):
        return _FeedForward.apply(between, tuple(counts), x, *flat)  # type: ignore[no-any-return]


class _Part(NamedTuple):
    """Neighbouring groups that are worked on together."""

    groups: slice
    rows: slice
    counts: tuple[int, ...]


def _parts(counts: tuple[int, ...], width: int) -> Iterator[_Part]:
    """All groups, in runs of about `PART_NUMEL` elements."""
    begin, row, rows = 0, 0, 0
    for group, count in enumerate(counts):
        rows += count
        if rows * width >= PART_NUMEL or group + 1 == len(counts):
            yield _Part(slice(begin, group + 1), slice(row, row + rows), counts[begin : group + 1])
            begin, row, rows = group + 1, row + rows, 0


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, between: Between, counts: tuple[int, ...], x: Tensor, *flat: Tensor | None) -> Tensor:
        last, *first = _layers(flat)
        out = x.new_empty(len(x), last.weight.shape[1])
        hidden: list[Tensor] = []
        for part in _parts(counts, last.weight.shape[2]):
            inner = [_apply(layer, x[part.rows], part) for layer in first]
            _apply(last, between(*inner), part, out[part.rows])
            hidden += inner
        ctx.between, ctx.counts = between, counts
        ctx.save_for_backward(x, *flat, *hidden)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, *saved = ctx.saved_tensors
        flat, hidden = saved[: len(ctx.needs_input_grad) - 3], iter(saved[len(ctx.needs_input_grad) - 3 :])
        last, *first = _layers(flat)
        needs_x, needs = ctx.needs_input_grad[2], ctx.needs_input_grad[3:]
        d_x = torch.empty_like(x) if needs_x else None
        d_flat = [torch.empty_like(t) if t is not None and need else None for t, need in zip(flat, needs, strict=True)]
        grads = [tuple(d_flat[i : i + 2]) for i in range(0, len(d_flat), 2)]
        grad = grad.contiguous()  # that of a sum is expanded, for one
        for part in _parts(ctx.counts, last.weight.shape[2]):
            inner = [next(hidden).detach().requires_grad_() for _ in first]
            with torch.enable_grad():
                middle = ctx.between(*inner)
            _write(grads[0], grad[part.rows], middle.detach(), part)
            d_middle = multiply(grad[part.rows], last.weight[part.groups], None, part.counts)
            d_inner = torch.autograd.grad(middle, inner, d_middle)
            del middle, inner, d_middle
            for d_rows, place in zip(d_inner, grads[1:], strict=True):
                _write(place, d_rows, x[part.rows], part)
            if d_x is not None:
                _back(first, d_inner, part, d_x[part.rows])
        return None, None, d_x, *d_flat


def _layers(flat: Sequence[Tensor | None]) -> list[Layer]:
    return [Layer(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]  # type: ignore[arg-type]


def _apply(layer: Layer, rows: Tensor, part: _Part, out: Tensor | None = None) -> Tensor:
    bias = None if layer.bias is None else layer.bias[part.groups]
    return multiply(rows, layer.weight[part.groups].transpose(1, 2), bias, part.counts, out)


def _back(first: Sequence[Layer], d_inner: Sequence[Tensor], part: _Part, place: Tensor) -> None:
    """The gradient of the rows that entered: the sum over the first layers."""
    for index, (layer, d_rows) in enumerate(zip(first, d_inner, strict=True)):
        weight = layer.weight[part.groups]
        if index == 0:
            multiply(d_rows, weight, None, part.counts, place)
        else:
            place += multiply(d_rows, weight, None, part.counts)


def _write(places: tuple[Tensor | None, ...], grad: Tensor, rows: Tensor, part: _Part) -> None:
    """The gradients of a layer's weight and bias, from those of its result and what entered it."""
    weight, bias = places
    if weight is not None:
        outer(grad, rows, part.counts, weight[part.groups])
    if bias is not None:
        sums(grad, part.counts, bias[part.groups])
