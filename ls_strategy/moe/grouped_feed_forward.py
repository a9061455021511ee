"""Feed-forward networks of all experts on a CPU, computed from end to end for a few experts at a time.

The intermediate activations are the widest tensors of the network. Computed for all experts at once, each of them
leaves the cache, and the kernel maps its memory page by page: the gradient of a GELU on 4,096 x 1,024 fp32 elements
takes 22 ms, of which 4 ms are arithmetic (one core of an EPYC). Computed in portions, they stay in the cache. The
activation is computed again in backward instead of being saved, so a block also saves less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ls_strategy.moe.grouped import autocast, check_counts, multiply, outer, sums

PART_NUMEL = 1 << 19
"""Intermediate elements per portion, if experts are small: 2 MiB in fp32."""


class StackedLinear(NamedTuple):
    """Stacked linear layers."""

    weight: Tensor
    """``(G, out, in)``."""

    bias: Tensor | None
    """``(G, out)``."""


Between = Callable[..., Tensor]
"""Maps the results of the first layers, ``(rows, f)`` each, to ``(rows, f)``. Elementwise and deterministic."""


def grouped_feed_forward(
    x: Tensor, first: Sequence[StackedLinear], between: Between, last: StackedLinear, counts: Sequence[int]
) -> Tensor:
    """Compute ``last(between(*(layer(x) for layer in first)))`` with the weights of each row's group.

    Args:
        x: ``(T, in)`` on a CPU, ordered by group.
        first: Layers from ``in`` to ``f``: one, or two if the first gates the second.
        between: See `Between`.
        last: Layer from ``f`` to ``out``.
        counts: Rows of each group. The gradients of a group without rows are 0.

    Returns:
        ``(T, out)``, in the dtype that ``nn.Linear`` would return, also under autocast.
    """
    check_counts(counts, last.weight, x)
    flat = [t for layer in (last, *first) for t in layer]
    x, *flat = autocast(x, *flat)  # type: ignore[assignment]
    with torch.autocast(x.device.type, enabled=False):
        return _FeedForward.apply(between, tuple(counts), x, *flat)  # type: ignore[no-any-return]


class _Part(NamedTuple):
    """Adjacent groups that are computed together."""

    groups: slice
    rows: slice
    counts: tuple[int, ...]


def _parts(counts: tuple[int, ...], width: int) -> Iterator[_Part]:
    """Split the groups into portions of about `PART_NUMEL` elements."""
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
        grad = grad.contiguous()  # the gradient of a sum is expanded
        for part in _parts(ctx.counts, last.weight.shape[2]):
            inner = [next(hidden).detach().requires_grad_() for _ in first]
            with torch.enable_grad():
                middle = ctx.between(*inner)
            _weight_gradients(grads[0], grad[part.rows], middle.detach(), part)
            d_middle = multiply(grad[part.rows], last.weight[part.groups], None, part.counts)
            d_inner = torch.autograd.grad(middle, inner, d_middle)
            del middle, inner, d_middle
            for d_rows, target in zip(d_inner, grads[1:], strict=True):
                _weight_gradients(target, d_rows, x[part.rows], part)
            if d_x is not None:
                _input_gradient(first, d_inner, part, d_x[part.rows])
        return None, None, d_x, *d_flat


def _layers(flat: Sequence[Tensor | None]) -> list[StackedLinear]:
    return [StackedLinear(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]  # type: ignore[arg-type]


def _apply(layer: StackedLinear, rows: Tensor, part: _Part, out: Tensor | None = None) -> Tensor:
    bias = None if layer.bias is None else layer.bias[part.groups]
    return multiply(rows, layer.weight[part.groups].transpose(1, 2), bias, part.counts, out)


def _input_gradient(first: Sequence[StackedLinear], d_inner: Sequence[Tensor], part: _Part, target: Tensor) -> None:
    """Write the gradient of the input rows: the sum over the first layers."""
    for index, (layer, d_rows) in enumerate(zip(first, d_inner, strict=True)):
        weight = layer.weight[part.groups]
        if index == 0:
            multiply(d_rows, weight, None, part.counts, target)
        else:
            target += multiply(d_rows, weight, None, part.counts)


def _weight_gradients(targets: tuple[Tensor | None, ...], grad: Tensor, rows: Tensor, part: _Part) -> None:
    """Write the gradients of a layer's weight and bias, given the gradient of its result and its input."""
    weight, bias = targets
    if weight is not None:
        outer(grad, rows, part.counts, weight[part.groups])
    if bias is not None:
        sums(grad, part.counts, bias[part.groups])
