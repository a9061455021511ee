"""The engine's own plan for any options and number of ranks, and what optimizers store per element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import ranks_of_group
from ls_strategy.extras.planner.parallelism import Parallelism
from ls_strategy.layout import TensorPart
from ls_strategy.plan import MOMENT_BYTES, Plan
from ls_strategy.precision import PrecisionPolicy
from ls_strategy.zero.setup.assembly import Draft
from ls_strategy.zero.setup.share import Share
from ls_strategy.zero.step.elementwise import copy_of
from ls_strategy.zero.step.fused_optimizers import kernel_for
from ls_strategy.zero.step.owner.full_tensor_groups import full_tensor_groups
from ls_strategy.zero.step.owner.owner_updater import tensor_cost
from ls_strategy.zero_stages import policy_of

_PROBED = 64  # elements of the parameter that an optimizer is probed with: a square matrix, if it needs full tensors
_TORCH_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose step is a single pass over memory. Others need temporaries as large as the stepped shards."""


@dataclass(frozen=True)
class ModelStates:
    """A model and its optimizers, simulated or real. Nothing is modified."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    precision: PrecisionPolicy
    parts: Mapping[int, TensorPart] = field(default_factory=dict)  # of sharded layers and experts, by ``id(parameter)``
    parallel: Parallelism = field(default_factory=Parallelism)

    def draft(self, config: ZeROConfig, world_size: int, share: Share | None = None) -> Draft:
        """Return what one rank would build. ``share``: of a pipeline.

        Raises:
            PlanError: model, optimizers and options are incompatible.
        """
        draft = Draft(
            self.model,
            self.optimizers,
            config=config,
            precision=self.precision,
            policy=policy_of(config, world_size),
            parts=self.parts,
            share=share or Share(),
        )
        draft.agree(Comm(None, None))
        return draft

    def redraft(self, draft: Draft, config: ZeROConfig, world_size: int) -> Draft:
        """Return a draft of this model with other options, for which the checks of the first one hold, too."""
        other = copy(draft)
        other.config, other.policy = config, policy_of(config, world_size)
        return other

    def plan(
        self, config: ZeROConfig, world_size: int, node_size: int | None = None, share: Share | None = None
    ) -> Plan:
        """Return the engine's plan on ``world_size`` ranks, of a rank with the most; ``node_size`` of them on a node.

        Raises:
            PlanError: the ranks cannot be grouped as the options say.
        """
        ranks = self.parallel.zero(world_size)
        return self.resolve(self.draft(config, ranks, share), config, world_size, node_size)

    def resolve(self, draft: Draft, config: ZeROConfig, world_size: int, node_size: int | None = None) -> Plan:
        """Return `plan` from its draft, which is the same on all numbers of ranks above one.

        Raises:
            PlanError: the ranks cannot be grouped as the options say.
        """
        parallel = self.parallel
        ranks = parallel.zero(world_size)
        cut = partial(ranks_of_group, node_size=node_size or world_size, replicated=ranks, tensor=parallel.tensor)
        group, copies = cut("shard_size", config.sharding.shard_size), cut("hpz", config.sharding.hpz)
        groups = ranks // group
        sizes: Any = SimpleNamespace(
            zero=SimpleNamespace(world_size=ranks),
            shards=SimpleNamespace(world_size=group, replica=min(1, groups - 2) if groups > 1 else 0, replicas=groups),
            node=None if copies in (1, ranks) else SimpleNamespace(world_size=copies),
            expert_zero=SimpleNamespace(world_size=parallel.expert_zero(world_size)),
            tensor=SimpleNamespace(size=parallel.tensor),
        )
        given = config.sharding.rank_weights
        known = isinstance(given, tuple) and len(given) == ranks > 1
        weights = tuple(map(Fraction, given)) if known and isinstance(given, tuple) else ()
        fullest = weights.index(max(weights)) if weights else 0
        return draft.resolve(sizes, {}, weights, fullest)

    def optimizer_bytes(self, config: ZeROConfig) -> tuple[float, ...]:
        """Return the bytes that each optimizer stores per element that it steps."""
        return tuple(moment_bytes(o, config) for o in self.optimizers)

    @property
    def has_temporaries(self) -> bool:
        """Return whether some optimizer's step needs memory in addition to its states."""
        return any(kernel_for(o) is None and type(o) not in _TORCH_FUSED for o in self.optimizers)


def matrix_flops(optimizer: Optimizer) -> int:
    """Return the operations of an optimizer's steps on full matrices, all of them together: of Newton-Schulz."""
    total = 0.0
    for group in optimizer.param_groups:
        if "ns_steps" not in group and not hasattr(optimizer, "tensor_cost"):
            continue
        costs = ((p.numel(), tensor_cost(optimizer, group, tuple(p.shape))) for p in group["params"])
        total += sum(2 * cost for numel, cost in costs if cost > numel)  # others are updated element by element
    return int(total)


def moment_bytes(optimizer: Optimizer, config: ZeROConfig) -> float:
    """Return the bytes that an optimizer stores per element: in the format of ``precision.moments`` for fused updates.

    Other optimizers are probed on a small parameter, and their element-wise states are counted.
    """
    kernel = kernel_for(optimizer)
    if kernel is not None:
        names = {name for group in optimizer.param_groups for name in kernel.moments(group)}
        return MOMENT_BYTES[config.precision.moments] * len(names)
    most = 0.0
    for group, full in zip(optimizer.param_groups, full_tensor_groups(optimizer), strict=True):
        settings = {k: v for k, v in group.items() if k != "params"}
        state = _state_after_a_step(optimizer, settings, (8, _PROBED // 8) if full else (_PROBED,))
        kept = [v for v in state.values() if isinstance(v, Tensor) and v.numel() == _PROBED]
        most = max(most, float(sum(v.element_size() for v in kept)))
    return most


def _state_after_a_step(optimizer: Optimizer, settings: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    early = next((s for s in optimizer.state.values() if s), None)
    if early is not None:  # Adagrad creates its state before the first step
        return {k: torch.zeros(_PROBED) if isinstance(v, Tensor) and v.ndim else v for k, v in early.items()}
    value = torch.ones(shape, requires_grad=True)
    value.grad = torch.ones(shape)
    fresh = copy_of(optimizer, settings, [value])
    type(optimizer).step(fresh)
    return dict(fresh.state[value])
