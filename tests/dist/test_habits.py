"""Habits of user code outside the standard path: the same code under DDP gives the same numbers.

Weights that hooks read and write, wherever they rest. Every habit runs under DDP and at every stage on the same ranks;
what it reads, its losses and the final weights are compared.
"""

from __future__ import annotations

import copy
import gc
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ls_strategy.config import nested
from ls_strategy.errors import StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    OPTIONS,
    WIDTH,
    Net,
    differences,
    fit,
    global_batches,
    mean_over_ranks,
    on_ranks,
    quiet,
    weights,
)
from tests.marks import in_turn

STEPS = 6


class Habit(Net):
    """Notes numbers in ``seen``."""

    def note(self, value: Any) -> None:
        self.seen.append(float(torch.as_tensor(value).double().sum()))


# --- reading ----------------------------------------------------------------------------------------------------------


class ReadsNorms(Habit):
    """After every batch, and in the middle of the step."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(sum(p.norm() for p in self.parameters()))

    def on_after_backward(self) -> None:
        self.note(self.blocks[1].wide.weight.abs().max())


class Penalty(Habit):
    """L1 and L2 of everything, with gradients; some parameters before their block runs, some after."""

    def loss(self, batch: Any) -> Tensor:
        before = sum(p.abs().sum() for p in self.blocks[1].parameters())
        loss = super().loss(batch)
        after = sum(p.square().sum() for p in self.parameters())
        cross = (self.blocks[0].wide.weight * self.blocks[2].wide.weight).sum()
        return loss + 1e-3 * before + 1e-3 * after + 1e-3 * cross


class PenaltyOnProducts(Habit):
    """Results of views and products that autograd saves: orthogonality of each weight."""

    def loss(self, batch: Any) -> Tensor:
        terms = []
        for block in self.blocks:
            w = block.wide.weight
            terms.append((w.t() @ w - torch.eye(WIDTH)).square().mean())
        return super().loss(batch) + 0.01 * torch.stack(terms).sum()


class ReadsVector(Habit):
    def on_train_batch_start(self, *_: Any) -> None:
        self.note(parameters_to_vector(self.parameters()).detach().abs())

    def on_train_epoch_end(self) -> None:
        self.note(parameters_to_vector(self.blocks[2].parameters()).norm())


class ReadsStateDict(Habit):
    def on_train_batch_end(self, *_: Any) -> None:
        for name, value in sorted(self.state_dict().items()):
            if "bias" in name:
                self.note(value)
        self.note(self.blocks[1].state_dict()["narrow.weight"])


class Copies(Habit):
    """A copy of a block stays as it was, and works on its own."""

    def on_train_batch_start(self, *_: Any) -> None:
        block = copy.deepcopy(self.blocks[1])
        assert all(type(p) is nn.Parameter for p in block.parameters())
        with torch.no_grad():
            for p in block.parameters():
                p.mul_(2)
            self.note(block(torch.ones(1, WIDTH)))


class KeepsViews(Habit):
    """Views that outlive the hook: they go on showing the parameter."""

    def on_train_start(self) -> None:
        self.kept = [self.blocks[0].wide.weight.detach(), self.last.weight.data, self.blocks[2].norm.bias.view(-1)]
        self.first_values = [k.clone() for k in self.kept]

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(sum(p.square().sum() for p in self.parameters()))
        self.note(self.first_values[0])


class UsesWeightsElsewhere(Habit):
    """A block's weight used by functions outside of the block, before, after and without the block's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.layer_norm(x, (WIDTH,), self.blocks[2].norm.weight, self.blocks[2].norm.bias)
        h = super().forward(x)
        return h + 0.1 * functional.linear(torch.tanh(functional.linear(h, self.blocks[0].wide.weight)),
                                           self.blocks[1].narrow.weight)  # fmt: skip


class ForwardInHook(Habit):
    """The model itself, run in a hook without gradients."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.note(self(batch[0]).square().mean())
        self.note(self.blocks[0](batch[0]).detach().mean())


# --- writing ----------------------------------------------------------------------------------------------------------


class Clamps(Habit):
    """As a WGAN's critic, in place of data."""

    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters():
            p.data.clamp_(-0.15, 0.15)


