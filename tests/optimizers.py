"""Optimizers as users write them: the engine knows nothing of their classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class EachTensor(Optimizer):
    """Steps one tensor after the other, by `change`."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.change(p, p.grad, group)
        return loss

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError
