"""Where activations change from whole to divided over an axis: a collective forward, and its adjoint backward.

======================  ======================  ======================
function                forward                 backward
======================  ======================  ======================
`copy_to`               nothing                 sum over the ranks
`reduce_from`           sum over the ranks      nothing
`gather_from`           join the parts          take this rank's part
`scatter_to`            take this rank's part   join the parts
`gather_sequence`       join the parts          sum, take one's part
`scatter_sequence`      sum, take one's part    join the parts
`slice_sequence`        take this rank's part   join the parts
`join_sequence`         join the parts          take this rank's part
`exchange`              swap divided dimension  swap it back
======================  ======================  ======================

The first two: Shoeybi et al., arXiv:1909.08053, figure 3 (f and g). Those of the sequence: Korthikanti et al.,
arXiv:2205.05198, section 4.2.2. `exchange`: Jacobs et al., arXiv:2309.14509.

All are collective over the axis, forward and backward. They save nothing for backward, so that recomputing them costs
no memory, and backward can itself be differentiated. `torch.compile` does not look inside: it breaks the graph there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ls_strategy.distributed.axis import Axis, sum_in_order
from ls_strategy.errors import PlanError

Map = Callable[[Tensor], Tensor]
F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """`torch.compiler.disable`, with the function's type."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


class _Region(torch.autograd.Function):
    """``ahead`` forward, its adjoint ``back`` backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Map, back: Map) -> Tensor:
        ctx.ahead, ctx.back = ahead, back
        return ahead(x if ahead is _same else x.contiguous())  # the gradient of a sum is expanded, for one

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Region.apply(grads[0], ctx.back, ctx.ahead), None, None


def _run(x: Tensor, axis: Axis, ahead: Map, back: Map) -> Tensor:
    return x if axis.size == 1 else _Region.apply(x, ahead, back)  # type: ignore[no-any-return]


def _same(x: Tensor) -> Tensor:
    # An alias rather than x itself, of which autograd would make a view, whose base it keeps.
    return x.detach()


def _part(axis: Axis, dim: int, sizes: Sequence[int] | None) -> Map:
    def part(x: Tensor) -> Tensor:
        lengths = sizes or [divided(x, dim, axis)] * axis.size
        # A copy, so that the whole tensor can be freed.
        return x.narrow(dim, sum(lengths[: axis.rank]), lengths[axis.rank]).clone(memory_format=torch.contiguous_format)

    return part


def _join(axis: Axis, dim: int, sizes: Sequence[int] | None) -> Map:
    return lambda x: axis.all_gather(x, dim, sizes)


def divided(x: Tensor, dim: int, axis: Axis) -> int:
    """Length of one rank's part along ``dim``.

    Raises:
        PlanError: it does not divide.
    """
    length = x.shape[dim]
    if length % axis.size:
        raise PlanError(
            f"dimension {dim} of activations {tuple(x.shape)} is divided over the {axis.size} ranks of the "
            f"{axis.name!r} axis, but {length} does not divide by {axis.size}. Pad it to a multiple of {axis.size}."
        )
    return length // axis.size


@untraced
def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """What is whole on every rank enters layers that each have a part of."""
    return _run(x, axis, _same, axis.all_reduce)


@untraced
def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum of the ranks' partial results, whole on every rank."""
    return _run(x, axis, axis.all_reduce, _same)


