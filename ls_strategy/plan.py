"""What a run will do, resolved before anything is moved: its buffers, bytes per rank, and elements sent.

Pure integers over shapes; the engine builds exactly what the plan says, and tests hold it against counted bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from ls_strategy.config import MomentFormat, OffloadConfig, TierName, ZeROConfig
from ls_strategy.layout import ALIGN, FlatLayout, TensorPart
from ls_strategy.ops.moments import BLOCK as MOMENT_BLOCK
from ls_strategy.zero_stages import StagePolicy

FROZEN = -1
"""Optimizer number of parameters that no optimizer updates."""

_TIERS = {"device": "on the device", "cpu": "in host memory", "nvme": "on NVMe"}


@dataclass(frozen=True)
class ParamFacts:
    """What a plan needs to know of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype that the forward reads."""

    optimizer: int = FROZEN
    group: int = 0
    part: TensorPart | None = None
    """What of it is on this rank, with tensor or expert parallelism; ``shape`` is then the part's."""

    tied: bool = False
    """Whether another stage of the pipeline holds it, too."""

    twin: bool = False
    """Whether that one counts and saves it."""


@dataclass(frozen=True)
class FlatPlan:
    """One flat buffer: parameters of a unit with the same optimizer and dtype."""

    layout: FlatLayout
    dtype: torch.dtype
    master_dtype: torch.dtype
    optimizer: int
    optimizer_tier: TierName = "device"
    """Where master weights and optimizer states rest; for a frozen buffer the same as ``param_tier``."""

    param_tier: TierName = "device"
    """Stage 3: where this rank's shard of the parameters rests."""

    gradient_tier: TierName = "device"
    """Where averaged gradients rest between backward and step."""

    copies: int = 1
    """Ranks of the tensor-parallel axis, side by side, that hold the same parameters."""

    tied: bool = False
    """Whether another stage of the pipeline holds the same, too: gradients are summed over both."""

    twin: bool = False
    """Whether that one counts and saves them."""

    @property
    def trainable(self) -> bool:
        """Whether an optimizer updates it."""
        return self.optimizer != FROZEN

    @property
    def gathered_numel(self) -> int:
        """Elements that this rank sends in a gather, padding included: its shard, to every other rank."""
        return self.layout.shard * (self.layout.world_size - 1)

    @property
    def reduced_numel(self) -> int:
        """Elements that this rank sends in a reduction, padding included: the other ranks' shards."""
        return self.layout.numel - self.layout.shard

    def has_own_shard(self, policy: StagePolicy) -> bool:
        """Stage 3: whether this rank's part of the parameters is kept beside the masters, in the forward's dtype.

        In memory a unit is gathered straight from the masters, cast on the way; a drive would move twice the bytes.
        """
        same_place = self.param_tier == self.optimizer_tier
        return policy.parameters and not (same_place and (self.param_tier != "nvme" or self.dtype == self.master_dtype))


