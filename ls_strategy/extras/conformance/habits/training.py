"""Optimizers, accumulation and clipping, automatic and by hand; data that ranks do not share evenly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from ls_strategy.extras.conformance.case import ROWS, WIDTH, AdamNet, Block, Case, Net
from ls_strategy.extras.conformance.habit import habit


@habit()
def plain_sgd(case: Case) -> None:
    """Trains with SGD and nothing else."""
    case.train(Net)


@habit()
def plain_adamw(case: Case) -> None:
    """Trains with AdamW."""
    case.train(AdamNet, max_epochs=2)


class _TwoGroups(AdamNet):
    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 0.05}]
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-2)


@habit()
def parameter_groups(case: Case) -> None:
    """Decays weights, not biases, in two parameter groups chosen by the number of dimensions."""
    case.train(_TwoGroups)


@habit()
def accumulate_clip_norm(case: Case) -> None:
    """Accumulates three batches and clips by norm; the last window of an epoch is incomplete."""
    case.train(Net, loader=case.loader(8), max_epochs=2, accumulate_grad_batches=3, gradient_clip_val=0.05)


@habit()
def accumulate_clip_value(case: Case) -> None:
    """Accumulates two batches and clips by value."""
    options = {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2}
    case.train(Net, max_epochs=2, **options)


class _Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.keep(loss, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


@habit()
def manual_optimization(case: Case) -> None:
    """Optimizes by hand: accumulates two batches, clips with clip_gradients, steps."""
    case.train(_Manual)


_GENERATOR = "generator's batch"


class _Gan(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        _, x, real = batch
        self.play(generator, nn.functional.softplus(-self.critic(self.generator(x))).mean(), batch_idx, _GENERATOR)
        fake = self.generator(x).detach()
        distance = nn.functional.softplus(self.critic(fake)).mean() + nn.functional.softplus(-self.critic(real)).mean()
        self.play(critic, distance, batch_idx, "critic's batch")

    def play(self, optimizer: Any, loss: Tensor, batch_idx: int, name: str) -> None:
        self.keep(loss, batch_idx, name)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.2) for part in (self.generator, self.critic)]


class _ToggledGan(_Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        _, x, real = batch
        self.toggle_optimizer(generator)
        self.play(generator, nn.functional.softplus(-self.critic(self.generator(x))).mean(), batch_idx, _GENERATOR)
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        both = self.critic(torch.cat([self.generator(x).detach(), real]))
        fake, true = both.chunk(2)
        distance = nn.functional.softplus(fake).mean() + nn.functional.softplus(-true).mean()
        self.play(critic, distance, batch_idx, "critic's batch")
        self.untoggle_optimizer(critic)


@habit()
def gan(case: Case) -> None:
    """Trains a GAN by hand with two optimizers; the generator's loss leaves gradients in the critic."""
    case.train(_Gan)


@habit()
def gan_toggled(case: Case) -> None:
    """Trains a GAN by hand, and toggles the optimizers as Lightning's documentation does."""
    case.train(_ToggledGan)


class _Lbfgs(Net):
    optimizer = torch.optim.LBFGS
    optimizer_options = {"lr": 0.3, "max_iter": 3}  # noqa: RUF012

    def keep(self, loss: Tensor, batch_idx: int, name: str = "batch") -> None:
        super().keep(loss, batch_idx, f"evaluation {len(self.losses)} in batch")


@habit()
def lbfgs(case: Case) -> None:
    """Trains with LBFGS, which evaluates the loss of a batch several times."""
    case.train(_Lbfgs)


class _Checkpointed(AdamNet):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return self.head(x)


@habit()
def checkpointed_blocks(case: Case) -> None:
    """Recomputes blocks in backward with torch.utils.checkpoint."""
    case.train(_Checkpointed)


class _Compiled(AdamNet):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.compile(backend="aot_eager")


@habit()
def compiled_blocks(case: Case) -> None:
    """Compiles blocks with torch.compile (backend aot_eager)."""
    case.train(_Compiled)


