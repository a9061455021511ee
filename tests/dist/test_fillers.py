"""``uneven="join"``: nothing counts of what a finished rank runs while others have batches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics import Metric, SumMetric

from ls_strategy import ZeROStrategy
from ls_strategy.errors import DataError, LSError, PlanError
from tests.dist.ranks import WIDTH, Net, assert_close, assert_equal, on_ranks, trainer_of, weights
from tests.dist.test_join import LENGTHS, SIZES, Stream, batches_of, loader

FEWER_ON_0 = (3, 7)
SAMPLES = 3 * SIZES[0] + 7 * SIZES[1]


def strategy(stage: int, mode: str = "join") -> ZeROStrategy:
    return ZeROStrategy(stage, sharding={"min_unit_numel": 0}, uneven=mode)  # type: ignore[arg-type]


class Recorder(Logger):
    """Every value by step."""

    name = version = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[float]] = {}

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.values.setdefault(name, []).append(value)


class Counting(pl.Callback):
    """A user's callback."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch_idx)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs


class Everything(Net):
    """Has a batch norm, dropout, metrics, and logs."""

    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.samples: Metric = SumMetric()
        self.started: list[int] = []
        self.random: Tensor | None = None
        self.own: list[tuple[float, int]] = []

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self(functional.dropout(self.norm(batch[0]), 0.1)), batch[1])

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = self.loss(batch)
        self.samples(len(batch[0]))
        self.log("samples", self.samples, on_step=False, on_epoch=True)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log(
            "most", torch.tensor(i + 10.0 * (self.global_rank == 0)), sync_dist=True, reduce_fx="max", on_step=True
        )
        self.log("local", loss, on_step=True, on_epoch=False)
        if not self.trainer.strategy.runs_filler:
            self.own.append((loss.item(), len(batch[0])))
        return loss

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        self.started.append(i)

    def on_train_batch_end(self, outputs: Any, batch: Any, i: int) -> None:
        self.random = torch.get_rng_state()

    def on_train_epoch_end(self) -> None:
        assert self.random is not None
        assert torch.equal(self.random, torch.get_rng_state())

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.wide), pytest.param(1, marks=pytest.mark.wide)])
@on_ranks(2)
def test_what_does_not_count(rank: int, world_size: int, stage: int) -> None:
    module, counting, recorder = Everything(), Counting(), Recorder()
    trainer = trainer_of(
        strategy(stage), max_epochs=1, use_distributed_sampler=False, callbacks=[counting], logger=recorder,
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, loader(rank, sized=True, lengths=FEWER_ON_0))
    mine = FEWER_ON_0[rank]
    assert counting.seen == module.started == list(range(mine))
    assert len(module.own) == mine
    assert trainer.global_step == trainer.fit_loop.epoch_loop.batch_progress.total.completed == 7
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 7
    assert module.norm.num_batches_tracked == 7  # rank 0's while it has batches, then rank 1's
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, (module.own, module.norm.running_mean))
    assert torch.equal(every[0][1], every[1][1])
    losses = [[own[i][0] for own, _ in every if i < len(own)] for i in range(7)]
    mean = sum(loss * size for own, _ in every for loss, size in own) / SAMPLES
    metrics = trainer.callback_metrics
    assert metrics["samples"] == SAMPLES
    assert metrics["loss_epoch"].item() == pytest.approx(mean, rel=1e-6)
    if rank == 0:
        steps = recorder.values["loss_step"]
        assert steps == pytest.approx([sum(each) / len(each) for each in losses], rel=1e-6)
        assert recorder.values["most"] == [10, 11, 12, 3, 4, 5, 6]
        assert len(recorder.values["local"]) == 3


class Validated(Net):
    """Notes what it validates."""

    def validation_step(self, batch: Any, i: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val", loss, sync_dist=True)
        if not self.trainer.strategy.runs_filler:
            self.seen.append(loss.item())

    test_step = validation_step


@on_ranks(2)
def test_evaluation_at_stage_3(rank: int, world_size: int) -> None:
    module = Validated()
    data = loader(rank, sized=True, lengths=FEWER_ON_0)
    found = trainer_of(strategy(3), use_distributed_sampler=False).validate(module, data, verbose=False)
    assert len(module.seen) == FEWER_ON_0[rank]
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, module.seen)
    mean = sum(sum(seen) * size for seen, size in zip(every, SIZES[:2], strict=True)) / SAMPLES
    assert found[0]["val"] == pytest.approx(mean, rel=1e-6)
    predicted = trainer_of(strategy(3), use_distributed_sampler=False).predict(module, data)
    assert predicted is not None
    assert len(predicted) == FEWER_ON_0[rank]


