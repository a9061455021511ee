"""Parameters that join an optimizer while training runs: as in plain torch, at every stage and tier.

Trusted run: a plain Trainer on one process that sees the same global batches. DDP itself averages only gradients of
parameters that require one when it wraps the model.
"""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn
from torch.nn.utils import prune

from ls_strategy.config import nested
from ls_strategy.errors import PlanError, StateError
from ls_strategy.extras.callbacks import ShardedEMA
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    OPTIONS,
    Block,
    Net,
    assert_close,
    differences,
    fit,
    global_batches,
    mean_over_ranks,
    on_ranks,
    quiet,
    weights,
)
from tests.dist.trusted import once
from tests.marks import few_or_all, in_turn, wide

STEPS = 3
EPOCHS = 4

Outcome = tuple[list[float], list[float], dict[str, Tensor]]


class Joins(Net):
    """The blocks are frozen at first; Adam, whose moments and step counts show in the weights.

    With eps=1e-3 a bias that starts at zero is 1.0e-6 away from a run in fp64 in plain torch, with 1e-2 it is 0.7e-6.
    """

    fused: bool | None = True

    def __init__(self) -> None:
        super().__init__()
        self.optimizer_ids: list[int] = []

    def build(self) -> None:
        super().build()
        self.backbone = self.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        params = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(params, lr=self.lr, eps=1e-2, weight_decay=0.1, fused=self.fused)

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Rates, as loggers see them, and a weight."""
        for optimizer in self.trainer.optimizers:
            self.seen += [group["lr"] for group in optimizer.param_groups]
        self.seen.append(float(self.blocks[1].wide.weight.detach().double().sum()))

    def unfreeze(self, part: nn.Module, lr: float) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        part.requires_grad_(True)
        self.trainer.optimizers[0].add_param_group({"params": list(part.parameters()), "lr": lr})


class ByCallback(Joins):
    """Lightning's own."""

    def configure_callbacks(self) -> Any:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.3, verbose=False)]


class AtEpochs(Joins):
    """One block after the other."""

    def on_train_epoch_start(self) -> None:
        if 1 <= self.current_epoch <= 3:
            self.unfreeze(self.blocks[self.current_epoch - 1], 0.01 * self.current_epoch)


class AtABatch(Joins):
    """In the middle of an epoch, with a scheduler of torch's."""

    fused = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 4:
            self.unfreeze(self.blocks[1:], 0.02)

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class IntoAGroup(Joins):
    """Into a list that is there."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        if self.trainer.global_step == 4:
            self.blocks.requires_grad_(True)
            self.trainer.optimizers[0].param_groups[0]["params"].extend(self.blocks.parameters())


class Momentum(AtEpochs):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class Unfreezes(Joins):
    """In the optimizer from the start, without a gradient until then."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-2, weight_decay=0.1, fused=True)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.blocks.requires_grad_(True)


class ByHand(Joins):
    """In ``training_step``, before the forward of the next step; and clipped."""

    manual = True

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.noted_loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        if self.trainer.global_step == 4:
            self.unfreeze(self.blocks, 0.02)


class AnotherOptimizer(Joins):
    """Adam, then SGD with momentum on everything, as in a schedule of two phases."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.blocks.requires_grad_(True)
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)]


class Regrouped(AtEpochs):
    """A parameter moves to another group with its moments."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 3:
            first, last = self.trainer.optimizers[0].param_groups[0], self.trainer.optimizers[0].param_groups[-1]
            last["params"].append(first["params"].pop(0))


class Renamed(AtEpochs):
    """Pruning has given a parameter another name, under which it keeps its moments."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            prune.l1_unstructured(self.first, "weight", 0.3)
        super().on_train_epoch_start()


class GrowsABlock(Joins):
    """A block that is made while training runs."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            torch.manual_seed(1)
            self.blocks.append(Block())
            self.unfreeze(self.blocks[-1], 0.02)


