"""Habits of user code with gradients: the same code under DDP gives the same numbers, at every stage and tier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from ls_strategy.testing import spawn
from ls_strategy.config import LossScaleConfig
from ls_strategy.errors import StateError
from ls_strategy.precision_plugin import ZeROPrecision
from ls_strategy.strategy import ZeROStrategy
from tests.dist.parallel_runs import Module, Run, train
from tests.dist.ranks import fit, global_batches, quiet
from tests.dist.test_combinations import EXPERTS, LAYOUTS
from tests.dist.test_habits import OPTIONS, STEPS, Habit, problems


class Clips(Habit):
    """In the place where Lightning clips, by torch's own function."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.note(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))


class ClipsByValue(Habit):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.003)


class ClipsABlock(Habit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(torch.nn.utils.clip_grad_norm_(self.blocks[1].parameters(), 0.01))


class ClipsByHand(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        self.note(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))
        optimizer.step()


class Scales(Habit):
    def on_after_backward(self) -> None:
        for p in self.blocks.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class ScalesData(Habit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.data.clamp_(-0.003, 0.003)  # type: ignore[union-attr]


class Drops(Habit):
    """Some gradients are thrown away: no decay, no step."""

    def on_after_backward(self) -> None:
        for p in self.blocks[1].parameters():
            p.grad = None
        self.last.bias.grad = None


class DropsInTurn(Habit):
    """Half of the parameters train in every second step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.blocks[self.trainer.global_step % 3].parameters():
            p.grad = None


class Replaces(Habit):
    def on_after_backward(self) -> None:
        for p in self.blocks[2].parameters():
            p.grad = p.grad.sign() * 1e-3  # type: ignore[union-attr]


class SkipsNaN(Habit):
    """A step whose gradients are not finite is left out."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * float("nan") if self.trainer.global_step == 0 and len(self.losses) == 2 else loss

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().loss(batch)
        if i == 2:
            loss = loss * float("nan")
        else:
            self.losses.append(loss.item())
        self.manual_backward(loss)
        if all(p.grad.isfinite().all() for p in self.parameters() if p.grad is not None):
            optimizer.step()


class LightningsNorm(Habit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for value in grad_norm(self, 2).values():
            self.note(value)


class Noise(Habit):
    def on_after_backward(self) -> None:
        generator = torch.Generator().manual_seed(len(self.losses))
        for p in self.parameters():
            assert p.grad is not None
            p.grad += 1e-3 * torch.randn(p.shape, generator=generator)


class ReadsAfterTheStep(Habit):
    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters():
            assert p.grad is not None
            self.note(p.grad.abs())


class ZeroesThem(Habit):
    """After backward, for a part of the model."""

    def on_after_backward(self) -> None:
        self.note(sum(p.grad.norm() for p in self.parameters()))  # type: ignore[union-attr]
        self.blocks[0].zero_grad()
        self.blocks[2].narrow.zero_grad(set_to_none=False)
        for p in self.blocks[1].parameters():
            assert p.grad is not None
            p.grad.zero_()
        self.note(sum(p.grad.norm() for p in self.parameters() if p.grad is not None))


class Conflicts(Habit):
    """Two losses, two backwards, and the second's gradient without its part against the first's (PCGrad)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        gradients = []
        for target in batch[1], -batch[1]:
            optimizer.zero_grad()
            loss = self.loss((batch[0], target))
            self.losses.append(loss.item())
            self.manual_backward(loss)
            gradients.append([p.grad.clone() for p in self.parameters()])  # type: ignore[union-attr]
        inner = sum((a * b).sum() for a, b in zip(*gradients, strict=True))
        square = sum((a * a).sum() for a in gradients[0])
        self.note(inner)
        for p, a, b in zip(self.parameters(), *gradients, strict=True):
            p.grad = a + b - (inner.clamp(max=0) / square) * a  # type: ignore[union-attr]
        optimizer.step()


HABITS = [
    Clips, ClipsByValue, ClipsABlock, ClipsByHand, Scales, ScalesData, Drops, DropsInTurn, Replaces, SkipsNaN,
    LightningsNorm, Noise, ReadsAfterTheStep, ZeroesThem, Conflicts,
]  # fmt: skip


@pytest.mark.parametrize("habit", HABITS)
def test_on_two_ranks_as_under_ddp(habit: type[Habit]) -> None:
    found = spawn(problems, 2, habit, OPTIONS, timeout_s=100)
    assert not any(found), "\n".join(found[0])


@pytest.mark.parametrize("habit", [Clips, Scales, Drops, LightningsNorm])
def test_with_accumulation_as_under_ddp(habit: type[Habit]) -> None:
    """Hooks after every backward see what has come so far."""
    found = spawn(problems, 2, habit, OPTIONS, {"accumulate_grad_batches": 2}, timeout_s=100)
    assert not any(found), "\n".join(found[0])


@pytest.mark.parametrize("habit", [Clips, Replaces, ScalesData])
def test_on_one_rank_as_a_plain_trainer(habit: type[Habit]) -> None:
    found = spawn(problems, 1, habit, OPTIONS, timeout_s=100)
    assert not any(found), "\n".join(found[0])


class TwoNorms(Habit):
    """Torch's own norm of ``p.grad`` beside the strategy's, where gradients are scaled, and where they are not."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        strategy: Any = self.trainer.strategy
        before = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])  # type: ignore[misc]
        self.note(before / strategy.grad_norm() - 1)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        after = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])  # type: ignore[misc]
        self.note(strategy.grad_norm() / after - 1)
        self.note(after.clamp(min=0.1) / 0.1 - 1)


def norms(rank: int, world_size: int, precision: str) -> list[str]:
    quiet()
    found = []
    for name, options in OPTIONS.items():
        module = TwoNorms()
        data = global_batches(rank, world_size, STEPS)
        plugin, scale = ZeROPrecision(precision), LossScaleConfig(initial_power=6)
        strategy = ZeROStrategy(**options, precision_plugin=plugin, loss_scale=scale)
        fit(strategy, module, data, use_distributed_sampler=False, max_epochs=1)
        worst = max(map(abs, module.seen))
        found += [f"{name}: {worst}, {len(module.seen)} norms"] * (not worst < 2e-6 or len(module.seen) < 2 * STEPS)
    return found


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed", "16-true"])
def test_norms_and_clipping_in_16_bit(precision: str) -> None:
    found = spawn(norms, 2, precision, timeout_s=100)
    assert not any(found), found[0]


def refused(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    quiet()
    run = Run(layout, {"num_layers": 4}, EXPERTS if "expert_parallel_size" in layout else None, 2)
    with pytest.raises(StateError, match=r"grad was read under (tensor|pipeline|expert) parallelism.*grad_norm\(\)"):
        train(rank, world_size, run, ClipsParts)


class ClipsParts(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "sequence"])
def test_norms_over_a_part_of_the_model_are_refused(name: str) -> None:
    """Not under sequence parallelism, which leaves every rank with the whole model."""
    spawn(refused, 2, LAYOUTS[name], init_process_group=False, timeout_s=60)
