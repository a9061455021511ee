"""The Lion optimizer, which torch does not have.

Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, arXiv:2302.06675, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.checked import Range, at_least, checked
from ls_strategy.ops.moments import Moment
from ls_strategy.ops.update import lion_


class Lion(Optimizer):
    """Updates by the sign of an interpolated momentum: one moment instead of AdamW's two, updates of equal size.

    The paper recommends a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by that factor.

    Args:
        params: fp32 parameters, or groups of them.
        lr: learning rate.
        betas: for the direction, and for the stored momentum.
        weight_decay: decoupled.

    Raises:
        ConfigError: a value is out of range.
    """

    @checked(lr=at_least(0), betas=Range(least=0, below=1), weight_decay=at_least(0))
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        moment = Moment(state["exp_avg"].view(-1), None, True)
        param = p.detach().contiguous()
        lion_(
            param.view(-1),
            moment,
            p.grad.contiguous().view(-1),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
        )
        if param.data_ptr() != p.data_ptr():
            p.copy_(param)