JOIN = [
    ByCallback, AtEpochs, AtABatch, IntoAGroup, Momentum, Unfreezes, ByHand, AnotherOptimizer, Regrouped, Renamed,
    GrowsABlock,
]  # fmt: skip


def outcome(rank: int, world_size: int, module: Joins, strategy: Any, **options: Any) -> Outcome:
    data = global_batches(rank, world_size, STEPS)
    fit(strategy, module, data, use_distributed_sampler=False, **{"max_epochs": EPOCHS, **options})
    return mean_over_ranks(module.losses), module.seen, weights(module)


def assert_equal_outcomes(actual: Outcome, expected: Outcome, name: str) -> None:
    for what, ours, theirs in zip(("losses", "seen", "weights"), actual, expected, strict=True):
        assert_close(ours, theirs, f"{name}: {what}", 1e-6)


def trusted(rank: int, world_size: int, kinds: list[type[Joins]], options: dict[str, Any]) -> dict[str, Outcome]:
    quiet()
    return {kind.__name__: outcome(0, 1, kind(), "auto", devices=1, **options) for kind in kinds}


def problems(
    rank: int,
    world_size: int,
    expected: dict[str, Outcome],
    kinds: list[type[Joins]],
    options: dict[str, Any],
    trainer: dict[str, Any],
) -> list[str]:
    quiet()
    found = []
    for kind in kinds:
        different = differences(
            lambda name: outcome(rank, world_size, kind(), ZeROStrategy(**nested(options[name])), **trainer),  # noqa: B023
            expected[kind.__name__],
            options,
        )
        found += [f"{kind.__name__}, {name}: {words}" for name, words in different.items()]
    return found


def compare(world_size: int, kinds: list[type[Joins]], options: dict[str, Any], **trainer: Any) -> None:
    expected = once(trusted, 1, kinds, trainer)[0]
    found = spawn(problems, world_size, expected, kinds, options, trainer, timeout_s=150)
    assert not any(found), "\n".join(found[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "options"), in_turn(JOIN, OPTIONS, 3))
def test_on_two_ranks_as_in_a_plain_trainer(kind: type[Joins], options: dict[str, Any]) -> None:
    compare(2, [kind], options)


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "options"), in_turn([AnotherOptimizer, ByCallback, AtABatch], OPTIONS, 4))
def test_on_one_rank_as_in_a_plain_trainer(kind: type[Joins], options: dict[str, Any]) -> None:
    compare(1, [kind], options)


@pytest.mark.wide
@pytest.mark.parametrize("names", few_or_all(("zero2", "zero3_offload"), tuple(OPTIONS)))
def test_with_accumulation_and_clipping(names: tuple[str, ...]) -> None:
    options = {name: OPTIONS[name] for name in names}
    compare(2, [AtEpochs], options, accumulate_grad_batches=3, gradient_clip_val=0.1)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def resumed(rank: int, world_size: int, kind: type[Joins], strategies: list[Any], path: str) -> Outcome:
    """Train half of the epochs with one strategy, the rest with another; parameters join before and after."""
    module = kind()
    data = global_batches(rank, world_size, STEPS)
    trainer = fit(strategies[0], module, data, use_distributed_sampler=False, max_epochs=3)
    trainer.save_checkpoint(path)
    rest = kind()
    fit(strategies[1], rest, data, path, use_distributed_sampler=False, max_epochs=EPOCHS + 1)
    return mean_over_ranks(rest.losses), rest.seen, weights(rest)


def trusted_resume(rank: int, world_size: int, kind: type[Joins]) -> Outcome:
    quiet()
    with TemporaryDirectory() as path:
        return resumed(0, 1, kind, ["auto", "auto"], f"{path}/trusted.ckpt")


def resume_problems(
    rank: int,
    world_size: int,
    kind: type[Joins],
    expected: Outcome,
    options: list[dict[str, Any]],
    path: str,
    forms: tuple[str, ...],
) -> list[str]:
    quiet()

    def run(name: Any) -> Outcome:
        strategies = [ZeROStrategy(**nested({"checkpoint.format": name, **one})) for one in options]
        return resumed(rank, world_size, kind, strategies, f"{path}/{name}.ckpt")

    found = differences(run, expected, forms)
    return [f"{kind.__name__}, {options}, {name}: {words}" for name, words in found.items()]


