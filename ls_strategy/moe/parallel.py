"""Experts divided over ranks: every rank holds some, and tokens travel to them (GShard, arXiv:2006.16668)."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.moe.sparse import ExpertParallel, SparseLayer


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Stacked parameters of all experts of a model's MoE layers."""
    return [p for m in model.modules() if isinstance(m, SparseLayer) for p in m.experts.parameters()]


@torch.no_grad()
def apply_expert_parallel(
    model: nn.Module,
    expert_axis: Axis,
    *,
    tensor_axis: Axis | None = None,
    tokens_divided: bool = False,
    gradient_scale: float = 1.0,
) -> dict[int, TensorPart]:
    """Leave every rank its ``E / size`` experts of each MoE layer. Parameters stay the same objects.

    The gradient of an expert is the sum over the tokens of all ranks of ``expert_axis``, times ``gradient_scale``.

    Args:
        model: all ranks' have the same values, or are on meta.
        expert_axis: ranks that hold different experts.
        tensor_axis: ranks whose layers get the same tokens; ``expert_axis`` may span them.
        tokens_divided: the MoE layers get different tokens on the ranks of ``tensor_axis`` (sequence parallelism).
        gradient_scale: for ranks that average gradients afterwards: over fewer ranks than all whose tokens are summed.

    Returns:
        What is here of each parameter that was divided, by ``id(parameter)``.

    Raises:
        PlanError: there is no MoE layer, or one whose experts do not shard.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, SparseLayer)]
    size = expert_axis.size
    if not layers:
        raise PlanError(
            f"expert parallelism over {size} ranks: the model has no ls_strategy.MoE layer, nothing to shard. "
            "Use MoE in place of feed-forward layers, convert_moe(model) on a model of transformers, or "
            "parallel.expert=1."
        )
    for name, layer in layers:
        if layer.num_experts % size:
            raise PlanError(
                f"expert parallelism over {size} ranks: layer {name!r} has num_experts={layer.num_experts}, which does "
                f"not divide by {size}. Change its num_experts, or parallel.expert."
            )
    replicas = tensor_axis if tensor_axis is not None and tensor_axis.size > 1 and not tokens_divided else None
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
