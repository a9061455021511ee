"""Which (token, expert) pairs an expert has room for.

Capacity is per rank and expert: GShard (Lepikhin et al. 2020, arXiv:2006.16668, section 2.2), Switch (Fedus et al.
2021, arXiv:2101.03961, section 2.2). Nothing is padded to it; it only says who is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor


def capacity_of(tokens: int, num_experts: int, factor: float, min_capacity: int) -> int:
    """``max(ceil(tokens / num_experts * factor), min_capacity)`` pairs, computed in fp32 as DeepSpeed does.

    >>> capacity_of(10, 4, 1.0, 2), capacity_of(3, 4, 1.0, 2)
    (3, 2)
    """
    even = torch.tensor(factor, dtype=torch.float32, device="cpu") * (tokens / num_experts)
    return max(int(even.ceil()), min_capacity)


def kept_pairs(
    experts: Tensor, num_experts: int, capacity: int, *, priority: Tensor | None = None, ranks_first: bool = False
) -> Tensor | None:
    """Whether each pair is among the first ``capacity`` of its expert.

    Args:
        experts: ``(S, k)``, the experts of each token, all different.
        num_experts: E.
        capacity: pairs.
        priority: ``(S, k)``, larger is first; the position of the token without.
        ranks_first: all first choices come before all second ones, otherwise token after token.

    Returns:
        ``(S, k)`` bool, or None when all are kept whatever they are: an expert gets at most S pairs.
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
    # The place of each pair in the line before its expert: its index, less the index at which the line begins.
    owner = flat[order]
    begins = torch.searchsorted(owner, torch.arange(num_experts, device=owner.device))
    place = torch.arange(len(owner), device=owner.device) - begins[owner]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = place < capacity
    kept = kept.view(shape)
    return kept.t() if ranks_first else kept