FORMS = few_or_all(("sharded",), ("sharded", "file"))


class Stepwise(BaseFinetuning):
    """A user's own: one block after the other; those of before are unfrozen again after a resume."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if 1 <= epoch <= 3:
            self.unfreeze_and_add_param_group(pl_module.blocks[epoch - 1], optimizer, lr=0.01 * epoch)
        for block in pl_module.blocks[: max(epoch, 0)]:
            block.requires_grad_(True)


class ByOwnCallback(Joins):
    def configure_callbacks(self) -> Any:
        return [Stepwise()]


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [ByCallback, ByOwnCallback])
@pytest.mark.parametrize("names", [("zero1", "zero3, small units"), ("zero2", "zero2"), ("zero3_offload", "zero1")])
@pytest.mark.parametrize("forms", FORMS)
def test_resume_after_unfreezing(
    kind: type[Joins], names: tuple[str, str], forms: tuple[str, ...], tmp_path: Path
) -> None:
    expected = once(trusted_resume, 1, kind)[0]
    options = [OPTIONS[name] for name in names]
    found = spawn(resume_problems, 2, kind, expected, options, str(tmp_path), forms, timeout_s=100)
    assert not any(found), "\n".join(found[0])


# --- what is refused --------------------------------------------------------------------------------------------------


class InTheMiddle(Joins):
    """Between forward and step."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 2:
            self.unfreeze(self.blocks, 0.02)


class Removes(Joins):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            self.trainer.optimizers[0].param_groups[0]["params"].pop()


class Twice(Joins):
    """Past torch's own check."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            params = self.trainer.optimizers[0].param_groups[0]["params"]
            params.append(params[0])


class Strange(Joins):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            self.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3, 7))]})


class Accumulates(Joins):
    """In the middle of a step of three micro-batches, by hand."""

    manual = True

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.noted_loss(batch) / 3)
        if i == 2:
            optimizer.step()
            optimizer.zero_grad()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 1:
            self.unfreeze(self.blocks, 0.02)


class Averaged(AtEpochs):
    def configure_callbacks(self) -> Any:
        return [ShardedEMA()]


REFUSED: list[tuple[type[Joins], type[Exception], str]] = [
    (InTheMiddle, PlanError, "AdamW were changed in the middle of a training step.*on_train_batch_start"),
    (Removes, PlanError, r"'last\.bias' is in none of them any more.*requires_grad_\(False\)"),
    (Twice, PlanError, r"'first\.weight' is in optimizer 0 .*twice.*Remove it from one"),
    (Strange, PlanError, r"\(3, 7\).*not in the LightningModule"),
    (Averaged, PlanError, "ShardedEMA.*configure_optimizers"),
]


@pytest.mark.parametrize("name", [wide("zero1"), "zero3"])
@on_ranks(2, init_process_group=True)
def test_what_cannot_be_followed_is_refused(rank: int, world_size: int, name: str) -> None:
    options = OPTIONS[name]
    for kind, error, message in REFUSED:
        with pytest.raises(error, match=message):
            outcome(rank, world_size, kind(), ZeROStrategy(**nested(options)))


def accumulates(rank: int, world_size: int, expected: Outcome) -> None:
    quiet()
    actual = outcome(rank, world_size, Accumulates(), ZeROStrategy(1))
    assert_equal_outcomes(actual, expected, "stage 1")
    for stage in (2, 3):
        with pytest.raises(StateError, match=r"parameters of AdamW had gradients.*zero_grad\(\) before its backward"):
            outcome(rank, world_size, Accumulates(), ZeROStrategy(stage))


def test_groups_that_change_in_the_middle_of_an_accumulation() -> None:
    """Where ``p.grad`` holds what has been added up, it stays; averages that are sharded do not, which is an error."""
    expected = once(trusted, 1, [Accumulates], {})[0]["Accumulates"]
    spawn(accumulates, 2, expected, timeout_s=60)


# --- optimizers and their closures ------------------------------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is written with a closure; without one it is plain SGD."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        params = [p for group in self.param_groups for p in group["params"]]
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            moves = [0.01 * p.grad.sign() for p in params]
            for p, move in zip(params, moves, strict=True):
                p.add_(move)
            with torch.enable_grad():
                closure()
            for p, move in zip(params, moves, strict=True):
                p.sub_(move)
        self.descend(self.param_groups[0]["lr"])
        return loss

    def descend(self, rate: float) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=rate)


class Ahead(Sam):
    """Calls its closure once, at other weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is not None:
            for p in self.param_groups[0]["params"]:
                p.mul_(0.9)
            with torch.enable_grad():
                closure()
        self.descend(0.05)


