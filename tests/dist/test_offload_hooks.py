"""Whoever reads weights, gradients or states of an offloaded run reads what a run without offload would show."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from ls_strategy.config import nested
from ls_strategy.extras.callbacks import Monitor, ShardedEMA
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.tiers import stream
from ls_strategy.tiers.nvme import NVMeTier
from ls_strategy.tiers.stream import Ticket
from ls_strategy.zero.flat import averages, flat_states
from ls_strategy.zero.step import fused_optimizers
from tests.dist.ranks import WIDTH, Block, Net, assert_equal, batches, fit, on_ranks, trainer_of, weights

pytestmark = pytest.mark.wide

TIERS = {
    1: [{"offload.optimizer": "cpu"}, {"offload.optimizer": "nvme"}],
    2: [{"offload.optimizer": "cpu"}, {"offload.optimizer": "nvme"}],
    3: [
        {"offload.optimizer": "cpu", "offload.parameters": "cpu"},
        {"offload.optimizer": "nvme", "offload.parameters": "nvme"},
    ],
}


class ByDefault(Net):
    """An optimizer that names no kernel, and a learning rate that changes at every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step % 3))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def validation_step(self, batch: Any, i: int) -> None:
        self.seen.append(self.loss(batch).item())


class ReadsWeights(ByDefault):
    def on_train_batch_end(self, *_: Any) -> None:
        """After every step, through the strategy and, where they are whole, directly."""
        strategy: Any = self.trainer.strategy
        with strategy.gathered_parameters():
            self.seen.append(self.first.weight.double().sum().item())


class ReadsGradients(ByDefault):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """What the optimizer's groups hold."""
        self.seen += [p.grad.double().sum().item() for g in optimizer.param_groups for p in g["params"] if p.numel()]


class ChangesGradients(ByDefault):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad = p.grad * 0.5


class StepHooks(ByDefault):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)
        optimizer.register_step_post_hook(self.after_step)
        return optimizer

    def after_step(self, optimizer: Any, *_: Any) -> None:
        self.seen += [p.detach().double().sum().item() for p in optimizer.param_groups[0]["params"]]


class Toggles(ByDefault):
    """A block is frozen for a while, another is not used at first."""

    def training_step(self, batch: Any, i: int) -> Any:
        self.blocks[1].requires_grad_(i % 4 != 2)
        return super().training_step(batch, i)

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != 2 or self.trainer.global_step > 3:
                h = block(h)
        return self.last(h)


def pairs(stage: int, path: Any) -> list[ZeROStrategy]:
    return [
        ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, "offload.nvme_path": str(path), **o}))
        for o in TIERS[stage]
    ]  # type: ignore


EVERYWHERE = [ByDefault, ReadsWeights, Toggles, ReadsGradients, ChangesGradients, StepHooks]


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, timeout_s=150)
def test_hooks(rank: int, world_size: int, stage: int, tmp_path: Any) -> None:
    """Losses, weights and what the hooks saw; trusted run: the same stage without offload."""
    for net in EVERYWHERE:
        trusted = net()
        fit(stage, trusted)
        for strategy in pairs(stage, tmp_path):
            ours = net()
            fit(strategy, ours)
            what = f"{net.__name__} on {strategy.config.offload.optimizer}"
            assert ours.losses == trusted.losses, what
            assert ours.seen == trusted.seen, what
            assert_equal(weights(ours), weights(trusted), what)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2, timeout_s=120)
def test_validation_between_steps_and_averages(rank: int, world_size: int, stage: int, tmp_path: Any) -> None:
    """Validation after every second batch, on the average of the weights; and a second fit, a test, a prediction."""

    def train(options: dict[str, Any]) -> tuple[Any, ...]:
        module = ByDefault()
        data = batches()
        ema = ShardedEMA(decay=0.7)
        trainer = trainer_of(strategy(options), callbacks=[ema, Monitor()], val_check_interval=2, max_epochs=1)
        trainer.fit(module, data, batches(seed=2))
        averages = [a.clone() for a in ema._average]
        tested = trainer.test(module, batches(seed=3), verbose=False)
        predicted = torch.cat(trainer.predict(module, batches(seed=3)))  # type: ignore[arg-type]
        again = trainer_of(strategy(options), max_epochs=1)
        again.fit(module, data)
        return module.losses, module.seen, averages, tested, predicted, weights(module)

    def strategy(options: dict[str, Any]) -> ZeROStrategy:
        return ZeROStrategy(
            stage, **nested({"sharding.min_unit_numel": 0, "offload.nvme_path": str(tmp_path), **options})
        )  # type: ignore[arg-type]

    trusted = train({})
    for options in TIERS[stage]:
        ours = train(options)
        assert len(ours[0]) == 8
        for a, b in zip(ours[:2], trusted[:2], strict=True):
            assert a == b
        for a, b in zip(ours[2], trusted[2], strict=True):
            assert torch.equal(a, b)
        assert ours[3] == trusted[3]
        assert torch.equal(ours[4], trusted[4])
        assert_equal(ours[5], trusted[5], "weights")


class Late(ByDefault):
    """Built in ``configure_model``."""

    def build(self) -> None:
        self.first: Any = None
        self.was_on_meta = False

    def configure_model(self) -> None:
        if self.first is None:
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList([Block() for _ in range(3)])
            self.last = nn.Linear(WIDTH, WIDTH)
            self.was_on_meta = self.first.weight.is_meta


