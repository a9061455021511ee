"""The costs of a partitioned step: operations, bytes per link, bubble, and bounds of the time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ls_strategy.config.parallel import Schedule
from ls_strategy.extras.planner.forecast import EFFICIENCY
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.job import Job
from ls_strategy.extras.planner.partitioned import PartitionedModel
from ls_strategy.parallel.pipeline.schedules import make_table, stages_per_rank_of
from ls_strategy.parallel.pipeline.simulate import simulate


@dataclass(frozen=True)
class Costs:
    """Costs of one step on the busiest rank: FLOPs, traffic and seconds."""

    flops: int
    sent: dict[str, int]
    """Bytes to other ranks, by axis: ``zero tensor context expert pipeline``."""

    between_nodes: dict[str, int]
    """Those that go to other nodes. For NCCL, as if every part went straight to its owner."""

    bubble: float
    """Share of the time in which ranks of a pipeline wait, by the schedule's table."""

    seconds: tuple[float, float]
    """Lower and upper bound: everything overlapped at peak speed, or nothing at usual speed."""

    parts: dict[str, float]
    """Seconds of the upper bound, by what takes them."""

    @property
    def total_between_nodes(self) -> int:
        """All bytes to ranks of other nodes."""
        return sum(self.between_nodes.values())

    @property
    def total_in_node(self) -> int:
        """All bytes to other ranks of the same node."""
        return sum(self.sent.values()) - self.total_between_nodes


def costs_of(model: PartitionedModel, job: Job, hardware: Hardware) -> Costs:
    """Return the costs of a job. ``hardware`` must have ``tflops`` and ``link_gbs``."""
    zero = model.traffic(job)
    spent = model.spent(job)
    flops = spent.pop("flops")
    sent = {"zero": zero.sent, **spent}
    far = {"zero": zero.between_nodes, **{axis: _far(axis, nbytes, job) for axis, nbytes in spent.items()}}
    bubble = bubble_of(job.parallel.schedule, job.parallel.pipeline, job.micro_batches)
    assert hardware.tflops is not None
    compute = flops / (hardware.tflops * 1e12) / (1 - bubble)
    parts = {"computation": compute / EFFICIENCY}
    for axis, nbytes in sent.items():
        parts[f"traffic of {axis}"] = _seconds(nbytes, far[axis], hardware)
    for what, nbytes, speed in (("bus", zero.bus, hardware.bus_gbs), ("drive", zero.drive, hardware.drive_gbs)):
        if nbytes and speed is not None:
            parts[f"traffic of the {what}"] = nbytes / (speed * 1e9)
    links = sum(parts.values()) - parts["computation"]
    return Costs(flops, sent, far, bubble, (max(compute, links), sum(parts.values())), parts)


def _seconds(nbytes: int, far: int, hardware: Hardware) -> float:
    assert hardware.link_gbs is not None
    if hardware.node_gbs is None:
        return nbytes / (hardware.link_gbs * 1e9)
    inside = (nbytes - far) / (hardware.link_gbs * 1e9)
    return inside + far * hardware.on_a_node / (hardware.node_gbs * 1e9)  # the ranks of a node share its link


def _far(axis: str, nbytes: int, job: Job) -> int:
    """Return the bytes of an axis that leave the node: groups are neighbours, in the order of the mesh."""
    parallel = job.parallel
    size, stride = {
        "tensor": (parallel.tensor, 1),
        "context": (parallel.context, parallel.tensor),
        "expert": (parallel.expert, 1),
        "pipeline": (parallel.pipeline, job.ranks // parallel.pipeline),
    }[axis]
    if size == 1 or job.ranks <= job.node_size:
        return 0
    if axis == "pipeline":  # to the next stage only
        return nbytes if stride >= job.node_size else nbytes * stride // job.node_size
    here = parallel.on_a_node(job.node_size, size, stride)
    return nbytes * (size - here) // (size - 1)


@cache
def bubble_of(schedule: Schedule, ranks: int, micro_batches: int) -> float:
    """Return the share of the time in which the ranks of a pipeline wait, by the schedule's table.

    With blocks of equal times, a rank works on every micro-batch once per stage that it holds, and waits for the other
    ranks once: Narayanan et al., arXiv:2104.04473, section 2.2. Other schedules are simulated.
    """
    if schedule in ("1f1b", "interleaved_1f1b"):
        return (ranks - 1) / (stages_per_rank_of(schedule) * micro_batches + ranks - 1)
    return simulate(make_table(schedule, ranks, micro_batches)).bubble if ranks > 1 else 0.0
