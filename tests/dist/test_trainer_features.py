"""The Trainer's own features, crossed with the stages: the same numbers as under DDP on the same ranks."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MeanSquaredError, MetricCollection

from ls_strategy.testing import spawn
from tests.dist.ranks import (
    STAGES,
    WIDTH,
    Net,
    assert_close,
    assert_equal,
    batches,
    fit,
    global_batches,
    on_ranks,
    quiet,
    samples,
    trainer_of,
    weights,
)

pytestmark = pytest.mark.wide


def same_as_ddp(make: Any = Net, data: Any = None, stages: tuple[int, ...] = STAGES, **options: Any) -> None:
    """Losses and final weights of every stage are DDP's. ``make`` and callable options are called for each run."""

    def run(strategy: str | int) -> tuple[Net, dict[str, Tensor]]:
        module = make()
        fit(strategy, module, data, **{k: v() if callable(v) else v for k, v in options.items()})
        return module, weights(module)

    ddp, expected = run("ddp")
    assert len(ddp.losses) > 2
    for stage in stages:
        module, actual = run(stage)
        assert_close(module.losses, ddp.losses, f"stage {stage}, losses")
        assert_close(actual, expected, f"stage {stage}")


# --- accumulation -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_accumulation_with_an_incomplete_last_window(rank: int, world_size: int) -> None:
    same_as_ddp(accumulate_grad_batches=3)  # four batches an epoch: a window of three and one of one


@on_ranks(2)
def test_accumulation_that_changes_over_epochs(rank: int, world_size: int) -> None:
    same_as_ddp(callbacks=lambda: [GradientAccumulationScheduler({0: 2, 1: 1, 2: 3})], max_epochs=3)


@on_ranks(2)
def test_accumulation_with_clipping(rank: int, world_size: int) -> None:
    same_as_ddp(accumulate_grad_batches=2, gradient_clip_val=0.05)
    same_as_ddp(accumulate_grad_batches=2, gradient_clip_val=0.002, gradient_clip_algorithm="value")


# --- learning rate ----------------------------------------------------------------------------------------------------


class Warmup(Net):
    """From a learning rate of exactly zero."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OneCycle(Net):
    """Cycles the learning rate and the betas."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Plateau(Net):
    """Two groups; halves the learning rates after every epoch whose metric is no better."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        self.log("constant", 1.0)
        return loss

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": rest, "weight_decay": 0.0}, {"params": decay, "lr": 2e-2}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-4, fused=True)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "constant"}}


@on_ranks(2)
def test_learning_rate_schedules(rank: int, world_size: int) -> None:
    same_as_ddp(Warmup)
    same_as_ddp(OneCycle)
    same_as_ddp(Plateau, max_epochs=4)


@on_ranks(2)
def test_learning_rate_monitor_reads_the_schedule(rank: int, world_size: int, tmp_path: Path) -> None:
    for make in (Warmup, Plateau):
        seen = []
        for strategy in ("ddp", 1, 3):
            logger = CSVLogger(tmp_path / f"{make.__name__}{strategy}")
            fit(strategy, make(), logger=logger, callbacks=[LearningRateMonitor()], log_every_n_steps=1, max_epochs=4)
            if rank == 0:
                rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").open())
                seen.append([{k: v for k, v in row.items() if k.startswith("lr-")} for row in rows])
        if rank == 0:
            assert len({row[k] for row in seen[0] for k in row}) > 3, seen[0]
            assert seen[1:] == seen[:1] * 2, make.__name__


@on_ranks(2)
def test_learning_rate_finder(rank: int, world_size: int, tmp_path: Path) -> None:
    """It saves, trains with a growing learning rate, restores and goes on: nothing of the search is left."""
    expected = expected_weights = None
    for strategy in ("ddp", 1, 2, 3):
        module = Net()
        finder = LearningRateFinder(min_lr=1e-4, max_lr=1e-1, num_training_steps=24)
        fit(strategy, module, batches(128), callbacks=[finder], default_root_dir=tmp_path)
        found = finder.optimal_lr
        assert found is not None
        assert found.suggestion() is not None
        if expected is None:
            expected, expected_weights = found, weights(module)
            continue
        assert_close(found.results["loss"], expected.results["loss"], f"{strategy}, losses of the search", 1e-5)
        assert_close(found.suggestion(), expected.suggestion(), f"{strategy}, suggestion")
        assert_close(weights(module), expected_weights, f"stage {strategy}")


@on_ranks(2)
def test_tuner_finds_a_learning_rate_before_fit(rank: int, world_size: int, tmp_path: Path) -> None:
    expected = expected_weights = None
    for strategy in ("ddp", 1, 3):
        module = Net()
        before = weights(module)
        trainer = trainer_of(strategy, default_root_dir=tmp_path, max_epochs=1)
        found = Tuner(trainer).lr_find(module, batches(256), min_lr=1e-4, max_lr=1e-1, num_training=24)
        assert found is not None
        assert found.suggestion() is not None
        if strategy != 3:
            assert_equal(weights(module), before, f"{strategy}: weights after the search")
        trainer.fit(module, batches())
        if expected is None:
            expected, expected_weights = found.suggestion(), weights(module)
            continue
        assert_close(found.suggestion(), expected, f"{strategy}, suggestion")
        assert module.lr == found.suggestion()
        assert_close(weights(module), expected_weights, f"stage {strategy}")


# --- callbacks --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_early_stopping_and_best_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    expected = None
    for strategy in ("ddp", *STAGES):
        module = Net(lr=3e-2)
        stopping = EarlyStopping("val_loss", patience=1, min_delta=0.04)
        folder = tmp_path / str(strategy)
        saving = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, filename="{epoch}", save_last=True)
        trainer = trainer_of(strategy, max_epochs=8, callbacks=[stopping, saving], enable_checkpointing=True)
        trainer.fit(module, batches(), batches(16, seed=2))
        tested = trainer.test(module, batches(16, seed=3), ckpt_path="best", verbose=False)
        result = [
            trainer.current_epoch,
            stopping.stopped_epoch,
            float(stopping.best_score),
            float(saving.best_model_score),
            tested[0]["test_loss"],
        ]
        files = sorted(p.name for p in folder.iterdir())
        if expected is None:
            expected, expected_files = result, files
            assert 1 < result[0] < 8, result
            continue
        assert_close(result, expected, f"stage {strategy}", 1e-5)
        assert files == expected_files


class Counted(ModelSummary):
    """Keeps the numbers that it would print."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        summary = self._summary(trainer, pl_module)
        self.numbers = (summary.total_parameters, summary.trainable_parameters, summary.param_nums)


