"""Averages of weights: callbacks, libraries, and by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.dist.habits.rows import Row
from tests.dist.ranks import WIDTH
from tests.dist.test_habits import OPTIONS, Habit


class Swa(Row):
    options: ClassVar[dict[str, Any]] = {"max_epochs": 4}

    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def callbacks(self, root: Path) -> list[pl.Callback]:
        return [StochasticWeightAveraging(5e-3, swa_epoch_start=2)]


class EveryOtherStep(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 0


class Averaging(Row):
    """Validates the averages, and ends with them."""

    options: ClassVar[dict[str, Any]] = {"limit_val_batches": 1, "enable_checkpointing": True}

    def callbacks(self, root: Path) -> list[pl.Callback]:
        return [
            EveryOtherStep(),
            ModelCheckpoint(root, filename="{epoch}", save_top_k=-1, enable_version_counter=False),
        ]

    def validation_step(self, batch: Any, i: int) -> None:
        super().validation_step(batch, i)
        self.note(self.loss(batch))

    def train_under(self, strategy: Any, data: Any, root: Path) -> pl.Trainer:
        trainer = super().train_under(strategy, data, root)
        trainer.strategy.barrier()
        saved = type(self).load_from_checkpoint(next(iter(sorted(root.glob("epoch=1*")))))
        self.note(sum(p.abs().sum() for p in saved.parameters()))
        return trainer


class EmaAveraging(Averaging):
    def callbacks(self, root: Path) -> list[pl.Callback]:
        return [EMAWeightAveraging(decay=0.7)]

    train_under = Row.train_under


class AveragesByHand(Row):
    """`torch.optim.swa_utils`, outside of the module, with batch norms brought up to date in the end."""

    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def on_fit_start(self) -> None:
        averages = AveragedModel(self.blocks), AveragedModel(self.last, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        self.averages = [averages]  # not a part of the module

    def on_train_batch_end(self, *_: Any) -> None:
        for average, part in zip(self.averages[0], (self.blocks, self.last), strict=True):
            average.update_parameters(part)

    def on_train_end(self) -> None:
        for average, part in zip(self.averages[0], (self.blocks, self.last), strict=True):
            part.load_state_dict(average.module.state_dict())
        update_bn([batch[0] for batch in self.trainer.train_dataloader], self)  # type: ignore[arg-type,union-attr]
        self.note(self.norm.running_mean)


class Ema(nn.Module):
    """As ``ema_pytorch``: a copy of the model that is a part of the module, and the model itself that is not."""

    initted: Tensor
    steps: Tensor

    def __init__(self, model: nn.Module, beta: float = 0.8, after: int = 2) -> None:
        super().__init__()
        self.online = [model]
        self.copied = copy.deepcopy(model)
        for p in self.copied.parameters():
            p.detach_()
        self.beta, self.after = beta, after
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("steps", torch.tensor(0))

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        named = dict(self.online[0].named_parameters())
        for name, mine in self.copied.named_parameters():
            yield mine, named[name]

    def update(self) -> None:
        self.steps += 1
        if self.steps <= self.after:
            return
        if not self.initted:
            for mine, online in self.pairs():
                mine.data.copy_(online.data)
            self.initted.data.copy_(torch.tensor(True))
        for mine, online in self.pairs():
            mine.data.lerp_(online.data, 1 - self.beta)


class LibraryEma(Row):
    def build(self) -> None:
        super().build()
        self.ema = Ema(self.blocks)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema.update()

    def on_train_end(self) -> None:
        self.blocks.load_state_dict(self.ema.copied.state_dict())


class LateEma(LibraryEma):
    """Made when the fit starts, after the strategy has taken the model."""

    def build(self) -> None:
        Habit.build(self)

    def on_fit_start(self) -> None:
        self.ema = Ema(self.blocks)


class EmaOfStates(Row):
    """As timm's ``ModelEmaV2``: through the values of two state dicts."""

    def build(self) -> None:
        super().build()
        self.ema = copy.deepcopy(self.blocks).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for mine, online in zip(self.ema.state_dict().values(), self.blocks.state_dict().values(), strict=True):
            mine.copy_(0.8 * mine + 0.2 * online)


class WritesToStates(Row):
    """Through the values of state dicts, in place and behind the counter of versions."""

    def on_train_batch_end(self, *_: Any) -> None:
        for value in self.blocks[0].state_dict().values():
            value.mul_(0.99)
        for value in self.blocks[1].state_dict().values():
            value.data *= 0.99


class SwapsForValidation(Row):
    options: ClassVar[dict[str, Any]] = {"limit_val_batches": 1}

    def on_train_start(self) -> None:
        self.average = {n: p.detach().clone() for n, p in self.named_parameters()}

    def on_train_batch_end(self, *_: Any) -> None:
        for name, p in self.named_parameters():
            self.average[name].mul_(0.7).add_(p.detach(), alpha=0.3)

    def swap(self) -> None:
        for name, p in self.named_parameters():
            held = p.data.clone()
            p.data.copy_(self.average[name])
            self.average[name].copy_(held)

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.swap()

    def validation_step(self, batch: Any, i: int) -> None:
        self.note(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.swap()


class SwapsMemory(SwapsForValidation):
    """The average that is copied from tutorial to tutorial: swaps by ``p.data = ...``, and keeps what was there."""

    def on_train_batch_end(self, *_: Any) -> None:
        for name, p in self.named_parameters():
            self.average[name] = (0.7 * self.average[name] + 0.3 * p.data).clone()

    def swap(self) -> None:
        self.backup = {}
        for name, p in self.named_parameters():
            self.backup[name] = p.data
            p.data = self.average[name]

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            for name, p in self.named_parameters():
                p.data = self.backup[name]


class KeepsTheBest(Row):
    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.best = copy.deepcopy(self.state_dict())

    def on_train_end(self) -> None:
        self.load_state_dict(self.best)


class LooksAhead(Row):
    """Slow weights that every third step meets half way, kept beside the optimizer."""

    def on_train_start(self) -> None:
        self.slow = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step % 3 == 0:
            for mine, p in zip(self.slow, self.parameters(), strict=True):
                mine.add_(p.detach() - mine, alpha=0.5)
                p.data.copy_(mine)


class Lookahead(torch.optim.Optimizer):
    """As timm's: wraps an optimizer, and keeps the slow weights in its state."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._hooks_for_profile: Any = None
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        self.base = base
        self.param_groups = base.param_groups
        self.state = base.state
        self.defaults = base.defaults
        for group in self.param_groups:
            group["lookahead_step"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % 3:
                continue
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.base.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                state["slow"].add_(p - state["slow"], alpha=0.5)
                p.copy_(state["slow"])
        return loss


class LookaheadOptimizer(Row):
    refused: ClassVar[dict[str, str]] = dict.fromkeys(
        OPTIONS, "Lookahead wraps another optimizer, .*on_train_batch_end"
    )

    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4))
