"""An axis of ranks that are not there: collectives allocate what they would, and count what they would send.

Values are never exchanged, so it serves steps on fake tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ls_strategy.distributed.axis import Axis
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
    """The first rank of an axis."""

    def __init__(self, name: str, size: int, *, native: bool = False) -> None:
        super().__init__(name, PretendComm(size, native=native))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Axis.all_reduce`."""
        if not self.comm.native or self.size == 1 or tensor.numel() == 0:
            return super().all_reduce(tensor)
        sent = 2 * (self.size - 1) * tensor.numel() // self.size
        self.traffic.count_elements("all_reduce", sent, tensor.element_size())
        return tensor.contiguous().clone()

    def _start(self, sends: Sequence[Tensor], receives: Sequence[Tensor], kind: str) -> Sequence[Any]:
        for to in range(1, self.size):
            if sends[to].numel():
                self.traffic.count(kind, sends[to])
        return []


def sent_bytes(axis: Axis) -> int:
    """Return the bytes that were counted so far, of all kinds."""
    return sum(axis.traffic.bytes.values())


def on_meta(tensor: Tensor) -> Tensor:
    """Return an empty tensor of the same shape and dtype on meta."""
    return torch.empty_like(tensor, device="meta")
