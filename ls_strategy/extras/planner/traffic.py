"""Bytes that one rank moves per optimizer step: to other ranks, over the bus to its host, and to and from NVMe."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ls_strategy.distributed.comm import ranks_by_node
from ls_strategy.distributed.wire_format import FORMATS
from ls_strategy.plan import FlatPlan, Plan


@dataclass(frozen=True)
class StepTraffic:
    """Bytes per rank and step."""

    sent: int
    """To other ranks."""

    between_nodes: int
    """Of it to ranks on other nodes. With NCCL, as if every shard went straight to its owner."""

    bus: int
    """Between device and host, both directions together."""

    drive: int
    """Read from and written to NVMe."""

    activations: int = 0
    """Of both: what offload of activations moves, to their tier and back."""


def traffic(
    plan: Plan,
    optimizer_bytes: tuple[float, ...],
    *,
    micro_batches: int | None = 1,
    native_fp32: bool = False,
    cuda: bool = False,
    gradients_stored: bool = False,
    node_size: int | None = None,
) -> StepTraffic:
    """Count the bytes of a step.

    Args:
        plan: the run's plan.
        optimizer_bytes: bytes that each optimizer stores per element.
        micro_batches: per optimizer step. None: of a pipeline, which gathers and reduces once for all of them.
        native_fp32: the transport reduces in fp32 (NCCL).
        cuda: the device has its own memory.
        gradients_stored: averages stay on their tier until backward ends.
        node_size: ranks per node. None: all are on one.
    """
    bus = 0
    once, micro_batches = micro_batches is None, micro_batches or 1
    for unit, gathers in zip(plan.units, plan.gathers_per_step(micro_batches, once=once), strict=True) if cuda else ():
        for flat in unit.flats:
            shard_bytes = flat.shard_bytes
            if flat.trainable and flat.optimizer_tier != "device":
                bus += plan.flat_states(flat, optimizer_bytes).averages * micro_batches + shard_bytes
            if flat.param_tier != "device":
                bus += gathers * shard_bytes
    read_and_written = plan.drive_bytes_per_step(
        gradients_stored=gradients_stored, micro_batches=micro_batches, optimizer_bytes=optimizer_bytes, once=once
    )
    sent = partial(_sent, plan, micro_batches, native_fp32=native_fp32, once=once)
    between = sent(far=_Far(plan, node_size)) if node_size else 0
    return StepTraffic(sent(far=None), between, bus, sum(read_and_written))


class _Far:
    """Count of the messages of a rank that leave its node."""

    def __init__(self, plan: Plan, node_size: int) -> None:
        self._node_size = node_size
        self._plan = plan

    def among(self, sent: int, ranks: int) -> int:
        """Return the part that leaves the node of ``sent``, the same to each of the other neighbouring ``ranks``."""
        return sent * max(ranks - self._node_size, 0) // (ranks - 1) if ranks > 1 else 0

    def crossings(self) -> tuple[int, int]:
        """Return how often a shard goes to other groups in all, and how often to other nodes."""
        (group, groups), size = self._plan.group, self._plan.world_size
        others = [other for other in (group - 1, group + 1) if 0 <= other < groups]
        node = group * size // self._node_size
        return len(others), sum(other * size // self._node_size != node for other in others)

    def replicas(self) -> tuple[int, int]:
        """Return how many other groups there are, and how many of them on other nodes."""
        (group, groups), size = self._plan.group, self._plan.world_size
        nodes = [other * size // self._node_size for other in range(groups)]
        return groups - 1, sum(node != nodes[group] for node in nodes)

    def reduced(self, flat: FlatPlan) -> int:
        """Return the bytes of a reduction in few bits that leave the node: of sums, where there are several nodes."""
        assert flat.reduced_as is not None
        layout, first = flat.layout, self._plan.group[0] * flat.layout.world_size
        nodes = ranks_by_node(range(first, first + layout.world_size), self._node_size)
        if len(nodes) == 1:
            return self.among(flat.reduced_numel, layout.world_size) * FORMATS[flat.reduced_as].dtype.itemsize
        cuts, place = layout.cuts, layout.rank % len(nodes[0])
        same_place = sum(cuts[node[place] + 1] - cuts[node[place]] for node in nodes)
        return FORMATS[flat.reduced_as].nbytes(same_place - layout.shard)


def _sent(plan: Plan, micro_batches: int, *, native_fp32: bool, once: bool, far: _Far | None) -> int:
    """Return `Plan.elements_sent` in bytes. ``far``: only what leaves the node."""
    policy = plan.policy

    def among(sent: int, ranks: int) -> int:
        return sent if far is None else far.among(sent, ranks)

    def crossing(flat: FlatPlan) -> int:
        sent = plan.crossing_numel(flat)
        if far is None or not sent:
            return sent
        every, away = far.crossings() if flat.reduced_as is None else far.replicas()
        return sent * away // every

    def gathered(flat: FlatPlan) -> int:
        sent = flat.gathered_numel * (flat.gathered_itemsize if policy.optimizer else 4)
        return among(sent, flat.layout.world_size)

    def regathered(flat: FlatPlan) -> int:
        return among(flat.regathered_numel * flat.gathered_itemsize, flat.node or flat.layout.world_size)

    def reduced(flat: FlatPlan) -> int:
        if flat.reduced_as is not None:
            itemsize = FORMATS[flat.reduced_as].dtype.itemsize
            return (flat.reduced_numel * itemsize if far is None else far.reduced(flat)) + crossing(flat) * itemsize
        size = flat.gradient_dtype.itemsize
        accumulates = policy.optimizer and not policy.gradients and micro_batches > 1
        fp32 = native_fp32 or not policy.optimizer or accumulates
        inside = among(flat.reduced_numel * (max(size, 4) if fp32 else size), flat.layout.world_size)
        return inside + crossing(flat) * max(flat.master_dtype.itemsize, 4)

    return plan.count_sent(micro_batches, gathered=gathered, regathered=regathered, reduced=reduced, once=once)
