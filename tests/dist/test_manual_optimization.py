"""``automatic_optimization=False``: equal to one process with a plain Trainer that sees the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY, call, patch

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy.config import nested
from ls_strategy.errors import StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    STAGES,
    WIDTH,
    Block,
    Net,
    assert_close,
    assert_equal,
    compare,
    fit,
    global_batches,
    on_ranks,
    train_all,
    weights,
)
from tests.dist.trusted import once
from tests.marks import few_or_all


class Manual(Net):
    """The plainest manual step; the cases below change one thing each."""

    manual = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class AdamW(Manual):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, fused=True)


class AccumulateByHand(Manual):
    """Two backward passes, one step: the sum of both."""

    def training_step(self, batch: Any, i: int) -> None:
        opt = self.optimizers()
        opt.zero_grad()
        first = self.noted_loss(batch)
        self.manual_backward(first)
        self.manual_backward(0.5 * self(batch[0]).square().mean())
        opt.step()


class AccumulateOverBatches(AdamW):
    """A step every third batch; the gradients of the last batch are never used."""

    def training_step(self, batch: Any, i: int) -> None:
        opt = self.optimizers()
        self.manual_backward(self.noted_loss(batch) / 3)
        if i % 3 == 2:
            self.clip_gradients(opt, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            opt.step()
            opt.zero_grad()


class AccumulateToggled(Manual):
    """As Lightning's documentation does it, with ``toggle_model(sync_grad=...)``."""

    def training_step(self, batch: Any, i: int) -> None:
        opt = self.optimizers()
        last = i % 2 == 1
        with opt.toggle_model(sync_grad=last):
            self.manual_backward(self.noted_loss(batch))
            if last:
                opt.step()
                opt.zero_grad()


class ZeroToZeros(Manual):
    """Gradients become zeros instead of None: momentum and decay go on."""

    def training_step(self, batch: Any, i: int) -> None:
        opt = self.optimizers()
        opt.zero_grad(set_to_none=False)
        if i != 4:
            self.manual_backward(self.noted_loss(batch))
        opt.step()


class ZeroHalfWay(Manual):
    """Gradients thrown away between two backward passes."""

    def training_step(self, batch: Any, i: int) -> None:
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(10 * self.loss(batch))
        opt.zero_grad(set_to_none=i % 2 == 0)
        self.manual_backward(self.noted_loss(batch))
        opt.step()


class ModulesZeroTheirOwn(AdamW):
    """``module.zero_grad()`` in place of the optimizer's, as GAN examples in plain torch have it, not everywhere."""

    def training_step(self, batch: Any, i: int) -> None:
        self.zero_grad()
        self.manual_backward(10 * self.loss(batch))
        self.blocks.zero_grad(set_to_none=i % 2 == 0)
        self.blocks[0].zero_grad()
        self.manual_backward(self.noted_loss(batch))
        self.optimizers().step()


class StepWithoutBackward(AdamW):
    """Every other step finds no gradients, and changes nothing."""

    def training_step(self, batch: Any, i: int) -> None:
        opt = self.optimizers()
        opt.zero_grad()
        if i % 2 == 0:
            self.manual_backward(self.noted_loss(batch))
        opt.step()


class TwoSteps(Manual):
    """Two steps on the same gradients."""

    def training_step(self, batch: Any, i: int) -> None:
        super().training_step(batch, i)
        self.optimizers().step()


class RawBackward(Manual):
    """``loss.backward()`` instead of ``manual_backward``."""

    def training_step(self, batch: Any, i: int) -> None:
        opt = self.optimizers()
        opt.zero_grad()
        self.noted_loss(batch).backward()
        opt.step()


class UserClips(Manual):
    def training_step(self, batch: Any, i: int) -> None:
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        how = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"}
        self.clip_gradients(opt, **(how if i % 2 else {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}))
        opt.step()


class Closure(AdamW):
    def training_step(self, batch: Any, i: int) -> None:
        opt = self.optimizers()

        def closure() -> Tensor:
            opt.zero_grad()
            loss = self.noted_loss(batch)
            self.manual_backward(loss)
            return loss

        opt.step(closure=closure)


