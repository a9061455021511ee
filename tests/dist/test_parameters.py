"""Unusual parameters and backward passes: equal to one process that sees the same global batches."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy._torch import REFUSES_FREED_MEMORY
from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    OPTIONS,
    STAGES,
    WIDTH,
    Block,
    Net,
    Sgd,
    assert_close,
    assert_equal,
    batches,
    compare,
    fit,
    on_ranks,
    train_all,
    trainer_of,
    weights,
)
from tests.dist.trusted import once
from tests.marks import few_or_all

# --- parameters -------------------------------------------------------------------------------------------------------


class Tied(Sgd):
    """Head and input layer are one parameter, and two blocks share another."""

    def build(self) -> None:
        super().build()
        self.last.weight = self.first.weight
        self.blocks[2].wide.weight = self.blocks[0].wide.weight


class SharedBlock(Sgd):
    """One block under two names."""

    def build(self) -> None:
        super().build()
        self.blocks[2] = self.blocks[0]


class RootParameters(Sgd):
    """Parameters of the LightningModule itself, a scalar among them, used directly in training_step."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))

    def loss(self, batch: Any) -> Tensor:
        return (
            functional.mse_loss(self(batch[0]) * self.scale + self.shift, batch[1]) + self.last.weight.square().mean()
        )


class ZeroSize(Sgd):
    def build(self) -> None:
        super().build()
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.blocks[1].nothing = nn.Parameter(torch.empty(0))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.nothing.sum()


class Unused(Sgd):
    """A whole block and a root parameter that nothing uses: no decay may touch them."""

    def build(self) -> None:
        super().build()
        self.idle = Block()
        self.blocks.append(Block())
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks[:3]:
            h = block(h)
        return self.last(h)


class UnusedOnOneRank(Sgd):
    """The first half of a global batch takes another way than the second half."""

    def build(self) -> None:
        super().build()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if self.trainer.world_size > 1:
            way = (self.left, self.right)[self.global_rank]
            return functional.mse_loss(self(x) + way(x), y)
        (x0, x1), (y0, y1) = x.chunk(2), y.chunk(2)
        return (
            functional.mse_loss(self(x0) + self.left(x0), y0) + functional.mse_loss(self(x1) + self.right(x1), y1)
        ) / 2


class UnusedAtTimes(Sgd):
    """Used in every other step only."""

    def build(self) -> None:
        super().build()
        self.sometimes = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(self.sometimes[0](x) if self.calls % 2 else x)


class Half(Sgd):
    """Frozen: a whole block, half of another, and the first layer."""

    def build(self) -> None:
        super().build()
        for frozen in (self.first, self.blocks[0], self.blocks[1].wide):
            frozen.requires_grad_(False)


class FrozenAfterTrainable(Sgd):
    """Blocks that are frozen entirely, with trainable ones before them: their backward only passes gradients on."""

    def build(self) -> None:
        super().build()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


# --- backward ---------------------------------------------------------------------------------------------------------


class Teacher(Sgd):
    """A forward without gradients inside the step, before and after the one with."""

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self(batch[0] + 0.1)
        loss = functional.mse_loss(self(batch[0]), batch[1] + 0.1 * target)
        with torch.no_grad():
            self(batch[0])
        return loss


class GradientPenalty(Sgd):
    """The loss holds a gradient: autograd inside the forward, differentiated again by backward."""

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return functional.mse_loss(out, batch[1]) + 0.1 * slope.square().mean()


class RetainGraph(Sgd):
    """Two backward passes through one graph."""

    manual = True

    def training_step(self, batch: Any, i: int) -> None:  # type: ignore[override]
        opt = self.optimizers()
        opt.zero_grad()
        out = self(batch[0])
        loss = functional.mse_loss(out, batch[1])
        self.losses.append(loss.item())
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.3 * out.square().mean())
        opt.step()


class PenaltyApart(Sgd):
    """A penalty on gradients, by inputs and by weights, with a backward pass of its own after that of the loss."""

    manual = True

    def training_step(self, batch: Any, i: int) -> None:  # type: ignore[override]
        opt: Any = self.optimizers()
        opt.zero_grad()
        x = batch[0].clone().requires_grad_(i % 2 == 0)
        out = self.last(self.blocks[1](self.blocks[0](x)))  # the first block's input has a gradient in turn
        sources, slope_of = ([x], out.sum()) if i % 2 == 0 else ([*self.blocks[0].parameters()], out.mean())
        slopes = torch.autograd.grad(slope_of, sources, create_graph=True)
        penalty = slopes[0].square().mean() if i % 2 == 0 else torch.stack([s.sum() for s in slopes]).sum()
        self.manual_backward(self.noted(functional.mse_loss(out, batch[1])), retain_graph=True)
        self.manual_backward(0.1 * penalty)
        opt.step()


