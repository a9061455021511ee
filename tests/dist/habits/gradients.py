"""Gradients that are computed, looked at and changed, and weights written to through lists and views."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.dist.habits.rows import Manual, Row
from tests.dist.test_habits import OPTIONS


class GradOfLoss(Row):
    """Gradients by `torch.autograd.grad`, to look at, before Lightning's own backward."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        found = torch.autograd.grad(loss, [*self.blocks[1].parameters(), self.first.weight], retain_graph=True)
        self.note(sum(g.square().sum() for g in found))
        return loss


class GradByHand(Manual):
    """No backward at all: gradients are computed, averaged over ranks, and put into ``p.grad``."""

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        params = list(self.parameters())
        found = torch.autograd.grad(self.noted(self.loss(batch)), params)
        for p, g in zip(params, found, strict=True):
            p.grad = self.all_gather(g).view(-1, *g.shape).mean(0)  # type: ignore[union-attr]
        optimizer.step()


class NoisyGradients(Row):
    """NaNs replaced in place, gradients centralised, through views and ``out=``."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            assert p.grad is not None
            torch.nan_to_num(p.grad, out=p.grad)
            if p.grad.dim() > 1:
                p.grad.data.sub_(p.grad.mean(1, keepdim=True))
            p.grad.detach().view(-1)[0].zero_()


class Adaptive(Row):
    """As timm's adaptive clipping: by the norms of weights and gradients, row by row."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for p in self.parameters():
            p_data, g_data = p.detach(), p.grad.detach()  # type: ignore[union-attr]
            limit = p_data.norm(dim=-1, keepdim=True).clamp(min=1e-3) * 0.01
            norm = g_data.norm(dim=-1, keepdim=True)
            clipped = g_data * (limit / norm.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(norm < limit, g_data, clipped))  # type: ignore[union-attr]


class TensorHooks(Row):
    """As W&B's watch: what comes to each parameter on this rank is noted, and here also bounded."""

    def on_fit_start(self) -> None:
        for p in self.parameters():
            p.register_hook(lambda g: self.note(g.data.abs().sum()))
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))


class EarlyTensorHooks(TensorHooks):
    """Registered before the strategy takes the model."""

    def build(self) -> None:
        super().build()
        TensorHooks.on_fit_start(self)

    def on_fit_start(self) -> None:
        pass


class Watches(Row):
    """As W&B's watch: after the forward of every module its parameters are read, and gradients on their way back."""

    def on_train_start(self) -> None:
        for part in (self.first, *self.blocks, self.blocks[0].wide):
            part.register_forward_hook(self.look)
        self.blocks[1].register_full_backward_hook(self.look_back)

    def look(self, module: nn.Module, *_: Any) -> None:
        for _name, p in module.named_parameters():
            self.note(p.data.abs().mean())

    def look_back(self, module: nn.Module, grad_in: Any, grad_out: Any) -> None:
        self.note(grad_out[0].square().sum())
        self.note(grad_in[0].square().sum())


class TogglesTraining(Row):
    """Blocks train in turn, by ``requires_grad`` before every step."""

    trusted = "ddp_find_unused_parameters_true"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for number, block in enumerate(self.blocks):
            block.requires_grad_(number == batch_idx % 3)


class WritesToLists(Row):
    """As diffusers' EMA: by operations on lists of all parameters, or of views of them."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        torch._foreach_mul_([p.data for p in self.parameters()], 0.99)
        torch._foreach_mul_([p.detach() for p in self.parameters()], 0.99)
        torch._foreach_add_(list(self.parameters()), 1e-3)
        self.note(torch.stack(torch._foreach_norm([p.data for p in self.parameters()])).sum())


class WritesToKeptViews(Row):
    """Views taken once and written to in every step. Where a step brings new values from elsewhere they are lost."""

    refused: ClassVar[dict[str, str]] = dict.fromkeys(
        ["zero3", "zero3, small units", "zero3_offload", "zero1_offload"], r"kept through a step.*p\.data again"
    )

    def on_train_start(self) -> None:
        self.views = [p.data for p in self.blocks.parameters()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for view in self.views:
            view.clamp_(-0.2, 0.2)

    def on_train_batch_end(self, *_: Any) -> None:
        for view in self.views:
            self.note(view.abs().sum())
            view.mul_(0.99)


class ReadsState(Row):
    """The optimizer's state, parameter by parameter."""

    refused: ClassVar[dict[str, str]] = dict.fromkeys(OPTIONS, r"state.*sharded.*optimizer_state\(")

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.note(optimizer.state[p]["exp_avg"].norm())


class SavesState(ReadsState):
    def on_train_batch_end(self, *_: Any) -> None:
        self.kept = self.trainer.optimizers[0].state_dict()


class LoadsState(Row):
    """An optimizer's state from elsewhere."""

    def on_train_start(self) -> None:
        generator = torch.Generator().manual_seed(3)
        optimizer = self.trainer.optimizers[0]
        states = {}
        for i, p in enumerate(self.parameters()):
            average, square = (0.01 * torch.rand(p.shape, generator=generator) for _ in range(2))
            states[i] = {"step": torch.tensor(7.0), "exp_avg": average, "exp_avg_sq": square}
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        groups = [{**group, "lr": 2e-2, "params": list(states)}]
        optimizer.load_state_dict({"state": states, "param_groups": groups})


class Ewc(Row):
    """Elastic weight consolidation: squares of gradients and a copy of the weights, then a penalty."""

    def on_after_backward(self) -> None:
        if self.current_epoch == 0:
            self.fisher = [p.grad.detach().clone().pow(2) for p in self.parameters()]  # type: ignore[union-attr]

    def on_train_epoch_end(self) -> None:
        self.anchors = [p.clone().detach() for p in self.parameters()]

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.current_epoch == 0:
            return loss
        terms = zip(self.fisher, self.anchors, self.parameters(), strict=True)
        return loss + sum((f * (p - a).square()).sum() for f, a, p in terms)


class Anomalies(Row):
    options: ClassVar[dict[str, Any]] = {"detect_anomaly": True}