class EditsInPlace(Manual):
    """A hook that changes averaged gradients where they are."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5).clamp_(-0.01, 0.01)


class EditsByReplacing(Manual):
    """A hook that assigns new gradients, and drops those of one group."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None if p.grad is None or group["drop"] else p.grad.sign() * 0.01

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.first.parameters()), "drop": True},
            {"params": [*self.blocks.parameters(), *self.last.parameters()], "drop": False},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class Gan(Manual):
    """Two optimizers that take turns, with toggling, on one shared input layer that nobody trains."""

    def build(self) -> None:
        self.shared = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.generator = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
        self.critic = nn.Sequential(Block(), nn.Linear(WIDTH, 1))

    def play(self, opt: Any, loss: Tensor, *, noted: bool = True, **clip: Any) -> None:
        """One player's turn."""
        if noted:
            self.losses.append(loss.item())
        opt.zero_grad()
        self.manual_backward(loss)
        if clip:
            self.clip_gradients(opt, **clip)
        opt.step()

    def fooled(self, fake: Tensor) -> Tensor:
        """The generator's loss."""
        return functional.softplus(-self.critic(fake)).mean()

    def told_apart(self, fake: Tensor, real: Tensor) -> Tensor:
        """The critic's loss."""
        return functional.softplus(self.critic(fake.detach())).mean() + functional.softplus(-self.critic(real)).mean()

    def training_step(self, batch: Any, i: int) -> None:
        x, real = batch
        opt_g, opt_c = self.optimizers()
        self.toggle_optimizer(opt_g)
        assert all(p.requires_grad for p in self.generator.parameters())
        assert not any(p.requires_grad for p in self.critic.parameters())
        self.play(opt_g, self.fooled(self.generator(self.shared(x))))
        self.untoggle_optimizer(opt_g)
        assert all(p.requires_grad for p in self.critic.parameters())
        assert not any(p.requires_grad for p in self.shared.parameters())
        self.toggle_optimizer(opt_c)
        loss = self.told_apart(self.generator(self.shared(x)), real)
        self.play(opt_c, loss, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.untoggle_optimizer(opt_c)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=5e-3, betas=(0.5, 0.999), eps=1e-3, fused=True),
            torch.optim.SGD(self.critic.parameters(), lr=5e-2, momentum=0.5),
        ]


class GanUntoggled(Gan):
    """The generator's backward leaves gradients in the critic, as careless code does; they are thrown away."""

    def training_step(self, batch: Any, i: int) -> None:
        x, real = batch
        opt_g, opt_c = self.optimizers()
        fake = self.generator(self.shared(x))
        self.play(opt_g, self.fooled(fake))
        self.play(opt_c, self.told_apart(fake, real), noted=False)


class OneFake(Gan):
    """Both losses share one batch of fakes, whose last layer is in the root unit: its backward is after a step."""

    def build(self) -> None:
        super().build()
        self.tail = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, i: int) -> None:
        x, real = batch
        opt_g, opt_c = self.optimizers()
        fake = self.tail(self.generator(self.shared(x)))
        self.play(opt_c, self.told_apart(fake, real))
        self.play(opt_g, self.fooled(fake))

    def configure_optimizers(self) -> Any:
        generator, critic = super().configure_optimizers()
        generator.add_param_group({"params": list(self.tail.parameters())})
        return [generator, critic]


class OldScore(Gan):
    """The critic steps between a forward and its backward, which then has the new weights: versions do not count it."""

    def training_step(self, batch: Any, i: int) -> None:
        x, real = batch
        opt_g, opt_c = self.optimizers()
        score = self.critic(self.generator(self.shared(x)))
        self.play(opt_c, functional.softplus(-self.critic(real)).mean(), noted=False)
        self.play(opt_g, functional.softplus(-score).mean())

    def configure_optimizers(self) -> Any:
        generator, _ = super().configure_optimizers()
        return [generator, torch.optim.Adam(self.critic.parameters(), lr=5e-2, eps=1e-3, fused=True)]


