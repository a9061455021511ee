"""Simulate a model: its parameters and buffers are replaced by fake tensors without memory, temporarily."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy._torch import copy_of_optimizer, fake_tensors, tree_map
from ls_strategy.blocks import counters_of
from ls_strategy.config import PrecisionConfig
from ls_strategy.lightning.float8 import multiply_in_fp8
from ls_strategy.moe.router import Routing, RoutingAccounts
from ls_strategy.moe.sparse import SparseLayer
from ls_strategy.ops.permute import sort_by_expert
from ls_strategy.parallel.tensor.shard import TensorParallel
from ls_strategy.precision import PrecisionPolicy
from ls_strategy.zero.setup.kept import KeptInFp32, kept_in_fp32

# All experts get equally many pairs of token and expert, up to their capacity. So a rank keeps as many rows as it does
# in training where nothing is dropped, and at least as many otherwise: a router that prefers experts drops more.


def balance_experts(model: nn.Module) -> None:
    """Let all layers with experts count equal numbers of rows, by attributes of the layers."""
    for layer in model.modules():
        if isinstance(layer, SparseLayer):
            _balance(layer)


def _balance(layer: SparseLayer) -> None:
    def sorted_pairs(routing: Routing) -> tuple[Tensor, Tensor]:
        order, counts = sort_by_expert(routing.experts, None, layer.num_experts)
        return order[: _kept(layer, routing)], counts

    layer.sorted_pairs = sorted_pairs  # type: ignore[method-assign]
    layer.row_counts = lambda order, _counts: _equal(len(order), layer.num_experts)  # type: ignore[method-assign]

    def exchanged(order: Tensor, _counts: Tensor, axis: Any) -> tuple[list[list[int]], list[list[int]]]:
        each = _equal(len(order), layer.num_experts)
        own = layer.num_experts // axis.size
        send = [each[r * own : (r + 1) * own] for r in range(axis.size)]
        return send, [send[axis.rank]] * axis.size

    layer.exchanged_counts = exchanged  # type: ignore[method-assign]


def _kept(layer: SparseLayer, routing: Routing) -> int:
    """Return the most pairs of this rank's tokens that can be kept."""
    pairs = routing.experts.numel()
    if routing.kept is None:
        return pairs
    router = next(m for m in layer.modules() if isinstance(m, RoutingAccounts) and m.counts is layer.counts)
    replicas = None if layer.parallel is None else layer.parallel.replicas
    ranks = 1 if replicas is None else replicas.size  # they share the tokens, and the capacity
    capacity = router.options.capacity(len(routing.experts) * ranks, training=layer.training)
    return min(pairs, -(-capacity * layer.num_experts // ranks))


def _equal(total: int, parts: int) -> list[int]:
    low, more = divmod(total, parts)
    return [low + (i < more) for i in range(parts)]


@dataclass(frozen=True)
class Simulated:
    """The fake tensors of a model."""

    mode: Any  # in which new tensors are fake
    made: dict[int, Any]  # the fake tensors, by ``id`` of the parameter or buffer that each replaces

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Copy an optimizer of the model, with the fake parameters."""
        groups = [
            {**group, "params": [self.made.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups
        ]
        return copy_of_optimizer(optimizer, groups)


@contextmanager
def simulated(
    model: nn.Module, precision: PrecisionPolicy, fp32_names: tuple[str, ...], device: torch.device,
    options: PrecisionConfig | None = None,
) -> Generator[Simulated, None, None]:  # fmt: skip
    """Replace the model's parameters and buffers by fake tensors with the dtypes of training, until the exit.

    Tied tensors stay tied. Afterwards the model is restored, including its buffers, and module attributes that are
    tensors (metrics) or lists, dicts or sets of them. Changes deeper inside user objects remain. Layers with experts
    get equally many rows for all of them: a router has no values to choose by.

    Args:
        model: on any device, also on meta.
        precision: dtypes of training.
        fp32_names: classes and names that stay in fp32 in the 16-bit modes.
        device: the device that the fake tensors report.
        options: which layers multiply in fp8, as they do while a Trainer runs.

    Yields:
        The mode in which new tensors are fake, and the fake tensors.

    Raises:
        PlanError: they cannot.
    """
    mode = fake_tensors()
    kept = kept_in_fp32(model, fp32_names, precision.compute) if precision.rounds else KeptInFp32()
    made: dict[int, Any] = {}
    for module in model.modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in made:
                stays = id(tensor) in kept.params or (id(module), key) in kept.buffers
                dtype = torch.float32 if stays or precision.cast is None else precision.cast
                made[id(tensor)] = _like(mode, tensor, dtype if _is_cast(tensor, precision) else tensor.dtype, device)
    restore_counters = counters_of(model)
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    contents = [
        (c, copy.copy(c)) for _, attributes in before for c in attributes.values() if type(c) in (list, dict, set)
    ]
    swapped: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    swapped.append((module, name, tensor))
                    setattr(module, name, made[id(tensor)])
        balance_experts(model)
        with in_float8(model, options, precision, device):
            yield Simulated(mode, made)
    finally:
        for module, name, tensor in swapped:
            setattr(module, name, tensor)
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        restore_counters()  # of classes
        for container, content in contents:  # for example lists of outputs
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)


@contextmanager
def in_float8(
    model: nn.Module,
    options: PrecisionConfig | None,
    precision: PrecisionPolicy,
    device: torch.device,
    tensor: TensorParallel | None = None,
) -> Generator[None, None, None]:
    """Let layers multiply in fp8 as a Trainer's do, until the exit; those of a Trainer that has failed do already.

    ``tensor``: what has sharded them over pretended ranks.
    """
    done = options is None or any(hasattr(module, "reads_weight_in") for module in model.modules())
    layers = (
        [] if options is None or done else multiply_in_fp8(model, options, precision, device, tensor=tensor, log=False)
    )
    try:
        yield
    finally:
        for layer in layers:
            layer.remove()


def _is_cast(tensor: Tensor, precision: PrecisionPolicy) -> bool:
    return tensor.is_floating_point() and precision.cast is not None


def _like(mode: Any, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    with mode, torch.no_grad():
        empty = torch.empty(tensor.shape, dtype=dtype, device=device)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def simulated_batch(batch: Any, precision: PrecisionPolicy, device: torch.device) -> Any:
    """Return a fake batch of the same shapes, floating tensors in training's dtype. Call it inside the mode."""

    def empty(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.zeros(
            value.shape, dtype=precision.compute if _is_cast(value, precision) else value.dtype, device=device
        )

    return tree_map(empty, batch)
