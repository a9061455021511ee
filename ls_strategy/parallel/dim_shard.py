"""Which part of a divided tensor a rank has, and where it lies after a reshape or an index: mostly integers."""

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
    """How one dimension is divided: read as ``(outer, sum(sizes), inner)``, the middle one goes over the ranks."""

    axis: Axis
    dim: int
    sizes: tuple[int, ...]
    """Every rank's part."""

    averaged: bool
    """Whether the ranks' gradients of parameters are averaged later."""

    outer: int = 1
    inner: int = 1

    @property
    def full(self) -> int:
        """Length of what is divided."""
        return sum(self.sizes)

    @property
    def mine(self) -> int:
        """Length of this rank's part."""
        return self.sizes[self.axis.rank]

    @property
    def start(self) -> int:
        """Where this rank's part begins."""
        return sum(self.sizes[: self.axis.rank])

    @property
    def plain(self) -> bool:
        """Whether the dimension is nothing else than what is divided."""
        return self.outer == self.inner == 1

    def part(self, unsharded: Tensor) -> Tensor:
        """This rank's part of a tensor that is whole along the dimension."""
        folded = unsharded.unflatten(self.dim, (self.outer, self.full, self.inner))
        return folded.narrow(self.dim + 1, self.start, self.mine).flatten(self.dim, self.dim + 2)

    def join(self, part: Tensor) -> Tensor:
        """The tensor that is whole along the dimension. Collective."""
        folded = part.unflatten(self.dim, (self.outer, self.mine, self.inner))
        return self.axis.all_gather(folded, self.dim + 1, self.sizes).flatten(self.dim, self.dim + 2)

    def moved(self, dim: int) -> DimShard:
        """The same cut of another dimension."""
        return dataclasses.replace(self, dim=dim)

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> DimShard | None:
        """The cut of the same elements after a reshape; None if they lie across dimensions then."""
        stride = self.inner * math.prod(old[self.dim + 1 :])
        below = 1
        for dim in range(len(new) - 1, -1, -1):
            length = below * new[dim]
            if length >= stride * self.full:
                if stride % below or length % (stride * self.full):
                    return None
                outer, inner = length // (stride * self.full), stride // below
                return dataclasses.replace(self, dim=dim, outer=outer, inner=inner)
            below = length
        return None

    def local_length(self) -> int:
        """Length of the dimension on this rank."""
        return self.outer * self.mine * self.inner


def own_part(grad: Tensor, cuts: Sequence[DimShard]) -> Tensor:
    """What goes back to this rank's part from the gradient of the unsharded."""
    for cut in cuts:
        grad = cut.part(grad)
    scale = math.prod(cut.axis.size for cut in cuts if cut.averaged)
    return grad * scale if scale > 1 else grad


def unsharded(part: Tensor, cuts: Sequence[DimShard]) -> Tensor:
    """From this rank's part to the whole tensor; `own_part` goes back. Collective."""
    return _Unsharded.apply(part, tuple(cuts)) if cuts else part  # type: ignore[return-value]


class _Unsharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, cuts: tuple[DimShard, ...]) -> Tensor:
        ctx.cuts = cuts
        for cut in cuts:
            part = cut.join(part)
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return own_part(grad, ctx.cuts), None


def spelled_out(index: tuple[Any, ...], dims: int) -> list[Any] | None:
    """One item per dimension (and None for new ones); None if there is more to it, such as tensors."""
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


def slice_shard(item: Any, cut: DimShard) -> tuple[Any, DimShard | None]:
    """A slice of the whole dimension as a slice of this rank's part, and the cut of what is left."""
    if item == slice(None):
        return item, cut
    if not isinstance(item, slice) or item.step not in (None, 1) or not cut.plain:
        return item, None
    low, high, _ = item.indices(cut.full)
    ends = [sum(cut.sizes[: r + 1]) for r in range(len(cut.sizes))]
    stretches = [
        (min(max(low, end - size), end), min(max(high, end - size), end))
        for end, size in zip(ends, cut.sizes, strict=True)
    ]
    first, last = stretches[cut.axis.rank]
    sizes = tuple(max(b - a, 0) for a, b in stretches)
    return slice(first - cut.start, max(last, first) - cut.start), dataclasses.replace(cut, sizes=sizes)
