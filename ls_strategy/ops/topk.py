"""The top k of every row of scores; among equal scores, the lowest index is first."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ls_strategy.ops.extra_library import routing_library


def stable_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the top k as `torch.topk` does, but with equal indices on every device if scores are equal.

    Args:
        scores: ``(S, E)`` fp32, bf16 or fp16. A NaN is above all numbers, as in torch.
        k: choices per row, up to ``E``.

    Returns:
        ``(S, k)`` each: differentiable values in the dtype of ``scores``, the highest first, and int64 indices.

    Raises:
        ValueError: wrong shape, dtype or ``k``.
    """
    if scores.dim() != 2 or scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"Got scores of {scores.dtype}, {tuple(scores.shape)}, but they must be 2-d and fp32, bf16 or fp16."
        )
    if not 0 < k <= scores.shape[1]:
        raise ValueError(f"Got k={k}, but it must be from 1 to the number of experts, {scores.shape[1]}.")
    numbers = scores.detach().to(torch.float32)
    if _kernels(scores.device.type):
        indices = torch.ops.ls_strategy.topk_indices(numbers, k)
    else:
        indices = topk_indices_reference(numbers, k)
    return scores.gather(1, indices), indices


def topk_indices_reference(scores: Tensor, k: int) -> Tensor:
    """Compute the indices by their definition: keys are unique, so any correct `torch.topk` finds the same ones."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    keys = torch.where(scores.isnan(), 0x7FFFFFFF, torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(torch.int64)
    experts = torch.arange(scores.shape[1], device=scores.device)
    return ((keys << 32) - experts).topk(k, dim=1).indices


@torch.compiler.assume_constant_result
def _kernels(device_type: str) -> bool:
    return routing_library.available(device_type) and _register()


@functools.cache
def _register() -> bool:
    @torch.library.register_fake("ls_strategy::topk_indices")
    def _(scores: Tensor, k: int) -> Tensor:
        return scores.new_empty(scores.shape[0], k, dtype=torch.int64)

    return True