class ByTheLoss(Sam):
    """Steps by the loss."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = 1.0 if closure is None else float(closure())
        self.descend(0.05 * loss)


class ByTheTrend(ByTheLoss):
    """Steps less once the loss grows."""

    last = math.inf

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = 1.0 if closure is None else float(closure())
        rate, self.last = 0.05 if loss <= self.last else 0.01, loss
        self.descend(rate)


class Asserts(Sam):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "Sam requires a closure"
        return super().step(closure)


class Demands(Sam):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "give a closure"
        with torch.enable_grad():
            closure()
        return super().step()


class Sometimes(Sam):
    """Twice in every fifth step, which no trial of three steps shows."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        type(self).calls += 1
        with torch.enable_grad():
            loss = closure() if closure is not None else None
            if type(self).calls % 25 == 0 and closure is not None:
                loss = closure()
        self.descend(0.05)
        return loss


class Once(Sam):
    """Calls it once, first, as torch's own optimizers do; counts."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        type(self).calls += closure is not None
        self.descend(0.05)
        return loss


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow those of another optimizer."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.AdamW(params, lr=1e-2)
        super().__init__(self.inner.param_groups, {"lr": 1e-2})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


class Borrows(torch.optim.Optimizer):
    """Has another one's groups as a property, which a copy cannot set."""

    param_groups: Any = property(lambda self: self.inner.param_groups)
    state: Any = property(lambda self: self.inner.state)

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.AdamW(params, lr=1e-2)
        self.defaults = self.inner.defaults

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


class With(Net):
    def __init__(self, make: Any, *, manual: bool = False) -> None:
        super().__init__()
        self.make = make
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, i: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, i)
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.noted_loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)
        return None

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


SEVERAL_PASSES: list[tuple[Any, str]] = [
    (torch.optim.LBFGS, r"LBFGS\.step\(\) cannot run on gradients alone"),
    (Sam, r"Sam\.step\(\) calls its closure several times in a step"),
    (Ahead, r"Ahead\.step\(closure\) computes something else"),
    (ByTheLoss, r"ByTheLoss\.step\(closure\) computes something else"),
    (ByTheTrend, r"ByTheTrend\.step\(closure\) computes something else"),
    (Asserts, r"Asserts\.step\(\) calls its closure several times in a step"),
    (Lookahead, "Lookahead wraps another optimizer, AdamW.*on_train_batch_end"),
    (Borrows, "Borrows wraps another optimizer, AdamW.*on_train_batch_end"),
    (Demands, r"Demands\.step\(\) cannot run on gradients alone \(AssertionError: give a closure\)"),
]


def several_passes(rank: int, world_size: int, stages: tuple[int, ...]) -> None:
    quiet()
    for make, message in SEVERAL_PASSES:
        for manual in (False, True):
            for stage in stages:
                module = With(make, manual=manual)
                with pytest.raises(PlanError, match=f"{message}.*automatic_optimization=False"):
                    fit(stage, module)
                assert not module.losses


@pytest.mark.parametrize(("world_size", "stages"), [(1, (2,)), wide(1, (0, 1, 2, 3)), wide(2, (0, 1, 2, 3))])
def test_optimizers_that_need_several_passes_are_refused_before_training(
    world_size: int, stages: tuple[int, ...]
) -> None:
    spawn(several_passes, world_size, stages, timeout_s=100)


