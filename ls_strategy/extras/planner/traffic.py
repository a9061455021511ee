"""Bytes that one rank moves per optimizer step: to other ranks, over the bus to its host, and to and from NVMe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from ls_strategy.config import ActivationOffloadConfig
from ls_strategy.distributed.comm import ranks_by_node
from ls_strategy.distributed.wire_format import FORMATS
from ls_strategy.extras.planner.trace import Event
from ls_strategy.plan import FlatPlan, Plan


@dataclass(frozen=True)
class StepTraffic:
    """Bytes per rank and step."""

    sent: int  # to other ranks
    between_nodes: int  # of it to ranks on other nodes. With NCCL, as if every shard went straight to its owner.
    bus: int  # between device and host, both directions together
    drive: int  # read from and written to NVMe
    activations: int = 0  # of both: what offload of activations moves, to their tier and back


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


# --- activation offload, by the rules of `ls_strategy.activations.offload` --------------------------------------------

# A device with its own memory sends everything that autograd saves to storage, but need not load again what is in
# flight at the end of the forward. Without such a device, that part is not copied at all. In a pipeline, the next
# forwards displace it, so everything is counted as loaded again.


def saved_bytes(events: Iterable[Event], least: int) -> int:
    """Return the bytes that autograd keeps of the forward in ``events``, in storages of ``least`` bytes and more."""
    sizes: Counter[int] = Counter()
    saved: dict[int, int] = {}
    for kind, number, amount in events:
        if kind == "end_forward":
            break
        if kind == "bytes":
            sizes[number] += amount
            if number in saved:
                saved[number] += amount
        elif kind == "saved" and number not in saved and sizes[number] >= least:
            saved[number] = sizes[number]
    return sum(saved.values())


def with_activations(
    moved: StepTraffic,
    offload: ActivationOffloadConfig,
    *,
    saved: int,
    micro_batches: int,
    at_once: int = 1,
    cuda: bool,
) -> StepTraffic:
    """Add what offload of activations moves in a step.

    Args:
        moved: without it.
        offload: the options.
        saved: `saved_bytes` of a micro-batch.
        micro_batches: per optimizer step.
        at_once: micro-batches whose forward has run, and their backward has not.
        cuda: the device has its own memory.
    """
    away = max(at_once * saved - offload.in_flight_bytes, 0)
    back = micro_batches * (saved if away and at_once > 1 else away)
    both_ways = back + (saved * micro_batches if cuda else back)
    return replace(
        moved,
        activations=both_ways,
        bus=moved.bus + (both_ways if cuda else 0),
        drive=moved.drive + (both_ways if offload.tier == "nvme" else 0),
    )