class TwoOptimizersOneBackward(Gan):
    """Both step on the gradients of one loss, the second one only every other time."""

    def training_step(self, batch: Any, i: int) -> None:
        opt_g, opt_c = self.optimizers()
        loss = functional.softplus(self.critic(self.generator(self.shared(batch[0])))).mean()
        self.losses.append(loss.item())
        self.manual_backward(loss)
        opt_g.step()
        opt_g.zero_grad()
        if i % 2:
            opt_c.step()
            opt_c.zero_grad()


class ClampsWeights(Manual):
    """WGAN: clamps the module's weights after the step."""

    def training_step(self, batch: Any, i: int) -> None:
        super().training_step(batch, i)
        for p in self.parameters():
            p.data.clamp_(-0.1, 0.1)


GROUPS: dict[str, list[type[Net]]] = {
    "plain": [Manual, AdamW, RawBackward, Closure],
    "accumulation": [AccumulateByHand, AccumulateOverBatches, AccumulateToggled],
    "zero_grad": [ZeroToZeros, ZeroHalfWay, ModulesZeroTheirOwn, StepWithoutBackward, TwoSteps],
    "edits": [UserClips, EditsInPlace, EditsByReplacing],
    "two_optimizers": [Gan, GanUntoggled, OneFake, OldScore, TwoOptimizersOneBackward],
}


# One case of each group, at some stage.
FEW: dict[tuple[int, ...], list[type[Net]]] = {
    (3,): [AccumulateOverBatches, Gan, OneFake],
    (1,): [EditsByReplacing, OldScore],
    (2,): [ZeroHalfWay, RawBackward],
}


@pytest.mark.parametrize("stages", FEW)
def test_few_equal_one_process(stages: tuple[int, ...]) -> None:
    """Trusted run: Lightning's plain single-device strategy."""
    trusted = once(train_all, 1, [case for cases in FEW.values() for case in cases])[0]
    spawn(compare, 2, FEW[stages], trusted, stages, init_process_group=False)


@pytest.mark.wide
@pytest.mark.parametrize("group", GROUPS)
def test_equals_one_process(group: str) -> None:
    trusted = once(train_all, 1, GROUPS[group])[0]
    spawn(compare, 2, GROUPS[group], trusted, init_process_group=False)


@pytest.mark.wide
def test_clamped_weights_equal_one_process() -> None:
    """For stage 3 see `test_clamping_sharded_weights_counts`."""
    trusted = once(train_all, 1, [ClampsWeights])[0]
    spawn(compare, 2, [ClampsWeights], trusted, (0, 1, 2), init_process_group=False)


# --- what must not pass silently --------------------------------------------------------------------------------------


class BareStep(Manual):
    """Steps the optimizer itself, behind Lightning's back."""

    def training_step(self, batch: Any, i: int) -> None:
        opt = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(self.noted_loss(batch))
        with pytest.raises(StateError, match=r"bare optimizer.*self\.optimizers\(\)"):
            opt.step()


@pytest.mark.parametrize("stages", few_or_all((3,), STAGES))
@on_ranks(2)
def test_step_of_the_bare_optimizer_is_refused(rank: int, world_size: int, stages: tuple[int, ...]) -> None:
    for stage in stages:
        module = BareStep()
        before = weights(module)
        fit(stage, module, max_steps=-1, max_epochs=1)
        assert len(module.losses) == 4
        assert_equal(weights(module), before, f"stage {stage}")


@on_ranks(2)
def test_clamping_sharded_weights_counts(rank: int, world_size: int) -> None:
    """As a WGAN's critic is, after the step."""
    ours, theirs = ClampsWeights(), ClampsWeights()
    fit(3, ours)
    fit("ddp", theirs)
    assert_close(ours.losses, theirs.losses, "losses")
    assert_close(weights(ours), weights(theirs), "weights")