@on_ranks(2)
def test_model_summary_counts_whole_parameters(rank: int, world_size: int) -> None:
    for stage in STAGES:
        module = Net()
        module.last.requires_grad_(False)
        total = sum(p.numel() for p in module.parameters())
        frozen = sum(p.numel() for p in module.last.parameters())
        by_layer = [sum(p.numel() for p in m.parameters()) for m in module.children()]
        summary = Counted()
        fit(stage, module, callbacks=[summary], enable_model_summary=True, max_epochs=1)
        assert summary.numbers == (total, total - frozen, by_layer), f"stage {stage}: {summary.numbers}"
        assert sum(p.numel() for p in module.parameters()) == total


# --- logging ----------------------------------------------------------------------------------------------------------


class Logging(Net):
    """Logs its rank."""

    def build(self) -> None:
        super().build()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        rank = float(self.global_rank)
        self.log("mean", rank, sync_dist=True)
        self.log("sum", rank + 1, sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("max", rank, sync_dist=True, reduce_fx="max")
        self.log("loss_epoch", loss, sync_dist=True, on_step=False, on_epoch=True)
        self.metric.update(rank * 3)
        self.log("metric", self.metric, on_epoch=True, on_step=False)
        return loss


@on_ranks(2)
def test_logged_values_are_reduced_over_ranks(rank: int, world_size: int) -> None:
    expected: dict[str, float] = {}
    for strategy in ("ddp", 0, 1, 2, 3):
        metrics = {k: float(v) for k, v in fit(strategy, Logging()).callback_metrics.items()}
        expected = expected or metrics
        assert metrics["mean"] == 0.5
        assert metrics["sum_step"] == 3.0
        assert metrics["max"] == 1.0
        assert metrics["metric"] == 1.5
        assert list(metrics) == list(expected)
        assert_close(list(metrics.values()), list(expected.values()), f"stage {strategy}")


class Reducing(Net):
    """Reduces by the strategy: the loss that it returns, what it has logged already, and integers."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        loss = self.loss(batch)
        one, numbers = loss.detach().clone(), torch.tensor([3 + 2 * self.global_rank, 4 + self.global_rank])
        columns = batch[0][:2].clone().t()
        for op in ("sum", "mean", "max"):
            for value in (one, columns, *([numbers] if op != "mean" else [])):
                found = strategy.reduce(value, reduce_op=op)
                assert found is value
                self.seen += found.flatten().tolist()
        turning = strategy.reduce(torch.polar(one, one + self.global_rank))
        self.seen += torch.view_as_real(turning).tolist()
        reduced = strategy.reduce(loss) if i % 2 else strategy.reduce(loss, reduce_op="sum")
        return self.noted(loss + 0.5 * reduced)


@on_ranks(2)
def test_a_value_is_reduced_in_place(rank: int, world_size: int) -> None:
    """As under DDP, also what the loss is computed from, and for code that reads the value that it gave."""
    expected: Any = None
    for strategy in ("ddp", 0, 1, 3):
        module = Reducing()
        fit(strategy, module)
        found = module.losses, module.seen, weights(module)
        expected = expected or found
        for what, ours, theirs in zip(("losses", "seen", "weights"), found, expected, strict=True):
            assert_close(ours, theirs, f"{strategy}, {what}")


# --- data -------------------------------------------------------------------------------------------------------------


class DictData(Dataset):
    def __len__(self) -> int:
        return 30  # 15 on each rank: batches of 4, 4, 4, 3

    def __getitem__(self, i: int) -> dict[str, Any]:
        x, y = samples(30)
        return {"x": x[i], "more": {"y": y[i], "name": str(i)}}


class DictNet(Net):
    def training_step(self, batch: Any, i: int) -> Tensor:
        return super().training_step((batch["x"], batch["more"]["y"]), i)


class Stream(IterableDataset):
    """Different samples on each rank, and an odd number of batches."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = samples(64)
        yield from zip(x[self.rank : 44 : 2], y[self.rank : 44 : 2], strict=True)


class Constant(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.1)
        nn.init.zeros_(self.bias)


class CountsInMetrics(Net):
    """Builds metrics where stage 3 builds without memory: with sums, with lists, and in a collection."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "metrics"):
            self.layer = Constant(WIDTH, WIDTH)
            metrics = {"mean": MeanMetric(), "max": MaxMetric(), "all": CatMetric(), "squares": MeanSquaredError()}
            self.metrics = MetricCollection(metrics)

    def training_step(self, batch: Any, i: int) -> Tensor:
        error = (self.layer(batch[0]) - batch[1]).square().mean()
        for name in ("mean", "max", "all"):
            self.metrics[name].update(error.detach())
        self.metrics["squares"].update(self.layer(batch[0]).detach(), batch[1])
        return error

    def on_train_epoch_end(self) -> None:
        for value in self.metrics.compute().values():
            self.seen += value.reshape(-1).tolist()
        self.metrics.reset()


@on_ranks(2)
def test_metrics_that_configure_model_builds(rank: int, world_size: int) -> None:
    seen = []
    for strategy in ("ddp", 1, 3):
        module = CountsInMetrics()
        fit(strategy, module)
        seen.append(module.seen)
        assert {metric.device.type for metric in module.metrics.values()} == {"cpu"}
    assert len(seen[0]) == 2 * (3 + 8)
    assert_close(seen[1], seen[0], "stage 1")
    assert_close(seen[2], seen[0], "stage 3")


@on_ranks(2)
def test_uneven_dict_and_streamed_batches(rank: int, world_size: int) -> None:
    same_as_ddp(DictNet, DataLoader(DictData(), batch_size=4))
    same_as_ddp(data=DataLoader(Stream(rank), batch_size=4), accumulate_grad_batches=2, limit_train_batches=5)


@on_ranks(2)
def test_validation_inside_the_epoch(rank: int, world_size: int) -> None:
    """Validation between accumulating micro-batches must not disturb their gradients."""
    expected = None
    for strategy in ("ddp", *STAGES):
        module = Net()
        trainer = trainer_of(strategy, val_check_interval=1, accumulate_grad_batches=2)
        trainer.fit(module, batches(), batches(16, seed=2))
        result = [*module.losses, float(trainer.callback_metrics["val_loss"])]
        expected = expected or result
        assert_close(result, expected, f"stage {strategy}")


def one_process(rank: int, world_size: int, strategy: str | int) -> tuple[list[float], dict[str, Tensor]]:
    module = Net()
    quiet()
    data = global_batches(rank, world_size, 12)
    fit(strategy, module, data, use_distributed_sampler=False, accumulate_grad_batches=2, gradient_clip_val=0.1)
    return module.losses, weights(module)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_is_a_plain_trainer(stage: int) -> None:
    (losses, expected), (ours, actual) = (
        spawn(one_process, 1, strategy, init_process_group=False, timeout_s=60)[0] for strategy in ("auto", stage)
    )
    assert_close(ours, losses, "losses")
    assert_close(actual, expected, "weights")


# --- a trial run ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_fast_dev_run(rank: int, world_size: int) -> None:
    """Whose logger has every attribute that it is asked for."""
    same_as_ddp(fast_dev_run=3, logger=True)
