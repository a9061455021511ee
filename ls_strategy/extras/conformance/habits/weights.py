"""Weights that are tied, frozen, averaged, used and written to outside of the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy.extras.conformance.case import WIDTH, AdamNet, Block, Case, Net
from ls_strategy.extras.conformance.habit import habit
from ls_strategy.extras.conformance.lightning import callbacks, pl


class _Tied(AdamNet):
    def build(self) -> None:
        super().build()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


@habit()
def tied_weights(case: Case) -> None:
    """Ties the weight of the first layer to that of the last."""
    case.train(_Tied)


class _Scaled(AdamNet):
    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def loss(self, batch: Any) -> Tensor:
        _, x, y = batch
        return nn.functional.mse_loss(self(x) * self.scale, y)


@habit()
def own_parameter(case: Case) -> None:
    """Uses a parameter of the LightningModule itself in training_step."""
    case.train(_Scaled)


class _Outside(AdamNet):
    def loss(self, batch: Any) -> Tensor:
        _, x, y = batch
        hidden = self.blocks(x)
        penalty = sum(block.get_parameter("inner.weight").square().mean() for block in self.blocks)
        return nn.functional.mse_loss(hidden @ self.head.weight.T + self.head.bias, y) + 0.1 * penalty


@habit()
def weights_outside_forward(case: Case) -> None:
    """Uses weights of layers outside of their forward: a penalty, and a product by hand."""
    case.train(_Outside)


class _Frozen(AdamNet):
    def build(self) -> None:
        super().build()
        self.blocks[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, eps=1e-2)


@habit()
def frozen_block(case: Case) -> None:
    """Freezes a block before the fit."""
    case.train(_Frozen)


class _Unfreezes(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.blocks)  # type: ignore[arg-type]

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks, optimizer, lr=0.1)  # type: ignore[arg-type]


class _Finetuned(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2)


@habit()
def unfreezing(case: Case) -> None:
    """Unfreezes the blocks after an epoch with BaseFinetuning."""
    case.train(_Finetuned, max_epochs=3, callbacks=[_Unfreezes()])


class _Clamps(Net):
    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in self.parameters():
            p.clamp_(-0.2, 0.2)
        self.head.weight.data.mul_(0.9)


@habit()
def writes_weights(case: Case) -> None:
    """Clamps weights in place after every batch, and writes through .data."""
    case.train(_Clamps, max_epochs=2)


class _Loads(Net):
    def on_fit_start(self) -> None:
        torch.manual_seed(5)
        self.blocks[0].load_state_dict(Block().state_dict())


@habit()
def loads_at_start(case: Case) -> None:
    """Loads weights into a block in on_fit_start, after the strategy has taken the model."""
    case.train(_Loads)


class _Initializes(Net):
    def on_fit_start(self) -> None:
        torch.manual_seed(5)
        nn.init.normal_(self.head.weight, std=0.3)


@habit()
def initializes_at_start(case: Case) -> None:
    """Initializes a weight at random in on_fit_start, from the same seed on all ranks."""
    case.train(_Initializes)


class _AverageByHand(callbacks.Callback):
    """The one that is copied from project to project: averages, and swaps them in for validation."""

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.average = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, p in pl_module.named_parameters():
            self.average[name].mul_(0.7).add_(p.detach(), alpha=0.3)

    @torch.no_grad()
    def swap(self, pl_module: pl.LightningModule) -> None:
        for name, p in pl_module.named_parameters():
            held = p.detach().clone()
            p.copy_(self.average[name])
            self.average[name].copy_(held)

    def on_validation_epoch_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.swap(pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.swap(pl_module)


@habit(right="the losses of one process, in training and validation")
def average_by_hand(case: Case) -> None:
    """Averages weights in a callback of its own, and validates the averages."""
    trainer = case.train(Net, max_epochs=2, limit_val_batches=2, callbacks=[_AverageByHand()])
    case.note("val_loss", trainer.callback_metrics["val_loss"])


@habit(right="the losses of one process, in training and validation")
def ema_weight_averaging(case: Case) -> None:
    """Averages weights with Lightning's EMAWeightAveraging."""
    averaging = callbacks.EMAWeightAveraging(decay=0.7)
    trainer = case.train(Net, max_epochs=2, limit_val_batches=2, callbacks=[averaging])
    case.note("val_loss", trainer.callback_metrics["val_loss"])


@habit()
def stochastic_weight_averaging(case: Case) -> None:
    """Averages weights with StochasticWeightAveraging, and tests the averages."""
    model = case.module(Net)
    averaging = callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=1)
    trainer = case.fit(model, max_epochs=4, callbacks=[averaging])
    case.note_losses(model)
    case.note("test_loss", trainer.test(model, case.loader(2, seed=1), verbose=False)[0]["test_loss"])


class _Normed(Net):
    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(3 * x + 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.steps += 1
        return super().training_step(batch, batch_idx)


@habit(right="DDP: losses, validation, and the buffers of rank 0", trusted="ddp")
def batch_norm(case: Case) -> None:
    """Has batch norm and a counter as buffers, and validates with them."""
    model = case.module(_Normed)
    trainer = case.fit(model, max_epochs=2, limit_val_batches=2)
    case.note_losses(model)
    case.note("val_loss", trainer.callback_metrics["val_loss"])
    for name in ("running_mean", "running_var"):
        case.note(name, getattr(model.norm, name), "first")
    case.note("counter", int(model.steps))


class _Late(AdamNet):
    def build(self) -> None:
        self.head = nn.Linear(WIDTH, WIDTH)

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            torch.manual_seed(2)
            self.blocks = nn.Sequential(Block(), Block())


@habit()
def made_in_configure_model(case: Case) -> None:
    """Makes its blocks in configure_model."""
    case.train(_Late)
