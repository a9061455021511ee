"""The kinds of parallelism: how a module is partitioned along the axes of the device mesh.

The one invariant: the ranks of an axis partition the same parameters, so that together they hold each of them in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ls_strategy.config import ParallelConfig
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError
from ls_strategy.host.pytorch import pl, rank_zero_info
from ls_strategy.layout import TensorPart
from ls_strategy.lightning.pipeline.step import Pipeline
from ls_strategy.moe.parallel import apply_expert_parallel, expert_parameters
from ls_strategy.parallel.context.ulysses import apply_sequence_parallel
from ls_strategy.parallel.stack import head_after, one_stack
from ls_strategy.parallel.tensor.dtensor import Localized, has_dtensors, localize, parallelize
from ls_strategy.parallel.tensor.plans import resolve_tensor_plan
from ls_strategy.parallel.tensor.shard import TensorParallel, apply_tensor_parallel

Parts: TypeAlias = dict[int, TensorPart]
"""What this rank holds of each partitioned parameter, by ``id(parameter)``."""


@dataclass(frozen=True)
class Partitioning:
    """What modules are partitioned by."""

    config: ParallelConfig
    mesh: Mesh
    device_mesh: Any
    """torch's, which ``configure_model`` sees; None without tensor parallelism."""

    pipeline: Pipeline | None
    """The stages that the module was partitioned into."""

    layers: list[TensorParallel | Localized] = field(default_factory=list)
    """Filled in by what shards layers over tensor-parallel ranks."""


def _take_dtensors(module: pl.LightningModule, given: Partitioning) -> Parts | None:
    """Take a module over whose layers `configure_model` has partitioned by ``parallelize_module``."""
    if not has_dtensors(module):
        return None
    if given.config.tp.plan != "auto" or given.config.tp.sequence_parallel:
        raise PlanError(
            "Got parallel.tensor.plan or sequence_parallel, but configure_model has already partitioned the "
            "module by parallelize_module (it holds DTensors). Leave these options out, or do not partition it "
            "in configure_model."
        )
    local = localize(module, given.mesh.tensor)
    given.layers.append(local)
    rank_zero_info("ZeROStrategy: configure_model has partitioned the module over tensor-parallel ranks.")
    return local.parts


def _partition_layers(module: pl.LightningModule, given: Partitioning) -> Parts:
    axis, config = given.mesh.tensor, given.config.tp
    plan = resolve_tensor_plan(module, config.plan, axis.size)
    if config.sequence_parallel and (plan.torch_styles or not plan.blocks):
        raise PlanError(
            "Got parallel.tensor.sequence_parallel=True, but it requires repeated blocks (equal children of a "
            "ModuleList or Sequential) with a plan in this package's styles, and there are none. Leave it out."
        )
    rank_zero_info(f"ZeROStrategy: {plan.describe()}")
    if plan.torch_styles:
        local = parallelize(module, plan.torch_styles, given.device_mesh["tensor_parallel"], axis)
        given.layers.append(local)
        return local.parts
    elsewhere = {id(p) for p in expert_parameters(module)} if given.mesh.expert.size > 1 else set()
    sequence, blocks = config.sequence_parallel, plan.blocks
    layers = apply_tensor_parallel(module, plan.styles, axis, sequence=sequence, blocks=blocks, elsewhere=elsewhere)
    given.layers.append(layers)
    return layers.parts


def _partition_sequences(module: pl.LightningModule, given: Partitioning) -> Parts:
    config, mesh = given.config, given.mesh
    blocks = one_stack(module)
    head = head_after(module, blocks)
    inner = mesh.tensor if config.tp.sequence_parallel else None
    sequence = apply_sequence_parallel(module, mesh.sequence, blocks=blocks, head=head, ring=config.ring, inner=inner)
    if given.pipeline is not None:
        given.pipeline.runner.stages.on_received = sequence.receive
    rank_zero_info(f"ZeROStrategy: {sequence.describe()}")
    return {}


def _partition_experts(module: pl.LightningModule, given: Partitioning) -> Parts:
    mesh = given.mesh
    parts = apply_expert_parallel(
        module,
        mesh.expert,
        tensor_axis=mesh.tensor,
        tokens_sharded=given.config.tp.sequence_parallel,
        # An expert's gradient is summed over its group and averaged over the groups: stage / expert ranks. The
        # loss is a mean over zero = stage / tensor ranks.
        gradient_scale=mesh.tensor.size / mesh.expert.size,
    )
    rank_zero_info(f"ZeROStrategy: the experts of every MoE layer are partitioned over {mesh.expert.size} ranks.")
    return parts


Kind: TypeAlias = Callable[[pl.LightningModule, Partitioning], Parts | None]
"""Partitions a module in place, with hooks that make it compute the full model; None leaves it to the next kind.

Collective over all ranks. Parameters stay the same objects. A `PlanError` comes before anything is changed.
"""

KINDS: dict[str, list[Kind]] = {
    "tensor": [_take_dtensors, _partition_layers],
    "sequence": [_partition_sequences],
    "expert": [_partition_experts],
}
"""By axis of the mesh, in the order in which they partition a module. The first kind that takes a module has the axis.
Another one is another entry."""


def partition(module: pl.LightningModule, given: Partitioning) -> Parts:
    """Partition a module along every axis with several ranks, in place. Collective.

    Raises:
        PlanError: the module cannot be partitioned this way; with the cure.
    """
    parts: Parts = {}
    for axis, kinds in KINDS.items():
        if getattr(given.mesh, axis).size > 1:
            parts |= next(found for kind in kinds if (found := kind(module, given)) is not None)
    return parts
