"""Load balancing without a loss: a bias per expert that follows the loads (Wang et al. 2024, arXiv:2408.15664)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ls_strategy.moe.router import Router


@torch.no_grad()
def update_router_bias(model: nn.Module, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
    """Raise the bias of experts below the mean load by ``bias_update_rate``, and lower that of the others.

    Call it once per optimizer step. The load of an expert is the number of pairs routed to it in training forwards
    since the last call, dropped pairs included. The call resets the loads.

    Args:
        model: The model that holds the MoE layers. Layers with ``bias_update_rate=0`` do not change.
        reduce: Sums a tensor over all ranks that see different tokens. Called once, or never if no layer has a bias;
            collective if it is. None: only this rank's loads count.
    """
    routers = [m for m in model.modules() if isinstance(m, Router) and m.bias is not None]
    if not routers:
        return
    loads = torch.cat([router.counts.take_loads(router.weight.device) for router in routers])
    loads = loads if reduce is None else reduce(loads)
    for router, load in zip(routers, loads.split([r.options.num_experts for r in routers]), strict=True):
        assert router.bias is not None
        if router.bias.dtype.itemsize < 4:  # the model was cast to 16 bit, which rounds small steps away
            router.bias = router.bias.float()
        router.bias.add_(torch.sign(load.mean() - load), alpha=router.options.bias_update_rate)
