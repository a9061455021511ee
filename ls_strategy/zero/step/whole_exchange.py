"""Shards of parameters on their way to the one rank that steps each of them whole, and back.

::

    rank 0   | a | b |       |            a is owned by rank 1, b by rank 0
    rank 1       | b | c     |
                                          gather:   the other rank's part of b to rank 0, of a to rank 1, ...
                                          scatter:  the same ranges in the other direction

A range is sent straight to where it belongs, in one all-to-all, and what stays on its rank is not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ls_strategy.distributed.axis import Axis, PendingExchange
from ls_strategy.distributed.comm import Comm
from ls_strategy.layout import TensorPart
from ls_strategy.zero.flat.units import Flat
from ls_strategy.zero.parts import full_of, part_of


def balanced(costs: Sequence[float], ranks: int) -> list[int]:
    """Assign every cost to a rank, the largest first, each to the rank with the least so far. The same on all ranks.

    >>> balanced([1.0, 4.0, 2.0, 2.0], 2)
    [1, 0, 1, 1]
    """
    totals = [0.0] * ranks
    result = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: totals[r])
        result[i] = rank
        totals[rank] += costs[i]
    return result


@dataclass(frozen=True)
class WholeTensor:
    """One parameter that is stepped whole, by one of the ranks that hold shards of it."""

    number: int
    """Number of the parameter, in `OptimizerStates`."""

    flat: Flat
    index: int
    """Position in the flat buffer."""

    owner: int
    """Rank of ``flat.comm`` that steps it, if states are sharded. Otherwise every rank does."""

    ranges: tuple[tuple[int, int], ...]
    """``(first element, elements)`` of every rank's part; all of this rank's own, if states are not sharded."""

    @classmethod
    def of(cls, number: int, flat: Flat, index: int, owner: int) -> WholeTensor:
        """Return the parameter at position ``index`` of a flat buffer."""
        layout = flat.layout
        slot = layout.slots[index]
        ranges: list[tuple[int, int]] = []
        if not flat.policy.optimizer:
            ranges = [(0, slot.numel if r == flat.comm.rank else 0) for r in range(layout.world_size)]
            return cls(number, flat, index, owner, tuple(ranges))
        for rank in range(layout.world_size):
            start, stop = layout.shard_range(rank)
            lo, hi = max(slot.offset, start), min(slot.end, stop)
            ranges.append((lo - slot.offset, hi - lo) if lo < hi else (0, 0))
        return cls(number, flat, index, owner, tuple(ranges))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the parameter; of this rank's part, with tensor parallelism."""
        return self.flat.layout.slots[self.index].shape

    @property
    def numel(self) -> int:
        """Return the elements of the parameter; of this rank's part, with tensor parallelism."""
        return self.flat.layout.slots[self.index].numel

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the shape that is stepped: that of the parameter over all tensor-parallel ranks."""
        part = self._split
        return self.shape if part is None else part.full_shape

    @property
    def _split(self) -> TensorPart | None:
        """Return this rank's part of a matrix that tensor parallelism splits. Experts are stepped where they are."""
        part = self.flat.layout.slots[self.index].part
        return None if part is None or part.axis == "expert" else part

    def full_of(self, values: Tensor) -> Tensor:
        """Return the full tensor, of `full_shape`, from this rank's part. Collective over tensor-parallel ranks.

        They all own the same tensors, since they assign them by the same costs.
        """
        return full_of(values.view(self.shape), self._split, self.flat.axis)

    def part_of(self, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor."""
        return part_of(full, self._split)

    @property
    def is_mine(self) -> bool:
        """Whether this rank steps it."""
        return self.stepped_by == self.flat.comm.rank

    @property
    def stepped_by(self) -> int:
        """Return the rank that steps this rank's part."""
        return self.owner if self.flat.policy.optimizer else self.flat.comm.rank

    @property
    def away_numel(self) -> int:
        """Return the elements that other ranks than the owner hold: what one gather, or one scatter, sends."""
        return self.numel - self.ranges[self.stepped_by][1]

    @property
    def mine(self) -> tuple[int, int]:
        """Return the range of this rank's shard that holds the parameter."""
        piece = self.flat.pieces[self.index]
        return piece.start, piece.stop


class Exchange:
    """Sends whole tensors of one communicator and dtype."""

    def __init__(self, comm: Comm, dtype: torch.dtype, device: torch.device) -> None:
        """``device``: of the model. NCCL sends from there, other back ends from host memory too."""
        self._comm = comm
        self._axis = Axis("whole tensors", comm)
        self._dtype = dtype
        self._device = device

    def _wire(self, tensors: list[Tensor], device: torch.device) -> Tensor:
        """Return the tensors in one, where the transport can send it from."""
        device = self._device if self._comm.native else device
        parts = [t.to(device, self._dtype).reshape(-1) for t in tensors]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self._dtype, device=device)

    def _received(self, sizes: list[int], device: torch.device) -> list[Tensor]:
        device = self._device if self._comm.native else device
        return [torch.empty(n, dtype=self._dtype, device=device) for n in sizes]

    def start_gather(
        self, members: Sequence[WholeTensor], parts: Callable[[WholeTensor], Sequence[Tensor]], width: int
    ) -> PendingWholes:
        """Start sending this rank's parts of every tensor to its owner. Collective.

        Args:
            members: the tensors, the same on all ranks.
            parts: returns ``width`` parts, 1-d, of one tensor: of its gradient and its master weights, for example.
            width: how many values per element are sent.

        Traffic:
            On all ranks together, ``width`` times the `WholeTensor.away_numel` of the members.
        """
        ranks, rank = self._comm.world_size, self._comm.rank
        home = _home(members)
        outgoing: list[list[Tensor]] = [[] for _ in range(ranks)]
        for member in members:
            if member.ranges[rank][1]:
                outgoing[member.stepped_by] += parts(member)
        sends = [self._wire(tensors, home) for tensors in outgoing]
        mine = [m for m in members if m.is_mine]
        received = self._received([width * sum(m.ranges[r][1] for m in mine) for r in range(ranks)], home)
        return PendingWholes(self._axis.start_all_to_all(sends, received), mine, received, width)

    def start_scatter(self, members: Sequence[WholeTensor], values: Callable[[WholeTensor], Tensor]) -> PendingParts:
        """Start sending every rank its part of the tensors that this rank owns. Collective.

        Args:
            members: as in `start_gather`.
            values: returns the value of a tensor of this rank, in any shape.
        """
        ranks, rank = self._comm.world_size, self._comm.rank
        home = _home(members)
        outgoing: list[list[Tensor]] = [[] for _ in range(ranks)]
        for member in members:
            if member.is_mine:
                value = values(member).detach().reshape(-1)
                for r, (start, numel) in enumerate(member.ranges):
                    if numel:
                        outgoing[r].append(value[start : start + numel])
        sends = [self._wire(tensors, home) for tensors in outgoing]
        here = [m for m in members if m.ranges[rank][1]]
        sizes = [sum(m.ranges[rank][1] for m in here if m.stepped_by == r) for r in range(ranks)]
        received = self._received(sizes, home)
        return PendingParts(self._axis.start_all_to_all(sends, received), here, received)