def one_pass(rank: int, world_size: int) -> None:
    quiet()
    data = global_batches(rank, world_size, 8)
    for make in (Once, torch.optim.SGD, torch.optim.Adagrad):
        for manual in (False, True):
            expected = With(make, manual=manual)
            fit("ddp" if world_size > 1 else "auto", expected, data, use_distributed_sampler=False)
            for stage in (0, 1, 2, 3):
                module = With(make, manual=manual)
                Once.calls = 0
                fit(stage, module, data, use_distributed_sampler=False)
                assert make is not Once or Once.calls >= 8
                assert_close(module.losses, expected.losses, f"{make.__name__}, {manual}, {stage}", 1e-6)
                assert_close(weights(module), weights(expected), f"{make.__name__}, {manual}, {stage}", 1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_that_call_their_closure_once_work(world_size: int) -> None:
    spawn(one_pass, world_size, timeout_s=100)


@pytest.mark.parametrize("stages", few_or_all((1,), (0, 1, 3)))
@on_ranks(2, init_process_group=True)
def test_a_second_call_of_the_closure_is_an_error_whenever_it_comes(
    rank: int, world_size: int, stages: tuple[int, ...]
) -> None:
    for stage in stages:
        Sometimes.calls = 0
        with pytest.raises(PlanError, match=r"Sometimes\.step\(\) calls its closure several times in a step"):
            fit(stage, With(Sometimes), max_epochs=10)


# --- parameters in no optimizer ---------------------------------------------------------------------------------------


class InNone(Net):
    """They get gradients, which norms count, and are not stepped."""

    def configure_optimizers(self) -> Any:
        params = [*self.first.parameters(), *self.blocks[1:].parameters(), self.last.weight]
        return torch.optim.AdamW(params, lr=self.lr, eps=1e-3, fused=True)

    def on_after_backward(self) -> None:
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)))
        self.seen += [float(p.grad.norm()) for p in self.blocks[0].parameters() if p.grad is not None]
        self.last.bias.grad = None

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.zero_grad()


class AddsUp(InNone):
    """Nobody drops their gradients."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.blocks[0].wide.weight.grad.norm()))  # type: ignore[union-attr]


class OwnOptimizer(InNone):
    """One that Lightning knows nothing of steps them."""

    def on_fit_start(self) -> None:
        self.own = torch.optim.SGD(self.blocks[0].parameters(), lr=0.05, momentum=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        self.own.step()
        self.own.zero_grad()
        self.seen.append(float(self.blocks[0].wide.weight.detach().double().sum()))


class FrozenAtFirst(InNone):
    """Against one process: DDP itself leaves out what required no gradient at first."""

    def build(self) -> None:
        super().build()
        self.blocks[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.blocks[0].requires_grad_(True)


class FrozenOwn(FrozenAtFirst, OwnOptimizer):
    pass


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "options"), in_turn([InNone, AddsUp, OwnOptimizer, FrozenAtFirst, FrozenOwn], OPTIONS, 4)
)
def test_parameters_in_no_optimizer_get_gradients(kind: type[Any], options: dict[str, Any]) -> None:
    compare(2, [kind], options)


# --- one parameter in several optimizers ------------------------------------------------------------------------------


class Shared(Net):
    """Two optimizers of different kinds take turns on parameters that are partly the same."""

    manual = True

    def take(self, i: int, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.losses.append(loss.item())
        self.manual_backward(loss)
        optimizer.step()

    def training_step(self, batch: Any, i: int) -> None:
        optimizers: Any = self.optimizers()
        for number, optimizer in enumerate(optimizers):
            self.take(i, self.loss(batch) * (1 + number), optimizer)

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.seen += [group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]

    def configure_optimizers(self) -> Any:
        first = [*self.first.parameters(), *self.blocks[:2].parameters()]
        second = [*self.blocks[1:].parameters(), *self.last.parameters()]
        return [
            torch.optim.AdamW(first, lr=1e-2, eps=1e-3, weight_decay=0.1, fused=True),
            torch.optim.SGD([{"params": second[:5]}, {"params": second[5:], "lr": 0.02}], lr=0.05, momentum=0.9),
        ]


class TheSame(Shared):
    """Both of all parameters, of one kind, as Lightning's own test models have it."""

    def configure_optimizers(self) -> Any:
        make = torch.optim.AdamW
        first = make(self.parameters(), lr=1e-2, eps=1e-3)
        optimizers = [first, make(self.layers(), lr=3e-3, eps=1e-3, betas=(0.5, 0.9))]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]

    def layers(self) -> list[nn.Parameter]:
        return list(reversed(list(self.parameters())))

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()