class TwoForwardsOneBackward(Sgd):
    """Contrastive: the graphs of two forwards meet in one loss."""

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self(batch[0]), batch[1]) + 0.1 * functional.mse_loss(
            self(batch[0].roll(1, 1)), batch[1]
        )


class DetachedHalf(Sgd):
    """The gradient never reaches the first blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](self.first(x)).detach()
        return self.last(self.blocks[2](self.blocks[1](h)))


GROUPS: dict[str, list[type[Net]]] = {
    "shared": [Tied, SharedBlock, RootParameters, ZeroSize],
    "unused": [Unused, UnusedOnOneRank, UnusedAtTimes],
    "frozen": [Half, FrozenAfterTrainable],
    "second_pass": [Teacher, GradientPenalty, RetainGraph, PenaltyApart],
    "graphs": [TwoForwardsOneBackward, DetachedHalf],
}


# Of every group some, each at a stage or two.
FEW: dict[tuple[int, ...], list[type[Net]]] = {
    (3,): [Tied, UnusedAtTimes, GradientPenalty, PenaltyApart],
    (2,): [UnusedOnOneRank, RetainGraph],
    (1,): [RootParameters, FrozenAfterTrainable],
    (0,): [TwoForwardsOneBackward],
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


# --- stage 3 only -----------------------------------------------------------------------------------------------------


class ReadsOutside(Net):
    """Uses a block's parameter outside the block."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.blocks[1].wide.weight.sum()


@on_ranks(2)
def test_a_parameter_read_outside_its_block_is_gathered(rank: int, world_size: int) -> None:
    ours, theirs = ReadsOutside(), ReadsOutside()
    fit(3, ours, max_epochs=1)
    fit("ddp", theirs, max_epochs=1)
    assert_close(ours.losses, theirs.losses, "losses")
    assert_close(weights(ours), weights(theirs), "weights")


class Keeps(Block):
    """Keeps views of weights that nothing holds after its forward, one of them inside of autograd."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.wide.weight.detach(), self.narrow.weight.data, self.norm.weight.detach()[:3]]
        return super().forward(x) + x * self.narrow.bias.detach()


class KeepsViews(Net):
    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([Keeps() for _ in range(3)])

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.seen += [float(view.norm()) for block in self.blocks for view in block.kept]
        return loss + (self.blocks[0].kept[0] @ batch[0].T).square().mean()

    def on_before_backward(self, loss: Tensor) -> None:
        for block in self.blocks:
            block.kept[0].mul_(0.9) if self.trainer.precision == "bf16-mixed" else block.kept[1].mul_(0.9)


class KeepsAliases(Block):
    """What ``detach()`` and ``data`` return is freed when the forward ends: other views of it are kept."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.wide.weight.detach().data, self.narrow.weight.data.detach()]
        self.in_evaluation = None if self.training else self.wide.weight.view(-1)[3:]
        return super().forward(x)


class KeepsOtherViews(KeepsViews):
    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([KeepsAliases() for _ in range(3)])

    def validation_step(self, batch: Any, i: int) -> None:
        self(batch[0])
        self.seen += [float(block.in_evaluation.norm()) for block in self.blocks]


@on_ranks(2)
def test_views_that_a_block_keeps_from_its_forward_have_the_values_and_take_writes(rank: int, world_size: int) -> None:
    """Their memory would be released, and a read of it would end the process."""
    for kind, precision in itertools.product((KeepsViews, KeepsOtherViews), ("32-true", "bf16-mixed")):
        ours, theirs = kind(), kind()
        for strategy, module in ((3, ours), ("ddp", theirs)):
            trainer = fit(strategy, module, max_steps=2, precision=precision)
            trainer.validate(module, batches(), verbose=False)
        assert_close(ours.seen, theirs.seen, f"{kind.__name__}, {precision}, views")
        assert_close(ours.losses, theirs.losses, f"{kind.__name__}, {precision}, losses")
        assert_close(weights(ours), weights(theirs), f"{kind.__name__}, {precision}, weights")


