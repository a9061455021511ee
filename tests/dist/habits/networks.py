"""Several networks in one module, and modules that are used in other ways than by their forward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
)
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanSquaredError

from tests.dist.habits.rows import EPOCHS, Manual, Row
from tests.dist.ranks import WIDTH, trainer_of
from tests.dist.test_habits import Habit


class Gan(Manual):
    """Two optimizers; the generator's average makes the samples that are looked at."""

    trusted = "ddp_find_unused_parameters_true"

    def build(self) -> None:
        super().build()
        self.critic = nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, 1))
        self.average = copy.deepcopy(self.blocks).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        generator = [*self.first.parameters(), *self.blocks.parameters(), *self.last.parameters()]
        return (
            torch.optim.Adam(generator, lr=5e-3, betas=(0.5, 0.9), eps=1e-4),
            torch.optim.Adam(self.critic.parameters(), lr=5e-3, betas=(0.5, 0.9), eps=1e-4),
        )

    def critics_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        return functional.softplus(-self.critic(real)).mean() + functional.softplus(self.critic(fake)).mean()

    def training_step(self, batch: Any, i: int) -> None:
        optimizer_g, optimizer_c = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(optimizer_c)
        optimizer_c.zero_grad()
        self.manual_backward(self.noted(self.critics_loss(batch[1], self(batch[0]).detach())))
        optimizer_c.step()
        self.untoggle_optimizer(optimizer_c)
        self.toggle_optimizer(optimizer_g)
        optimizer_g.zero_grad()
        self.manual_backward(self.noted(functional.softplus(-self.critic(self(batch[0]))).mean()))
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)
        with torch.no_grad():
            for mine, p in zip(self.average.parameters(), self.blocks.parameters(), strict=True):
                mine.lerp_(p, 0.2)

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            h = torch.ones(2, WIDTH)
            for block in self.average:
                h = block(h)
            self.note(h)


class WganGp(Gan):
    """The critic's loss holds its gradient at its inputs."""

    def critics_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty


class GradientPenalty(Row):
    """Of the blocks, in automatic optimization."""

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return functional.mse_loss(out, batch[1]) + 0.01 * slope.square().mean()


class FrozenTeacher(Row):
    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False).eval()

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = batch[0]
            for block in self.teacher:
                target = block(target)
        return super().loss((batch[0], batch[1] + target))


class TeacherInHyperparameters(Row):
    options: ClassVar[dict[str, Any]] = {"enable_checkpointing": True}

    def __init__(self, teacher: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        teacher = teacher or nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.teacher = teacher.requires_grad_(False)
        self.save_hyperparameters({"teacher": teacher})

    def callbacks(self, root: Path) -> list[pl.Callback]:
        return [ModelCheckpoint(root, filename="last", enable_version_counter=False)]

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0], batch[1] + self.teacher(batch[0])))

    def train_under(self, strategy: Any, data: Any, root: Path) -> pl.Trainer:
        trainer = super().train_under(strategy, data, root)
        trainer.strategy.barrier()
        again = type(self).load_from_checkpoint(root / "last.ckpt", weights_only=False)
        self.note(again(torch.ones(1, WIDTH)))
        self.note(again.hparams["teacher"](torch.ones(1, WIDTH)))
        return trainer


class LateTeacher(FrozenTeacher):
    """Copied in a hook, after the strategy has taken the model; a part of the module all the same."""

    def build(self) -> None:
        Habit.build(self)

    def on_fit_start(self) -> None:
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)


class Searches(LearningRateFinder):
    """In the middle of a fit: saves, trains, and restores."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


class LateTeacherRestored(LateTeacher):
    def callbacks(self, root: Path) -> list[pl.Callback]:
        return [Searches(num_training_steps=3, update_attr=False)]


class TargetNetwork(FrozenTeacher):
    """As in DQN: the target takes the online weights every third step."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step % 3 == 0:
            self.teacher.load_state_dict(self.blocks.state_dict())


class InnerLayers(Row):
    """Layers of a block, called one by one past the block's own forward, and a weight used by a function."""

    trusted = "ddp_find_unused_parameters_true"

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        block = self.blocks[0]
        h = h + block.narrow(torch.tanh(block.wide(block.norm(h))))
        h = self.blocks[1](h)
        h = functional.linear(h, self.last.weight.t() @ self.blocks[2].narrow.weight @ self.blocks[2].wide.weight)
        return self.last(h)


class FunctionalCall(Row):
    """The model run on other weights that are made of its own."""

    def loss(self, batch: Any) -> Tensor:
        scaled = {name: 0.9 * p + 0.01 for name, p in self.blocks[1].named_parameters()}
        h = self.blocks[0](self.first(batch[0]))
        h = torch.func.functional_call(self.blocks[1], scaled, (h,))
        return functional.mse_loss(self.last(self.blocks[2](h)), batch[1])


class Maml(Row):
    """An inner step of gradient descent that the outer gradient goes through."""

    def loss(self, batch: Any) -> Tensor:
        names, params = zip(*self.blocks[0].named_parameters(), strict=True)
        inner = functional.mse_loss(self.blocks[0](batch[0]), batch[1])
        slopes = torch.autograd.grad(inner, params, create_graph=True)
        fast = {n: p - 0.1 * g for n, p, g in zip(names, params, slopes, strict=True)}
        adapted = torch.func.functional_call(self.blocks[0], fast, (batch[0],))
        return super().loss(batch) + functional.mse_loss(adapted, batch[1])


class PerSample(Row):
    """Norms of the gradients of every sample, by `torch.func`."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        params = {n: p.detach() for n, p in self.blocks[1].named_parameters()}

        def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
            return functional.mse_loss(torch.func.functional_call(self.blocks[1], params, (x[None],)), y[None])

        found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, *batch)
        self.note(sum(g.flatten(1).norm(dim=1).sum() for g in found.values()))


class ZerothOrder(Row):
    """As MeZO: no optimizer, no backward; weights are moved along a random direction and back."""

    def configure_optimizers(self) -> None:
        return None

    def move(self, seed: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            p.data.add_(scale * torch.randn(p.shape, generator=generator))

    manual = True

    @torch.no_grad()
    def training_step(self, batch: Any, i: int) -> None:
        seed = len(self.losses)
        self.move(seed, 1e-2)
        up = self.all_gather(self.loss(batch)).mean()  # type: ignore[union-attr]
        self.move(seed, -2e-2)
        down = self.all_gather(self.loss(batch)).mean()  # type: ignore[union-attr]
        self.losses.append(float(up + down))
        self.move(seed, 1e-2 - 0.05 * float(up - down) / 2e-2)


class Metrics(Row):
    options: ClassVar[dict[str, Any]] = {"limit_val_batches": 1}

    def build(self) -> None:
        super().build()
        self.error = MeanSquaredError()
        self.val_error = MeanSquaredError()

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.error(self(batch[0]).detach(), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return super().training_step(batch, i)

    def validation_step(self, batch: Any, i: int) -> None:
        self.val_error.update(self(batch[0]), batch[1])
        self.log("val_error", self.val_error)

    def on_train_epoch_end(self) -> None:
        for value in self.trainer.callback_metrics.values():
            self.note(value)


class Compiled(Row):
    """The module compiled before the fit. What dynamo makes of it counts here, and not who compiles that."""

    def train_under(self, strategy: Any, data: Any, root: Path) -> pl.Trainer:
        torch._dynamo.reset()
        trainer = trainer_of(strategy, use_distributed_sampler=False, max_epochs=EPOCHS, default_root_dir=root)
        trainer.fit(torch.compile(self, backend="eager"), data)  # type: ignore[arg-type]
        return trainer
