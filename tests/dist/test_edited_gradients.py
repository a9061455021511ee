"""What user code makes of gradients between backward and step counts: in norms, in clipping, in the step.

Trusted run: a plain Trainer on one process that sees the same global batches.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    STAGES,
    Net,
    Result,
    assert_close,
    assert_equal,
    compare,
    fit,
    global_batches,
    mean_over_ranks,
    on_ranks,
    train_all,
    weights,
)
from tests.marks import slow

pytestmark = pytest.mark.wide

LIMIT = 0.05
"""Where norms are clipped; without clipping they are 0.3 to 3."""


class Clips(Net):
    """Asks for the norm, edits, asks again, clips. SGD, so that what is clipped wrongly shows in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.append(self.total_norm(optimizer))  # next to the losses: what `compare` looks at
        self.edit([p for group in optimizer.param_groups for p in group["params"]])
        self.losses.append(self.total_norm(optimizer))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
        self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")

    def edit(self, params: list[Tensor]) -> None:
        """Nothing, here."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class InPlace(Clips):
    def edit(self, params: list[Tensor]) -> None:
        for p in params:
            if p.grad is not None:
                p.grad.mul_(7.0).clamp_(-0.05, 0.2)


class Replaced(Clips):
    def edit(self, params: list[Tensor]) -> None:
        for p in params:
            if p.grad is not None:
                p.grad = p.grad.sign() * 0.01


class Dropped(Clips):
    """The first group gets no step, and does not count in the norm."""

    def configure_optimizers(self) -> Any:
        groups = [[*self.first.parameters(), *self.blocks[0].parameters()], [*self.blocks[1:].parameters()]]
        return torch.optim.SGD([{"params": g} for g in groups], lr=0.5, momentum=0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = None
        self.losses.append(self.total_norm(optimizer))


class AroundClipping(InPlace):
    """Edits before and after its own clipping."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.append(self.total_norm(optimizer))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.edit(params)
        super().configure_gradient_clipping(optimizer)
        self.edit(params)


class ClipsByValue(Replaced):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
        self.clip_gradients(optimizer, gradient_clip_val=0.004, gradient_clip_algorithm="value")


class Sometimes(Clips):
    """Manual; a block that every second step leaves out, whose gradients of the step before are gone."""

    manual = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != 1 or self.odd:
                h = block(h)
        return self.last(h)

    def training_step(self, batch: Any, i: int) -> None:  # type: ignore[override]
        self.odd = bool(i % 2)
        self.zero(i)
        loss = self.noted_loss(batch)
        self.manual_backward(loss)
        self.after_backward()
        self.configure_gradient_clipping(self.optimizers())
        self.losses.append(self.total_norm(self.optimizers()))
        self.optimizers().step()

    def total_norm(self, optimizer: Any) -> float:
        """Before clipping."""
        return 0.0 if not hasattr(self.trainer.strategy, "grad_norm") else super().total_norm(optimizer) * 0

    def zero(self, i: int) -> None:
        self.optimizers().zero_grad()

    def after_backward(self) -> None:
        """Nothing, here."""


class SometimesModules(Sometimes):
    def zero(self, i: int) -> None:
        self.zero_grad()


class SometimesByHand(Sometimes):
    """Not at stages 2 and 3, where there is no ``p.grad``."""

    def zero(self, i: int) -> None:
        for p in self.parameters():
            p.grad = None


class DropsAfterBackward(Sometimes):
    """Not at stages 2 and 3."""

    def after_backward(self) -> None:
        for p in self.blocks[0].parameters():
            p.grad = None


class ReplacesAfterBackward(Sometimes):
    """Only at stage 0, where ``p.grad`` is DDP's: before the averages are asked for, and after."""

    def after_backward(self) -> None:
        for p in self.first.parameters():
            p.grad = p.grad * 3.0

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
        super().total_norm(optimizer)
        for p in self.blocks[0].parameters():
            p.grad = p.grad * 2.0
        for p in self.last.parameters():
            p.grad = None
        super().configure_gradient_clipping(optimizer)


class ZeroesAfterNorm(Sometimes):
    """The norm is asked for, some modules' gradients are zeroed or dropped, then it is asked for again and clipped."""

    def forward(self, x: Tensor) -> Tensor:
        self.odd = True
        return super().forward(x)

    def zero(self, i: int) -> None:
        self.i = i
        super().zero(i)

    def after_backward(self) -> None:
        self.losses.append(Clips.total_norm(self, self.optimizers()))
        self.blocks[0].zero_grad(set_to_none=self.i % 2 == 0)
        self.first.zero_grad(set_to_none=False)
        self.losses.append(Clips.total_norm(self, self.optimizers()))


class ByHand(Sometimes):
    """Gradients that no backward pass has made; only at stage 0, where ``p.grad`` is DDP's."""

    def training_step(self, batch: Any, i: int) -> None:
        self.odd = True
        opt = self.optimizers()
        loss = self.loss(batch)
        if i % 2:
            self.manual_backward(loss)
            self.losses.append(loss.item())
        else:
            for p in self.blocks[i % 3].parameters():
                p.grad = torch.ones_like(p)
        self.configure_gradient_clipping(opt)
        opt.step()
        opt.zero_grad()


