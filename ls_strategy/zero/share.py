"""What of a model's parameters this rank of a pipeline holds, and what it shares with other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from ls_strategy.distributed.comm import Comm


@dataclass(frozen=True)
class Share:
    """By ``id`` of the parameters, in a model of which other ranks hold the rest. Without a pipeline: everything."""

    absent: frozenset[int] = frozenset()
    """On other ranks alone; on the meta device here."""

    tied: frozenset[int] = frozenset()
    """Here, and on another stage, too: their gradients are summed over the stages once per step."""

    replicas: frozenset[int] = frozenset()
    """Those of them that an earlier stage holds, which counts them in norms and saves them."""

    blocks: tuple[str, ...] = ()
    """Prefixes of the names of all that is in blocks of this rank."""

    all_blocks: tuple[str, ...] = ()
    """Likewise of all blocks that are divided over stages."""

    pipeline: Comm | None = None
    """The ranks of the pipeline."""

    group_names: Sequence[Sequence[Sequence[str]]] = ()
    """Names of all parameters, here or not, by optimizer and group."""

    tied_group: dist.ProcessGroup | None = None
    """The ranks that hold what is tied; None on the others."""

    def sum_tied(self, gradients: Tensor) -> None:
        """Sum in place over the stages that hold a tied parameter. Collective over them.

        Two terms have one sum, so that all copies stay the same bits.
        """
        if self.tied_group is not None:
            assert self.pipeline is not None
            self.pipeline.traffic.count("tied", gradients)
            with self.pipeline.blocking("all_reduce", "tied", group=self.tied_group):
                dist.all_reduce(gradients, group=self.tied_group)
