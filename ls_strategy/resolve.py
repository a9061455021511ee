"""Resolve the plan of a run: which parameters share a flat buffer, and where its states are stored."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import torch

from ls_strategy.config import FrozenFormat, TierConfig, TierName, ZeROConfig
from ls_strategy.layout import ALIGN, FlatLayout, TensorPart
from ls_strategy.ops.exact_norm import BLOCK
from ls_strategy.ops.moments import BLOCK as MOMENT_BLOCK
from ls_strategy.ops.quantized import TILE
from ls_strategy.plan import FROZEN, FlatPlan, Plan, UnitPlan
from ls_strategy.zero_stages import StagePolicy

QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parameters that can be gathered in fewer bits."""


@dataclass(frozen=True)
class ParamFacts:
    """Facts about one parameter that a plan needs."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype in the forward."""

    optimizer: int = FROZEN
    group: int = 0
    part: TensorPart | None = None
    """This rank's part of it, with tensor or expert parallelism; ``shape`` is then the shape of the part."""

    tied: bool = False
    """Whether another pipeline stage holds it too."""

    replica: bool = False
    """Whether the other pipeline stage counts and saves it."""

    shared_by: tuple[int, ...] = ()
    """Numbers of its optimizers if there are several; ``optimizer`` is then the number of this set."""

    replicated: bool = False
    """Whether every rank is to hold it in full at stage 3."""

    quantized: FrozenFormat | None = None
    """Format of a frozen weight in 4 or 8 bits."""

    cast_to: torch.dtype | None = None
    """Dtype in which its modules read it: that of autocast, or fp8."""

    frozen: bool = False
    """Whether it is in an optimizer, but requires no gradient."""

    adapter: bool = False
    """Whether it is an adapter's: frozen adapters may be switched on without the model around them."""


def resolve_plan(  # noqa: PLR0913  (sizes of groups, one by one)
    units: Iterable[tuple[str, bool, Sequence[ParamFacts]]],
    *,
    policy: StagePolicy,
    world_size: int,
    master_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    config: ZeROConfig | None = None,
    tensor_size: int = 1,
    expert_world_size: int = 1,
    weights: Sequence[Fraction] = (),
    rank: int = 0,
    group: tuple[int, int] = (0, 1),
    node: int = 0,
) -> Plan:
    """Lay out every unit's buffers.

    Args:
        units: name, whether it is a root unit, and its parameters, in order of registration.
        policy: which states are sharded.
        world_size: ranks over which states are sharded.
        master_dtype: of master weights for parameters in ``compute_dtype``. Others keep their dtype.
        compute_dtype: of most parameters in the forward.
        config: options of offload and moments.
        tensor_size: size of the tensor-parallel axis. Parameters that it replicates get separate buffers, so that a
            norm counts them once.
        expert_world_size: ranks over which the states of experts are sharded, with expert parallelism.
        weights: relative shard sizes by rank; empty for equal shards.
        rank: the rank to plan for, with ``weights``.
        group: which of how many groups of ``world_size`` ranks to plan for; each holds a replica of all states.
        node: ranks that share a second copy of the parameters that are sharded; 0 for none.
    """
    config = config or ZeROConfig()
    weights = tuple(weights) if len(set(weights)) > 1 else ()
    setting = _PlanSetting(
        policy=policy,
        config=config,
        world_size=world_size,
        expert_world_size=expert_world_size,
        tensor_size=tensor_size,
        master_dtype=master_dtype,
        compute_dtype=compute_dtype,
        weights=weights,
        rank=rank,
        replicas=group[1],
        node=node,
    )
    plans: list[UnitPlan] = []
    for name, is_root, params in units:
        together: defaultdict[_Together, list[ParamFacts]] = defaultdict(list)
        for p in params:
            together[setting.together(p)].append(p)
        flats = tuple(setting.flat(what, members, is_root=is_root) for what, members in together.items())
        plans.append(UnitPlan(name, is_root, flats))
    return Plan(policy, world_size, _assign_tiers(plans, config), config.precision.moments, weights, rank, group)


class _Together(NamedTuple):
    """What the parameters of one buffer have in common."""

    optimizer: int
    dtype: torch.dtype
    copies: int
    tied: bool
    replica: bool
    expert: bool
    replicated: bool
    quantized: FrozenFormat | None
    cast_to: torch.dtype | None
    frozen: tuple[bool, bool]
    """Whether they are frozen, and then whether they are an adapter's."""


