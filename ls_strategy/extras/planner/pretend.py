"""An axis of ranks that are not there: collectives allocate what they would, and count what they would send.

Values are never exchanged, so it serves steps on fake tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ls_strategy.distributed.axis import Axis, sum_in_order
from ls_strategy.distributed.comm import Comm


class PretendComm(Comm):
    """The first of ``size`` ranks, without a process group."""

    def __init__(self, size: int, *, native: bool = False) -> None:
        """``native``: the transport computes sums (NCCL)."""
        super().__init__(None, None)
        self.world_size = size
        self.native = native
        self.far = (False,) * size

    def exchange_objects(self, value: Any) -> list[Any]:
        """Return this rank's value for every rank."""
        return [value] * self.world_size

    def broadcast_(self, tensor: Tensor, source: int = 0) -> None:
        """Leave the tensor as it is."""

    def sendable(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor


class PretendAxis(Axis):
    """The first rank of an axis.

    What the other ranks send or get is one tensor, not one for each: as many bytes at the same time, and a step of the
    same operations on any number of ranks, so that steps on some numbers tell those on others.
    """

    def __init__(self, name: str, size: int, *, native: bool = False) -> None:
        super().__init__(name, PretendComm(size, native=native))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Axis.all_reduce`."""
        if not self.comm.native or self.size == 1 or tensor.numel() == 0:
            return super().all_reduce(tensor)
        sent = 2 * (self.size - 1) * tensor.numel() // self.size
        self.traffic.count_elements("all_reduce", sent, tensor.element_size())
        return tensor.contiguous().clone()

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """See `Axis.all_gather`."""
        if self.size == 1:
            return super().all_gather(tensor, dim, sizes)
        mine, shape = tensor.contiguous(), list(tensor.shape)
        shape[dim] = sum(sizes) if sizes is not None else shape[dim] * self.size
        result_numel = math.prod(shape)
        others = mine.new_empty(result_numel - mine.numel())
        self._count("all_gather", mine, (self.size - 1) * mine.numel())
        result = mine.new_empty(shape)
        del others
        return result

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """See `Axis.all_to_all`."""
        if self.size == 1 or shapes is not None or any(part.shape != parts[0].shape for part in parts):
            return super().all_to_all(parts, shapes)
        parts = self._contiguous(parts)
        others = parts[0].new_empty((self.size - 1, *parts[0].shape))
        self._count("all_to_all", others, others.numel())
        return [parts[0], *others.unbind(0)]

    def _split(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None) -> list[Tensor]:
        if sizes is not None or tensor.shape[dim] % self.size:
            return super()._split(tensor, dim, sizes)
        return self._contiguous(tensor.chunk(self.size, dim))

    def _contiguous(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return equal parts, each contiguous."""
        if parts[0].is_contiguous():
            return list(parts)
        return [parts[0].contiguous(), *parts[0].new_empty((self.size - 1, *parts[0].shape)).unbind(0)]

    def _sum_of_mine(self, parts: list[Tensor], kind: str) -> Tensor:
        mine = parts[0]
        others = mine.new_empty((self.size - 1, *mine.shape))
        self._count(kind, mine, sum(part.numel() for part in parts[1:]))
        total = sum_in_order([mine, mine])
        del others
        return total

    def _count(self, kind: str, like: Tensor, numel: int) -> None:
        self.traffic.count_elements(kind, numel, like.element_size())

    def _start(self, sends: Sequence[Tensor], receives: Sequence[Tensor], kind: str) -> Sequence[Any]:
        for to in range(1, self.size):
            if sends[to].numel():
                self.traffic.count(kind, sends[to])
        return []
