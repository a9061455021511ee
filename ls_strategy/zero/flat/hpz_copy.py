"""A second copy of sharded parameters inside each node, from which backward gathers them (hpZ).

::

    forward     all-gather over all ranks; of what arrives, every rank keeps the slice of its place in the node
    backward    all-gather of the slices, inside the node

The states stay sharded over all ranks. The copy is sharded over the ranks of a node, so it costs each of them the
parameters of the model divided by those ranks, in the dtype that is sent. Wang et al. 2023, "ZeRO++",
arXiv:2306.10209, section 3.2.

The one invariant: whether a copy is current changes at the same place of the program on all ranks, because gathers from
it and over all ranks must never meet. So writes by user code, which each rank detects for its own shard, do not outdate
a copy but update it. From a ``state_dict()``, to which user code may write, to the end of its hook no copy is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_strategy.distributed.comm import Comm, PendingGather


class Secondary:
    """This rank's slice of the second copy of one flat buffer."""

    def __init__(self, comm: Comm) -> None:
        """``comm``: the ranks of the node."""
        self.comm = comm
        self.values: Tensor | None = None
        """The slice, as it is sent."""

        self.is_current = False
        """Whether the slices of all ranks are the newest parameters."""

        self._sending = False
        """Whether a gather of the slices is in flight."""

    def outdate(self) -> None:
        """Gather over all ranks the next time. Every rank must do so at the same time."""
        self.is_current = False

    def start(self, wire: Tensor, of: str) -> PendingGather:
        """Start filling ``wire``, ``(numel,)``, from the slices. Collective over the node."""
        assert self.values is not None
        self._slice(wire).copy_(self.values)
        self._sending = True
        return self.comm.all_gather(wire, of)

    def arrived(self, wire: Tensor) -> None:
        """Keep this rank's slice of parameters that were gathered over all ranks into ``wire``."""
        if self._sending:  # they came from the slices
            self._sending = False
            return
        self._keep(wire)
        self.is_current = True

    def dropped(self) -> None:
        """End a gather whose result is not used."""
        self._sending = False

    def written(self, wire: Tensor) -> None:
        """Take user code's writes to gathered parameters. Not collective: all ranks write the same."""
        if self.is_current:
            self._keep(wire)

    def _keep(self, wire: Tensor) -> None:
        mine = self._slice(wire)
        if self.values is None:
            self.values = torch.empty_like(mine)
        self.values.copy_(mine)

    def _slice(self, wire: Tensor) -> Tensor:
        size = wire.numel() // self.comm.world_size
        return wire.narrow(0, self.comm.rank * size, size)
