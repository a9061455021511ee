"""Unusual parameters, blocks and backward passes: equal to one process that sees the same global batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ls_strategy.testing import spawn
from tests.dist.ranks import (
    STAGES,
    WIDTH,
    Block,
    Net,
    assert_close,
    assert_equal,
    batches,
    fit,
    global_batches,
    mean_over_ranks,
    on_ranks,
    quiet,
    trainer_of,
    weights,
)

STEPS = 8


class Sgd(Net):
    """Momentum and decay, so that a gradient that is lost or zero instead of None shows in the weights."""

    def configure_optimizers(self) -> Any:
        params = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


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
        return F.mse_loss(self(batch[0]) * self.scale + self.shift, batch[1]) + self.last.weight.square().mean()


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
            return F.mse_loss(self(x) + way(x), y)
        (x0, x1), (y0, y1) = x.chunk(2), y.chunk(2)
        return (F.mse_loss(self(x0) + self.left(x0), y0) + F.mse_loss(self(x1) + self.right(x1), y1)) / 2


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


class Adapter(nn.Module):
    """LoRA: a frozen matrix and a trainable low-rank one; backward reads the frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Lora(Sgd):
    def build(self) -> None:
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Adapter() for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


class FrozenAfterTrainable(Sgd):
    """Blocks that are frozen entirely, with trainable ones before them: their backward only passes gradients on."""

    def build(self) -> None:
        super().build()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


# --- blocks -----------------------------------------------------------------------------------------------------------


class Twice(Sgd):
    """Every block runs twice in a row, and the first one once more at the end."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(block(h))
        return self.last(self.blocks[0](h))


@dataclass
class Output:
    """What a block of transformers might return."""

    hidden: Tensor
    extra: Any = None


class Returning(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor | dict | tuple | Output) -> Any:
        x = x["h"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else getattr(x, "hidden", x)
        h = super().forward(x)
        return {
            "dict": {"h": h, "none": None, "name": "h"},
            "tuple": (h, None, [h.detach(), 3]),
            "dataclass": Output(h, "extra"),
            "object": Opaque(h),
        }[self.kind]


class Opaque:
    """Holds a tensor where nobody looks for it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Returns(Sgd):
    """Each block returns something else than the one before, and takes what that one returned."""

    kinds = ("dict", "tuple", "dict")

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([Returning(kind) for kind in self.kinds])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h["h"] if isinstance(h, dict) else h[0] if isinstance(h, tuple) else h.hidden)


class ReturnsDataclass(Returns):
    kinds = ("dataclass", "dataclass", "dataclass")


class ReturnsOpaque(Returns):
    kinds = ("object", "object", "object")


class ReturnsNone(Sgd):
    """A block that returns nothing, and one whose result is thrown away."""

    def build(self) -> None:
        super().build()
        self.blocks.append(Silent())

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        box: list[Tensor] = []
        for block in self.blocks[:3]:
            h = block(h)
        assert self.blocks[3](h, box) is None
        self.blocks[0](h)
        return self.last(box[0])


class Silent(Block):
    def forward(self, x: Tensor, box: list[Tensor]) -> None:  # type: ignore[override]
        box.append(super().forward(x))


class NoInputGradient(Sgd):
    """The blocks come first: the inputs of the first one need no gradient; two such calls in one forward."""

    def build(self) -> None:
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x) + self.blocks[0](-x)
        return self.blocks[2](self.blocks[1](h))


class InPlace(Sgd):
    """Outputs are changed in place after the block."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
            h += 0.1
            h.mul_(0.9)
        return self.last(h)


class Views(Sgd):
    """Inputs by keyword, outputs cut into views."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            a, b = block(x=h).chunk(2, dim=-1)
            h = torch.cat([b, a], dim=-1)
        return self.last(h)


# --- recompute --------------------------------------------------------------------------------------------------------


class Recompute(Sgd):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(h)


class RecomputeReentrant(Recompute):
    reentrant = True


class RecomputeTwice(Recompute):
    """Gradients of one block arrive in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(h)


class RecomputeTwiceReentrant(RecomputeTwice):
    reentrant = True


class RecomputeTiedReentrant(RecomputeReentrant):
    """The tied weight's gradient comes once from inside a recomputed region and once from outside."""

    def build(self) -> None:
        super().build()
        self.blocks[2] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last.weight = self.blocks[2][0].weight


class RecomputeGroup(Sgd):
    """One recomputed region over two blocks, another over the last block and the root's head."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = checkpoint(lambda t: self.blocks[1](self.blocks[0](t)), h, use_reentrant=self.reentrant)
        return checkpoint(lambda t: self.last(self.blocks[2](t)), h, use_reentrant=self.reentrant)


class RecomputeGroupReentrant(RecomputeGroup):
    reentrant = True


class RecomputeInside(Sgd):
    """Recompute within a block."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([Thrifty() for _ in range(3)])


