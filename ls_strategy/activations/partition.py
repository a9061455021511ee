"""Partitioned activations: what all ranks of a tensor-parallel axis hold alike is kept by each in part.

The input of a block is replicated over the axis. Each rank keeps ``1 / size`` of it, and backward gathers it before the
block runs again (Rajbhandari et al., arXiv:1910.02054, section 6.1, "partitioned activation checkpointing")::

    x       | a | b | c | d | e | f | g |       (7,), the same on every rank
    rank 0  | a | b | c | d |
    rank 1                  | e | f | g | 0 |   padded, so that all parts are as long

Parts lie one behind the other in a buffer that is allocated once: between forwards and backwards of other things, they
would leave holes in memory that nothing fits into.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_strategy.activations.saved import Keeper, Kept
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError

_ALIGNMENT = 512
"""Bytes. Where the caching allocator of CUDA would begin a tensor, too."""


class PartBuffer:
    """Memory for parts, used from the front to the back, and from the front again when nothing is in it."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is allocated before the first step is over, which tells how much is needed."""
        self._device = device
        self._memory: Tensor | None = None
        self._used = 0
        self._wanted = 0
        self._alive = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``(numel,)``, any contents: in the buffer, or beside it where it is too small; then it grows after the step.

        `give` must follow.
        """
        nbytes = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        begin, self._used = self._used, self._used + nbytes
        self._alive += 1
        self._wanted = max(self._wanted, self._used)
        if self._memory is None or self._used > self._memory.nbytes:
            return torch.empty(numel, dtype=dtype, device=self._device)
        return self._memory[begin : begin + numel * dtype.itemsize].view(dtype)

    def give(self) -> None:
        """One part is not needed any more; when none is, the next begins at the front."""
        self._alive -= 1
        if self._alive == 0:
            self._used = 0
            if self._wanted > self.nbytes:
                self._memory = None  # first, so that the two are never there together
                self._memory = torch.empty(self._wanted, dtype=torch.uint8, device=self._device)


class KeptPart:
    """This rank's part of a region. A `Kept`."""

    def __init__(self, partition: ActivationPartition, numel: int, mine: Tensor | None, kept: Kept | None) -> None:
        """``mine``: the part itself; or ``kept``: where it is."""
        self.numel = numel
        self.mine = mine
        self.kept = kept
        self._partition = partition

    def add_use(self) -> None:
        """See `Kept`."""
        if self.kept is not None:
            self.kept.add_use()

    def load(self) -> Tensor:
        """See `Kept`. Collective over the axis."""
        return self._partition.load(self)

    def drop(self) -> None:
        """See `Kept`."""
        self._partition.drop(self)


class ActivationPartition:
    """A keeper of this rank's part of regions that are the same on all ranks of an axis.

    Collective: all ranks keep and bring the same regions in the same order, as they do when they run the same modules.
    """

    def __init__(self, axis: Axis, device: torch.device, keeper: Keeper | None = None) -> None:
        """Keep parts.

        Args:
            axis: the ranks that hold the same activations.
            device: of the activations.
            keeper: where this rank's parts go; they stay on the device without.
        """
        self.axis = axis
        self.buffer = PartBuffer(device)
        self.bytes_whole = 0
        """Of the regions so far."""
        self.bytes_kept = 0
        """Of this rank's parts of them."""
        self._keeper = keeper
        self._checking = True
        self._latest: tuple[KeptPart, Tensor] | None = None

    def keep(self, region: Tensor) -> KeptPart:
        """Keep this rank's part. The regions of the first forward are compared between the ranks: collective then.

        Raises:
            PlanError: the region is not the same on all ranks of the axis.
        """
        if self._checking:
            self._check_replicated(region)
        numel = -(-region.numel() // self.axis.size)
        if self._keeper is None:
            mine = self.buffer.take(numel, region.dtype)
        else:
            mine = torch.empty(numel, dtype=region.dtype, device=region.device)
        begin = self.axis.rank * numel
        piece = region[begin : begin + numel]
        mine[: piece.numel()].copy_(piece)
        mine[piece.numel() :].zero_()
        self.bytes_whole += region.nbytes
        self.bytes_kept += mine.nbytes
        if self._keeper is None:
            return KeptPart(self, region.numel(), mine, None)
        return KeptPart(self, region.numel(), None, self._keeper.keep(mine))

    def load(self, part: KeptPart) -> Tensor:
        """Gather a region; the latest one is not gathered twice. Collective."""
        self._checking = False
        if self._latest is None or self._latest[0] is not part:
            self._latest = None
            mine = part.mine if part.kept is None else part.kept.load()
            assert mine is not None
            self._latest = (part, self.axis.all_gather(mine, 0)[: part.numel])
        return self._latest[1]

    def drop(self, part: KeptPart) -> None:
        """Forget a part. Not collective."""
        if self._latest is not None and self._latest[0] is part:
            self._latest = None
        if part.kept is not None:
            part.kept.drop()
        else:
            part.mine = None
            self.buffer.give()

    def _check_replicated(self, region: Tensor) -> None:
        """Compare sums over the bits: of all elements, and weighted by position, so that an exchange shows."""
        flat = region.view(torch.uint8).to(torch.int64)
        weights = torch.arange(flat.numel(), device=flat.device) % 8191 + 1
        mine = torch.stack((flat.sum(), (flat * weights).sum(), torch.tensor(flat.numel(), device=flat.device)))
        sums = self.axis.all_gather(mine, 0).view(self.axis.size, 3)
        if not bool((sums == sums[0]).all()):
            raise PlanError(
                f"activation partitioning: an input of a recomputed module ({region.numel()} elements, {region.dtype}) "
                f"is not the same on the {self.axis.size} ranks of axis {self.axis.name!r}, so that no rank may keep a "
                "part of it for the others. Recompute modules whose inputs are replicated over the axis "
                "(RecomputeConfig(policy='full', block_classes=...)), or leave activations.partitioning out."
            )