class ScalesInPlace(Habit):
    def on_train_batch_start(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.blocks[1].parameters():
                p.mul_(0.95)


class SetsData(Habit):
    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters():
            p.data = p.data * 0.99


class Vectors(Habit):
    def on_train_batch_end(self, *_: Any) -> None:
        vector_to_parameters(parameters_to_vector(self.parameters()).detach() * 0.98, self.parameters())


class LoadsAtStart(Habit):
    """Pretrained weights in a hook."""

    def on_fit_start(self) -> None:
        self.load_state_dict({k: v * 0.5 for k, v in self.state_dict().items()})

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(self.first.weight)


class LoadsAPart(Habit):
    def on_train_epoch_start(self) -> None:
        self.blocks[1].load_state_dict(self.blocks[0].state_dict())


class ResetsALayer(Habit):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            torch.manual_seed(7)
            self.blocks[2].wide.reset_parameters()
            nn.init.constant_(self.blocks[0].narrow.bias, 0.25)


class NormalisesInStep(Habit):
    """As SwAV's prototypes, at the start of the step; and in a block's own forward."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        with torch.no_grad():
            w = self.blocks[1].wide.weight.data.clone()
            self.blocks[1].wide.weight.copy_(functional.normalize(w, dim=1))
        return super().training_step(batch, i)


class NormalisesInForward(Habit):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.register_forward_pre_hook(normalise)


def normalise(block: nn.Module, _: Any) -> None:
    w: Any = block.wide.weight  # type: ignore[union-attr]
    w.data = functional.normalize(w.data, dim=1)


class Momentum(Habit):
    """A teacher that follows by a moving average, as in BYOL and DINO: in the model, without gradients."""

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = batch[0]
            for block in self.teacher:
                target = block(target)
        h = self.first(batch[0])
        for block in self.blocks:
            h = block(h)
        return functional.mse_loss(self.last(h), batch[1]) + functional.mse_loss(h, target)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for t, p in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
                t.mul_(0.9).add_(p, alpha=0.1)


class MomentumOfData(Momentum):
    def on_train_batch_end(self, *_: Any) -> None:
        for t, p in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
            t.data = t.data * 0.9 + p.data * 0.1


class Average(Habit):
    """An average kept outside of the module, swapped in at the end."""

    def on_train_start(self) -> None:
        self.average = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        for a, p in zip(self.average, self.parameters(), strict=True):
            a.lerp_(p.detach(), 0.3)

    def on_train_end(self) -> None:
        with torch.no_grad():
            for a, p in zip(self.average, self.parameters(), strict=True):
                p.copy_(a)


class Sam(Habit):
    """Two backward passes per step, the weights perturbed in between."""

    manual = True

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.noted_loss(batch)
        self.manual_backward(loss)
        optimizer.zero_grad()
        with torch.no_grad():
            moves = [0.01 * p.sign() for p in self.parameters()]
            for p, move in zip(self.parameters(), moves, strict=True):
                p.add_(move)
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, move in zip(self.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


HABITS = [
    ReadsNorms, Penalty, PenaltyOnProducts, ReadsVector, ReadsStateDict, Copies, KeepsViews, UsesWeightsElsewhere,
    ForwardInHook, Clamps, ScalesInPlace, SetsData, Vectors, LoadsAtStart, LoadsAPart, ResetsALayer, NormalisesInStep,
    NormalisesInForward, Momentum, MomentumOfData, Average, Sam,
]  # fmt: skip


def outcome(rank: int, world_size: int, habit: type[Habit], strategy: Any, **trainer: Any) -> tuple[Any, ...]:
    module = habit()
    data = global_batches(rank, world_size, STEPS)
    fit(strategy, module, data, use_distributed_sampler=False, max_epochs=2, **trainer)
    return mean_over_ranks(module.losses), mean_over_ranks(module.seen), weights(module)


def problems(
    rank: int, world_size: int, habit: type[Habit], options: dict[str, dict[str, Any]], trainer: Any = None
) -> list[str]:
    quiet()
    trainer = trainer or {}
    expected = outcome(rank, world_size, habit, "ddp" if world_size > 1 else "auto", **trainer)
    found = differences(
        lambda name: outcome(rank, world_size, habit, ZeROStrategy(**nested(options[name])), **trainer),
        expected,
        options,
    )
    return [f"{habit.__name__}, {name}: {words}" for name, words in found.items()]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("habit", "options"), in_turn(HABITS, OPTIONS))
def test_on_two_ranks_as_under_ddp(habit: type[Habit], options: dict[str, Any]) -> None:
    found = spawn(problems, 2, habit, options, timeout_s=100)
    assert not any(found), "\n".join(found[0])


class WritesOnOneRank(Habit):
    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_rank == 1:
            with torch.no_grad():
                self.first.weight.mul_(0.5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["zero2", "zero1", "zero1_offload"])
@on_ranks(2, init_process_group=True)
def test_a_write_on_one_rank_is_an_error_on_all(rank: int, world_size: int, name: str) -> None:
    """Under DDP the ranks would go on with different models. At stage 3 the touch itself waits for the others."""
    options = OPTIONS[name]
    with pytest.raises(StateError, match="written to on some ranks and not on others"):
        outcome(rank, world_size, WritesOnOneRank, ZeROStrategy(**nested(options)))


class Bounded(Clamps):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)  # stepped by one kernel on every tier

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            nn.init.constant_(self.blocks[1].narrow.bias, 0.1)


def in_16_bit(rank: int, world_size: int, precision: str, names: tuple[str, ...]) -> list[str]:
    quiet()
    results, found = {}, []
    for name in ("zero1", *names):
        module = Bounded()
        data = global_batches(rank, world_size, STEPS)
        options = {"use_distributed_sampler": False, "max_epochs": 2, "precision": precision}
        fit(ZeROStrategy(**nested(OPTIONS[name])), module, data, **options)
        results[name] = weights(module)
        largest = max(float(v.abs().max()) for v in results[name].values())
        found += [f"{name}: {largest} after clamping to 0.15"] * (largest > 0.1505)
        same = all(torch.equal(v, results["zero1"][k]) for k, v in results[name].items())
        found += [] if same else [f"{name} differs from zero1"]
    return found


OTHERS = ("zero2", "zero3", "zero3, small units", "zero3_offload", "zero1_offload")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("precision", "names"), [("bf16-true", OTHERS[3:4]), ("bf16-true", OTHERS), ("bf16-mixed", OTHERS)]
)
def test_writes_reach_the_masters_in_16_bit(precision: str, names: tuple[str, ...]) -> None:
    """All stages and tiers come to the same bits, and the bounds hold."""
    found = spawn(in_16_bit, 2, precision, names, timeout_s=100)
    assert not any(found), found[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("habit", "options"), in_turn([Penalty, SetsData, Clamps, Momentum, Copies, Average], OPTIONS))
def test_on_one_rank_as_a_plain_trainer(habit: type[Habit], options: dict[str, Any]) -> None:
    found = spawn(problems, 1, habit, options, timeout_s=100)
    assert not any(found), "\n".join(found[0])


# --- gathered_parameters ----------------------------------------------------------------------------------------------


class Opens(Habit):
    """Reads and writes a block through the strategy, or through the module alone under DDP."""

    def on_train_batch_end(self, *_: Any) -> None:
        strategy: Any = self.trainer.strategy
        opened = getattr(strategy, "gathered_parameters", lambda *_, **__: nullcontext())
        with opened(self.blocks[1]):
            self.note(self.blocks[1].wide.weight.norm())
        with opened(self.blocks[1].parameters(), modify=True):
            self.blocks[1].wide.weight.data.mul_(0.9)
        with opened():
            self.note(parameters_to_vector(self.parameters()).norm())


class WritesUnasked(Habit):
    def on_train_batch_end(self, *_: Any) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.gathered_parameters(self.blocks[1]):
            self.blocks[1].wide.weight.data[0].zero_()  # in one rank's shard only


def refused(rank: int, world_size: int, habit: type[Habit], message: str) -> None:
    quiet()
    for name in ("zero3, small units", "zero3_offload"):
        with pytest.raises(StateError, match=message):
            outcome(rank, world_size, habit, ZeROStrategy(**nested(OPTIONS[name])))


@pytest.mark.wide
def test_opened_parameters_count_like_others() -> None:
    found = spawn(problems, 2, Opens, OPTIONS, timeout_s=100)
    assert not any(found), "\n".join(found[0])


def test_a_write_where_only_reading_was_asked_for_is_an_error_on_all_ranks() -> None:
    spawn(refused, 2, WritesUnasked, r"opened for reading.*modify=True", timeout_s=60)


class GivesAnotherShape(Habit):
    def on_train_batch_end(self, *_: Any) -> None:
        self.last.weight.data = torch.zeros(2, 2)


def test_data_of_another_shape_is_an_error() -> None:
    spawn(refused, 2, GivesAnotherShape, r"last\.weight\.data was set to.*shape \(2, 2\)", timeout_s=60)


# --- memory -----------------------------------------------------------------------------------------------------------


class Weighs(Habit):
    """How many blocks are in memory while all are read, one after the other, and after the hook."""

    def in_memory(self) -> int:
        strategy: Any = self.trainer.strategy
        blocks = [f for f in strategy.require_engine().flats if f.name.startswith("blocks")]
        return sum(f.full.untyped_storage().size() > 0 for f in blocks)

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([*self.blocks, *copy.deepcopy(self.blocks)])
        self.largest, self.between = 0, 0

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.between = max(self.between, self.in_memory())
        penalty: Any = 0
        for p in self.blocks.parameters():
            penalty = penalty + p.square().sum()
            self.largest = max(self.largest, self.in_memory())
        return super().training_step(batch, i) + 1e-3 * penalty

    def on_after_backward(self) -> None:
        for p in self.blocks.parameters():
            p.norm()
            self.largest = max(self.largest, self.in_memory())


@on_ranks(2, init_process_group=True)
def test_reading_all_blocks_takes_the_memory_of_few(rank: int, world_size: int) -> None:
    """Two that are kept, the one that is read, and the next one that is being gathered for the forward."""
    module = Weighs()
    fit(3, module, global_batches(rank, world_size, 2), use_distributed_sampler=False, max_epochs=1)
    largest, between = module.largest, module.between
    assert 1 <= largest <= 4
    assert between <= 1


class ReadsInAThread(Habit):
    """A thread of the user's looks at weights while training goes on."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.errors: list[BaseException] = []

    def look(self) -> None:
        weight = self.blocks[1].wide.weight
        try:
            self.note(weight.norm() if self.of == "weight" else weight.grad.norm())  # type: ignore[union-attr]
        except StateError as error:
            self.errors.append(error)

    def on_after_backward(self) -> None:
        thread = threading.Thread(target=self.look, name="users_logger")
        thread.start()
        thread.join()


@pytest.mark.parametrize("of", ["weight", "gradient"])
@on_ranks(2, init_process_group=True)
def test_a_thread_beside_the_training_is_refused(rank: int, world_size: int, of: str) -> None:
    for stage in (2, 3) if of == "gradient" else (3,):
        module = ReadsInAThread(of)
        fit(stage, module, global_batches(rank, world_size, 2), use_distributed_sampler=False, max_epochs=1)
        assert len(module.errors) == 2
        assert "used by the thread 'users_logger' while another thread trains" in str(module.errors[0])
        if of == "weight":
            module.look()  # after the fit every thread may
            assert len(module.errors) == 2


@on_ranks(2, init_process_group=True)
def test_a_parameter_without_its_model_is_an_error_and_no_nan(rank: int, world_size: int) -> None:
    module = Habit()
    fit(3, module, global_batches(rank, world_size, 2), use_distributed_sampler=False, max_epochs=1)
    param = module.blocks[0].wide.weight
    module._trainer = None
    del module
    gc.collect()
    gc.collect()  # what tensors held in circles is seen when they are gone
    for use in (lambda: param.sum(), lambda: param.data):
        with pytest.raises(StateError, match=r"shape .* used after the model .* were freed"):
            use()