class KeepsPlainViews(Block):
    """Keeps views that share the weight's place in autograd's graph."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.wide.weight
        self.kept = [weight[0], weight.view(-1)[3:], weight.t()]
        return super().forward(x)


class UsesPlainViews(Net):
    use: int | None = None

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([KeepsPlainViews() for _ in range(3)])

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.use is None:
            return loss
        return loss + self.blocks[1].kept[self.use].square().sum()


@pytest.mark.skipif(not REFUSES_FREED_MEMORY, reason="torch 2.11 cannot take the refusal back")
@on_ranks(2)
def test_views_of_the_weight_itself_that_a_block_keeps_are_refused_after_its_release(rank: int, world: int) -> None:
    """A read of the memory would end the process. Unused ones cost nothing, and later fits get the same numbers."""
    ours, theirs = UsesPlainViews(), UsesPlainViews()
    for use in range(3):
        ours.use = use
        with pytest.raises(RuntimeError, match=r"'blocks\.1.*Take the view where it is used"):
            fit(3, ours, max_steps=1)
    ours.use, ours.losses = None, []
    fit(3, ours, max_steps=2)
    fit("ddp", theirs, max_steps=2)
    assert_close(ours.losses, theirs.losses, "losses")
    assert_close(weights(ours), weights(theirs), "weights")


class Transforms(Net):
    """Differentiates layers of blocks per sample, outside of the blocks' own forwards."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        for layer in (self.blocks[1].wide, self.last):
            per_sample = torch.func.grad(lambda row, layer=layer: layer(row).square().sum())
            loss = loss + torch.func.vmap(per_sample)(batch[0]).square().mean()
        return loss


@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.wide), "bf16-mixed"])
@on_ranks(2)
def test_a_layer_inside_of_a_transform_of_torch_func_is_gathered(rank: int, world_size: int, precision: str) -> None:
    ours, theirs = Transforms(), Transforms()
    fit(3, ours, max_steps=2, precision=precision)
    fit("ddp", theirs, max_steps=2, precision=precision)
    assert_close(ours.losses, theirs.losses, "losses")
    assert_close(weights(ours), weights(theirs), "weights")


class Tangents(Net):
    """Differentiates along a direction in a block's weights, which may still be on their way from the last step."""

    def loss(self, batch: Any) -> Tensor:
        block = self.blocks[1]
        values = dict(block.named_parameters())
        direction = {name: torch.ones_like(value) for name, value in values.items()}
        run = partial(torch.func.functional_call, block, args=(batch[0],))
        change: Tensor = torch.func.jvp(run, (values,), (direction,))[1]
        return super().loss(batch) + 0.01 * change.square().mean()


@pytest.mark.parametrize("name", ["zero1_offload", pytest.param("zero3_offload", marks=pytest.mark.wide)])
@on_ranks(2)
def test_weights_are_the_primals_of_a_transform_of_torch_func(rank: int, world_size: int, name: str) -> None:
    ours, theirs = Tangents(), Tangents()
    fit(ZeROStrategy(**nested(OPTIONS[name])), ours, max_steps=3)
    fit("ddp", theirs, max_steps=3)
    assert_close(ours.losses, theirs.losses, "losses")
    assert_close(weights(ours), weights(theirs), "weights")


class Samples(Net):
    """Runs the model by itself, in eval mode, on all ranks, in a hook outside every step."""

    def on_validation_epoch_end(self) -> None:
        self.eval()
        h = torch.ones(1, WIDTH)
        for _ in range(3):
            h = self(h)
        self.train()
        self.sampled = h.clone()


@pytest.mark.wide
@pytest.mark.parametrize("stages", few_or_all((3,), STAGES))
@on_ranks(2)
def test_sampling_between_validation_and_training(rank: int, world_size: int, stages: tuple[int, ...]) -> None:
    expected = None
    for strategy in ("ddp", *stages):
        module = Samples()
        trainer = trainer_of(strategy)
        trainer.fit(module, batches(), batches(16, seed=2))
        result = {"sampled": module.sampled, **weights(module)}
        expected = expected or result
        assert_close(result, expected, f"stage {strategy}")
        assert_equal(trainer.global_step, 8, "steps")
