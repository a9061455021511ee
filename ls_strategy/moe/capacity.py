"""Expert capacity: which (token, expert) pairs are computed and which are dropped.

Capacity is per rank and expert: GShard (Lepikhin et al. 2020, arXiv:2006.16668, section 2.2), Switch (Fedus et al.
2021, arXiv:2101.03961, section 2.2). No tensor is padded to it.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor


def capacity_of(tokens: int, num_experts: int, factor: float, min_capacity: int) -> int:
    """Return ``max(ceil(tokens / num_experts * factor), min_capacity)`` pairs, computed in fp32 as in DeepSpeed.

    >>> capacity_of(10, 4, 1.0, 2), capacity_of(3, 4, 1.0, 2)
    (3, 2)
    """
    even = _rounded(_rounded(factor) * _rounded(tokens / num_experts))
    return max(math.ceil(even), min_capacity)


def _rounded(value: float) -> float:
    """Round to fp32. Not by a tensor: the planner has none with values."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def kept_pairs(
    experts: Tensor, num_experts: int, capacity: int, *, priority: Tensor | None = None, ranks_first: bool = False
) -> Tensor | None:
    """Select the first ``capacity`` pairs of each expert.

    Args:
        experts: ``(S, k)``, the experts of each token, all different.
        num_experts: E.
        capacity: Pairs per expert.
        priority: ``(S, k)``, larger values come first. None: the order of the tokens.
        ranks_first: All first choices come before all second ones. Otherwise token by token.

    Returns:
        ``(S, k)`` bool, or None if no pair can be dropped: an expert gets at most S pairs.
    """
    if capacity >= experts.shape[0]:
        return None
    shape = experts.t().shape if ranks_first else experts.shape
    flat = (experts.t() if ranks_first else experts).reshape(-1)
    if priority is None:
        order = flat.argsort(stable=True)
    else:
        by_priority = priority.reshape(-1).argsort(stable=True, descending=True)
        order = by_priority[flat[by_priority].argsort(stable=True)]
    # The position of each pair among those of its expert: its index minus the index of the expert's first pair.
    owner = flat[order]
    starts = torch.searchsorted(owner, torch.arange(num_experts, device=owner.device))
    position = torch.arange(len(owner), device=owner.device) - starts[owner]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = position < capacity
    kept = kept.view(shape)
    return kept.t() if ranks_first else kept
