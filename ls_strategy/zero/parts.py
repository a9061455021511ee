"""Convert between full parameters and the part that a rank of the tensor- or expert-parallel axis holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy._torch import make_wrapper
from ls_strategy.distributed.axis import Axis
from ls_strategy.layout import TensorPart, flat_range_to_boxes
from ls_strategy.meta_init.lazy import LazyTensor


def part_of(value: Tensor, part: TensorPart | None) -> Tensor:
    """Return this rank's part of a full value: a view or a copy; lazy if ``value`` is. Not collective."""
    if part is None:
        return value
    if isinstance(value, LazyTensor):
        return LazyPart(value, part)
    pieces = [value.detach().narrow(part.dim, first, length) for first, length in part.runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.dim)


def full_of(mine: Tensor, part: TensorPart | None, axis: Axis) -> Tensor:
    """Return the full value from every rank's part, on the device of ``mine``. Collective over the axis."""
    if part is None or axis.size == 1:
        return mine
    parts: list[TensorPart] = axis.comm.exchange_objects(part)
    full = mine.new_zeros(part.full_shape)
    dim = parts[0].dim
    lengths = [other.shape[dim] for other in parts]
    every = axis.all_gather(axis.comm.sendable(mine), dim, lengths).split(lengths, dim)
    for value, other in zip(every, parts, strict=True):
        at = 0
        for first, length in other.runs:
            full.narrow(other.dim, first, length).copy_(value.narrow(other.dim, at, length))
            at += length
    return full


class LazyPart(LazyTensor):
    """This rank's part of a lazy tensor."""

    source: LazyTensor
    part: TensorPart

    @staticmethod
    def __new__(cls: Any, source: LazyTensor, part: TensorPart) -> LazyPart:  # noqa: D102
        self = make_wrapper(cls, part.shape, source.dtype)
        self.source, self.part = source, part
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyPart({self.part}, of {self.source!r})"

    @override
    def load(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=self.dtype)
        for box in flat_range_to_boxes(self.part.shape, start, stop):
            target = out[box.start - start : box.stop - start].view(box.sizes)
            for piece, offsets in self.part.in_full(box):
                target_box = target
                for dim, (at, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                    target_box = target_box.narrow(dim, at - box.offsets[dim], size)
                target_box.copy_(self.source.box(offsets, piece.sizes))
        return out
