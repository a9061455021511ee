"""Optimizers, their groups and states, Lightning's hooks around the step, and its tools."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from tests.dist.habits.rows import EPOCHS, Manual, Row
from tests.dist.ranks import WIDTH, trainer_of
from tests.dist.test_habits import OPTIONS, Habit


class Filtered(Row):
    def build(self) -> None:
        super().build()
        self.blocks[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2, eps=1e-4)


class RatesPerParameter(Row):
    """A group for every parameter, whose rates, decays and betas change while training runs."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(self.parameters())]
        return torch.optim.AdamW(groups, eps=1e-4)

    def on_train_epoch_start(self) -> None:
        for i, group in enumerate(self.trainer.optimizers[0].param_groups):
            group["lr"] *= 0.5 if i % 2 else 2
            group["weight_decay"] = 0.1 * (self.current_epoch + i % 3)
            group["betas"] = (0.8, 0.99)


class WarmsUp(Row):
    """Lightning's own hooks around the step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (self.trainer.global_step + 1)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.note(scheduler.get_last_lr()[0])

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class StepsInTurn(Row):
    """A step every second batch; the gradients of the others are thrown away."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


class ClipsGroups(Row):
    """By what the optimizer's groups hold."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for group in optimizer.param_groups:
            self.note(torch.nn.utils.clip_grad_norm_(group["params"], 0.05))


class ClipsGroupsByHand(Manual):
    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.noted(self.loss(batch)))
        self.note(torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05))
        optimizer.step()


class SurgeryOnGroups(Manual):
    """As the PCGrad that is found everywhere: it works on the groups of the optimizer it wraps."""

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        found = []
        for target in batch[1], -batch[1]:
            optimizer.zero_grad()
            self.manual_backward(self.noted(self.loss((batch[0], target))))
            params = [p for group in optimizer.param_groups for p in group["params"]]
            found.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params])
        inner = sum((a * b).sum() for a, b in zip(*found, strict=True))
        square = sum((a * a).sum() for a in found[0])
        self.note(inner)
        for p, a, b in zip(params, *found, strict=True):
            p.grad = a + b - (inner.clamp(max=0) / square) * a  # type: ignore[union-attr]
        optimizer.step()


class PerturbsGroups(Manual):
    """As the SAM that is found everywhere: it moves what the groups hold along its gradient, and back."""

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.noted(self.loss(batch)))
        moves: dict[Any, Tensor] = {}
        with torch.no_grad():
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in held] or [torch.zeros(())]).norm()
            for p in held:
                moves[p] = p.grad * (0.05 / (norm + 1e-12))
                p.add_(moves[p])
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, move in moves.items():
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


class ReadsGroups(Row):
    """Weights through the optimizer's groups: their sum, and how many elements there are."""

    def on_train_batch_end(self, *_: Any) -> None:
        held = [p for group in self.trainer.optimizers[0].param_groups for p in group["params"]]
        self.note(sum(p.detach().abs().sum() for p in held))
        self.note(torch.tensor(sum(p.numel() for p in held)))


class ClampsGroups(Row):
    def on_train_batch_end(self, *_: Any) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            for p in group["params"]:
                p.data.clamp_(-0.15, 0.15)


class FindsRates(Row):
    """The search, and the fit that follows it."""

    def train_under(self, strategy: Any, data: Any, root: Path) -> pl.Trainer:
        options = {"use_distributed_sampler": False, "max_epochs": 6, "default_root_dir": root}
        trainer = trainer_of(strategy, **options)
        found = Tuner(trainer).lr_find(self, data, min_lr=1e-4, max_lr=1e-1, num_training=24)
        assert found is not None
        for loss in found.results["loss"]:
            self.note(loss)
        self.note(self.lr)
        trainer.fit(self, data)
        return trainer


class FindsBatchSizes(Row):
    """Lightning itself refuses the search with strategies for several ranks."""

    batch_size = 1

    def train_dataloader(self) -> Any:
        data = torch.utils.data.TensorDataset(torch.ones(64, WIDTH), torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH))
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def train_under(self, strategy: Any, data: Any, root: Path) -> pl.Trainer:
        trainer = trainer_of(strategy, max_epochs=1, default_root_dir=root, use_distributed_sampler=False)
        refused = pytest.raises(ValueError, match="distributed")
        with nullcontext() if strategy == "auto" else refused:
            Tuner(trainer).scale_batch_size(self, max_trials=3, steps_per_trial=2)
        self.batch_size = 8
        self.losses.clear()  # those of the search
        trainer.fit(self)
        return trainer


class Prunes(Row):
    options: ClassVar[dict[str, Any]] = {"max_epochs": 3, "enable_checkpointing": True}

    def callbacks(self, root: Path) -> list[pl.Callback]:
        saves = ModelCheckpoint(root, filename="last", enable_version_counter=False)
        return [ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False), saves]

    def train_under(self, strategy: Any, data: Any, root: Path) -> pl.Trainer:
        trainer = super().train_under(strategy, data, root)
        trainer.strategy.barrier()
        self.note(torch.tensor(sum(int((p == 0).sum()) for p in self.parameters())))
        again = Habit.load_from_checkpoint(root / "last.ckpt")
        self.note(sum(p.abs().sum() for p in again.parameters()))
        return trainer


class LotteryTicket(Row):
    """In plain torch ``p.data = q.data`` has the two share memory, and the step changes both."""

    options: ClassVar[dict[str, Any]] = {"max_epochs": 3}
    refused: ClassVar[dict[str, str]] = dict.fromkeys(OPTIONS, "Set use_lottery_ticket_hypothesis=False")

    def callbacks(self, root: Path) -> list[pl.Callback]:
        layers = [(block.wide, "weight") for block in self.blocks]
        return [ModelPruning("random_unstructured", layers, amount=0.3, use_global_unstructured=False,
                             use_lottery_ticket_hypothesis=True)]  # fmt: skip


class MonitorsRates(WarmsUp):
    options: ClassVar[dict[str, Any]] = {"log_every_n_steps": 1}

    def callbacks(self, root: Path) -> list[pl.Callback]:
        return [LearningRateMonitor(log_momentum=True, log_weight_decay=True)]

    def train_under(self, strategy: Any, data: Any, root: Path) -> pl.Trainer:
        options = {"use_distributed_sampler": False, "max_epochs": EPOCHS, **self.options}
        trainer = trainer_of(strategy, callbacks=self.callbacks(root), logger=CSVLogger(root), **options)
        trainer.fit(self, data)
        for value in trainer.logged_metrics.values():
            self.note(value)
        return trainer


class WorksAfterwards(Row):
    """Weights changed when the fit is over, evaluated, and trained on."""

    def train_under(self, strategy: Any, data: Any, root: Path) -> pl.Trainer:
        trainer = super().train_under(strategy, data, root)
        self.load_state_dict({k: 0.5 * v for k, v in self.state_dict().items()})
        self.note(trainer.validate(self, data, verbose=False)[0]["val_loss"])
        with torch.no_grad():
            self.blocks[0].wide.weight.mul_(0.5)
        self.note(trainer.validate(self, data, verbose=False)[0]["val_loss"])
        trainer.fit_loop.max_epochs = EPOCHS + 1
        trainer.fit(self, data)
        self.note(sum(p.norm() for p in self.parameters()))
        return trainer


class LogsOnOneRank(Row):
    """The norm of a weight, logged by rank 0."""

    options: ClassVar[dict[str, Any]] = {"log_every_n_steps": 1}

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            norm = self.blocks[1].wide.weight.norm()
            self.log("norm", norm, rank_zero_only=True)
            self.note(norm)
        else:
            self.note(0.0)