@dataclass(frozen=True)
class UnitPlan:
    """One unit."""

    name: str
    is_root: bool
    flats: tuple[FlatPlan, ...]

    @property
    def numel(self) -> int:
        """Parameters, without padding."""
        return sum(f.layout.param_numel for f in self.flats)

    @property
    def gathered_numel(self) -> int:
        """Elements that this rank sends when all buffers are gathered."""
        return sum(f.gathered_numel for f in self.flats)


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first collective of training."""

    policy: StagePolicy
    world_size: int
    units: tuple[UnitPlan, ...]
    moments: MomentFormat = "fp32"
    """How optimizer moments are stored."""

    weights: tuple[Fraction, ...] = ()
    """Of the ranks' shards; none: all have the same length. Bytes and traffic are then those of ``rank``."""

    rank: int = 0

    @property
    def numel(self) -> int:
        """Parameters of the model, shared ones once."""
        return sum(u.numel for u in self.units)

    def elements_sent(self, micro_batches: int = 1) -> int:
        """Elements that one rank sends in one optimizer step, padding included, agreements of a few bytes not.

        ZeRO section 7, less what stage 3 need not gather again: root units stay from their first use until the step,
        and the unit whose backward comes first stays from forward to backward.
        """
        trained = [f for u in self.units for f in u.flats if f.trainable]
        reduced = sum(f.reduced_numel for f in trained)
        if not self.policy.parameters:
            published = sum(f.gathered_numel for f in trained)
            return published + reduced * (micro_batches if self.policy.gradients else 1)
        blocks = [u.gathered_numel for u in self.units if not u.is_root]
        roots = sum(u.gathered_numel for u in self.units if u.is_root)
        again = 2 * sum(blocks) - (blocks[-1] if blocks else 0)
        return roots + micro_batches * (again + reduced)

    def bytes_by_tier(self) -> dict[TierName, dict[str, int]]:
        """Bytes of model state on one rank between two steps, by tier and kind, with AdamW's two moments.

        Padding included. ``gradients`` are the averages, and for stages 0 and 1 this rank's own gradients in the
        parameters' dtype (in fp32 once they are accumulated over micro-batches; stage 0 averages in place).
        """
        result: dict[TierName, dict[str, int]] = {
            tier: {"parameters": 0, "masters": 0, "gradients": 0, "optimizer": 0} for tier in ("device", "cpu", "nvme")
        }
        for flat in (f for u in self.units for f in u.flats):
            self._add_flat(flat, result)
        return result

    def _add_flat(self, flat: FlatPlan, result: dict[TierName, dict[str, int]]) -> None:
        whole, policy = flat.layout.numel, self.policy
        stepped = flat.layout.shard if policy.optimizer else whole
        if not policy.parameters:
            result["device"]["parameters"] += whole * flat.dtype.itemsize
        elif flat.has_own_shard(policy):
            result[flat.param_tier]["parameters"] += stepped * flat.dtype.itemsize
        own_master = flat.trainable and (flat.master_dtype != flat.dtype or flat.optimizer_tier != "device")
        if policy.parameters or own_master:
            result[flat.optimizer_tier]["masters"] += stepped * flat.master_dtype.itemsize
        if flat.trainable:
            result[flat.optimizer_tier]["optimizer"] += round(stepped * self._moment_bytes(flat))
            result[flat.gradient_tier]["gradients"] += stepped * 4
            if policy.optimizer and not policy.gradients:
                result["device"]["gradients"] += whole * flat.dtype.itemsize

    def _moment_bytes(self, flat: FlatPlan) -> float:
        return {"fp32": 2.0 * flat.master_dtype.itemsize, "bf16": 4.0, "int8": 2.0 + 2 * 4 / MOMENT_BLOCK}[self.moments]

    def state_bytes(self) -> dict[str, int]:
        """Bytes of model state on one rank by kind, on all tiers together."""
        tiers = self.bytes_by_tier().values()
        return {kind: sum(tier[kind] for tier in tiers) for kind in ("parameters", "masters", "gradients", "optimizer")}

    def drive_bytes_per_step(self, *, gradients_rest: bool) -> tuple[int, int]:
        """Bytes that one rank reads from and writes to the NVMe tier in one step of one micro-batch.

        Args:
            gradients_rest: averages wait on the drive for clipping, instead of going straight into the update.
        """
        read = written = 0
        for flat in (f for u in self.units for f in u.flats):
            shard = flat.layout.shard
            if flat.trainable and flat.optimizer_tier == "nvme":
                moved = round(shard * (flat.master_dtype.itemsize + self._moment_bytes(flat)))
                read, written = read + moved, written + moved
            if flat.param_tier == "nvme" and self.policy.parameters:
                read += 2 * shard * flat.dtype.itemsize
                written += shard * flat.dtype.itemsize if flat.has_own_shard(self.policy) and flat.trainable else 0
            if flat.trainable and flat.gradient_tier == "nvme" and gradients_rest:
                read, written = read + 4 * shard, written + 4 * shard
        return read, written

    def describe(self) -> str:
        """The plan as a table, for the log."""
        mib = 1 << 20
        sharded = [k for k in ("optimizer", "gradients", "parameters") if getattr(self.policy, k)]
        lines = [
            f"{self.numel:,} parameters in {len(self.units)} units over {self.world_size} ranks; "
            f"sharded: {', '.join(sharded) or 'nothing'}",
        ]
        if self.weights:
            told = " : ".join(f"{float(w):g}" for w in self.weights)
            share = float(100 * self.weights[self.rank] / sum(self.weights))
            lines.append(f"  shards by weights {told}; this is rank {self.rank}, with {share:.1f} %")
        runs: list[tuple[str, str, int, bool, int]] = []
        for unit in self.units:
            if runs and runs[-1][2] == unit.numel and runs[-1][3] == unit.is_root:
                first, _, numel, root, count = runs[-1]
                runs[-1] = (first, unit.name, numel, root, count + 1)
            else:
                runs.append((unit.name, unit.name, unit.numel, unit.is_root, 1))
        for first, last, numel, root, count in runs:
            name = first if count == 1 else f"{first} ... {last}"
            times = f"{count} x " if count > 1 else ""
            lines.append(f"  {name:<40} {times}{numel:,} parameters{', gathered for the whole step' if root else ''}")
        for tier, states in self.bytes_by_tier().items():
            if tier == "device" or any(states.values()):
                lines.append(
                    f"  per rank, {_TIERS[tier]}: " + ", ".join(f"{k} {v / mib:,.1f} MiB" for k, v in states.items())
                    + f", together {sum(states.values()) / mib:,.1f} MiB"
                )  # fmt: skip
        lines.append(f"  sent per step: {self.elements_sent():,} elements")
        return "\n".join(lines)


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
) -> Plan:
    """Lay out every unit's buffers.

    Args:
        units: name, whether it is a root unit, and its parameters, in order of registration.
        policy: what is sharded.
        world_size: ranks over which states are divided.
        master_dtype: of the weights the optimizer updates, for parameters in ``compute_dtype``; others are their own.
        compute_dtype: of the parameters that the forward reads, as a rule.
        config: what is offloaded, and how moments are stored.
        tensor_size: ranks of the tensor-parallel axis. Parameters that it replicates get buffers of their own, so that
            a norm can count them once.
        expert_world_size: ranks over which the states of experts are divided, with expert parallelism.
        weights: of the ranks' shards; none: all have the same length.
        rank: whose plan this is, with weights.
    """
    config = config or ZeROConfig()
    weights = tuple(weights) if len(set(weights)) > 1 else ()
    # A block of an 8-bit moment belongs to one parameter, so that two updates never share its scale.
    align = MOMENT_BLOCK if config.moments == "int8" else ALIGN
    plans: list[UnitPlan] = []
    for name, is_root, params in units:
        classes: defaultdict[tuple[int, torch.dtype, int, bool, bool, bool], list[ParamFacts]] = defaultdict(list)
        for p in params:
            copies = tensor_size if p.part is None else p.part.copies
            expert = p.part is not None and p.part.axis == "expert"
            classes[p.optimizer, p.dtype, copies, p.tied, p.twin, expert].append(p)
        flats: list[FlatPlan] = []
        for (optimizer, dtype, copies, tied, twin, expert), members in classes.items():
            # Groups side by side: decay and no-decay make two runs per unit instead of one per parameter.
            members.sort(key=lambda p: p.group)
            parts = {p.name: p.part for p in members if p.part is not None}
            ranks = expert_world_size if expert else world_size
            layout = FlatLayout.pack(
                ((p.name, p.shape) for p in members), ranks, align=align, parts=parts, weights=weights, rank=rank
            )
            own = optimizer == FROZEN or dtype != compute_dtype
            kept = dtype if own else master_dtype
            flats.append(FlatPlan(layout, dtype, kept, optimizer, copies=copies, tied=tied, twin=twin))
        plans.append(UnitPlan(name, is_root, tuple(flats)))
    return Plan(policy, world_size, _assign_tiers(plans, config), config.moments, weights, rank)