class _OwnStep(AdamNet):
    """As the page on optimizers of Lightning's documentation: a warm-up in ``optimizer_step``."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 6)


@habit()
def warm_up_by_hand(case: Case) -> None:
    """Overrides optimizer_step, and sets the learning rate there after each step."""
    case.train(_OwnStep, max_epochs=2)


class _Penalty(_Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        _, x, y = batch
        x = x.requires_grad_()
        outputs = self(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        loss = nn.functional.mse_loss(outputs, y) + 0.1 * slope.square().sum(1).mean()
        self.keep(loss, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@habit()
def gradient_penalty(case: Case) -> None:
    """Penalizes the gradient of the outputs by the inputs, with torch.autograd.grad(create_graph=True)."""
    case.train(_Penalty)


class _Functional(AdamNet):
    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 0.9 * p for name, p in self.blocks.named_parameters()}
        return self.head(torch.func.functional_call(self.blocks, weights, (x,)))


@habit()
def functional_call(case: Case) -> None:
    """Calls blocks with other weights, computed from their own, by torch.func.functional_call."""
    case.train(_Functional)


class _Parametrized(AdamNet):
    def build(self) -> None:
        super().build()
        nn.utils.parametrizations.weight_norm(self.head)


@habit()
def weight_norm(case: Case) -> None:
    """Has a layer with torch.nn.utils.parametrizations.weight_norm."""
    case.train(_Parametrized)


# --- data -------------------------------------------------------------------------------------------------------------


@habit(right="the losses of DDP, rank by rank", trusted="ddp")
def sharded_loader(case: Case) -> None:
    """Shuffles with a plain DataLoader, which Lightning splits over the ranks."""
    model = case.module(Net)
    loader = DataLoader(case.rows(), batch_size=ROWS, shuffle=True)
    case.fit(model, loader, use_distributed_sampler=True, max_epochs=2)
    for name, loss in model.losses.items():
        case.note(name, loss)


class _SeesRows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.seen += batch[0].tolist()
        return super().training_step(batch, batch_idx)


@habit(right="every row is trained on once", trusted="nobody")
def uneven_data(case: Case) -> None:
    """Has one batch less on the last rank."""
    model = case.module(_SeesRows)
    rows = [*case.sampler(case.rows())]
    if case.rank == case.ranks - 1:
        del rows[-ROWS:]
    case.fit(model, DataLoader(Subset(case.rows(), rows), batch_size=ROWS))
    case.claim(f"{len(rows)} rows are trained on ({len(set(model.seen))} were)", sorted(model.seen) == rows)


class _PartOfRows(Net):
    """The rows of rank 0 alone go through ``extra``."""

    def build(self) -> None:
        super().build()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.ranks = 2

    def loss(self, batch: Any) -> Tensor:
        index, x, y = batch
        chosen = index % self.ranks == 0
        if chosen.any():
            x = torch.where(chosen[:, None], self.extra(x), x)
        return nn.functional.mse_loss(self(x), y)


@habit()
def unused_on_other_ranks(case: Case) -> None:
    """Has a layer that only the rows of rank 0 go through."""
    model = case.module(_PartOfRows)
    model.ranks = case.ranks
    case.fit(model)
    case.note_losses(model)


class _Unused(AdamNet):
    def build(self) -> None:
        super().build()
        self.old_head = nn.Linear(WIDTH, 3)


@habit()
def unused_layer(case: Case) -> None:
    """Has a layer that is never used."""
    case.train(_Unused)


class _Sometimes(AdamNet):
    def build(self) -> None:
        super().build()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.ranks = 2

    def loss(self, batch: Any) -> Tensor:
        index, x, y = batch
        is_odd = int(index[0]) // (ROWS * self.ranks) % 2
        return nn.functional.mse_loss(self(self.extra(x) if is_odd else x), y)


@habit()
def unused_in_every_other_batch(case: Case) -> None:
    """Has a layer that every other batch goes through, on all ranks; AdamW skips what has no gradient."""
    model = case.module(_Sometimes)
    model.ranks = case.ranks
    case.fit(model, max_epochs=2)
    case.note_losses(model)
