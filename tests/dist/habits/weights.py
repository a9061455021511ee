"""Layers whose weights are computed, noised, pruned, tied, or filled by hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

from tests.dist.habits.rows import Row
from tests.dist.ranks import WIDTH
from tests.dist.test_habits import Habit


class OldSpectralNorm(Row):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            torch.nn.utils.spectral_norm(block.wide)
        torch.nn.utils.spectral_norm(self.last)


class SpectralNorm(Row):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            parametrizations.spectral_norm(block.wide)
        parametrizations.spectral_norm(self.last)


class OldWeightNorm(Row):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            torch.nn.utils.weight_norm(block.narrow)
        torch.nn.utils.weight_norm(self.first)


class WeightNorm(Row):
    """Also one layer at a time as a unit, and a look at the computed weight from outside."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            parametrizations.weight_norm(block.narrow)
        self.last = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))  # type: ignore[assignment]

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(self.blocks[1].narrow.weight.norm())
        self.note(self.last[1].weight.norm())  # type: ignore[index]


class Orthogonal(Row):
    """Once per step, and a penalty on the computed weight."""

    def build(self) -> None:
        super().build()
        parametrizations.orthogonal(self.blocks[0].wide)
        parametrizations.orthogonal(self.first)

    def loss(self, batch: Any) -> Tensor:
        with parametrize.cached():
            return super().loss(batch) + 0.01 * self.blocks[0].wide.weight.abs().mean()


class RemovesWeightNorm(OldWeightNorm):
    """For export, when training is over."""

    def train_under(self, strategy: Any, data: Any, root: Path) -> pl.Trainer:
        trainer = super().train_under(strategy, data, root)
        for block in self.blocks:
            torch.nn.utils.remove_weight_norm(block.narrow)
        self.note(sum(p.norm() for p in self.parameters()))
        return trainer


class Pruned(Row):
    """By hand, layer by layer, while training runs."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for block in self.blocks:
                prune.l1_unstructured(block.wide, "weight", amount=0.4)
            prune.random_unstructured(self.first, "bias", amount=2)

    def on_train_end(self) -> None:
        for block in self.blocks:
            self.note(block.wide.weight)
            prune.remove(block.wide, "weight")


class Standardized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean(1, keepdim=True)
        return functional.linear(x, w / w.std(1, keepdim=True), self.bias)


class ExchangesWeights(Row):
    """Parameters exchange their memory, or get that of others."""

    def on_train_batch_end(self, *_: Any) -> None:
        a, b, c = (block.wide.weight for block in self.blocks)
        a.data, b.data = b.data, a.data
        self.first.weight.data, self.last.weight.data = self.last.weight.data, self.first.weight.data
        c.data = (a.data + b.data) / 2
        kept = self.first.bias.data
        self.first.bias.data = torch.zeros_like(kept)
        self.note(self(torch.ones(1, WIDTH)))
        self.first.bias.data = kept


class MakesArrays(Row):
    """NumPy arrays of weights and gradients, as for TensorBoard's histograms; some are kept."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(sum(p.detach().cpu().numpy().sum() for p in self.parameters()))
        with torch.no_grad():
            self.first.weight.numpy()[0] *= 0.5
        self.last.weight.detach().numpy()[0] *= 0.5
        np.asarray(self.blocks[2].narrow.weight.detach())[0] = 0
        self.kept = self.blocks[1].wide.weight.detach().numpy()
        self.note(self.kept)

    def on_after_backward(self) -> None:
        for p in self.blocks.parameters():
            self.note(p.grad.detach().cpu().numpy())  # type: ignore[union-attr]


class StandardizesWeights(Row):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.wide = Standardized(WIDTH, 2 * WIDTH + 1)


class NoisyWeights(Row):
    """Noise on the weights while a block runs, taken off afterwards."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.register_forward_pre_hook(self.add)
            block.register_forward_hook(self.take_off)

    def add(self, block: Any, _: Any) -> None:
        generator = torch.Generator().manual_seed(len(self.losses))
        block.noise = 0.1 * torch.randn(block.wide.weight.shape, generator=generator)
        block.wide.weight.data.add_(block.noise)

    def take_off(self, block: Any, *_: Any) -> None:
        block.wide.weight.data.sub_(block.noise)


class TiesInSetup(Row):
    def setup(self, stage: str) -> None:
        self.last.weight = self.first.weight
        self.blocks[2].wide.weight = self.blocks[0].wide.weight


class TiesInConfigureModel(Row):
    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        with torch.device("cpu"):  # with values, as they are under DDP
            torch.manual_seed(3)
            Habit.build(self)
        self.last.weight = self.first.weight
        self.blocks[2] = self.blocks[0]


class TiesLate(Row):
    """While training runs; DDP then waits for a gradient that never comes, and says so."""

    trusted = "ddp_find_unused_parameters_true"

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.last.weight = self.first.weight


class AppliesInit(Row):
    def on_fit_start(self) -> None:
        torch.manual_seed(11)
        self.apply(initialise)


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.1)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()
