"""When updates of offloaded states begin, and what may not happen behind anybody's back."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ls_strategy.config import nested
from ls_strategy.engine import Engine
from ls_strategy.errors import RankFailedError, StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.ops.norm import sum_of_squares
from ls_strategy.tiers.stream import Stream
from ls_strategy.zero.step import fused_optimizers, update
from tests.dist.ranks import Net, assert_close, assert_equal, batches, fit, on_ranks, weights
from tests.marks import slow

pytestmark = pytest.mark.wide


class Plain(Net):
    """Notes how many updates were begun when its backward pass had ended."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)


class Looks(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Anything may be read here."""


class LooksAfterTheStep(Plain):
    """At the gradients of the steps whose numbers are ``at``, from 1."""

    at: tuple[int, ...] = ()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.trainer.global_step in self.at:
            self.seen += [p.grad.double().norm().item() for p in self.parameters() if p.grad is not None]


class LooksAtOnce(LooksAfterTheStep):
    at = (1, 3)


class LooksLate(LooksAfterTheStep):
    at = (3,)


class SkipsSteps(Plain):
    """Lightning's way to step every second batch."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Manual(Plain):
    manual = True


def strategy(stage: int, **options: Any) -> ZeROStrategy:
    options = {"offload.optimizer": "cpu", **options}
    return ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, **options}))  # type: ignore[arg-type]