@on_ranks(1)
def test_one_process_never_holds_the_model(rank: int, world_size: int, tmp_path: Any) -> None:
    """Stage 3 with offloaded parameters builds on meta also without ranks; weights are drawn as elsewhere."""
    for strategy in pairs(3, tmp_path):
        module = Late()
        torch.manual_seed(1)
        trainer = fit(strategy, module)
        assert module.was_on_meta
        assert all(map(math.isfinite, module.losses))
        state = trainer.strategy.lightning_module_state_dict()
        assert all(bool(v.isfinite().all()) for v in state.values())


class Seconds:
    """A clock that only updates move: every one of a buffer takes a second, and all else none."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.updates = 0.0, 0
        self.may_update = threading.Semaphore(0)
        self.gated = False
        update, wait = fused_optimizers.ops.adamw_, Ticket.wait

        def takes_a_second(*args: Any, **options: Any) -> None:
            if self.gated:
                assert self.may_update.acquire(timeout=20), "nobody waits for this update"
            update(*args, **options)
            self.updates += 1
            self.now += 1.0

        def notes(ticket: Ticket) -> None:
            self.may_update.release()
            wait(ticket)

        patch.setattr(fused_optimizers.ops, "adamw_", takes_a_second)
        patch.setattr(Ticket, "wait", notes)
        for module in (stream, flat_states, averages):
            patch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now, monotonic=time.monotonic))


class Counts(pl.Callback):
    """Seconds that were exposed so far, after every step. ``before``: what to do before each, ``after``: after all."""

    def __init__(self, before: Any = None, after: Any = None) -> None:
        self.exposed: list[float] = []
        self.before, self.after = before, after

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.before:
            self.before(trainer.strategy.require_engine().flats)

    def on_train_end(self, *_: Any) -> None:
        if self.after:
            self.after()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.exposed.append(trainer.strategy.exposed_step_s)


def until_done(flats: Any) -> None:
    """The host computes long enough for all updates to end."""
    while not all(f.updating is None or f.updating.done for f in flats):
        time.sleep(0.001)


def exposed(clock: Seconds, counts: Counts, *, overlap: bool) -> list[float]:
    """Eight steps of five buffers; clipping keeps updates out of backward."""
    ours = ZeROStrategy(2, sharding={"min_unit_numel": 0, "overlap_step": overlap}, offload={"optimizer": "cpu"})
    fit(ours, ByDefault(), callbacks=[counts], gradient_clip_val=1.0)
    assert clock.updates == 5 * len(counts.exposed)
    return counts.exposed


@on_ranks(1)
def test_exposed_time_is_what_training_waits_for_updates(rank: int, world_size: int) -> None:
    """Without overlap all of it; with it none of updates that end before they are needed, all of those that do not."""
    with pytest.MonkeyPatch.context() as patch:
        found = exposed(Seconds(patch), Counts(), overlap=False)
    steps = len(found)
    assert steps >= 8
    assert found == [5.0 * (i + 1) for i in range(steps)], "blocking"
    with pytest.MonkeyPatch.context() as patch:
        found = exposed(Seconds(patch), Counts(before=until_done), overlap=True)
    assert found == [0.0] * steps, "hidden"
    with pytest.MonkeyPatch.context() as patch:
        clock = Seconds(patch)
        clock.gated = True  # no update runs before somebody waits for one, until the last step is over
        found = exposed(clock, Counts(after=lambda: clock.may_update.release(5)), overlap=True)
    assert found == [5.0 * i for i in range(steps)], "those of the step before"


class Landing(Future):
    """A copy to the host that takes `SECONDS`; notes how often the training thread has waited for one."""

    SECONDS = 0.01
    waited = 0

    def result(self, timeout: float | None = None) -> None:
        time.sleep(self.SECONDS)
        if threading.current_thread() is threading.main_thread():
            Landing.waited += 1


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(1)
def test_the_wait_for_gradients_is_exposed(rank: int, world_size: int, overlap: bool) -> None:
    """A norm begins with it: without, clipping would look cheaper than not to clip."""
    land = averages.Averages.land

    def slowly(to: Any, *args: Any, **options: Any) -> None:
        land(to, *args, **options)
        to.landing = Landing()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averages.Averages, "land", slowly)
        ours = ZeROStrategy(2, sharding={"min_unit_numel": 0, "overlap_step": overlap}, offload={"optimizer": "cpu"})
        fit(ours, ByDefault(), gradient_clip_val=0.1)
    assert Landing.waited >= 8  # steps
    updates_s = 0.0 if overlap else ours.require_engine().offload.stream.busy_s
    assert ours.exposed_step_s - updates_s >= Landing.SECONDS * Landing.waited


@on_ranks(1)
def test_gradients_written_to_a_drive_are_exposed(rank: int, world_size: int, tmp_path: Any) -> None:
    """Whoever clips waits for them; nothing else of the update does, without overlap, but what is busy."""
    seconds = 0.01
    puts: list[str] = []
    put = NVMeTier.put

    def slowly(tier: Any, key: Any, *args: Any) -> None:
        if key[1] == "grad":
            time.sleep(seconds)
            puts.append(key)
        put(tier, key, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NVMeTier, "put", slowly)
        ours = ZeROStrategy(
            2,
            sharding={"min_unit_numel": 0, "overlap_step": False},
            offload={"optimizer": "nvme", "nvme_path": str(tmp_path)},
        )
        fit(ours, ByDefault(), gradient_clip_val=0.1)
    assert len(puts) >= 8
    assert ours.exposed_step_s - ours.require_engine().offload.stream.busy_s >= seconds * len(puts)
