"""Describe the kinds of parallelism of a run, and shard a simulated model as the first rank would shard it."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, nn

from ls_strategy.blocks import repeated_blocks
from ls_strategy.config.parallel import Schedule
from ls_strategy.distributed.axis import Axis, sum_in_order
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.layout import TensorPart
from ls_strategy.moe.parallel import apply_expert_parallel, expert_parameters
from ls_strategy.parallel.context.ulysses import apply_sequence_parallel
from ls_strategy.parallel.pipeline.schedules import Table, make_table, place, placement_of, stages_per_rank_of
from ls_strategy.parallel.stack import head_after, one_stack
from ls_strategy.parallel.tensor.plans import resolve_tensor_plan
from ls_strategy.parallel.tensor.shard import TensorParallel, apply_tensor_parallel


class PretendComm(Comm):
    """The first of ``size`` ranks, without a process group."""

    def __init__(self, size: int, *, native: bool = False) -> None:
        """``native``: the transport computes sums (NCCL)."""
        super().__init__(None, None)
        self.world_size = size
        self.native = native
        self.far = (False,) * size

    def exchange_objects(self, value: Any) -> list[Any]:
        """Return this rank's value for every rank."""
        return [value] * self.world_size

    def broadcast_(self, tensor: Tensor, source: int = 0) -> None:
        """Leave the tensor as it is."""

    def sendable(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor


class PretendAxis(Axis):
    """The first rank of an axis.

    What the other ranks send or get is one tensor, not one for each: as many bytes at the same time, and a step of the
    same operations on any number of ranks, so that steps on some numbers tell those on others.
    """

    def __init__(self, name: str, size: int, *, native: bool = False) -> None:
        super().__init__(name, PretendComm(size, native=native))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Axis.all_reduce`."""
        if not self.comm.native or self.size == 1 or tensor.numel() == 0:
            return super().all_reduce(tensor)
        sent = 2 * (self.size - 1) * tensor.numel() // self.size
        self.traffic.count_elements("all_reduce", sent, tensor.element_size())
        return tensor.contiguous().clone()

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """See `Axis.all_gather`."""
        if self.size == 1:
            return super().all_gather(tensor, dim, sizes)
        mine, shape = tensor.contiguous(), list(tensor.shape)
        shape[dim] = sum(sizes) if sizes is not None else shape[dim] * self.size
        result_numel = math.prod(shape)
        others = mine.new_empty(result_numel - mine.numel())
        self._count("all_gather", mine, (self.size - 1) * mine.numel())
        result = mine.new_empty(shape)
        del others
        return result

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """See `Axis.all_to_all`."""
        if self.size == 1 or shapes is not None or any(part.shape != parts[0].shape for part in parts):
            return super().all_to_all(parts, shapes)
        parts = self._contiguous(parts)
        others = parts[0].new_empty((self.size - 1, *parts[0].shape))
        self._count("all_to_all", others, others.numel())
        return [parts[0], *others.unbind(0)]

    def _split(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None) -> list[Tensor]:
        if sizes is not None or tensor.shape[dim] % self.size:
            return super()._split(tensor, dim, sizes)
        return self._contiguous(tensor.chunk(self.size, dim))

    def _contiguous(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return equal parts, each contiguous."""
        if parts[0].is_contiguous():
            return list(parts)
        return [parts[0].contiguous(), *parts[0].new_empty((self.size - 1, *parts[0].shape)).unbind(0)]

    def _sum_of_mine(self, parts: list[Tensor], kind: str) -> Tensor:
        mine = parts[0]
        others = mine.new_empty((self.size - 1, *mine.shape))
        self._count(kind, mine, sum(part.numel() for part in parts[1:]))
        total = sum_in_order([mine, mine])
        del others
        return total

    def _count(self, kind: str, like: Tensor, numel: int) -> None:
        self.traffic.count_elements(kind, numel, like.element_size())

    def _start(self, sends: Sequence[Tensor], receives: Sequence[Tensor], kind: str) -> Sequence[Any]:
        for to in range(1, self.size):
            if sends[to].numel():
                self.traffic.count(kind, sends[to])
        return []


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Sizes of all axes but the data axis; 1 for none. As `ls_strategy.config.ParallelConfig`."""

    tensor: int = 1
    context: int = 1
    ring: int = 1
    expert: int = 1
    pipeline: int = 1
    schedule: Schedule = "1f1b"

    @property
    def replica(self) -> int:
        """Ranks that work on one batch together."""
        return self.tensor * self.context * self.pipeline

    def zero(self, ranks: int) -> int:
        """Return the ranks over which ZeRO shards states: those along the data and the context axes."""
        return ranks // (self.tensor * self.pipeline)

    def expert_zero(self, ranks: int) -> int:
        """Return the ranks over which ZeRO shards the states of an expert."""
        return ranks // (self.pipeline * self.expert)

    def on_a_node(self, node_size: int, group: int, stride: int) -> int:
        """Return how many of ``group`` ranks, ``stride`` apart, are on one node."""
        return min(group, max(node_size // stride, 1))

    @property
    def name(self) -> str:
        """Its options, such as ``tp 2, pp 4 (1f1b)``; empty without any."""
        parts = [f"tp {self.tensor}"] if self.tensor > 1 else []
        if self.context > 1:
            parts.append(f"context {self.context}" + (f" (ring {self.ring})" if self.ring > 1 else ""))
        if self.expert > 1:
            parts.append(f"ep {self.expert}")
        if self.pipeline > 1:
            parts.append(f"pp {self.pipeline} ({self.schedule})")
        return ", ".join(parts)

    def arguments(self, micro_batches: int = 1) -> dict[str, Any]:
        """Return the group ``parallel`` of `ZeROStrategy`."""
        sizes = {"tensor": self.tensor, "context": self.context, "ring": self.ring, "expert": self.expert}
        chosen: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
        if self.pipeline > 1:
            chosen["pipeline"] = {"size": self.pipeline, "micro_batches": micro_batches, "schedule": self.schedule}
        return chosen


@dataclass
class Axes:
    """The axes of a sharded model."""

    parts: dict[int, TensorPart] = field(default_factory=dict)  # what the first rank holds, by ``id(parameter)``
    layers: TensorParallel | None = None
    tensor: PretendAxis | None = None
    context: PretendAxis | None = None
    expert: PretendAxis | None = None

    def sent(self, name: str) -> int:
        """Return the bytes sent along an axis so far."""
        axis: PretendAxis | None = getattr(self, name)
        return 0 if axis is None else sum(axis.traffic.bytes.values())


@contextmanager
def sharded(module: nn.Module, parallel: Parallelism, mode: Any, *, native: bool) -> Generator[Axes, None, None]:
    """Shard a simulated module in place, as the first rank does; inside of `simulated`, which undoes it.

    Args:
        module: its tensors are fake.
        parallel: sizes of the axes. Pipelines are not applied.
        mode: of the fake tensors.
        native: the transport computes sums (NCCL).

    Raises:
        PlanError: the model does not support this.
    """
    axes = Axes()
    with ExitStack() as exit:
        if parallel.tensor > 1:
            axes.tensor = PretendAxis("tensor", parallel.tensor, native=native)
            plan = resolve_tensor_plan(module, "auto", parallel.tensor)
            if plan.torch_styles:
                raise PlanError("the planner does not cover plans of torch's parallelize_module.")
            experts = expert_parameters(module) if parallel.expert > 1 else []
            with mode:
                layers = apply_tensor_parallel(
                    module, plan.styles, axes.tensor, blocks=plan.blocks, elsewhere={id(p) for p in experts}
                )
            exit.callback(layers.remove)
            axes.parts |= layers.parts
            axes.layers = layers
        if parallel.context > 1:
            axes.context = PretendAxis("context", parallel.context, native=native)
            blocks = one_stack(module)
            head = head_after(module, blocks)
            sequence = apply_sequence_parallel(
                module, axes.context, blocks=blocks, head=head, ring=parallel.ring, check=False
            )
            exit.callback(sequence.remove)
        if parallel.expert > 1:
            axes.expert = PretendAxis("expert", parallel.expert, native=native)
            with mode:
                axes.parts |= apply_expert_parallel(
                    module, axes.expert, tensor_axis=axes.tensor, gradient_scale=parallel.tensor / parallel.expert
                )
        yield axes


@dataclass(frozen=True)
class Stack:
    """The repeated blocks of a model."""

    name: str
    blocks: tuple[nn.Module, ...]


def stack_of(module: nn.Module) -> Stack | None:
    """Return the blocks of a model that has one stack of them; None otherwise."""
    stacks = repeated_blocks(module)
    if len(stacks) != 1:
        return None
    ((name, blocks),) = stacks.items()
    return Stack(name, tuple(blocks)) if len(blocks) > 1 else None


def is_uniform(stack: Stack) -> bool:
    """Return whether all blocks have the same class and the same parameters, so that one stands for all."""

    def shape(block: nn.Module) -> Sequence[Any]:
        return [type(block), *((n, tuple(p.shape), p.requires_grad) for n, p in block.named_parameters())]

    first = shape(stack.blocks[0])
    owners = [id(p) for block in stack.blocks for p in block.parameters()]
    return all(shape(block) == first for block in stack.blocks) and len(owners) == len(set(owners))


@contextmanager
def shortened(module: nn.Module, stack: Stack, blocks: int) -> Generator[None, None, None]:
    """Keep the first ``blocks`` blocks of a stack only, until the exit."""
    container = module.get_submodule(stack.name)
    before = dict(container._modules)
    try:
        container._modules.clear()
        container._modules.update(list(before.items())[:blocks])
        yield
    finally:
        container._modules.clear()
        container._modules.update(before)


# --- describe how one step is partitioned over the ranks, and the schedule of its pipeline ----------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """Partitioning of one step: the candidate, the parallelism, and the micro-batches."""

    candidate: Candidate
    parallel: Parallelism
    ranks: int
    node_size: int
    samples: int  # per micro-batch
    micro_batches: int  # per step and replica: accumulated, or of the pipeline


def table_of(job: Job) -> Table:
    """Return the schedule of a pipeline."""
    return _table(job.parallel.schedule, job.parallel.pipeline, job.micro_batches)


@cache
def _table(schedule: str, ranks: int, micro_batches: int) -> Table:
    return make_table(schedule, ranks, micro_batches, stages_per_rank_of(schedule))


def ranks_of_stages(parallel: Parallelism) -> Sequence[int]:
    """Return the rank of every stage of a pipeline; of the one stage without a pipeline."""
    if parallel.pipeline == 1:
        return (0,)
    return _placed(parallel.schedule, parallel.pipeline)


@cache
def _placed(schedule: str, ranks: int) -> Sequence[int]:
    return tuple(place(ranks, stages_per_rank_of(schedule), placement_of(schedule)))


def stages_of(parallel: Parallelism) -> int:
    """Return the stages of all ranks of a pipeline."""
    return len(ranks_of_stages(parallel))


def messages_of(rank_of: Sequence[int]) -> int:
    """Return the messages of the busiest rank of a pipeline per micro-batch, activations and gradients."""
    last = len(rank_of) - 1
    sent = dict.fromkeys(rank_of, 0)
    for stage, rank in enumerate(rank_of):
        sent[rank] += stage < last and rank_of[stage + 1] != rank
        sent[rank] += stage > 0 and rank_of[stage - 1] != rank
    return max(sent.values())
