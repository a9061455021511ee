"""Build a sharded model from a draft: flat buffers, and the objects that gather and reduce them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.plan import Plan
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import unnoticed
from ls_strategy.zero.flat.units import Unit
from ls_strategy.zero.passes.gather import Gatherer
from ls_strategy.zero.passes.reduce import Reducer
from ls_strategy.zero.setup import materialize as materials
from ls_strategy.zero.setup import weights
from ls_strategy.zero.setup.assembly import Draft
from ls_strategy.zero.setup.share import Share
from ls_strategy.zero.step.offload import Offload
from ls_strategy.zero.user_code.on_demand import OnDemandGather
from ls_strategy.zero_stages import StagePolicy


@dataclass(frozen=True)
class ShardedModel:
    """The sharded form of one model, without a reference to the model itself."""

    config: ZeROConfig
    policy: StagePolicy
    mesh: Mesh
    share: Share
    plan: Plan
    units: list[Unit]
    offload: Offload
    on_demand: OnDemandGather
    gatherer: Gatherer
    reducer: Reducer
    rows: frozenset[int]
    """``id`` of parameters of which the optimizer gets sparse gradients, with the rows of all ranks."""

    @property
    def flats(self) -> list[FlatBuffer]:
        """Return every flat buffer, in order of the units."""
        return [f for u in self.units for f in u.flats]


def shard(
    draft: Draft, optimizers: Sequence[Optimizer], mesh: Mesh, device: torch.device, held: dict[int, FlatBuffer]
) -> ShardedModel:
    """Move the parameters of an agreed draft into flat buffers on ``device``. Collective.

    ``held`` is ``id(parameter)`` -> the flat buffer of an earlier engine that holds it now.
    """
    config, policy = draft.config, draft.policy
    shares = weights.rank_weights(config.sharding.rank_weights, mesh.zero, device)
    plan = draft.resolve(mesh, held, shares, mesh.zero.rank)
    offload = Offload.prepare(plan, list(optimizers), config, mesh.world, device)
    with unnoticed():
        units = draft.build(plan, mesh, device, held, offload)
    on_demand = OnDemandGather([f for u in units for f in u.flats], sharded=policy.parameters, units=units)
    materials.place_buffers(draft.model, device, draft.precision.cast, draft.kept.buffers)
    gatherer = Gatherer(units, sharded=policy.parameters, prefetch_units=config.sharding.prefetch_units)
    together = mesh.zero if mesh.shape.expert == 1 else mesh.stage
    reducer = Reducer(units, policy=policy, comm=together, reduce_in_fp32=draft.precision.reduce_in_fp32)
    reducer.selective = len(optimizers) > 1
    if draft.share.tied_control is not None:
        reducer.agree_on_tied = draft.share.agree_on_tied
    assert draft.sparse is not None
    reducer.check_sparse, rows = draft.sparse.check, draft.sparse.needing_rows
    return ShardedModel(config, policy, mesh, draft.share, plan, units, offload, on_demand, gatherer, reducer, rows)