@pytest.mark.wide
@on_ranks(2)
def test_checkpoint_and_resume_of_two_optimizers(rank: int, world_size: int, tmp_path: Path) -> None:
    """Six steps, a checkpoint, four steps: the same bits as ten steps."""
    for stage in (1, 2, 3):
        whole, half, rest = Gan(), Gan(), Gan()
        data = global_batches(rank, world_size, 5)
        fit(stage, whole, data, use_distributed_sampler=False)
        trainer = fit(stage, half, data, use_distributed_sampler=False, max_epochs=1)
        trainer.save_checkpoint(tmp_path / f"{stage}.ckpt")
        fit(stage, rest, data, tmp_path / f"{stage}.ckpt", use_distributed_sampler=False)
        assert_equal(half.losses + rest.losses, whole.losses, f"stage {stage}")
        assert_equal(weights(rest), weights(whole), f"stage {stage}")


class SometimesUnused(Net):
    """A block that every second step leaves out, under an optimizer that clips."""

    manual = True

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != 1 or self.step % 2 == 0:
                h = block(h)
        return self.last(h)

    def training_step(self, batch: Any, i: int) -> None:
        self.step = i
        head, body = self.optimizers()
        loss = self.noted_loss(batch)
        self.manual_backward(loss)
        self.norms.append(self.total_norm(body))
        self.clip_gradients(body, 0.05, "norm")
        for optimizer in (head, body):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        head = [*self.first.parameters(), *self.last.parameters()]
        return [torch.optim.SGD(head, lr=0.05), torch.optim.SGD(self.blocks.parameters(), lr=0.05, momentum=0.9)]


@pytest.mark.parametrize("stages", few_or_all((3,), (1, 2, 3)))
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"offload.optimizer": "cpu"}, {"offload.optimizer": "nvme"}])
@on_ranks(2)
def test_the_norm_forgets_gradients_of_the_step_before(
    rank: int, world_size: int, stages: tuple[int, ...], options: dict[str, Any], tmp_path: Any
) -> None:
    """Trusted run: DDP."""
    trusted = SometimesUnused()
    fit("ddp_find_unused_parameters_true", trusted)
    for stage in stages:
        ours = SometimesUnused()
        fit(
            ZeROStrategy(
                stage, **nested({"sharding.min_unit_numel": 0, "offload.nvme_path": str(tmp_path), **options})
            ),
            ours,
        )  # type: ignore[arg-type]
        assert_close(ours.norms, trusted.norms, f"stage {stage}, norms")
        assert_close(ours.losses, trusted.losses, f"stage {stage}, losses")


class Watching(ZeROStrategy):
    """Overrides what Lightning's `Strategy.backward` calls before and after the hooks."""

    calls = 0

    def pre_backward(self, closure_loss: Tensor) -> None:
        self.calls += 1

    def post_backward(self, closure_loss: Tensor) -> None:
        self.calls += 100


@pytest.mark.parametrize(
    "options", [{"stage": 3}, {"stage": 1, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}]
)
@on_ranks(2)
def test_the_base_class_runs_backward(rank: int, world_size: int, options: dict[str, Any]) -> None:
    strategy = Watching(**nested(options))
    with patch.object(Strategy, "backward", autospec=True, side_effect=Strategy.backward) as backward:
        fit(strategy, Net() if "parallel.pipeline.size" in options else Manual(), max_epochs=1, max_steps=3)
    assert backward.call_count == 3
    assert strategy.calls == 303


@on_ranks(2)
def test_a_mock_of_step_gets_the_arguments_of_step_and_no_other_call(rank: int, world_size: int) -> None:
    """Nothing is asked of a class's `step` at every step: what is put in its place may count."""

    class Closure(Manual):
        def training_step(self, batch: Any, i: int) -> None:
            opt = self.optimizers()
            self.manual_backward(self.noted_loss(batch))
            opt.step(closure=lambda: None, extra=1)
            opt.zero_grad()

    for stage in (1, 2, 3):
        with patch.object(torch.optim.SGD, "step") as step:
            module = Closure()
            module.on_train_start = step.reset_mock
            fit(stage, module, max_epochs=1, max_steps=2)
            assert step.mock_calls == [call(closure=ANY, extra=1)] * 2, f"stage {stage}: {step.mock_calls}"