class BothStep(TheSame):
    """One backward, both step, one drops the gradients."""

    def training_step(self, batch: Any, i: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.noted_loss(batch))
        first.step()
        second.step()
        (first if i % 2 else second).zero_grad()


class DropsBetween(Shared):
    """The first drops what it shares before the second steps."""

    def training_step(self, batch: Any, i: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.noted_loss(batch))
        first.step()
        first.zero_grad(set_to_none=i % 2 == 0)
        self.seen.append(sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None))
        second.step()
        second.zero_grad()


class ClipsBetween(BothStep):
    """By one of them, which the other sees; and by hand."""

    def training_step(self, batch: Any, i: int) -> None:
        optimizers: Any = self.optimizers()
        first, second = optimizers
        first.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        if i % 2:
            self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        else:
            self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)))
        second.step()
        self.clip_gradients(second, gradient_clip_val=0.02, gradient_clip_algorithm="value")
        self.first.weight.grad = None
        first.step()
        self.seen += [float(p.grad.norm()) for p in self.blocks[1].parameters() if p.grad is not None]


class Toggled(Shared):
    def training_step(self, batch: Any, i: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            with self.toggled_optimizer(optimizer):
                self.seen.append(sum(p.requires_grad for p in self.parameters()))
                self.take(i, self.loss(batch), optimizer)


class Accumulated(Shared):
    """Gradients of two batches; whoever is not asked to drop them keeps them."""

    def training_step(self, batch: Any, i: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.noted_loss(batch))
        if i % 2:
            first.step()
            first.zero_grad()
        else:
            second.step()


class Grows(Shared):
    """A parameter of the one joins the other."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 4:
            self.trainer.optimizers[1].add_param_group({"params": [self.first.weight], "lr": 0.01})


class ByNorm(Shared):
    """Through the strategy, or by hand."""

    def take(self, i: int, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.losses.append(loss.item())
        self.manual_backward(loss)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        if hasattr(self.trainer.strategy, "grad_norm"):
            strategy: Any = self.trainer.strategy
            assert_close([float(strategy.grad_norm(optimizer=optimizer))], [float(norm)], "norm")
            total = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            assert_close([float(strategy.grad_norm())], [float(total)], "norm of all")
        self.seen.append(float(norm))
        optimizer.step()


SHARED = [Shared, TheSame, BothStep, DropsBetween, ClipsBetween, Toggled, Accumulated, Grows, ByNorm]
ON_DEVICE = {name: one for name, one in OPTIONS.items() if "offload.optimizer" not in one}
ON_DEVICE["zero0"] = {"stage": 0}
ON_DEVICE["zero3, parameters on the host"] = {"stage": 3, "sharding.min_unit_numel": 0, "offload.parameters": "cpu"}


def shared_problems(rank: int, world_size: int, kind: type[Any], options: dict[str, Any]) -> list[str]:
    quiet()
    expected = outcome(rank, world_size, kind(), "ddp_find_unused_parameters_true" if world_size > 1 else "auto")
    found = differences(
        lambda name: outcome(rank, world_size, kind(), ZeROStrategy(**nested(options[name]))), expected, options
    )
    return [f"{kind.__name__}, {name}: {words}" for name, words in found.items()]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "options"), in_turn(SHARED, ON_DEVICE, 3))
def test_one_parameter_in_two_optimizers_as_under_ddp(kind: type[Any], options: dict[str, Any]) -> None:
    found = spawn(shared_problems, 2, kind, options, timeout_s=100)
    assert not any(found), "\n".join(found[0])


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "options"), in_turn([ClipsBetween, BothStep], ON_DEVICE, 1))
def test_one_parameter_in_two_optimizers_on_one_rank(kind: type[Any], options: dict[str, Any]) -> None:
    found = spawn(shared_problems, 1, kind, options, timeout_s=100)
    assert not any(found), "\n".join(found[0])


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Shared, TheSame])
@pytest.mark.parametrize("names", [("zero1", "zero3, small units"), ("zero2", "zero2")])
@pytest.mark.parametrize("forms", FORMS)
def test_states_of_shared_parameters_are_kept_apart_in_checkpoints(
    kind: type[Any], names: tuple[str, str], forms: tuple[str, ...], tmp_path: Path
) -> None:
    expected = once(trusted_resume, 1, kind)[0]
    options = [OPTIONS[name] for name in names]
    found = spawn(resume_problems, 2, kind, expected, options, str(tmp_path), forms, timeout_s=100)
    assert not any(found), "\n".join(found[0])


@on_ranks(2, init_process_group=True)
def test_shared_parameters_are_refused_where_states_have_one_place(rank: int, world_size: int, tmp_path: Path) -> None:
    path = str(tmp_path)
    options: list[tuple[dict[str, Any], str]] = [
        ({"stage": 1, "offload.optimizer": "cpu"}, "offload.optimizer='cpu'"),
        ({"stage": 3, "offload.optimizer": "nvme", "offload.nvme_path": path}, "offload.optimizer='nvme'"),
        ({"stage": 2, "precision.moments": "int8"}, "precision.moments='int8'"),
    ]
    for one, what in options:
        with pytest.raises(PlanError, match=rf"'blocks\.1\.\S+' is in optimizers 0 and 1, but {what}.*one of them"):
            fit(ZeROStrategy(**nested(one)), Shared())


# --- hooks of the step itself -----------------------------------------------------------------------------------------


class StepHooks(Net):
    """Hooks of the optimizer, which look at its groups; before the closure that ``step`` gets, and after it."""

    @staticmethod
    def params(optimizer: Any) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def before(self, optimizer: Any, *_: Any) -> None:
        """Clips by the norm, and drops a gradient."""
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.params(optimizer), 0.1)))
        self.params(optimizer)[1].grad = None

    def after(self, optimizer: Any, *_: Any) -> None:
        self.seen += [float(p.detach().double().norm()) for p in self.params(optimizer)]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-3, fused=self.fused)
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)
        return optimizer

    fused: bool | None = True


class StepHooksFused(StepHooks):
    """Stepped by this package's own kernels."""

    fused = None


class StepHooksLate(StepHooks):
    """Registered when the fit has begun; weights are written before the step and after."""

    def on_train_start(self) -> None:
        for optimizer in self.trainer.optimizers:
            optimizer.register_step_pre_hook(self.scale)
            optimizer.register_step_post_hook(self.clamp)

    def scale(self, optimizer: Any, *_: Any) -> None:
        for p in self.params(optimizer):
            p.data.mul_(0.99)
            if p.grad is not None:
                p.grad.mul_(0.5)

    def clamp(self, optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for p in self.params(optimizer):
                p.clamp_(-0.2, 0.2)


class StepHooksByHand(StepHooksLate):
    """After backward, where ``step`` is called without a closure."""

    manual = True


class StepHooksByHandFused(StepHooksByHand):
    fused = None


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    in_turn([StepHooks, StepHooksFused, StepHooksLate, StepHooksByHand, StepHooksByHandFused], OPTIONS, 1),
)
def test_hooks_of_the_step_see_what_they_see_under_ddp(kind: type[Any], options: dict[str, Any]) -> None:
    compare(2, [kind], options)