def _assign_tiers(units: list[UnitPlan], config: ZeROConfig) -> tuple[UnitPlan, ...]:
    """Give every buffer its tiers. What a ``ratio`` keeps on the device are the first buffers, whole, as they fit."""
    flats = [f for u in units for f in u.flats]
    optimizer = _split([f for f in flats if f.trainable], config.offload_optimizer)
    param = _split(flats, config.offload_param)
    gradient = _split([f for f in flats if optimizer.get(id(f), "device") != "device"], config.offload_gradient)
    result: list[UnitPlan] = []
    for unit in units:
        placed: list[FlatPlan] = []
        for f in unit.flats:
            param_tier = param.get(id(f), "device")
            optimizer_tier = optimizer.get(id(f), "device") if f.trainable else param_tier
            followed = optimizer_tier if f.trainable else "device"
            gradient_tier = followed if config.offload_gradient is None else gradient.get(id(f), "device")
            placed.append(replace(f, optimizer_tier=optimizer_tier, param_tier=param_tier, gradient_tier=gradient_tier))
        result.append(replace(unit, flats=tuple(placed)))
    return tuple(result)


def _split(flats: list[FlatPlan], offload: OffloadConfig | None) -> dict[int, TierName]:
    """Tier of each buffer by its ``id``."""
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
