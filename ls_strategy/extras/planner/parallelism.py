"""Describe the kinds of parallelism of a run, and shard a simulated model as the first rank would shard it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ls_strategy.blocks import repeated_blocks
from ls_strategy.config.parallel import Schedule
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.pretend import PretendAxis
from ls_strategy.layout import TensorPart
from ls_strategy.moe.parallel import apply_expert_parallel, expert_parameters
from ls_strategy.parallel.context.ulysses import apply_sequence_parallel
from ls_strategy.parallel.stack import head_after, one_stack
from ls_strategy.parallel.tensor.plans import resolve_tensor_plan
from ls_strategy.parallel.tensor.shard import TensorParallel, apply_tensor_parallel


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

    parts: dict[int, TensorPart] = field(default_factory=dict)
    """What the first rank holds, by ``id(parameter)``."""

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
    """Of their container."""

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