@pytest.mark.wide
@on_ranks(2)
def test_a_share_of_the_batches_in_evaluation_is_one_of_each_rank(rank: int, world_size: int) -> None:
    """As below stage 3, where every rank evaluates its own batches; also before the fit and in prediction."""
    for stage in (2, 3):
        module = Validated()
        options: dict[str, Any] = {"limit_val_batches": 0.5, "limit_predict_batches": 0.5, "num_sanity_val_steps": 2}
        trainer = trainer_of(strategy(stage), max_epochs=1, use_distributed_sampler=False, **options)
        data = [loader(rank, sized=True, lengths=FEWER_ON_0), loader(rank, sized=True, lengths=(4, 2))]
        trainer.fit(module, loader(rank, sized=True), data)
        assert len(module.seen) == ((1 + 2) + (1 + 2), (2 + 1) + (3 + 1))[rank], f"stage {stage}"
        predicted: Any = trainer.predict(module, data[0])
        assert len(predicted) == (1, 3)[rank], f"stage {stage}"


@pytest.mark.wide
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_several_loaders_in_validation(rank: int, world_size: int, stage: int) -> None:
    """They are run through one after the other, and each ends on all ranks together."""
    module = Validated()
    first = loader(rank, sized=False, lengths=(3, 7))
    second = loader(rank, sized=False, lengths=(4, 1))
    trainer = trainer_of(strategy(stage), max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=1)
    trainer.fit(module, loader(rank, sized=True), [first, second])
    assert len(module.seen) == 2 + (3 + 4 if rank == 0 else 7 + 1)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.wide), 3])
@on_ranks(2)
def test_a_rank_without_data(rank: int, world_size: int, stage: int) -> None:
    """It runs another rank's batch, and logs nothing."""
    module = Everything()
    trainer = trainer_of(strategy(stage), max_epochs=2, use_distributed_sampler=False)
    if rank == 0:
        module.on_train_epoch_end = lambda: None  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(Stream(batches_of(rank) if rank else []), batch_size=None))
    assert trainer.global_step == 6
    assert len(module.own) == (6 if rank else 0)
    assert trainer.callback_metrics["samples"] == 3 * SIZES[1]


