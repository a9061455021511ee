"""Bytes that one rank moves per optimizer step: to other ranks, over the bus to its host, and to and from NVMe."""

from __future__ import annotations

from dataclasses import dataclass

from ls_strategy.plan import FlatPlan, Plan


@dataclass(frozen=True)
class StepTraffic:
    """Bytes per rank and step."""

    sent: int
    """To other ranks."""

    bus: int
    """Between device and host, both directions together."""

    drive: int
    """Read from and written to NVMe."""


def traffic(
    plan: Plan,
    optimizer_bytes: tuple[float, ...],
    *,
    micro_batches: int = 1,
    native_fp32: bool = False,
    cuda: bool = False,
    gradients_stored: bool = False,
) -> StepTraffic:
    """Count the bytes of a step.

    Args:
        plan: the run's plan.
        optimizer_bytes: bytes that each optimizer stores per element.
        micro_batches: per optimizer step.
        native_fp32: the transport reduces in fp32 (NCCL).
        cuda: the device has its own memory.
        gradients_stored: averages stay on their tier until backward ends.
    """
    bus = 0
    for unit, gathers in zip(plan.units, plan.gathers_per_step(micro_batches), strict=True) if cuda else ():
        for flat in unit.flats:
            shard_bytes = flat.shard_bytes
            if flat.trainable and flat.optimizer_tier != "device":
                bus += plan.flat_states(flat, optimizer_bytes).averages * micro_batches + shard_bytes
            if flat.param_tier != "device":
                bus += gathers * shard_bytes
    read_and_written = plan.drive_bytes_per_step(
        gradients_stored=gradients_stored, micro_batches=micro_batches, optimizer_bytes=optimizer_bytes
    )
    return StepTraffic(_sent(plan, micro_batches, native_fp32=native_fp32), bus, sum(read_and_written))


def _sent(plan: Plan, micro_batches: int, *, native_fp32: bool) -> int:
    """Return `Plan.elements_sent` in bytes."""
    policy = plan.policy

    def gathered(flat: FlatPlan) -> int:
        return flat.gathered_numel * (flat.gathered_itemsize if policy.optimizer else 4)

    def regathered(flat: FlatPlan) -> int:
        return flat.regathered_numel * flat.gathered_itemsize

    def reduced(flat: FlatPlan) -> int:
        size = flat.dtype.itemsize
        accumulates = policy.optimizer and not policy.gradients and micro_batches > 1
        fp32 = native_fp32 or not policy.optimizer or accumulates
        return flat.reduced_numel * (max(size, 4) if fp32 else size)

    return plan.count_sent(micro_batches, gathered=gathered, regathered=regathered, reduced=reduced)