@untraced
def gather_from(x: Tensor, axis: Axis, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """The ranks' parts along ``dim`` as one, for what all ranks compute alike.

    Args:
        x: this rank's part.
        axis: over which it is divided.
        dim: that is divided.
        sizes: length of every rank's part along ``dim``; all the same without.
    """
    dim %= x.ndim
    return _run(x, axis, _join(axis, dim, sizes), _part(axis, dim, sizes))


@untraced
def scatter_to(x: Tensor, axis: Axis, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part along ``dim`` of what all ranks computed alike. Arguments as for `gather_from`."""
    dim %= x.ndim
    return _run(x, axis, _part(axis, dim, sizes), _join(axis, dim, sizes))


@untraced
def gather_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """All tokens, ``(B, T / size, ...)`` to ``(B, T, ...)``, for layers that each rank has a part of."""
    return _run(x, axis, _join(axis, dim, None), lambda g: axis.reduce_scatter(g, dim))


@untraced
def scatter_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Sum of the ranks' partial results, of which each keeps its tokens: ``(B, T, ...)`` to ``(B, T / size, ...)``.

    Raises:
        PlanError: the tokens do not divide.
    """
    divided(x, dim, axis)
    return _run(x, axis, lambda y: axis.reduce_scatter(y, dim), _join(axis, dim, None))


@untraced
def slice_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """This rank's tokens of what is whole on every rank: ``(B, T, ...)`` to ``(B, T / size, ...)``.

    Raises:
        PlanError: the tokens do not divide.
    """
    divided(x, dim, axis)
    return scatter_to(x, axis, dim)


@untraced
def join_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """All tokens, ``(B, T / size, ...)`` to ``(B, T, ...)``, for what all ranks compute alike from there on."""
    return gather_from(x, axis, dim)


@untraced
def exchange(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Divide ``split_dim`` in place of ``concat_dim``, which becomes whole: tokens for heads, say.

    Traffic:
        ``(size - 1) / size`` of the elements of ``x`` sent per rank, forward and backward.

    Raises:
        PlanError: ``split_dim`` does not divide.
    """
    split_dim, concat_dim = split_dim % x.ndim, concat_dim % x.ndim
    divided(x, split_dim, axis)
    return _run(x, axis, _swap(axis, split_dim, concat_dim), _swap(axis, concat_dim, split_dim))


def _swap(axis: Axis, split_dim: int, concat_dim: int) -> Map:
    return lambda x: torch.cat(axis.all_to_all(x.chunk(axis.size, split_dim)), concat_dim)


def sum_copies(tensor: Tensor, axis: Axis, copies: int) -> Tensor:
    """Sum over the ``copies`` ranks side by side that this one is among; the same bits on each of them. Collective.

    16-bit terms are summed in fp32 and rounded once.

    Traffic:
        ``2 * (copies - 1) / copies`` of the elements sent per rank.
    """
    if copies == axis.size:
        return axis.all_reduce(tensor)
    first = axis.rank // copies * copies
    flat = tensor.reshape(-1)
    pieces = list(flat.tensor_split(copies))
    mine = pieces[axis.rank - first]
    received = _among(axis, first, pieces, [mine] * copies)
    return torch.cat(_among(axis, first, [sum_in_order(received)] * copies, pieces)).view(tensor.shape)


def _among(axis: Axis, first: int, sends: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Exchange among ``len(sends)`` ranks from ``first``; ``like`` has the shapes of what arrives."""
    nothing = sends[0].new_empty(0)
    members = range(first, first + len(sends))
    parts = [sends[r - first] if r in members else nothing for r in range(axis.size)]
    shapes = [like[r - first].shape if r in members else nothing.shape for r in range(axis.size)]
    received = axis.all_to_all(parts, shapes)
    return [received[r] for r in members]


class SharedCopy:
    """`copy_to` of which layers that get the same tensor share one: query, key and value cost one sum in backward.

    Remembers the last tensor, and no longer than that lives.
    """

    def __init__(self, axis: Axis) -> None:
        """Start empty."""
        self._axis = axis
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._copy: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The copy of ``x``, made now or, if ``x`` was the last tensor and has not changed since, before."""
        if not (torch.is_grad_enabled() and x.requires_grad) or self._axis.size == 1:
            return x  # no backward
        source = self._source() if self._source is not None else None
        if source is x and self._version == x._version and self._copy is not None:
            return self._copy
        copy = self._copy = copy_to(x, self._axis)
        self._version = x._version
        self._source = weakref.ref(x, self._forget)
        return copy

    def clear(self) -> None:
        """Forget: the layers that share are through."""
        self._source = self._copy = None

    def _forget(self, source: weakref.ref[Tensor]) -> None:
        if source is self._source:
            self.clear()
