"""Bytes that one rank moves in one optimizer step: to other ranks, over the bus to its host, from and to its drive."""

from __future__ import annotations

from dataclasses import dataclass

from ls_strategy.plan import FlatPlan, Plan
from ls_strategy.planner.states import flat_states


@dataclass(frozen=True)
class Traffic:
    """Of one rank and step."""

    sent: int
    """To other ranks."""

    bus: int
    """Between device and host, both directions together."""

    drive: int
    """Read and written."""


def traffic(
    plan: Plan,
    optimizer_bytes: tuple[float, ...],
    *,
    micro_batches: int = 1,
    native_fp32: bool = False,
    cuda: bool = False,
    gradients_rest: bool = False,
) -> Traffic:
    """Count it.

    Args:
        plan: of the run.
        optimizer_bytes: that each optimizer keeps per element.
        micro_batches: per step.
        native_fp32: the transport sums, and gradients are sent to it in fp32 (NCCL).
        cuda: the device's memory is not the host's.
        gradients_rest: averages wait on their tier for clipping.
    """
    sent = _sent(plan, micro_batches, native_fp32=native_fp32)
    bus = drive = 0
    for flat in (f for u in plan.units for f in u.flats):
        each = flat_states(flat, plan, optimizer_bytes)
        reads = 2 * micro_batches * flat.layout.shard * flat.dtype.itemsize if plan.policy.parameters else 0
        if flat.trainable and flat.optimizer_tier != "device":
            bus += each.averages * micro_batches + flat.layout.shard * flat.dtype.itemsize
        if flat.trainable and flat.optimizer_tier == "nvme":
            drive += 2 * (each.masters + each.optimizer)
        if flat.trainable and flat.gradient_tier == "nvme" and gradients_rest:
            drive += 2 * each.averages * micro_batches
        if flat.param_tier != "device":
            bus += reads
        if flat.param_tier == "nvme":
            drive += reads + (each.own_shard if flat.trainable else 0)
    return Traffic(sent, bus if cuda else 0, drive)


def _sent(plan: Plan, micro_batches: int, *, native_fp32: bool) -> int:
    """As `Plan.elements_sent`, in bytes."""
    policy = plan.policy

    def gathered(flat: FlatPlan) -> int:
        return flat.gathered_numel * flat.dtype.itemsize

    def reduced(flat: FlatPlan) -> int:
        size = flat.dtype.itemsize
        accumulates = policy.optimizer and not policy.gradients and micro_batches > 1
        fp32 = native_fp32 or not policy.optimizer or accumulates
        return flat.reduced_numel * (max(size, 4) if fp32 else size)

    trained = [f for u in plan.units for f in u.flats if f.trainable]
    reductions = sum(map(reduced, trained))
    if not policy.parameters:
        again = sum(f.gathered_numel * 4 if not policy.optimizer else gathered(f) for f in trained)
        return again + reductions * (micro_batches if policy.gradients else 1)
    blocks = [sum(map(gathered, u.flats)) for u in plan.units if not u.is_root]
    roots = sum(gathered(f) for u in plan.units if u.is_root for f in u.flats)
    return roots + micro_batches * (2 * sum(blocks) - (blocks[-1] if blocks else 0) + reductions)
