"""The device mesh: the grid of ranks, and a communicator for each of its axes.

::

    rank = ((pipeline * data_size + data) * sequence_size + sequence) * tensor_size + tensor

The tensor axis, which sends most, joins neighbours on a host; the pipeline axis, which sends least, spans hosts.

=========  ==============================================================================================
axis       ranks that differ along it
=========  ==============================================================================================
data       train on different batches
sequence   train on different tokens of the same batch
tensor     hold different parts of the same layers, and see the same tokens
pipeline   hold different layers, and see the same batch one after the other
zero       data and sequence together: replicate parameters, over which ZeRO shards states
shard      neighbours along ``zero`` that shard states together, in groups of ``shard_size``
replica    hold the same shard, one rank of every such group
node       neighbours along ``zero`` that share a second copy of parameters, with ``hpz``
model      pipeline, sequence and tensor together: see the same batch
stage      data, sequence and tensor together: hold the same layers of a pipeline, or parts of them
=========  ==============================================================================================

Experts are folded over the ranks of a pipeline stage, whatever axes it has: ``expert_size`` neighbours hold different
experts (``expert``), and the ranks at the same position among their neighbours hold the same experts, over which ZeRO
shards their states (``expert_zero``). As in Megatron's parallel folding (Liu et al. 2025, arXiv:2504.14960).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch.distributed as dist

from ls_strategy import device as dev
from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import Comm, process_group
from ls_strategy.distributed.shard_groups import ShardGroup
from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart

_FREE = {
    "pipeline": (0,), "data": (1,), "sequence": (2,), "tensor": (3,),
    "zero": (1, 2), "model": (0, 2, 3), "stage": (1, 2, 3),
}  # fmt: skip
"""Indices of the coordinates that differ along each axis."""


def ranks_of_group(
    option: str, size: int | Literal["node"] | None, *, node_size: int, replicated: int, tensor: int
) -> int:
    """Return how many neighbours along the zero axis form a group.

    Args:
        option: in ``sharding``, for messages.
        size: its value.
        node_size: consecutive ranks on one node.
        replicated: ranks of the zero axis.
        tensor: ranks of the tensor axis, which comes inside of it.

    Raises:
        PlanError: the zero axis cannot be cut into such groups.

    >>> ranks_of_group("shard_size", "node", node_size=8, replicated=16, tensor=2)
    4
    """
    if size is None:
        return replicated
    if size == "node":
        stage = replicated * tensor  # consecutive ranks, like those of a node
        if node_size % stage == 0:
            return replicated
        if stage % node_size or node_size % tensor:
            raise PlanError(
                f'Got sharding.{option}="node", but the {stage} ranks that hold the same layers do not fill nodes of '
                f"{node_size} ranks evenly. Set sharding.{option} to a number, or change devices."
            )
        return node_size // tensor
    if replicated % size:
        raise PlanError(
            f"Got sharding.{option}={size}, but it must divide the {replicated} ranks over which states are sharded. "
            f"Set it to a divisor of {replicated}, or leave it out."
        )
    return size


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the axes: integers only.

    >>> shape = MeshShape.of(8, tensor=2, sequence=2)
    >>> shape.data, shape.coordinates(5), list(shape.groups("zero"))
    (2, (0, 1, 0, 1), [(0, 2, 4, 6), (1, 3, 5, 7)])
    """

    pipeline: int = 1

    data: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    """Ranks of a stage that hold different experts; folded over the other axes."""

    shard: int | None = None
    """Ranks of the zero axis that shard states together. None: all."""

    node: int | None = None
    """Ranks of the zero axis that share a second copy of parameters. None: there is none."""

    @classmethod
    def of(  # noqa: PLR0913  (sizes of axes, one by one)
        cls,
        world_size: int,
        *,
        tensor: int = 1,
        sequence: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        shard: int | Literal["node"] | None = None,
        hpz: int | Literal["node"] | None = None,
        node_size: int | None = None,
    ) -> MeshShape:
        """Return the mesh of ``world_size`` ranks; the ranks that the other axes leave form the data axis.

        Args:
            world_size: all ranks.
            tensor: ranks of the tensor axis.
            sequence: ranks of the sequence axis.
            pipeline: stages.
            expert: ranks that hold different experts.
            shard: ranks of the zero axis that shard states together, or ``"node"`` for those on one node.
            hpz: ranks of the zero axis that share a second copy of parameters, or ``"node"``.
            node_size: consecutive ranks on one node. None: all.

        Raises:
            PlanError: the sizes do not divide the world size.
        """
        ranks = tensor * sequence * pipeline
        if world_size % ranks:
            sizes = {"tensor": tensor, "context": sequence, "pipeline": pipeline}
            given = " times ".join(f"parallel.{axis}={size}" for axis, size in sizes.items() if size > 1)
            raise PlanError(
                f"{given} is {ranks} ranks for one batch, which does not divide the {world_size} ranks of this run. "
                "Change a size, or devices."
            )
        if (world_size // pipeline) % expert:
            among = "ranks" if pipeline == 1 else f"ranks of each of the {pipeline} pipeline stages"
            raise PlanError(
                f"parallel.expert={expert} does not divide the {world_size // pipeline} {among}, over which "
                "experts are spread. Change it, or devices."
            )
        replicated = world_size // (pipeline * tensor)
        cut = partial(ranks_of_group, node_size=node_size or world_size, replicated=replicated, tensor=tensor)
        size, node = cut("shard_size", shard), cut("hpz", hpz)
        return cls(
            pipeline,
            world_size // ranks,
            sequence,
            tensor,
            expert,
            shard=None if size == replicated else size,
            node=None if node in (1, replicated) else node,
        )

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.data * self.model_ranks

    @property
    def kinds(self) -> str:
        """The kinds of parallelism that give a rank only a part of the model, as text; empty without any."""
        return ", ".join(k for k in ("tensor", "pipeline", "expert") if getattr(self, k) > 1)

    @property
    def model_ranks(self) -> int:
        """The number of ranks that work on one batch together."""
        return self.pipeline * self.sequence * self.tensor

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Return ``(pipeline, data, sequence, tensor)`` of a rank."""
        rank, tensor = divmod(rank, self.tensor)
        rank, sequence = divmod(rank, self.sequence)
        return (*divmod(rank, self.data), sequence, tensor)

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Yield the ranks of every group along ``axis``, in order."""
        # Those that cut other groups: into neighbours, or into ranks at the same place among them.
        cut = {"expert": self.expert, "expert_zero": self.expert, "shard": self.shard, "replica": self.shard}
        if axis == "node" or axis in cut:
            for ranks in self.groups("stage" if axis.startswith("expert") else "zero"):
                size = cut.get(axis, self.node) or len(ranks)
                if axis in ("expert", "shard", "node"):
                    yield from (ranks[i : i + size] for i in range(0, len(ranks), size))
                else:
                    yield from (ranks[i::size] for i in range(size))
            return
        free = _FREE[axis]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            fixed = tuple(c for i, c in enumerate(self.coordinates(rank)) if i not in free)
            members.setdefault(fixed, []).append(rank)
        yield from (tuple(group) for group in members.values())


class Mesh:
    """The communicators of one rank."""

    def __init__(self, shape: MeshShape, world: Comm, **axes: Comm) -> None:
        """Use `make_mesh`, or `Mesh.data_only`."""
        self.shape = shape
        self.world = world
        self.zero = axes["zero"]
        self.shards = self.zero
        """The ranks over which the states of one replica are sharded: all of ``zero``, or a `ShardGroup` of it."""
        self.node: Comm | None = None
        """The ranks that share a second copy of sharded parameters, see `ls_strategy.zero.flat.hpz_copy`."""
        self.data = axes["data"]
        self.model = axes["model"]
        self.pipeline = axes["pipeline"]
        self.stage = axes["stage"]
        self.expert_zero = axes["expert_zero"]
        self.expert_zero.traffic = self.stage.traffic = self.zero.traffic  # ZeRO's, too
        self.expert = Axis("expert", axes["expert"])
        self.sequence = Axis("sequence", axes["sequence"])
        self.tensor = Axis("tensor", axes["tensor"])

    @classmethod
    def data_only(cls, world: Comm) -> Mesh:
        """Return the mesh with all ranks along the data axis."""
        alone = Comm(None, None)
        shape = MeshShape(data=world.world_size)
        return cls(
            shape, world, zero=world, data=world, stage=world, expert_zero=world,
            sequence=alone, tensor=alone, model=alone, pipeline=alone, expert=alone,
        )  # fmt: skip

    def holders(self, part: TensorPart | None) -> tuple[Comm, Axis]:
        """Return the ranks that replicate a part of a parameter, over which ZeRO shards, and those with other parts."""
        if part is not None and part.axis == "expert":
            return self.expert_zero, self.expert
        return self.shards, self.tensor


def make_mesh(shape: MeshShape, world: Comm) -> Mesh:
    """Create the process groups and return the mesh. Collective over all ranks."""
    made: dict[tuple[tuple[int, ...], ...], Comm] = {}

    def along(axis: str) -> Comm:
        groups = tuple(shape.groups(axis))
        if groups not in made:
            made[groups] = _comm_of(groups, world)
        same = made[groups]  # each axis has its own traffic meter
        comm = Comm(same.group, same.control, failures=world.failures)
        comm.locate(world.node_size)
        return comm

    if shape.model_ranks == shape.expert == 1:
        mesh = Mesh.data_only(world)
        mesh.shape = shape
    else:
        mesh = Mesh(shape, world, **{axis: along(axis) for axis in (*_FREE, "expert", "expert_zero")})
    if shape.shard is not None:
        inside, across = (_comm_of(tuple(shape.groups(axis)), world) for axis in ("shard", "replica"))
        mesh.shards = ShardGroup(inside, across, mesh.zero)
    if shape.node is not None:
        mesh.node = _comm_of(tuple(shape.groups("node")), world)
        mesh.node.traffic = mesh.zero.traffic
    world.own_open_sockets()
    return mesh


def _comm_of(groups: tuple[tuple[int, ...], ...], world: Comm) -> Comm:
    """Return this rank's group among ``groups``. Collective over all ranks."""
    if len(groups) == 1:
        return world
    if len(groups[0]) == 1:
        return Comm(None, None)
    mine: Comm | None = None
    for ranks in groups:
        group = process_group("mesh", ranks)
        control = process_group("control", ranks, backend=dev.host_backend())
        if world.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            assert isinstance(control, dist.ProcessGroup)
            mine = Comm(group, control, failures=world.failures)
    assert mine is not None
    mine.locate(world.node_size)
    return mine
