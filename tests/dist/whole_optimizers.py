"""Optimizers that need whole tensors, written as users write them, and the run in one process that is trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ls_strategy
from tests.dist.ranks import Net, global_batches
from tests.optimizers import EachTensor

STEPS = 20


class Lamb(EachTensor):
    """You et al., arXiv:1904.00962."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.01) -> None:
        super().__init__(params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=weight_decay)

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        b1, b2 = group["betas"]
        m = state["exp_avg"].lerp_(grad, 1 - b1)
        v = state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        m, v = m / (1 - b1 ** state["step"]), v / (1 - b2 ** state["step"])
        update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
        ratio = (p.norm() / update.norm()).item() if p.norm() > 0 else 1.0
        p.sub_(update, alpha=group["lr"] * ratio)


class Shampoo(EachTensor):
    """Gupta et al., arXiv:1802.09568: two preconditioners per matrix, of other shapes than the matrix."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.sub_(self._direction(grad, self.state[p]), alpha=group["lr"])

    @staticmethod
    def _direction(grad: Tensor, state: dict[str, Any]) -> Tensor:
        g = grad.view(len(grad), -1)
        if not state:
            state.update(calls=0, left=1e-2 * torch.eye(g.shape[0]), right=1e-2 * torch.eye(g.shape[1]))
        state["calls"] += 1
        state["left"] += g @ g.T
        state["right"] += g.T @ g
        return (_root(state["left"]) @ g @ _root(state["right"])).view_as(grad)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=1e-12).pow(-0.25) @ vectors.T).to(matrix.dtype)


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() == 2]


def vectors(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() != 2]


def muon(module: nn.Module) -> list[Optimizer]:
    """Two groups, one of which decays, and another optimizer for what is not a matrix.

    The iteration in bf16 turns a last bit of fp32 into a difference of 1e-3, so nothing else may round differently:
    products with a power of two are exact, with and without fused multiply-adds.
    """
    first, *others = matrices(module)
    groups = [{"params": others}, {"params": [first], "weight_decay": 0.0}]
    return [torch.optim.Muon(groups, lr=0.02), torch.optim.SGD(vectors(module), lr=2**-6)]


def muon_and_adamw(module: nn.Module) -> list[Optimizer]:
    """In one optimizer. Vectors do not change: other roundings of theirs would reach the iteration in bf16."""
    groups = [{"params": matrices(module)}, {"params": vectors(module), "use_muon": False, "lr": 0.0}]
    return [ls_strategy.Muon(groups, lr=0.02)]


MAKE: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "Muon": muon,
    "Muon and AdamW": muon_and_adamw,
    "Adafactor": lambda m: [torch.optim.Adafactor(m.parameters(), lr=0.05)],
    "Lamb": lambda m: [Lamb(m.parameters())],
    "ours": lambda m: [ls_strategy.Lamb(matrices(m), lr=0.01), ls_strategy.Lars(vectors(m), lr=1.0)],
    "SOAP": lambda m: [ls_strategy.SOAP(m.parameters(), lr=0.01, frequency=3)],
    "Shampoo": lambda m: [Shampoo(m.parameters())],
}


class Trained(Net):
    """All optimizers of a case in one step. ``spare`` never has a gradient, ``late`` from the fourth step on."""

    manual = True

    def __init__(self, case: str) -> None:
        self.case = case
        super().__init__()

    def build(self) -> None:
        super().build()
        self.blocks[1].wide.weight.data.mul_(3)
        self.spare = nn.Parameter(torch.ones(4, 3))
        self.late = nn.Parameter(torch.eye(8))
        self.calls = 0

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if self.calls >= 3:
            x = x @ self.late
        return super().loss((x, y))

    def configure_optimizers(self) -> Any:
        return MAKE[self.case](self)

    def training_step(self, batch: Any, i: int) -> None:
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        for optimizer in optimizers:
            optimizer.step()
        self.calls += 1


def one_process(case: str, world_size: int, steps: int = STEPS) -> tuple[dict[str, Tensor], list[Optimizer]]:
    """Weights after plain steps with the gradients that ``world_size`` ranks have, averaged in their order.

    The average has the engine's bits on three ranks too, where a division rounds otherwise than a product with a third:
    SOAP turns a last bit into another basis of what its first gradients do not reach.
    """
    module = Trained(case)
    optimizers = MAKE[case](module)
    loaders, share = [iter(global_batches(rank, world_size, steps)) for rank in range(world_size)], 1.0 / world_size
    for _ in range(steps):
        total: list[Tensor | None] = [None for _ in module.parameters()]
        for loader in loaders:
            module.zero_grad()
            module.loss(next(loader)).backward()
            for i, p in enumerate(module.parameters()):
                before = total[i]
                if p.grad is not None:
                    total[i] = p.grad * share if before is None else before.add(p.grad, alpha=share)
        for p, grad in zip(module.parameters(), total, strict=True):
            p.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        module.calls += 1
    return {k: v.detach().clone() for k, v in module.state_dict().items()}, optimizers
