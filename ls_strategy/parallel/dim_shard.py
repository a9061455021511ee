"""Compute which part of a sharded tensor a rank holds, and where it lies after a reshape or an index."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ls_strategy.distributed.axis import Axis


@dataclasses.dataclass(frozen=True)
class DimShard:
    """Sharding of one dimension, seen as ``(outer, sum(sizes), inner)``: the middle factor is split by rank."""

    axis: Axis
    dim: int
    sizes: tuple[int, ...]
    """The length on every rank."""

    averaged: bool
    """Whether gradients of parameters are averaged over these ranks later."""

    outer: int = 1
    inner: int = 1

    @property
    def full_size(self) -> int:
        """Length of the sharded factor on all ranks."""
        return sum(self.sizes)

    @property
    def local_size(self) -> int:
        """Length of the sharded factor on this rank."""
        return self.sizes[self.axis.rank]

    @property
    def start(self) -> int:
        """Index of this rank's first element along the sharded factor."""
        return sum(self.sizes[: self.axis.rank])

    @property
    def plain(self) -> bool:
        """Return whether the dimension consists of the sharded factor alone."""
        return self.outer == self.inner == 1

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that is full along the dimension."""
        folded = full.unflatten(self.dim, (self.outer, self.full_size, self.inner))
        return folded.narrow(self.dim + 1, self.start, self.local_size).flatten(self.dim, self.dim + 2)

    def gather(self, local: Tensor) -> Tensor:
        """Return the tensor that is full along the dimension. Collective."""
        folded = local.unflatten(self.dim, (self.outer, self.local_size, self.inner))
        return self.axis.all_gather(folded, self.dim + 1, self.sizes).flatten(self.dim, self.dim + 2)

    def with_dim(self, dim: int) -> DimShard:
        """Return the same shard of another dimension."""
        return dataclasses.replace(self, dim=dim)

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> DimShard | None:
        """Return the shard of the same elements after a reshape; None if these are no stretch of one dimension then."""
        stride = self.inner * math.prod(old[self.dim + 1 :])
        below = 1
        for dim in range(len(new) - 1, -1, -1):
            length = below * new[dim]
            if length >= stride * self.full_size:
                if stride % below or length % (stride * self.full_size):
                    return None
                outer, inner = length // (stride * self.full_size), stride // below
                return dataclasses.replace(self, dim=dim, outer=outer, inner=inner)
            below = length
        return None

    def local_length(self) -> int:
        """Return the length of the dimension on this rank."""
        return self.outer * self.local_size * self.inner


def local_gradient(grad: Tensor, shards: Sequence[DimShard]) -> Tensor:
    """Return the gradient of this rank's shard, from the gradient of the full tensor."""
    for shard in shards:
        grad = shard.shard(grad)
    scale = math.prod(shard.axis.size for shard in shards if shard.averaged)
    return grad * scale if scale > 1 else grad


def unshard(local: Tensor, shards: Sequence[DimShard]) -> Tensor:
    """Gather the full tensor; `local_gradient` is its backward. Collective."""
    return _Unshard.apply(local, tuple(shards)) if shards else local  # type: ignore[return-value]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, shards: tuple[DimShard, ...]) -> Tensor:
        ctx.shards = shards
        for shard in shards:
            local = shard.gather(local)
        return local

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return local_gradient(grad, ctx.shards), None


def expand_index(index: tuple[Any, ...], dims: int) -> list[Any] | None:
    """Return one item per dimension, plus None for every new one; None for indices that hold tensors, say."""
    if any(isinstance(i, bool) or not (i is None or i is Ellipsis or isinstance(i, (int, slice))) for i in index):
        return None
    numbers = [v for i in index if isinstance(i, slice) for v in (i.start, i.stop, i.step)]
    if any(not (v is None or isinstance(v, int)) for v in numbers):
        return None
    missing = dims - sum(i is not None and i is not Ellipsis for i in index)
    if missing < 0 or sum(i is Ellipsis for i in index) > 1:
        return None
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    return [*index[:at], *[slice(None)] * missing, *index[at + 1 :]]


def slice_shard(item: Any, shard: DimShard) -> tuple[Any, DimShard | None]:
    """Turn a slice of the full dimension into a slice of the local one, and the shard that remains.

    The shard is None where that is not possible: with a step, an integer, or a dimension of several factors.
    """
    if item == slice(None):
        return item, shard
    if not isinstance(item, slice) or item.step not in (None, 1) or not shard.plain:
        return item, None
    low, high, _ = item.indices(shard.full_size)
    ends = [sum(shard.sizes[: r + 1]) for r in range(len(shard.sizes))]
    stretches = [
        (min(max(low, end - size), end), min(max(high, end - size), end))
        for end, size in zip(ends, shard.sizes, strict=True)
    ]
    first, last = stretches[shard.axis.rank]
    sizes = tuple(max(b - a, 0) for a, b in stretches)
    return slice(first - shard.start, max(last, first) - shard.start), dataclasses.replace(shard, sizes=sizes)
