"""A conformance suite for strategies: ``python -m ls_strategy.conformance --strategy ddp zero3 my_package.MyStrategy``.

It runs what people do with a Trainer (habits) under any strategy of Lightning, and compares with a run that is trusted:
one process with the same global batches, or DDP. It stands on Lightning and torch alone and asks no strategy who it is.

- `fully_shard`: what ``ModelParallelStrategy`` asks for in ``configure_model``, for ``--strategy "... @ PATH"``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["fully_shard"]


def fully_shard(module: Any) -> None:
    """Shard a LightningModule by FSDP2 over the ranks, as torch's documentation does.

    Every child with parameters is a unit, and every layer of an `torch.nn.Sequential`. If the module owns parameters
    itself, it is a unit too, and its steps gather them. For ``ModelParallelStrategy(data_parallel_size=devices,
    tensor_parallel_size=1)``. Without a mesh (outside of a run) the module stays as it is.
    """
    from ls_strategy.extras.conformance.prepare import fully_shard as shard

    shard(module)
