"""Even loads without a loss: a bias per expert that follows the loads (Wang et al. 2024, arXiv:2408.15664)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ls_strategy.moe.router import Router


@torch.no_grad()
def update_router_bias(model: nn.Module, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
    """Raise the bias of experts with less than the mean load by ``bias_update_rate``, lower that of the others.

    Call it once per optimizer step. Loads are the pairs routed in training forwards since the last call, before any was
    dropped; they are forgotten.

    Args:
        model: holds the MoE layers; those with ``bias_update_rate=0`` are left alone.
        reduce: sums a tensor over all ranks that see different tokens, called once, and not at all if no layer has a
            bias. Collective where that is. Without, this rank's loads decide.
    """
    routers = [m for m in model.modules() if isinstance(m, Router) and m.bias is not None]
    if not routers:
        return
    loads = torch.cat([router.counts.take_loads(router.weight.device) for router in routers])
    loads = loads if reduce is None else reduce(loads)
    for router, load in zip(routers, loads.split([r.options.num_experts for r in routers]), strict=True):
        assert router.bias is not None
        if router.bias.dtype != torch.float32:  # the model was cast to 16 bit, where small steps get lost
            router.bias = router.bias.float()
        router.bias.add_(torch.sign(load.mean() - load), alpha=router.options.bias_update_rate)