class KeepsEverySecond(Sometimes):
    """Its own ``zero_grad`` sums up what it is about to drop, and drops it every second time only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def zero(self, i: int) -> None:
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        self.losses.append(sum(p.grad.abs().sum().item() for p in self.parameters() if p.grad is not None))
        if self.calls % 2:
            super().zero_grad(set_to_none)


class OnTheInstance(KeepsEverySecond):
    """The same, put on the object."""

    def __init__(self) -> None:
        super().__init__()
        self.zero_grad = functools.partial(KeepsEverySecond.zero_grad, self)  # type: ignore[method-assign]
        self.blocks[0].zero_grad = self.count  # type: ignore[method-assign]
        self.toggle_optimizer = self.count  # type: ignore[method-assign, assignment]
        self.counted = 0

    def count(self, *_: Any) -> None:
        self.counted += 1

    def after_backward(self) -> None:
        self.blocks[0].zero_grad()
        self.toggle_optimizer(self.optimizers())
        self.losses.append(float(self.counted))


class CountsZeros(torch.optim.SGD):
    """Counts, and keeps what there is every third time."""

    zeros = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        CountsZeros.zeros += 1
        if CountsZeros.zeros % 3:
            super().zero_grad(set_to_none)


class OptimizersZeroGrad(Sometimes):
    def __init__(self) -> None:
        super().__init__()
        CountsZeros.zeros = 0

    def after_backward(self) -> None:
        self.losses.append(float(CountsZeros.zeros))

    def configure_optimizers(self) -> Any:
        return CountsZeros(self.parameters(), lr=0.5, momentum=0.9)


ANY = [ZeroesAfterNorm, Clips, InPlace, Replaced, Dropped, AroundClipping, ClipsByValue, Sometimes, SometimesModules]
BY_HAND = [SometimesByHand, DropsAfterBackward]
METHODS = [KeepsEverySecond, OnTheInstance, OptimizersZeroGrad]
AT_STAGE_0 = [ReplacesAfterBackward, ByHand]


@pytest.fixture(scope="module")
def trusted() -> dict[str, Result]:
    return spawn(train_all, 1, [*ANY, *BY_HAND, *METHODS, *AT_STAGE_0], init_process_group=False)[0]


@pytest.mark.parametrize(("world_size", "stages"), [slow(1, (0,)), (2, (1, 3)), slow(2, STAGES)])
def test_clipping_takes_the_norm_of_gradients_as_they_are(
    world_size: int, stages: tuple[int, ...], trusted: dict[str, Result]
) -> None:
    spawn(compare, world_size, ANY, trusted, stages, init_process_group=False)


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_gradients_dropped_by_hand_count_for_nothing(world_size: int, trusted: dict[str, Result]) -> None:
    spawn(compare, world_size, BY_HAND, trusted, (0, 1) if world_size > 1 else (0,), init_process_group=False)


def test_methods_of_the_users_run_in_place_of_torchs(trusted: dict[str, Result]) -> None:
    spawn(compare, 2, METHODS, trusted, STAGES, init_process_group=False)


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_stage_0_takes_what_the_user_assigns(world_size: int, trusted: dict[str, Result]) -> None:
    spawn(compare, world_size, AT_STAGE_0, trusted, (0,), init_process_group=False)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@on_ranks(2)
def test_zeroed_gradients_leave_the_norm_on_every_tier(rank: int, world_size: int, tier: Any, tmp_path: Any) -> None:
    """On a drive squares are summed when gradients are written. Trusted run: the same stage without offload."""
    for stage in (1, 2, 3):
        found = []
        for options in ({}, {"offload.optimizer": tier, "offload.nvme_path": str(tmp_path)}):
            module = ZeroesAfterNorm()
            data = global_batches(rank, world_size, 5)
            strategy = ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, **options}))  # type: ignore[arg-type]
            fit(strategy, module, data, use_distributed_sampler=False, max_epochs=1)
            found.append((module.losses, weights(module)))
        assert found[0][0] == found[1][0], f"stage {stage}"
        assert_equal(found[1][1], found[0][1], f"stage {stage}")


class Low(Clips):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_clipping_without_masters(rank: int, world_size: int, stage: int) -> None:
    """The optimizer's parameters are in 16 bit."""
    found: dict[Any, tuple[list[float], dict[str, Tensor]]] = {}
    for kind in ("ddp", "ours"):
        strategy: Any = (
            "ddp"
            if kind == "ddp"
            else ZeROStrategy(stage, sharding={"min_unit_numel": 0}, precision={"master_weights": False})
        )  # type: ignore[arg-type]
        module = Low()
        data = global_batches(rank, world_size, 4)
        fit(strategy, module, data, precision="bf16-true", use_distributed_sampler=False, max_epochs=1)
        found[kind] = (mean_over_ranks(module.losses), {k: v.float() for k, v in weights(module).items()})
    assert_close(found["ours"][0], found["ddp"][0], "losses and norms", 0.02)
    assert_close(found["ours"][1], found["ddp"][1], "weights", 0.02)
