"""The plan of a run, resolved before anything is moved: buffers, bytes per rank, and elements sent.

A plan is integers over shapes. The engine builds exactly what it says, and tests compare it with counted bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice

import torch

from ls_strategy.config import FrozenFormat, MomentFormat, SplitFormat, TierName
from ls_strategy.distributed.wire_format import FORMATS
from ls_strategy.layout import FlatLayout
from ls_strategy.ops.moments import BLOCK as MOMENT_BLOCK
from ls_strategy.ops.quantized import packed_bytes
from ls_strategy.ops.split_master import BYTES as SPLIT_BYTES
from ls_strategy.ops.split_master import LOW, PER_BYTE
from ls_strategy.tiers import TIERS
from ls_strategy.zero_stages import REPLICATED, StagePolicy

FROZEN = -1
"""Optimizer number of parameters without an optimizer."""

MOMENT_BYTES: dict[MomentFormat, float] = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / MOMENT_BLOCK}
"""Bytes of one moment per element, scales included."""


@dataclass(frozen=True)
class FlatPlan:
    """One flat buffer: the parameters of a unit with the same optimizer and dtype."""

    layout: FlatLayout
    dtype: torch.dtype
    master_dtype: torch.dtype
    optimizer: int
    optimizer_tier: TierName = "device"
    """Tier of master weights and optimizer states; for a buffer that does not train, ``param_tier``."""

    param_tier: TierName = "device"
    """Tier of this rank's shard of the parameters, at stage 3."""

    gradient_tier: TierName = "device"
    """Tier of averaged gradients between backward and step."""

    copies: int = 1
    """Number of adjacent ranks of the tensor-parallel axis with the same parameters."""

    tied: bool = False
    """Whether another pipeline stage holds the parameters too, so that gradients are summed over both."""

    replica: bool = False
    """Whether the other pipeline stage counts and saves them."""

    shared_by: tuple[int, ...] = ()
    """Numbers of its optimizers if there are several; each has its own state."""

    replicated: bool = False
    """Stage 3: every rank holds the parameters, which are frozen, in full."""

    quantized: FrozenFormat | None = None
    """Format of frozen weights that are stored and sent in 4 or 8 bits, and dequantized when they are gathered."""

    gathered_as: str | None = None
    """Stage 3: format in which exact parameters are gathered."""

    cast_to: torch.dtype | None = None
    """Stage 3: dtype in which modules read the parameters (that of autocast, or fp8), and in which they are gathered
    for these."""

    reduced_in: torch.dtype | None = None
    """Stage 3: dtype in which gradients are sent, if it is not that of the parameters."""

    reduced_as: str | None = None
    """Format in which gradients are sent; None for their dtype."""

    unfrozen: FlatPlan | None = None
    """For parameters that are in an optimizer but frozen: the plan that applies once one of them is unfrozen."""

    exact_norm: bool = False
    """Whether norms of its gradients must not depend on the number of ranks."""

    node: int = 0
    """Ranks that share a second copy of the parameters, from which backward gathers; 0 without one."""

    split_masters: SplitFormat | None = None
    """Format in which of the masters only the bits are stored that the parameters lack, see
    `ls_strategy.ops.split_master`. None: masters are stored as they are."""

    @property
    def master_bytes(self) -> float:
        """Return the bytes that one master weight takes where it is stored."""
        return self.master_dtype.itemsize if self.split_masters is None else SPLIT_BYTES[self.split_masters]

    def master_states(self, numel: int) -> dict[str, tuple[int, torch.dtype]]:
        """Return elements and dtype of what is stored of ``numel`` master weights, by the states' names."""
        if self.split_masters is None:
            return {"master": (numel, self.master_dtype)}
        low = {"master.low": (numel, LOW[self.split_masters])}
        return low if self.split_masters == "24" else low | {"master.ties": (-(-numel // PER_BYTE), torch.uint8)}

    @property
    def owners(self) -> tuple[int, ...]:
        """Return the numbers of the optimizers that have its parameters."""
        return self.shared_by or ((self.optimizer,) if self.optimizer != FROZEN else ())

    @property
    def trainable(self) -> bool:
        """Return whether an optimizer updates the buffer."""
        return self.optimizer != FROZEN and self.unfrozen is None

    @property
    def gathered_numel(self) -> int:
        """Return the elements, or bytes of a quantized buffer, that this rank sends in a gather, with padding."""
        if self.replicated:
            return 0
        return self._on_wire(self.layout.shard) * (self.layout.world_size - 1)

    def _on_wire(self, numel: int) -> int:
        """Return the elements, of the wire format's dtype if there is one, in which ``numel`` elements are gathered."""
        return numel if self.wire_format is None else FORMATS[self.wire_format].numel(numel)

    @property
    def wire_format(self) -> str | None:
        """Return the wire format in which parameters are gathered; None for their dtype."""
        return self.quantized or self.gathered_as

    @property
    def regathered_numel(self) -> int:
        """Return what `gathered_numel` is in backward: with a second copy, it stays inside the node."""
        return self.secondary_numel * (self.node - 1) if self.node else self.gathered_numel

    @property
    def secondary_numel(self) -> int:
        """Return the elements, or bytes of a quantized buffer, of this rank's slice of the second copy."""
        return self._on_wire(self.layout.numel) // self.node if self.node else 0

    @property
    def gathered_itemsize(self) -> int:
        """Return the bytes of an element of `gathered_numel`."""
        return FORMATS[self.wire_format].dtype.itemsize if self.wire_format else (self.cast_to or self.dtype).itemsize

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Return the dtype of this rank's own gradients, which are sent."""
        return self.reduced_in or self.dtype

    @property
    def shard_bytes(self) -> int:
        """Return the bytes of this rank's shard of the parameters, as it is sent."""
        return self.bytes_of(self.layout.shard)

    def bytes_of(self, numel: int) -> int:
        """Return the bytes of ``numel`` elements as they are sent: of full tiles, if they are quantized."""
        return numel * self.dtype.itemsize if self.quantized is None else packed_bytes(numel, self.quantized)

    def policy(self, run: StagePolicy) -> StagePolicy:
        """Return which states are sharded. Quantized weights are replicated below stage 3, in all their forms."""
        return REPLICATED if self.replicated or (self.quantized is not None and not run.parameters) else run

    def stored_bytes(self, run: StagePolicy) -> int:
        """Return the bytes of quantized weights that one rank stores."""
        return self.bytes_of(self.layout.shard if self.policy(run).parameters else self.layout.numel)

    @property
    def reduced_numel(self) -> int:
        """Return the elements, or bytes in ``reduced_as``, that this rank sends in a reduction, with padding.

        As many as the other ranks' shards have, also where sums of a node are sent on to the other nodes.
        """
        if self.reduced_as is None:
            return self.layout.numel - self.layout.shard
        return FORMATS[self.reduced_as].numel(self.layout.numel - self.layout.shard)

    def has_own_shard(self, policy: StagePolicy) -> bool:
        """Return whether this rank stores a shard of the parameters in the forward's dtype, in addition to the masters.

        Only at stage 3, and only if the masters cannot replace it. Resident masters on the same tier can,
        since gathers cast them. From NVMe, fp32 masters would be read with twice the bytes of a 16-bit shard.
        """
        if self.split_masters is not None:  # it completes them
            return self.policy(policy).parameters
        same_place = self.param_tier == self.optimizer_tier
        cast_is_free = TIERS[self.param_tier].resident or self.dtype == self.master_dtype
        return self.policy(policy).parameters and not (same_place and cast_is_free)


@dataclass(frozen=True)
class UnitPlan:
    """One unit."""

    name: str
    is_root: bool
    flats: tuple[FlatPlan, ...]

    @property
    def numel(self) -> int:
        """Return the number of parameters, without padding."""
        return sum(f.layout.param_numel for f in self.flats)

    @property
    def gathered_numel(self) -> int:
        """Return the elements that this rank sends when all buffers are gathered."""
        return sum(f.gathered_numel for f in self.flats)


@dataclass(frozen=True)
class FlatBytes:
    """Bytes of one flat buffer on one rank between two steps, padding included."""

    parameters: int
    """At stage 3: the slice of a second copy."""

    own_shard: int
    masters: int
    optimizer: int
    averages: int
    """Averaged gradients in fp32; at stage 0, of the full buffer in place."""

    local_gradients: int
    """At stage 1: this rank's own gradients, in the parameters' dtype."""


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first collective of training."""

    policy: StagePolicy
    world_size: int
    units: tuple[UnitPlan, ...]
    moments: MomentFormat = "fp32"
    """Storage format of optimizer moments."""

    weights: tuple[Fraction, ...] = ()
    """Relative shard sizes by rank; empty for equal shards. With weights, bytes and traffic are those of ``rank``."""

    rank: int = 0

    group: tuple[int, int] = (0, 1)
    """Which of how many groups of ranks this is of. Each shards a replica of all states over ``world_size`` ranks."""

    def with_flats(self, flats: Iterable[FlatPlan]) -> Plan:
        """Return this plan with other states of its buffers, in the order of the units."""
        changed = iter(flats)
        return replace(self, units=tuple(replace(u, flats=tuple(islice(changed, len(u.flats)))) for u in self.units))

    @property
    def numel(self) -> int:
        """Return the parameters of the model, counting shared ones once."""
        return sum(u.numel for u in self.units)

    def elements_sent(self, micro_batches: int = 1) -> int:
        """Return the elements that one rank sends in one optimizer step, with padding, without agreements of bytes."""
        return self.count_sent(
            micro_batches,
            gathered=lambda f: f.gathered_numel,
            regathered=lambda f: f.regathered_numel,
            reduced=lambda f: f.reduced_numel + self.crossing_numel(f),
        )

    def crossing_numel(self, flat: FlatPlan) -> int:
        """Return the elements that this rank sends to other groups in a reduction, fp32 or wider: sums and totals.

        Or bytes in ``reduced_as``: then every replica adds a part of the shard, and sends the total to all others.
        """
        group, groups = self.group
        if flat.reduced_as is not None:
            return 2 * (groups - 1) * FORMATS[flat.reduced_as].numel(flat.layout.shard // groups)
        return flat.layout.shard * ((group > 0) + (group < groups - 1))

    def count_sent(
        self,
        micro_batches: int,
        *,
        gathered: Callable[[FlatPlan], int],
        regathered: Callable[[FlatPlan], int],
        reduced: Callable[[FlatPlan], int],
        once: bool = False,
    ) -> int:
        """Return the sum of what one rank sends in one optimizer step.

        This follows ZeRO section 7, except that stage 3 gathers some units less often; see `gathers_per_step`.

        Args:
            micro_batches: per step.
            gathered: amount sent by one gather of a buffer (at stage 0, of its averages).
            regathered: amount sent by one gather in backward.
            reduced: amount sent by one reduction of its gradients.
            once: see `gathers_per_step`.
        """
        trainable = [f for u in self.units for f in u.flats if f.trainable]
        reductions = sum(map(reduced, trainable))
        if not self.policy.parameters:
            return sum(map(gathered, trainable)) + reductions * (micro_batches if self.policy.gradients else 1)
        fetched = 0
        for gathers, unit in zip(self.gathers_per_step(micro_batches, once=once), self.units, strict=True):
            first = min(gathers, 1 if unit.is_root else micro_batches)
            fetched += first * sum(map(gathered, unit.flats)) + (gathers - first) * sum(map(regathered, unit.flats))
        return fetched + micro_batches * reductions

    def gathers_per_step(self, micro_batches: int = 1, *, once: bool = False) -> list[int]:
        """Return how often each unit is gathered in one optimizer step: never, unless parameters are sharded.

        Root units are gathered once. Blocks are gathered for forward and backward of each micro-batch, except that the
        last block stays gathered in between. ``once``: all stay gathered until the step, as in a pipeline.
        """
        if not self.policy.parameters or once:
            return [int(self.policy.parameters)] * len(self.units)
        last = max((i for i, unit in enumerate(self.units) if not unit.is_root), default=-1)
        return [1 if u.is_root else micro_batches * (1 if i == last else 2) for i, u in enumerate(self.units)]

    def flat_states(self, flat: FlatPlan, optimizer_bytes: Sequence[float] | None = None) -> FlatBytes:
        """Return the bytes of one buffer's states. Every other count of states is a sum of these.

        Args:
            flat: a buffer of this plan.
            optimizer_bytes: bytes of state per element, by optimizer. None: AdamW's two moments.
        """
        if flat.quantized is not None:
            return FlatBytes(flat.secondary_numel, 0, flat.stored_bytes(self.policy), 0, 0, 0)
        policy, full, trained = flat.policy(self.policy), flat.layout.numel, flat.trainable
        stepped = flat.layout.shard if policy.optimizer else full
        own_master = trained and (flat.master_dtype != flat.dtype or flat.optimizer_tier != "device")
        owners = flat.owners if trained else ()
        kept = [self._moment_bytes(flat) if optimizer_bytes is None else optimizer_bytes[i] for i in owners]
        return FlatBytes(
            parameters=(
                flat.secondary_numel * flat.gathered_itemsize if policy.parameters else full * flat.dtype.itemsize
            ),
            own_shard=stepped * flat.dtype.itemsize if flat.has_own_shard(policy) else 0,
            masters=round(stepped * flat.master_bytes) if policy.parameters or own_master else 0,
            optimizer=round(stepped * sum(kept)),
            averages=stepped * 4 if trained else 0,
            local_gradients=full * flat.dtype.itemsize if trained and policy.optimizer and not policy.gradients else 0,
        )

    def bytes_by_tier(self, optimizer_bytes: Sequence[float] | None = None) -> dict[TierName, dict[str, int]]:
        """Return the bytes of model state on one rank between two steps, by tier and kind, padding included.

        ``gradients`` are the averages, and at stages 0 and 1 this rank's own gradients in the parameters' dtype (in
        fp32 once they are accumulated over micro-batches; stage 0 averages in place).

        Args:
            optimizer_bytes: bytes of state per element, by optimizer. None: AdamW's two moments.
        """
        result: dict[TierName, dict[str, int]] = {
            tier: {"parameters": 0, "masters": 0, "gradients": 0, "optimizer": 0} for tier in TIERS
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
        """Return the bytes of model state on one rank by kind, on all tiers together."""
        tiers = self.bytes_by_tier().values()
        return {kind: sum(tier[kind] for tier in tiers) for kind in ("parameters", "masters", "gradients", "optimizer")}

    def bytes_per_update(self, optimizer_bytes: Sequence[float] | None = None) -> int:
        """Return the bytes that element-wise updates of one rank read and write per step: masters, averages, states."""
        total = 0.0
        for flat in (f for u in self.units for f in u.flats if f.trainable):
            stepped = flat.layout.shard if flat.policy(self.policy).optimizer else flat.layout.numel
            kept = [self._moment_bytes(flat) if optimizer_bytes is None else optimizer_bytes[i] for i in flat.owners]
            high = flat.dtype.itemsize if flat.split_masters else 0
            total += stepped * (2 * (flat.master_bytes + high) + 4 + 2 * sum(kept))
        return round(total)

    def drive_bytes_per_step(
        self, *, gradients_stored: bool, micro_batches: int = 1, optimizer_bytes: Sequence[float] | None = None,
        once: bool = False,
    ) -> tuple[int, int]:  # fmt: skip
        """Return the bytes that one rank reads from and writes to tiers out of memory in one optimizer step.

        Args:
            gradients_stored: averages stay on their tier until backward is over, for example for clipping, instead of
                going directly into the update.
            micro_batches: per step.
            optimizer_bytes: bytes of state per element, by optimizer. None: AdamW's two moments.
            once: see `gathers_per_step`.
        """
        read = written = 0
        rounds = micro_batches if self.policy.gradients else 1  # of averaging; later rounds add to the averages
        for unit, gathers in zip(self.units, self.gathers_per_step(micro_batches, once=once), strict=True):
            for flat in unit.flats:
                each = self.flat_states(flat, optimizer_bytes)
                if flat.trainable and not TIERS[flat.optimizer_tier].resident:
                    moved = each.masters + each.optimizer
                    read, written = read + moved, written + moved
                    if not gradients_stored and not self.policy.parameters and not flat.split_masters:
                        read += each.masters  # updated while backward ran; read again to update the parameters
                if not TIERS[flat.param_tier].resident:
                    read += gathers * flat.shard_bytes
                    if flat.trainable and flat.split_masters is not None:
                        read += each.own_shard  # the update completes its masters by it
                    written += each.own_shard if flat.trainable else 0
                leased = flat.trainable and not TIERS[flat.gradient_tier].resident
                if leased and (gradients_stored or rounds > 1):
                    read, written = read + rounds * each.averages, written + rounds * each.averages
        return read, written

    def _describe_memory(self, optimizer_bytes: Sequence[float | None] | None) -> list[str]:
        mib, later = 1 << 20, optimizer_bytes is not None and None in optimizer_bytes
        known = None if optimizer_bytes is None else [each or 0.0 for each in optimizer_bytes]
        lines = []
        for tier, states in self.bytes_by_tier(known).items():
            if tier == "device" or any(states.values()):
                by_kind = ", ".join(f"{kind} {nbytes / mib:,.1f} MiB" for kind, nbytes in states.items())
                total = sum(states.values()) / mib
                lines.append(f"  per rank, {TIERS[tier].place}: {by_kind}, together {total:,.1f} MiB")
        return [*lines, "  not counted: optimizer states that the first step creates"] if later else lines

    def describe(self, optimizer_bytes: Sequence[float | None] | None = None) -> str:
        """Return the plan as a table, for the log.

        Args:
            optimizer_bytes: bytes of state per element, by optimizer; an optimizer with None creates its states in the
                first step, and they are not counted. None: AdamW's two moments.
        """
        sharded = [k for k in ("optimizer", "gradients", "parameters") if getattr(self.policy, k)]
        lines = [
            f"{self.numel:,} parameters in {len(self.units)} units over {self.world_size} ranks; "
            f"sharded: {', '.join(sharded) or 'nothing'}",
        ]
        if self.group[1] > 1:
            lines.append(f"  {self.group[1]} groups of {self.world_size} ranks hold a replica of all states each")
        if self.weights:
            weights = " : ".join(f"{float(w):g}" for w in self.weights)
            share = float(100 * self.weights[self.rank] / sum(self.weights))
            lines.append(f"  shards by weights {weights}; this is rank {self.rank}, with {share:.1f} %")
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
        flats = [f for unit in self.units for f in unit.flats]
        frozen = sum(f.layout.param_numel for f in flats if f.unfrozen is not None)
        if frozen:
            lines.append(f"  {frozen:,} frozen parameters in optimizers have no gradients and states until unfrozen")
        kept = sum(f.layout.param_numel for f in flats if f.dtype == torch.float32)
        if kept and any(f.dtype.itemsize == 2 for f in flats):
            lines.append(f"  {kept:,} parameters stay in fp32 (batch norms, fp32_modules, the author's lists)")
        quantized = [f for f in flats if f.quantized is not None]
        if quantized:
            numel = sum(f.layout.param_numel for f in quantized)
            lines.append(f"  {numel:,} frozen parameters are stored as {quantized[0].quantized}")
        lines += self._describe_memory(optimizer_bytes)
        lines.append(f"  sent per step: {self.elements_sent():,} elements")
        return "\n".join(lines)