def updates_begun_in_backward(module: Plain, stage: int, **options: Any) -> int:
    """In the last step; counted between the start and the end of the backward pass."""
    begun = [0]
    submit, begin_backward, end_backward, end = Stream.submit, Engine.begin_backward, Engine.end_backward, []

    def counting(stream: Stream, jobs: Any) -> Any:
        begun[0] += 1
        return submit(stream, jobs)

    def begins(engine: Engine, **how: Any) -> None:
        begun[0] = 0
        begin_backward(engine, **how)

    def ends(engine: Engine, **how: Any) -> None:
        end_backward(engine, **how)
        end.append(begun[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "submit", counting)
        patch.setattr(Engine, "begin_backward", begins)
        patch.setattr(Engine, "end_backward", ends)
        fit(strategy(stage), module, **options)
    return end[-1]


@pytest.mark.parametrize("stage", [slow(1), 2, 3])
@on_ranks(2)
def test_updates_begin_in_backward_where_nobody_looks(rank: int, world_size: int, stage: int) -> None:
    """Five units; only with one optimizer, no clipping, automatic optimization, and no hook in between."""
    assert updates_begun_in_backward(Plain(), stage) == 5
    assert updates_begun_in_backward(LooksAfterTheStep(), stage) == 5
    assert updates_begun_in_backward(LooksAtOnce(), stage) == 0
    assert updates_begun_in_backward(Looks(), stage) == 0
    assert updates_begun_in_backward(SkipsSteps(), stage) == 0
    assert updates_begun_in_backward(Manual(), stage) == 0
    assert updates_begun_in_backward(Plain(), stage, gradient_clip_val=0.1) == 0
    assert updates_begun_in_backward(Plain(), stage, accumulate_grad_batches=2) == 5


@pytest.mark.parametrize("stage", [slow(1), 2, 3])
@on_ranks(2)
def test_a_module_that_skips_steps(rank: int, world_size: int, stage: int) -> None:
    """Trusted run: the same stage without offload."""
    trusted, ours = SkipsSteps(), SkipsSteps()
    fit(stage, trusted)
    fit(strategy(stage), ours)
    assert ours.losses == trusted.losses
    assert_equal(weights(ours), weights(trusted), f"stage {stage}")


@pytest.mark.parametrize("stage", [slow(1), 2, 3])
@on_ranks(2)
def test_gradients_are_read_after_the_step(rank: int, world_size: int, stage: int) -> None:
    """From the first step on they are there; later they are gone, and that is said."""
    trusted, ours = LooksAtOnce(), LooksAtOnce()
    fit("ddp", trusted)
    fit(strategy(stage), ours)
    assert_close(ours.losses, trusted.losses, "losses")
    assert_close(ours.seen, trusted.seen, "norms")
    assert_close(weights(ours), weights(trusted), "weights")
    with pytest.raises(StateError, match=r"their update began while backward ran.*sharding.overlap_step=False"):
        fit(strategy(stage), LooksLate())
    late, in_time = LooksLate(), LooksLate()
    fit("ddp", late)
    fit(strategy(stage, **{"sharding.overlap_step": False}), in_time)
    assert_close(in_time.seen, late.seen, "norms without overlap")


class Norms(pl.Callback):
    """Asks the strategy, which knows the norm also of gradients that are gone."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.norms.append(trainer.strategy.grad_norm())


@on_ranks(2)
def test_the_norm_of_gradients_that_are_gone(rank: int, world_size: int) -> None:
    """Updates still run when the callback asks: every portion of them waits before it adds to the sum."""
    trusted, ours = Norms(), Norms()
    fit(2, Plain(), callbacks=[trusted])

    def late(*args: Any, **kwargs: Any) -> Tensor:
        time.sleep(0.02)
        return sum_of_squares(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "sum_of_squares", late)
        fit(strategy(2), Plain(), callbacks=[ours])
    assert len(ours.norms) == 8
    assert torch.equal(torch.stack(ours.norms), torch.stack(trusted.norms)), (ours.norms, trusted.norms)


class Recomputed(Plain):
    """Every block is computed again in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(h)


class RecomputedReentrant(Recomputed):
    reentrant = True


class SharedReentrant(RecomputedReentrant):
    """The first block twice, so that its gradients come in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + checkpoint(self.blocks[0], self.first(x), use_reentrant=True)


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
@on_ranks(2, timeout_s=120)
def test_recomputed_blocks(rank: int, world_size: int, stage: int) -> None:
    """Right, or refused with the cure; never wrong. Trusted run: the same without recomputing or offload."""
    trusted = Plain()
    fit(stage, trusted)
    for net in (Recomputed, RecomputedReentrant):
        ours = net()
        fit(strategy(stage), ours)
        assert_close(ours.losses, trusted.losses, f"{net.__name__}, losses")
        assert_close(weights(ours), weights(trusted), net.__name__)
    twice, again = SharedReentrant(), SharedReentrant()
    fit(strategy(stage, **{"sharding.overlap_step": False}), twice)
    refusal = ""
    try:
        fit(strategy(stage), again)
    except StateError as error:
        refusal = str(error)
    if refusal:
        assert "sharding.overlap_step=False" in refusal
    else:
        assert_equal(weights(again), weights(twice), "a block whose gradients come in two parts")


class Fails(Plain):
    """Raises in the middle of the third backward pass."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        if i == 3:
            self.first.weight.register_hook(self.fail)
        return loss

    def fail(self, _: Tensor) -> None:
        raise RuntimeError("in the middle")


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_weights_of_no_step_are_not_saved(rank: int, world_size: int, overlap: bool, tmp_path: Any) -> None:
    module = Fails()
    ours = strategy(2, **{"sharding.overlap_step": overlap})
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(ours, module, batches(numel=64))
    if overlap:
        with pytest.raises(StateError, match="do not belong to one step"):
            ours.lightning_module_state_dict()
    else:
        assert ours.lightning_module_state_dict() or rank


class LooksInBackward(Plain):
    """At the weights of all units, when the backward of the last one begins."""

    def on_fit_start(self) -> None:
        self.first.register_full_backward_hook(lambda *_: self.look())

    def look(self) -> None:
        self.seen.append(sum(v.double().sum().item() for v in self.state_dict().values()))


@on_ranks(2)
def test_a_state_dict_of_half_updated_weights_is_refused(rank: int, world_size: int) -> None:
    module = LooksInBackward()
    fit(strategy(3, **{"sharding.overlap_step": False}), module)
    assert len(set(module.seen)) > 1
    with pytest.raises(StateError, match=r"read again in the backward pass.*overlap_step=False"):
        fit(strategy(3), LooksInBackward())


class FailingUpdate:
    """The fused update as it is, but the call of this number, which raises."""

    def __init__(self, number: int) -> None:
        self.number, self.calls, self.real = number, 0, fused_optimizers.ops.adamw_

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.number:
            raise ArithmeticError("in an update")
        return self.real(*args, **options)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("net", [Plain, Looks])
@on_ranks(2)
def test_a_failed_update_ends_all_ranks_and_nothing_is_updated_after_it(
    rank: int, world_size: int, net: type[Plain], overlap: bool
) -> None:
    """Five buffers per step; on rank 1 the third step's second update fails. Before or after backward is over."""
    module, update = net(), FailingUpdate(12 if rank == 1 else 0)
    ours = strategy(2, **{"sharding.overlap_step": overlap})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_optimizers.ops, "adamw_", update)
        with pytest.raises(ArithmeticError if rank == 1 else RankFailedError, match="in an update"):
            fit(ours, module, batches(numel=64))
    assert len(module.losses) in (3, 4)
    if rank == 1:
        assert update.calls == 12
        with pytest.raises(StateError, match=r"ArithmeticError: in an update.*do not belong to one step"):
            ours.require_engine().check_complete()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("net", [Plain, Looks])
@on_ranks(1)
def test_weights_of_a_failed_update_are_not_saved(
    rank: int, world_size: int, net: type[Plain], overlap: bool, tmp_path: Any
) -> None:
    """On one rank, whose connections are not broken: by a callback that saves what an exception has left."""
    ours = strategy(2, **{"sharding.overlap_step": overlap})
    keeper = OnExceptionCheckpoint(tmp_path, "left")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_optimizers.ops, "adamw_", FailingUpdate(12))
        with pytest.raises(ArithmeticError, match="in an update"):
            fit(ours, net(), batches(numel=64), callbacks=[keeper], enable_checkpointing=True)
    assert not (tmp_path / "left.ckpt").exists()
