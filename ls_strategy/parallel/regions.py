"""Differentiable collectives between replicated and sharded activations: one forward, its adjoint in backward.

======================  =======================  =======================
function                forward                  backward
======================  =======================  =======================
`copy_to`               identity                 all-reduce
`reduce_from`           all-reduce               identity
`gather_from`           all-gather               take the local shard
`scatter_to`            take the local shard     all-gather
`gather_sequence`       all-gather               reduce-scatter
`scatter_sequence`      reduce-scatter           all-gather

`exchange`              all-to-all               all-to-all
======================  =======================  =======================

The first two are f and g of Shoeybi et al., arXiv:1909.08053, figure 3. Those of the sequence follow Korthikanti et
al., arXiv:2205.05198, section 4.2.2, `exchange` follows Jacobs et al., arXiv:2309.14509.

All are collective over the axis, forward and backward. They save nothing for backward, and backward is differentiable.
`torch.compile` breaks its graph at each of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ls_strategy.distributed.axis import Axis, WithAdjoint, sum_in_order, unchanged
from ls_strategy.errors import PlanError

Map = Callable[[Tensor], Tensor]
F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Apply `torch.compiler.disable`, and keep the function's type."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


def _run(x: Tensor, axis: Axis, ahead: Map, back: Map) -> Tensor:
    return x if axis.size == 1 else WithAdjoint.apply(x, ahead, back)  # type: ignore[no-any-return]


def _slice(axis: Axis, dim: int) -> Map:
    def local(x: Tensor) -> Tensor:
        length = shard_length(x, dim, axis)
        # A copy, so that the full tensor can be freed.
        return x.narrow(dim, axis.rank * length, length).clone(memory_format=torch.contiguous_format)

    return local


def _gather(axis: Axis, dim: int) -> Map:
    return lambda x: axis.all_gather(x, dim)


def shard_length(x: Tensor, dim: int, axis: Axis) -> int:
    """Return the length of one rank's shard along ``dim``.

    Raises:
        PlanError: The length is not divisible by the number of ranks.
    """
    length = x.shape[dim]
    if length % axis.size:
        raise PlanError(
            f"dimension {dim} of activations {tuple(x.shape)} is sharded over the {axis.size} ranks of the "
            f"{axis.name!r} axis, but {length} is not divisible by {axis.size}. Pad it to a multiple of {axis.size}."
        )
    return length // axis.size


@untraced
def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Pass a replicated tensor into layers that are sharded over the ranks."""
    return _run(x, axis, unchanged, axis.all_reduce)


@untraced
def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum the ranks' partial results into a replicated tensor."""
    return _run(x, axis, axis.all_reduce, unchanged)


@untraced
def gather_from(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Concatenate the ranks' shards along ``dim`` into a replicated tensor."""
    dim %= x.ndim
    return _run(x, axis, _gather(axis, dim), _slice(axis, dim))


@untraced
def scatter_to(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Take this rank's shard along ``dim`` of a replicated tensor.

    Raises:
        PlanError: The length of ``dim`` is not divisible by the number of ranks.
    """
    dim %= x.ndim
    return _run(x, axis, _slice(axis, dim), _gather(axis, dim))


@untraced
def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Gather all tokens, ``(B, T / size, ...)`` to ``(B, T, ...)``, as input of layers sharded over the ranks."""
    return _run(x, axis, _gather(axis, 1), lambda grad: axis.reduce_scatter(grad, 1))


@untraced
def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Sum the ranks' partial results and keep this rank's tokens: ``(B, T, ...)`` to ``(B, T / size, ...)``.

    Raises:
        PlanError: The number of tokens is not divisible by the number of ranks.
    """
    shard_length(x, 1, axis)
    return _run(x, axis, lambda partial: axis.reduce_scatter(partial, 1), _gather(axis, 1))


@untraced
def exchange(x: Tensor, axis: Any, split_dim: int, concat_dim: int) -> Tensor:
    """Shard ``split_dim`` instead of ``concat_dim``, which becomes full: exchange tokens for heads, say.

    Traffic:
        ``(size - 1) / size`` of the elements of ``x`` sent per rank, forward and backward.

    Raises:
        PlanError: The length of ``split_dim`` is not divisible by the number of ranks.
    """
    split_dim, concat_dim = split_dim % x.ndim, concat_dim % x.ndim
    shard_length(x, split_dim, axis)
    return _run(x, axis, _swap(axis, split_dim, concat_dim), _swap(axis, concat_dim, split_dim))


def _swap(axis: Axis, split_dim: int, concat_dim: int) -> Map:
    return lambda x: torch.cat(axis.all_to_all(x.chunk(axis.size, split_dim)), concat_dim)


def sum_copies(tensor: Tensor, axis: Axis, copies: int) -> Tensor:
    """Sum over the ``copies`` adjacent ranks that include this one; bitwise equal on each of them. Collective.

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
    """Exchange among ``len(sends)`` ranks from ``first`` on; ``like`` has the shapes of the received tensors."""
    nothing = sends[0].new_empty(0)
    members = range(first, first + len(sends))
    parts = [sends[r - first] if r in members else nothing for r in range(axis.size)]
    shapes = [like[r - first].shape if r in members else nothing.shape for r in range(axis.size)]
    received = axis.all_to_all(parts, shapes)
    return [received[r] for r in members]


class SharedCopy:
    """Share one `copy_to` among layers with the same input: query, key and value then cost one sum in backward.

    The last input is remembered by a weak reference.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._copy: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the previous copy if ``x`` is the previous input and has not been modified, else a new copy."""
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
        """Drop the copy, once the layers that share it have run."""
        self._source = self._copy = None

    def _forget(self, source: weakref.ref[Tensor]) -> None:
        if source is self._source:
            self.clear()