class Stops(Net):
    """The ranks with batches stop in their fifth batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, i: int) -> None:
        if i == 4:
            self.trainer.should_stop = True


@pytest.mark.wide
@on_ranks(2)
def test_the_ranks_with_batches_may_stop(rank: int, world_size: int) -> None:
    trainer = trainer_of(strategy(2), max_epochs=3, min_epochs=0, use_distributed_sampler=False)
    trainer.fit(Stops(), loader(rank, sized=True), loader(rank, sized=True))
    assert trainer.global_step == 5


class StopsAlone(Net):
    def training_step(self, batch: Any, i: int) -> Any:
        if i == 1 and self.global_rank == 1:
            self.trainer.should_stop = True
        return super().training_step(batch, i)


@pytest.mark.wide
@on_ranks(2)
def test_leaving_alone_is_an_error_on_all_ranks(rank: int, world_size: int) -> None:
    trainer = trainer_of(strategy(2), max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(LSError, match="end of this training epoch on rank 1 after batch 2"):
        trainer.fit(StopsAlone(), loader(rank, sized=False))


@pytest.mark.wide
@on_ranks(2)
def test_max_steps(rank: int, world_size: int) -> None:
    trainer = trainer_of(strategy(1), max_epochs=-1, max_steps=9, use_distributed_sampler=False)
    trainer.fit(Net(), loader(rank, sized=False))
    assert trainer.global_step == 9


class Manual(Net):
    manual = True


class TwoOptimizers(Net):
    """Each steps in every other batch, by its number."""

    manual = True

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()[i % 2]  # type: ignore[index]
        optimizer.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = ([*self.first.parameters(), *self.blocks.parameters()], self.last.parameters())
        return [torch.optim.AdamW(part, lr=self.lr) for part in parts]


@pytest.mark.wide
@pytest.mark.parametrize("kind", [Manual, TwoOptimizers])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_manual_optimization(rank: int, world_size: int, stage: int, kind: type[Net]) -> None:
    """A finished rank steps with the others: the weights are those of the same run at stage 0."""
    found = []
    for each in (0, stage):
        module = kind()
        trainer = trainer_of(strategy(each), max_epochs=1, use_distributed_sampler=False)
        trainer.fit(module, loader(rank, sized=True))
        assert trainer.global_step == 7
        found.append(weights(module))
    assert_equal(found[1], found[0], kind.__name__)


class Breaks(Net):
    """In fillers: the loss is not a number, and a layer is used that no batch uses."""

    breaks = True

    def build(self) -> None:
        super().build()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = self.loss(batch)
        if self.breaks and self.trainer.strategy.runs_filler:
            return (loss + self.unused(batch[0]).sum()) * float("nan")
        return loss


@pytest.mark.wide
@pytest.mark.parametrize(
    ("stage", "every"),
    [
        (3, 1),
        pytest.param(1, 2, marks=pytest.mark.wide),
        pytest.param(0, 3, marks=pytest.mark.wide),
        pytest.param(2, 2, marks=pytest.mark.wide),
    ],
)
@on_ranks(2)
def test_gradients_of_fillers_are_left_out_whatever_they_are(
    rank: int, world_size: int, stage: int, every: int
) -> None:
    found = []
    for breaks in (False, True):
        module = Breaks()
        module.breaks = breaks
        trainer = trainer_of(
            strategy(stage), max_epochs=2, accumulate_grad_batches=every, use_distributed_sampler=False
        )
        trainer.fit(module, loader(rank, sized=True))
        found.append(weights(module))
    assert_equal(found[1], found[0], "with NaN")
    assert_equal(found[1]["unused.weight"], Breaks().unused.weight.detach(), "a layer that no batch uses")


@pytest.mark.wide
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_with_offload(rank: int, world_size: int, stage: int) -> None:
    found = []
    for offload in ({}, {"optimizer": "cpu"}):
        module = Net()
        own = ZeROStrategy(stage, sharding={"min_unit_numel": 0}, offload=offload, uneven="join_samples")  # type: ignore[arg-type]
        trainer_of(own, accumulate_grad_batches=2, use_distributed_sampler=False).fit(module, loader(rank, sized=True))
        found.append(weights(module))
    assert_close(found[1], found[0], "offload")


class Drops(Everything):
    """Has all that a filler may change."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = self.loss(batch)
        self.samples(len(batch[0]))
        self.log("samples", self.samples, on_step=False, on_epoch=True)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None: ...


@pytest.mark.parametrize(
    ("stage", "lengths", "accumulate"),
    [(1, FEWER_ON_0, 1), pytest.param(3, LENGTHS, 1, marks=pytest.mark.wide), (3, FEWER_ON_0, 5)],
)
@on_ranks(2)
def test_a_checkpoint_in_mid_epoch(
    rank: int, world_size: int, stage: int, lengths: tuple[int, int], accumulate: int, tmp_path: Any
) -> None:
    """Saved where one rank has finished: the resumed run ends with the bits of the unbroken one."""
    options: dict[str, Any] = {
        "max_epochs": 2, "use_distributed_sampler": False, "enable_checkpointing": True,
        "accumulate_grad_batches": accumulate,
    }  # fmt: skip
    torch.manual_seed(rank)
    whole, again = Drops(), Drops()
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=5 // accumulate, save_top_k=-1, filename="{step}")
    first = trainer_of(strategy(stage), callbacks=[saves], **options)
    first.fit(whole, loader(rank, sized=True, lengths=lengths))
    torch.manual_seed(rank + 5)
    trainer = trainer_of(strategy(stage), **{**options, "enable_checkpointing": False})
    trainer.fit(again, loader(rank, sized=True, lengths=lengths), ckpt_path=tmp_path / f"step={5 // accumulate}.ckpt")
    assert trainer.global_step == first.global_step
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert trainer.callback_metrics == first.callback_metrics
    assert torch.equal(whole.random, again.random)  # type: ignore[arg-type]


@on_ranks(2)
def test_what_cannot_work(rank: int, world_size: int) -> None:
    refused = ZeROStrategy(1, parallel={"tensor": 2}, uneven="join")
    with pytest.raises(PlanError, match=r"uneven='join' with parallel\.tensor=2"):
        trainer_of(refused).fit(Net(), loader(rank, sized=True))
    with pytest.raises(DataError, match="has a length on rank 0 and none on the others"):
        trainer_of(strategy(2), use_distributed_sampler=False).fit(Net(), loader(rank, sized=rank == 0))
