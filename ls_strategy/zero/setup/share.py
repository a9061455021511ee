"""Share of a model on this rank of a pipeline: the parameters that it holds, and those tied to other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from ls_strategy.distributed.comm import Comm


@dataclass(frozen=True)
class Share:
    """Parameters by ``id``, and blocks by name. Without a pipeline the rank holds everything."""

    absent: frozenset[int] = frozenset()
    """Parameters that only other ranks hold; on the meta device here."""

    tied: frozenset[int] = frozenset()
    """Parameters that another stage holds too. Their gradients are summed over the stages once per step."""

    replicas: frozenset[int] = frozenset()
    """Those of `tied` that an earlier stage holds, which counts them in norms and saves them."""

    blocks: tuple[str, ...] = ()
    """Name prefixes of the blocks on this rank."""

    all_blocks: tuple[str, ...] = ()
    """Name prefixes of all blocks that are partitioned over stages."""

    pipeline: Comm | None = None
    """The ranks of the pipeline."""

    group_names: Sequence[Sequence[Sequence[str]]] = ()
    """Names of all parameters of the model, by optimizer and group."""

    tied_group: dist.ProcessGroup | None = None
    """The ranks that hold the tied parameters; None on the others."""

    tied_control: dist.ProcessGroup | None = None
    """The same ranks, for decisions on the host."""

    def agree_on_tied(self, flags: Tensor) -> None:
        """Set in place what is set on any of the stages that hold the tied parameters. Collective over them."""
        if self.tied_control is not None:
            assert self.pipeline is not None
            self.pipeline.traffic.count("control", flags)
            with self.pipeline.blocking("all_reduce", "tied", group=self.tied_control):
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.tied_control)

    def sum_tied(self, gradients: Tensor) -> None:
        """Sum in place over the stages that hold a tied parameter. Collective over them.

        There are two terms, so all copies get bitwise the same sum. Offloaded gradients pass through the device if the
        back end sums there.
        """
        if self.tied_group is not None:
            assert self.pipeline is not None
            self.pipeline.traffic.count("tied", gradients)
            wire = self.pipeline.sendable(gradients)
            with self.pipeline.blocking("all_reduce", "tied", group=self.tied_group):
                dist.all_reduce(wire, group=self.tied_group)
            if wire is not gradients:
                gradients.copy_(wire)