def _home(members: Sequence[WholeTensor]) -> torch.device:
    """Return the device of the master weights."""
    return members[0].flat.master.device


class PendingWholes:
    """Whole tensors on their way to this rank."""

    def __init__(
        self, exchange: PendingExchange, mine: Sequence[WholeTensor], received: list[Tensor], width: int
    ) -> None:
        self._exchange = exchange
        self._mine = mine
        self._received = received
        self._width = width

    def wait(self, device: torch.device) -> dict[int, list[Tensor]]:
        """Return ``width`` flattened tensors for every one that this rank owns, by number, on ``device``."""
        self._exchange.wait()
        result: dict[int, list[Tensor]] = {}
        for member in self._mine:
            dtype = self._received[0].dtype
            result[member.number] = [torch.empty(member.numel, dtype=dtype, device=device) for _ in range(self._width)]
        for rank, buffer in enumerate(self._received):
            at = 0
            for member in self._mine:
                start, numel = member.ranges[rank]
                for whole in result[member.number]:
                    whole[start : start + numel].copy_(buffer[at : at + numel])
                    at += numel
        self._received = []
        return result


class PendingParts:
    """This rank's parts of tensors on their way from the owners."""

    def __init__(self, exchange: PendingExchange, here: Sequence[WholeTensor], received: list[Tensor]) -> None:
        self._exchange = exchange
        self._here = here
        self._received = received

    def wait(self) -> list[tuple[WholeTensor, Tensor]]:
        """Return this rank's part, 1-d, of every tensor of which it has one."""
        self._exchange.wait()
        at = [0] * len(self._received)
        result: list[tuple[WholeTensor, Tensor]] = []
        rank = self._here[0].flat.comm.rank if self._here else 0
        for member in self._here:
            numel = member.ranges[rank][1]
            source = member.stepped_by
            start = at[source]
            result.append((member, self._received[source][start : start + numel]))
            at[source] = start + numel
        self._received = []
        return result
