"""Shards of parameters on their way to the one rank that steps each of them whole, and back.

::

    rank 0   | a | b |       |            a is owned by rank 1, b by rank 0
    rank 1       | b | c     |
                                          gather:   the other rank's part of b to rank 0, of a to rank 1, ...
                                          scatter:  the same ranges in the other direction

A range is sent straight to where it belongs, in one all-to-all, and what stays on its rank is not sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ls_strategy.distributed.axis import Axis, PendingExchange
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.layout import TensorPart
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.parts import part_of


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
class ShardRange:
    """Range of a tensor that one rank of the communicator holds, within its part."""

    start: int
    """First element of the range in the part, flattened."""

    numel: int
    part: TensorPart | None = None
    """The part of the tensor, with tensor parallelism; None: all of it."""

    sends: bool = True
    """Whether the owner gets the range from this rank. False: another rank has the same values."""


@dataclass(frozen=True)
class FullTensor:
    """One parameter that is stepped whole, by one of the ranks that hold parts of it."""

    number: int
    """Number of the parameter, in `OptimizerStates`."""

    flat: FlatBuffer
    index: int
    """Position in the flat buffer."""

    comm: Comm
    """The ranks that hold parts of it."""

    owner: int
    """Rank of `comm` that steps it."""

    holdings: tuple[ShardRange, ...]
    """By rank of `comm`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that is stepped: that of the parameter over all tensor-parallel ranks."""
        part = self.holdings[self.comm.rank].part
        return self.flat.layout.slots[self.index].shape if part is None else part.full_shape

    @property
    def numel(self) -> int:
        """Return the elements of `shape`."""
        return math.prod(self.shape)

    @property
    def is_mine(self) -> bool:
        """Return whether this rank steps the tensor."""
        return self.owner == self.comm.rank

    def sent_by(self, rank: int) -> int:
        """Return the elements that a rank sends in a gather, to the owner or to itself."""
        held = self.holdings[rank]
        return held.numel if held.sends else 0

    @property
    def gathered_numel(self) -> int:
        """Return the elements that one gather sends between ranks."""
        return sum(self.sent_by(r) for r in range(len(self.holdings)) if r != self.owner)

    @property
    def scattered_numel(self) -> int:
        """Return the elements that one scatter sends between ranks."""
        return sum(held.numel for r, held in enumerate(self.holdings) if r != self.owner)

    @property
    def mine(self) -> tuple[int, int]:
        """Return the range of this rank's shard that holds the parameter."""
        piece = self.flat.pieces[self.index]
        return piece.start, piece.stop

    def assemble(self, ranges: Sequence[Tensor | None], out: Tensor) -> Tensor:
        """Fill ``out``, of `numel` elements, from every rank's range; return it in `shape`."""
        parts: dict[TensorPart | None, Tensor] = {}
        for held, values in zip(self.holdings, ranges, strict=True):
            if values is None or not held.numel:
                continue
            if held.part not in parts:
                parts[held.part] = out if held.part is None else out.new_empty(math.prod(held.part.shape))
            parts[held.part][held.start : held.start + held.numel].copy_(values)
        full = out.view(self.shape)
        for part, values in parts.items():
            at, cut = 0, values.view(self.shape if part is None else part.shape)
            for first, length in () if part is None else part.runs:
                assert part is not None
                full.narrow(part.dim, first, length).copy_(cut.narrow(part.dim, at, length))
                at += length
        return full

    def ranges_of(self, full: Tensor) -> list[Tensor]:
        """Return every rank's range of the full tensor, 1-d."""
        parts = {held.part: part_of(full.detach().view(self.shape), held.part).reshape(-1) for held in self.holdings}
        return [parts[held.part][held.start : held.start + held.numel] for held in self.holdings]


class ShardOwners:
    """Finds the ranks that hold parts of parameters, and what each of them has."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._alone = Comm(None, None)

    def comm_of(self, flat: FlatBuffer) -> Comm:
        """Return the ranks that hold parts of a buffer's parameters; this rank alone, if it has all of them."""
        mesh = self._mesh
        if flat.axis is mesh.tensor and mesh.tensor.size > 1:
            return mesh.stage if flat.policy.optimizer or mesh.zero.world_size == 1 else mesh.tensor.comm
        return flat.comm if flat.policy.optimizer else self._alone

    def of(self, comm: Comm, places: Sequence[tuple[FlatBuffer, int]]) -> list[tuple[ShardRange, ...]]:
        """Return what every rank of ``comm`` has of parameters, given by buffer and position. Collective."""
        mine: list[tuple[int, int, TensorPart | None]] = []
        for flat, i in places:
            slot, piece = flat.layout.slots[i], flat.pieces[i]
            split = slot.part if slot.part is not None and slot.part.axis == "tensor" else None
            mine.append((piece.param_start, piece.numel, split))
        column = self._mesh.tensor.rank if comm in (self._mesh.stage, self._mesh.tensor.comm) else 0
        by_rank = comm.exchange_objects((column, mine))
        result: list[tuple[ShardRange, ...]] = []
        for n in range(len(places)):
            first: dict[TensorPart | None, int] = {}
            for place, held in by_rank:  # of several copies of a part, the first one is sent
                part = held[n][2]
                first[part] = min(first.get(part, place), place)
            result.append(tuple(ShardRange(*held[n], sends=place == first[held[n][2]]) for place, held in by_rank))
        return result