class Thrifty(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda t: self.narrow(torch.tanh(self.wide(self.norm(t)))), x, use_reentrant=False)


class RecomputeLora(Lora):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.last(h)


# --- backward ---------------------------------------------------------------------------------------------------------


class Teacher(Sgd):
    """A forward without gradients inside the step, before and after the one with."""

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self(batch[0] + 0.1)
        loss = F.mse_loss(self(batch[0]), batch[1] + 0.1 * target)
        with torch.no_grad():
            self(batch[0])
        return loss


class GradientPenalty(Sgd):
    """The loss holds a gradient: autograd inside the forward, differentiated again by backward."""

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, batch[1]) + 0.1 * slope.square().mean()


class RetainGraph(Sgd):
    """Two backward passes through one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, i: int) -> None:  # type: ignore[override]
        opt = self.optimizers()
        opt.zero_grad()
        out = self(batch[0])
        loss = F.mse_loss(out, batch[1])
        self.losses.append(loss.item())
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.3 * out.square().mean())
        opt.step()


class TwoForwardsOneBackward(Sgd):
    """Contrastive: the graphs of two forwards meet in one loss."""

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1]) + 0.1 * F.mse_loss(self(batch[0].roll(1, 1)), batch[1])


class DetachedHalf(Sgd):
    """The gradient never reaches the first blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](self.first(x)).detach()
        return self.last(self.blocks[2](self.blocks[1](h)))


CASES = {
    case.__name__: case
    for case in (
        Tied, SharedBlock, RootParameters, ZeroSize, Unused, UnusedOnOneRank, UnusedAtTimes, Half, Lora,
        FrozenAfterTrainable, Twice, Returns, ReturnsDataclass, ReturnsOpaque, ReturnsNone, NoInputGradient, InPlace,
        Views, Recompute, RecomputeReentrant, RecomputeTwice,
        RecomputeTwiceReentrant, RecomputeTiedReentrant, RecomputeGroup, RecomputeGroupReentrant, RecomputeInside, RecomputeLora,
        Teacher, GradientPenalty, RetainGraph, TwoForwardsOneBackward, DetachedHalf,
    )
}  # fmt: skip

Result = tuple[list[float], dict[str, Tensor]]


def train(rank: int, world_size: int, case: str, strategy: str | int) -> Result:
    module = CASES[case]()
    fit(strategy, module, global_batches(rank, world_size, STEPS), use_distributed_sampler=False, max_epochs=1)
    return mean_over_ranks(module.losses), weights(module)


def train_all(rank: int, world_size: int) -> dict[str, Result]:
    quiet()
    return {case: train(rank, world_size, case, "auto") for case in CASES}


@pytest.fixture(scope="module")
def trusted() -> dict[str, Result]:
    """Every case in one process under Lightning's plain single-device strategy."""
    return spawn(train_all, 1, init_process_group=False)[0]


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(case: str, trusted: dict[str, Result]) -> None:
    spawn(_compare, 2, case, trusted[case], init_process_group=False, timeout_s=60)


def _compare(rank: int, world_size: int, case: str, expected: Result) -> None:
    quiet()
    for stage in STAGES:
        losses, actual = train(rank, world_size, case, stage)
        assert_close(losses, expected[0], f"{case}, stage {stage}, losses")
        assert_close(actual, expected[1], f"{case}, stage {stage}")


# --- stage 3 only -----------------------------------------------------------------------------------------------------


class ReadsOutside(Net):
    """Uses a block's parameter outside the block."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.blocks[1].wide.weight.sum()


@on_ranks(2)
def test_a_parameter_read_outside_its_block_is_nan(rank: int, world_size: int) -> None:
    module = ReadsOutside()
    fit(3, module, max_epochs=1)
    assert math.isnan(module.losses[0])


class Samples(Net):
    """Runs the model by itself, in eval mode, on all ranks, in a hook outside every step."""

    def on_validation_epoch_end(self) -> None:
        self.eval()
        h = torch.ones(1, WIDTH)
        for _ in range(3):
            h = self(h)
        self.train()
        self.sampled = h.clone()


@on_ranks(2)
def test_sampling_between_validation_and_training(rank: int, world_size: int) -> None:
    expected = None
    for strategy in ("ddp", *STAGES):
        module = Samples()
        trainer = trainer_of(strategy)
        trainer.fit(module, batches(), batches(16, seed=2))
        result = {"sampled": module.sampled, **weights(module)}
        expected = expected or result
        assert_close(result, expected, f"stage {strategy}")
        assert_equal(trainer.global_step, 8, "steps")
