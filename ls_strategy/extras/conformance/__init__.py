"""A conformance suite for strategies: ``python -m ls_strategy.conformance --strategy ddp zero3 my_package.MyStrategy``.

It runs what people do with a Trainer (habits) under any strategy of Lightning, and compares with a run that is trusted:
one process with the same global batches, or DDP. It stands on Lightning and torch alone and asks no strategy who it is.

- `fully_shard`: what ``ModelParallelStrategy`` asks for in ``configure_model``, for ``--strategy "... @ PATH"``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["fully_shard"]


def fully_shard(module: Any) -> None:
    """Shard a LightningModule by FSDP2 over the ranks, as torch's documentation does.

    Every child with parameters is a unit, and every layer of an `torch.nn.Sequential`. What is left is a unit whose
    parameters the module's steps gather: its own parameters, and children that share one, since FSDP2 wants these in
    one unit. For ``ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)``. Without a mesh (outside
    of a run) the module stays as it is.
    """
    from torch import nn
    from torch.distributed import fsdp

    if module.device_mesh is None:
        return
    mesh = module.device_mesh["data_parallel"]
    uses = Counter(id(p) for child in module.children() for p in child.parameters())
    alone = [
        c
        for c in module.children()
        if all(uses[id(p)] == 1 for p in c.parameters()) and next(c.parameters(), None) is not None
    ]
    covered = {id(p) for child in alone for p in child.parameters()}
    needs_root = any(id(p) not in covered for p in module.parameters())
    for child in alone:
        for each in (*(child if isinstance(child, nn.Sequential) else ()), child):
            if not isinstance(each, fsdp.FSDPModule):  # this is called again before each run
                fsdp.fully_shard(each, mesh=mesh)
    if needs_root and not isinstance(module, fsdp.FSDPModule):
        fsdp.fully_shard(module, mesh=mesh)
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            fsdp.register_fsdp_forward_method(module, step)
