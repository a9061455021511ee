"""Expert parallelism: every rank holds some of the experts, and tokens are sent to them (GShard, arXiv:2006.16668)."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.moe.sparse import ExpertParallel, SparseLayer


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the stacked parameters of all experts of a model's MoE layers."""
    return [p for m in model.modules() if isinstance(m, SparseLayer) for p in m.experts.parameters()]


@torch.no_grad()
def apply_expert_parallel(
    model: nn.Module,
    expert_axis: Axis,
    *,
    tensor_axis: Axis | None = None,
    tokens_sharded: bool = False,
    gradient_scale: float = 1.0,
) -> dict[int, TensorPart]:
    """Keep only this rank's ``E / size`` experts of each MoE layer. The parameter objects stay the same.

    The gradient of an expert is the sum over the tokens of all ranks of ``expert_axis``, times ``gradient_scale``.

    Args:
        model: The model, with equal values on all ranks, or on meta.
        expert_axis: Ranks that hold different experts.
        tensor_axis: Ranks whose layers get the same tokens. ``expert_axis`` may span them.
        tokens_sharded: The MoE layers get different tokens on the ranks of ``tensor_axis`` (sequence parallelism).
        gradient_scale: Corrects a later average of gradients that runs over fewer ranks than the tokens are summed
            over.

    Returns:
        The local part of each sharded parameter, by ``id(parameter)``.

    Raises:
        PlanError: The model has no MoE layer, or one whose experts cannot be sharded evenly.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, SparseLayer)]
    size = expert_axis.size
    if not layers:
        raise PlanError(
            f"expert parallelism over {size} ranks: the model has no ls_strategy.MoE layer, so there is nothing to "
            "shard. Use MoE instead of feed-forward layers, convert_moe(model) on a transformers model, or set "
            "parallel.expert=1."
        )
    for name, layer in layers:
        if layer.num_experts % size:
            raise PlanError(
                f"expert parallelism over {size} ranks: layer {name!r} has num_experts={layer.num_experts}, which is "
                f"not a multiple of {size}. Change its num_experts, or parallel.expert."
            )
    replicas = tensor_axis if tensor_axis is not None and tensor_axis.size > 1 and not tokens_sharded else None
    parts: dict[int, TensorPart] = {}
    for _, layer in layers:
        layer.shard(ExpertParallel(expert_axis, replicas, gradient_scale))
        for parameter in layer.experts.parameters():
            if id(parameter) in parts:
                continue  # experts that two layers share
            part = TensorPart.cut(parameter.shape, 0, expert_axis.rank, size)
            parts[id(parameter)] = dataclasses.replace(part, axis="expert")
            ((first, length),) = part.runs
            parameter.data = parameter.data[first : first + length].clone()
    return parts
