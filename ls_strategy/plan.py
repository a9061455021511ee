"""What a run will do, resolved before anything is moved: its buffers, bytes per rank, and elements sent.

Pure integers over shapes; the engine builds exactly what the plan says, and tests hold it against counted bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from ls_strategy.config import MomentFormat, TierConfig, TierName, ZeROConfig
from ls_strategy.layout import ALIGN, FlatLayout, TensorPart
from ls_strategy.ops.moments import BLOCK as MOMENT_BLOCK
from ls_strategy.zero_stages import StagePolicy

FROZEN = -1
"""Optimizer number of parameters that no optimizer updates."""

MOMENT_BYTES: dict[MomentFormat, float] = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / MOMENT_BLOCK}
"""Bytes of one moment of one element, scales included."""

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

    replica: bool = False
    """Whether that one counts and saves it."""

    shared_by: tuple[int, ...] = ()
    """Numbers of its optimizers, where there are several; ``optimizer`` is then a number for all of them together."""


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

    replica: bool = False
    """Whether that one counts and saves them."""

    shared_by: tuple[int, ...] = ()
    """Numbers of its optimizers, where there are several: each has a state of its own."""

    @property
    def owners(self) -> tuple[int, ...]:
        """Numbers of the optimizers that update it."""
        return self.shared_by or ((self.optimizer,) if self.trainable else ())

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
class FlatBytes:
    """Bytes of one flat buffer on one rank between two steps, padding included."""

    parameters: int
    own_shard: int
    masters: int
    optimizer: int
    averages: int
    """In fp32; stage 0: of the full buffer, in place."""

    local_gradients: int
    """Stage 1: this rank's own gradients, in the parameters' dtype."""


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
        """Elements that one rank sends in one optimizer step, padding included, agreements of a few bytes not."""
        return self.count_sent(micro_batches, gathered=lambda f: f.gathered_numel, reduced=lambda f: f.reduced_numel)

    def count_sent(
        self, micro_batches: int, *, gathered: Callable[[FlatPlan], int], reduced: Callable[[FlatPlan], int]
    ) -> int:
        """Add up what one rank sends in one optimizer step.

        ZeRO section 7, less what stage 3 need not gather again: root units stay from their first use until the step,
        and the unit whose backward comes first stays from forward to backward.

        Args:
            micro_batches: per step.
            gathered: what one gather of a buffer sends (stage 0: of its averages).
            reduced: what one reduction of its gradients sends.
        """
        trainable = [f for u in self.units for f in u.flats if f.trainable]
        reductions = sum(map(reduced, trainable))
        if not self.policy.parameters:
            return sum(map(gathered, trainable)) + reductions * (micro_batches if self.policy.gradients else 1)
        fetched = sum(
            gathers * sum(map(gathered, unit.flats))
            for gathers, unit in zip(self.gathers_per_step(micro_batches), self.units, strict=True)
        )
        return fetched + micro_batches * reductions

    def gathers_per_step(self, micro_batches: int = 1) -> list[int]:
        """How often each unit is gathered in one optimizer step: never, unless parameters are sharded.

        Root units once; blocks for forward and for backward of each micro-batch, but the last one, which stays between.
        """
        if not self.policy.parameters:
            return [0] * len(self.units)
        last = max((i for i, unit in enumerate(self.units) if not unit.is_root), default=-1)
        return [1 if u.is_root else micro_batches * (1 if i == last else 2) for i, u in enumerate(self.units)]

    def flat_states(self, flat: FlatPlan, optimizer_bytes: Sequence[float] | None = None) -> FlatBytes:
        """Bytes of one buffer's states; every other count of states adds these up.

        Args:
            flat: of this plan.
            optimizer_bytes: what each optimizer keeps per element. None: AdamW's two moments.
        """
        policy, full, trained = self.policy, flat.layout.numel, flat.trainable
        stepped = flat.layout.shard if policy.optimizer else full
        own_master = trained and (flat.master_dtype != flat.dtype or flat.optimizer_tier != "device")
        kept = [self._moment_bytes(flat) if optimizer_bytes is None else optimizer_bytes[i] for i in flat.owners]
        return FlatBytes(
            parameters=0 if policy.parameters else full * flat.dtype.itemsize,
            own_shard=stepped * flat.dtype.itemsize if flat.has_own_shard(policy) else 0,
            masters=stepped * flat.master_dtype.itemsize if policy.parameters or own_master else 0,
            optimizer=round(stepped * sum(kept)),
            averages=stepped * 4 if trained else 0,
            local_gradients=full * flat.dtype.itemsize if trained and policy.optimizer and not policy.gradients else 0,
        )

    def bytes_by_tier(self, optimizer_bytes: Sequence[float] | None = None) -> dict[TierName, dict[str, int]]:
        """Bytes of model state on one rank between two steps, by tier and kind.

        Padding included. ``gradients`` are the averages, and for stages 0 and 1 this rank's own gradients in the
        parameters' dtype (in fp32 once they are accumulated over micro-batches; stage 0 averages in place).

        Args:
            optimizer_bytes: what each optimizer keeps per element. None: AdamW's two moments.
        """
        result: dict[TierName, dict[str, int]] = {
            tier: {"parameters": 0, "masters": 0, "gradients": 0, "optimizer": 0} for tier in ("device", "cpu", "nvme")
        }
        for flat in (f for u in self.units for f in u.flats):
            each = self.flat_states(flat, optimizer_bytes)
            result["device"]["parameters"] += each.parameters
            result[flat.param_tier]["parameters"] += each.own_shard
            result[flat.optimizer_tier]["masters"] += each.masters
            result[flat.optimizer_tier]["optimizer"] += each.optimizer
            result[flat.gradient_tier]["gradients"] += each.averages
            result["device"]["gradients"] += each.local_gradients
        return result

    def _moment_bytes(self, flat: FlatPlan) -> float:
        return 2.0 * (flat.master_dtype.itemsize if self.moments == "fp32" else MOMENT_BYTES[self.moments])

    def state_bytes(self) -> dict[str, int]:
        """Bytes of model state on one rank by kind, on all tiers together."""
        tiers = self.bytes_by_tier().values()
        return {kind: sum(tier[kind] for tier in tiers) for kind in ("parameters", "masters", "gradients", "optimizer")}

    def drive_bytes_per_step(
        self, *, gradients_rest: bool, micro_batches: int = 1, optimizer_bytes: Sequence[float] | None = None
    ) -> tuple[int, int]:
        """Bytes that one rank reads from and writes to the NVMe tier in one optimizer step.

        Args:
            gradients_rest: averages wait on the drive until backward is over, for clipping or another reason,
                instead of going straight into the update.
            micro_batches: per step.
            optimizer_bytes: what each optimizer keeps per element. None: AdamW's two moments.
        """
        read = written = 0
        rounds = micro_batches if self.policy.gradients else 1  # of averaging; after the first, averages are added to
        for unit, gathers in zip(self.units, self.gathers_per_step(micro_batches), strict=True):
            for flat in unit.flats:
                each = self.flat_states(flat, optimizer_bytes)
                if flat.trainable and flat.optimizer_tier == "nvme":
                    moved = each.masters + each.optimizer
                    read, written = read + moved, written + moved
                    if not gradients_rest and not self.policy.parameters:
                        read += each.masters  # updated while backward ran, and read again when parameters may change
                if flat.param_tier == "nvme":
                    read += gathers * flat.layout.shard * flat.dtype.itemsize
                    written += each.own_shard if flat.trainable else 0
                if flat.trainable and flat.gradient_tier == "nvme" and (gradients_rest or rounds > 1):
                    read, written = read + rounds * each.averages, written + rounds * each.averages
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
    align = MOMENT_BLOCK if config.precision.moments == "int8" else ALIGN
    plans: list[UnitPlan] = []
    for name, is_root, params in units:
        classes: defaultdict[tuple[int, torch.dtype, int, bool, bool, bool], list[ParamFacts]] = defaultdict(list)
        for p in params:
            copies = tensor_size if p.part is None else p.part.copies
            expert = p.part is not None and p.part.axis == "expert"
            classes[p.optimizer, p.dtype, copies, p.tied, p.replica, expert].append(p)
        flats: list[FlatPlan] = []
        for (optimizer, dtype, copies, tied, replica, expert), members in classes.items():
            # Groups side by side: decay and no-decay make two runs per unit instead of one per parameter.
            members.sort(key=lambda p: p.group)
            parts = {p.name: p.part for p in members if p.part is not None}
            ranks = expert_world_size if expert else world_size
            layout = FlatLayout.pack(
                ((p.name, p.shape) for p in members), ranks, align=align, parts=parts, weights=weights, rank=rank
            )
            own = optimizer == FROZEN or dtype != compute_dtype
            kept = dtype if own else master_dtype
            shared_by = members[0].shared_by
            flats.append(
                FlatPlan(layout, dtype, kept, optimizer, copies=copies, tied=tied, replica=replica, shared_by=shared_by)
            )
        plans.append(UnitPlan(name, is_root, tuple(flats)))
    return Plan(policy, world_size, _assign_tiers(plans, config), config.precision.moments, weights, rank)


def _assign_tiers(units: list[UnitPlan], config: ZeROConfig) -> tuple[UnitPlan, ...]:
    """Give every buffer its tiers. What a ``ratio`` keeps on the device are the first buffers, whole, as they fit."""
    flats = [f for u in units for f in u.flats]
    optimizer = _split([f for f in flats if f.trainable], config.offload.tier_of("optimizer"))
    param = _split(flats, config.offload.tier_of("parameters"))
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
            placed.append(replace(f, optimizer_tier=optimizer_tier, param_tier=param_tier, gradient_tier=gradient_tier))
        result.append(replace(unit, flats=tuple(placed)))
    return tuple(result)


def _split(flats: list[FlatPlan], offload: TierConfig | None) -> dict[int, TierName]:
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