@dataclass(frozen=True)
class _PlanSetting:
    """What all buffers of a plan have in common."""

    policy: StagePolicy
    config: ZeROConfig
    world_size: int
    expert_world_size: int
    tensor_size: int
    master_dtype: torch.dtype
    compute_dtype: torch.dtype
    weights: tuple[Fraction, ...]
    rank: int
    replicas: int
    node: int

    @property
    def exact_norm(self) -> bool:
        """Whether norms are the same on any number of ranks."""
        return self.config.parallel.virtual_ranks is not None

    def together(self, p: ParamFacts) -> _Together:
        """Return what decides into which buffer of its unit a parameter comes."""
        replicated = p.replicated and p.optimizer == FROZEN and self.policy.parameters
        exact = not self.policy.parameters or replicated or p.quantized is not None
        # Only stage 3 would have buffers of what is gathered in 16 bits. Runs at all stages need the same ones if
        # moments are rounded by their places, and must be equal.
        exact = exact or (self.config.parallel.virtual_ranks is not None and self.config.precision.moments != "fp32")
        return _Together(
            p.optimizer,
            p.dtype,
            copies=self.tensor_size if p.part is None else p.part.copies,
            tied=p.tied,
            replica=p.replica,
            expert=p.part is not None and p.part.axis == "expert",
            replicated=replicated,
            quantized=p.quantized,
            cast_to=None if exact or self.config.sharding.quantized_gathers is not None else p.cast_to,
            frozen=(p.frozen, p.frozen and p.adapter),
        )

    def flat(self, what: _Together, members: list[ParamFacts], *, is_root: bool) -> FlatPlan:
        """Lay out one buffer."""
        # Sort by group, so that decay and no-decay are two runs per unit instead of one per parameter.
        members.sort(key=lambda p: p.group)
        ranks = self.expert_world_size if what.expert else self.world_size
        gathered, reduced = self._sent_as(what, ranks)
        # Gradients of what is gathered in 16 bits are sent in them; terms of virtual ranks never are.
        half = self.config.precision.reduce_dtype == "compute" and self.config.parallel.virtual_ranks is None
        half = half and reduced is None
        layout = FlatLayout.pack(
            ((p.name, p.shape) for p in members),
            ranks,
            align=self._align(what, in_tiles=gathered is not None or reduced is not None),
            parts={p.name: p.part for p in members if p.part is not None},
            weights=self.weights,
            rank=self.rank,
            replicas=self.replicas,
        )
        own = what.optimizer == FROZEN or what.dtype != self.compute_dtype
        copied = self.policy.parameters and not is_root and not what.replicated  # roots are gathered once per step
        flat = FlatPlan(
            layout,
            what.dtype,
            what.dtype if own else self.master_dtype,
            what.optimizer,
            copies=what.copies,
            tied=what.tied,
            replica=what.replica,
            exact_norm=self.exact_norm,
            node=self.node if copied else 0,
            gathered_as=gathered,
            cast_to=what.cast_to,
            reduced_in=what.cast_to if half and what.cast_to is not None and what.cast_to.itemsize == 2 else None,
            reduced_as=reduced,
            shared_by=members[0].shared_by,
            replicated=what.replicated,
            quantized=what.quantized,
            split_masters=None if own else self.config.precision.split_masters,
        )
        if not members[0].frozen:
            return flat
        return replace(flat, master_dtype=what.dtype, unfrozen=flat, split_masters=None)

    def _sent_as(self, what: _Together, ranks: int) -> tuple[str | None, str | None]:
        """Return the formats in which parameters and gradients are sent; None: as they are."""
        sharding, policy = self.config.sharding, self.policy
        if what.dtype not in QUANTIZABLE:
            return None, None
        gathers = policy.parameters and not what.replicated and what.quantized is None and ranks > 1
        reduces = policy.optimizer and what.optimizer != FROZEN and ranks * self.replicas > 1
        return sharding.quantized_gathers if gathers else None, sharding.quantized_gradients if reduces else None

    def _align(self, what: _Together, *, in_tiles: bool) -> int:
        """Return the elements at whose multiples parameters and shards begin."""
        # A block of an 8-bit moment belongs to one parameter, so that two updates never share a scale.
        align = MOMENT_BLOCK if self.config.precision.moments == "int8" else ALIGN
        if self.exact_norm:
            align = max(align, BLOCK)  # both are powers of two
        return math.lcm(align, TILE) if in_tiles else align if what.quantized is None else TILE


def _assign_tiers(units: list[UnitPlan], config: ZeROConfig) -> tuple[UnitPlan, ...]:
    """Assign the tiers. With a ``ratio``, the first buffers that fit stay on the device."""
    flats = [f for u in units for f in u.flats]
    optimizer = _split([f for f in flats if f.trainable], config.offload.tier_of("optimizer"))
    param = _split([f for f in flats if not f.replicated], config.offload.tier_of("parameters"))
    offloaded = [f for f in flats if optimizer.get(id(f), "device") != "device"]
    gradient = _split(offloaded, config.offload.tier_of("gradients"))
    result: list[UnitPlan] = []
    for unit in units:
        placed: list[FlatPlan] = []
        for f in unit.flats:
            param_tier = param.get(id(f), "device")
            optimizer_tier = optimizer.get(id(f), "device") if f.trainable else param_tier
            followed = optimizer_tier if f.trainable else "device"
            gradient_tier = followed if config.offload.gradients is None else gradient.get(id(f), "device")
            unfrozen = None if f.unfrozen is None else replace(f.unfrozen, param_tier=param_tier)
            offload = config.offload.tier_of("optimizer")
            if unfrozen is not None and offload is not None:  # whatever the ``ratio``: the device's share is taken
                gradients = config.offload.tier_of("gradients") or offload
                unfrozen = replace(unfrozen, optimizer_tier=offload.tier, gradient_tier=gradients.tier)
            placed.append(
                replace(
                    f,
                    optimizer_tier=optimizer_tier,
                    param_tier=param_tier,
                    gradient_tier=gradient_tier,
                    unfrozen=unfrozen,
                )
            )
        result.append(replace(unit, flats=tuple(placed)))
    return tuple(result)


def _split(flats: list[FlatPlan], offload: TierConfig | None) -> dict[int, TierName]:
    """Return the tiers of offloaded buffers by ``id``; the others stay on the device."""
    if offload is None:
        return {}
    room = (1.0 - offload.ratio) * sum(f.layout.shard for f in flats)
    result: dict[int, TierName] = {}
    for flat in flats:
        if flat.layout.shard <= room:
            room -= flat.layout.shard
        else:
            result[id(flat)] = offload.tier
    return result
