"""Partitioned activations: each rank of a tensor-parallel axis keeps a shard of what is replicated over the axis.

The input of a block is replicated over the axis. Each rank keeps ``1 / size`` of it, and backward gathers it before the
block runs again (Rajbhandari et al., arXiv:1910.02054, section 6.1, "partitioned activation checkpointing")::

    x       | a | b | c | d | e | f | g |       (7,), the same on every rank
    rank 0  | a | b | c | d |
    rank 1                  | e | f | g | 0 |   padded to equal length

Shards lie one after the other in a buffer that is allocated once. Separate allocations, made between those of forward
and backward, would fragment memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ls_strategy.activations.saved import Keeper
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError

_ALIGNMENT = 512
"""Bytes; the alignment of the CUDA caching allocator."""


class ShardBuffer:
    """A linear allocator for shards, which starts again at the front when it is empty."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None  # allocated after the first step, which shows how much is needed
        self._used = 0
        self._wanted = 0
        self._alive = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor ``(numel,)``. Each call must be matched by one of `give`.

        If the buffer is too small, the tensor is allocated separately, and the buffer grows once it is empty.
        """
        nbytes = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        begin, self._used = self._used, self._used + nbytes
        self._alive += 1
        self._wanted = max(self._wanted, self._used)
        if self._memory is None or self._used > self._memory.nbytes:
            return torch.empty(numel, dtype=dtype, device=self._device)
        return self._memory[begin : begin + numel * dtype.itemsize].view(dtype)

    def give(self) -> None:
        """Free one shard. When none is left, the next one starts at the front."""
        self._alive -= 1
        if self._alive == 0:
            self._used = 0
            if self._wanted > self.nbytes:
                self._memory = None  # free the old buffer before the new one is allocated
                self._memory = torch.empty(self._wanted, dtype=torch.uint8, device=self._device)


@dataclass
class KeptShard:
    """This rank's shard of a region."""

    numel: int
    """Elements of the full region."""

    shard: Tensor | None
    """The shard, unless another keeper has it."""

    kept: Any
    """What the other keeper returned for the shard."""


class ActivationPartition:
    """A `Keeper` of this rank's shard of regions that are replicated over an axis.

    Collective: all ranks must keep and load the same regions in the same order, as they do when they run the same
    modules.
    """

    def __init__(self, axis: Axis, device: torch.device, keeper: Keeper | None = None) -> None:
        """Create the keeper.

        Args:
            axis: Ranks that hold the same activations.
            device: Device of the activations.
            keeper: Takes this rank's shards. None: they stay on the device.
        """
        self.axis = axis
        self.buffer = ShardBuffer(device)
        self.bytes_full = 0
        """Bytes of the full regions so far."""
        self.bytes_kept = 0
        """Bytes of this rank's shards so far."""
        self._keeper = keeper
        self._checking = True
        self._latest: tuple[KeptShard, Tensor] | None = None

    def keep(self, region: Tensor) -> KeptShard:
        """Keep this rank's shard. Collective in the first forward, which compares the regions between the ranks.

        Raises:
            PlanError: The region differs between the ranks of the axis.
        """
        if self._checking:
            self._check_replicated(region)
        numel = -(-region.numel() // self.axis.size)
        if self._keeper is None:
            shard = self.buffer.take(numel, region.dtype)
        else:
            shard = torch.empty(numel, dtype=region.dtype, device=region.device)
        begin = self.axis.rank * numel
        piece = region[begin : begin + numel]
        shard[: piece.numel()].copy_(piece)
        shard[piece.numel() :].zero_()
        self.bytes_full += region.nbytes
        self.bytes_kept += shard.nbytes
        if self._keeper is None:
            return KeptShard(region.numel(), shard, None)
        return KeptShard(region.numel(), None, self._keeper.keep(shard))

    def add_use(self, kept: KeptShard) -> None:
        """See `Keeper`."""
        if self._keeper is not None:
            self._keeper.add_use(kept.kept)

    def load(self, kept: KeptShard) -> Tensor:
        """Return the full region. The latest one is not gathered twice. Collective."""
        self._checking = False
        if self._latest is None or self._latest[0] is not kept:
            self._latest = None
            shard = kept.shard if self._keeper is None else self._keeper.load(kept.kept)
            assert shard is not None
            self._latest = (kept, self.axis.all_gather(shard, 0)[: kept.numel])
        return self._latest[1]

    def drop(self, kept: KeptShard) -> None:
        """Forget a shard. Not collective."""
        if self._latest is not None and self._latest[0] is kept:
            self._latest = None
        if self._keeper is not None:
            self._keeper.drop(kept.kept)
        else:
            kept.shard = None
            self.buffer.give()

    def _check_replicated(self, region: Tensor) -> None:
        """Compare two sums over the bits: a plain one, and one weighted by position, which detects permutations."""
        flat = region.view(torch.uint8).to(torch.int64)
        weights = torch.arange(flat.numel(), device=flat.device) % 8191 + 1
        shard = torch.stack((flat.sum(), (flat * weights).sum(), torch.tensor(flat.numel(), device=flat.device)))
        sums = self.axis.all_gather(shard, 0).view(self.axis.size, 3)
        if not bool((sums == sums[0]).all()):
            raise PlanError(
                f"activation partitioning: an input of a recomputed module ({region.numel()} elements, {region.dtype}) "
                f"differs between the {self.axis.size} ranks of axis {self.axis.name!r}, but only replicated inputs "
                "can be partitioned. Recompute modules whose inputs are replicated over the axis "
                "(RecomputeConfig(policy='full', block_classes=...)), or remove activations.partitioning."
            )