PartsOf = Callable[[FullTensor], Sequence[Tensor]]
"""Returns this rank's parts of one tensor, 1-d: of its gradient and its master weights, for example."""

Gathering = Callable[[torch.device], dict[int, list[Tensor]]]
"""Waits for full tensors, and returns ``width`` of them for every one that this rank owns, by number, on a device."""

Scattering = Callable[[], list[tuple[FullTensor, Tensor]]]
"""Waits for this rank's part, 1-d, of every tensor of which it has one."""


class FullTensorExchange:
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
        parts = [t.to(self._dtype).to(device).reshape(-1) for t in tensors]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self._dtype, device=device)

    def _received(self, sizes: list[int], device: torch.device) -> list[Tensor]:
        device = self._device if self._comm.native else device
        return [torch.empty(n, dtype=self._dtype, device=device) for n in sizes]

    def start_gather(self, members: Sequence[FullTensor], parts: PartsOf, width: int) -> Gathering:
        """Start sending this rank's parts of every tensor to its owner. Collective.

        Args:
            members: the tensors, the same on all ranks.
            parts: returns ``width`` parts.
            width: how many values per element are sent.

        Traffic:
            On all ranks together, ``width`` times the `FullTensor.gathered_numel` of the members.
        """
        ranks, rank = self._comm.world_size, self._comm.rank
        home = members[0].flat.master.device
        outgoing: list[list[Tensor]] = [[] for _ in range(ranks)]
        for member in members:
            if member.sent_by(rank):
                outgoing[member.owner] += parts(member)
        sends = [self._wire(tensors, home) for tensors in outgoing]
        mine = [m for m in members if m.is_mine]
        received = self._received([width * sum(m.sent_by(r) for m in mine) for r in range(ranks)], home)
        return partial(_assembled, self._axis.start_all_to_all(sends, received), mine, received, width)

    def start_scatter(self, members: Sequence[FullTensor], values: Callable[[FullTensor], Tensor]) -> Scattering:
        """Start sending every rank its part of the tensors that this rank owns. Collective.

        Args:
            members: as in `start_gather`.
            values: returns the full value of a tensor of this rank.

        Traffic:
            On all ranks together, the `FullTensor.scattered_numel` of the members.
        """
        ranks, rank = self._comm.world_size, self._comm.rank
        home = members[0].flat.master.device
        outgoing: list[list[Tensor]] = [[] for _ in range(ranks)]
        for member in members:
            if member.is_mine:
                for r, part in enumerate(member.ranges_of(values(member))):
                    if part.numel():
                        outgoing[r].append(part)
        sends = [self._wire(tensors, home) for tensors in outgoing]
        here = [m for m in members if m.holdings[rank].numel]
        sizes = [sum(m.holdings[rank].numel for m in here if m.owner == r) for r in range(ranks)]
        received = self._received(sizes, home)
        return partial(_received_parts, self._axis.start_all_to_all(sends, received), here, received)


def _assembled(
    exchange: PendingExchange, mine: Sequence[FullTensor], received: list[Tensor], width: int, device: torch.device
) -> dict[int, list[Tensor]]:
    exchange.wait()
    at = [0] * len(received)
    result: dict[int, list[Tensor]] = {}
    for member in mine:
        wholes: list[Tensor] = []
        for _ in range(width):
            ranges: list[Tensor | None] = []
            for rank, buffer in enumerate(received):
                numel = member.sent_by(rank)
                ranges.append(buffer[at[rank] : at[rank] + numel] if numel else None)
                at[rank] += numel
            out = torch.empty(member.numel, dtype=received[0].dtype, device=device)
            wholes.append(member.assemble(ranges, out))
        result[member.number] = wholes
    received.clear()  # their memory
    return result


def _received_parts(
    exchange: PendingExchange, here: Sequence[FullTensor], received: list[Tensor]
) -> list[tuple[FullTensor, Tensor]]:
    exchange.wait()
    at = [0] * len(received)
    result: list[tuple[FullTensor, Tensor]] = []
    for member in here:
        numel = member.holdings[member.comm.rank].numel
        start = at[member.owner]
        result.append((member, received[member.owner][start : start + numel]))
        at[member.owner] = start + numel
    received.clear()
    return result
