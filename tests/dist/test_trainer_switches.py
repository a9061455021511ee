"""Profilers, callbacks, loaders and switches of the Trainer: the losses and weights are DDP's with the same one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    LambdaCallback,
    ModelCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from tests.dist.ranks import Net, assert_close, assert_equal, batches, on_ranks, trainer_of, weights


class Combined(Net):
    """Trains on two loaders at once."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        return self.noted(self.loss(batch["a"]) + self.loss(batch["b"]))


class Reloads(Net):
    """Another loader in every epoch."""

    def train_dataloader(self) -> Any:
        return batches(seed=self.current_epoch + 1)


def logged(**options: Any) -> Callable[[Path], dict[str, Any]]:
    """Options of a Trainer with a logger, since some callbacks ask for one."""
    return lambda folder: {"logger": CSVLogger(folder), "log_every_n_steps": 1, **options}


SWITCHES: dict[str, tuple[type[Net], Any, Callable[[Path], dict[str, Any]]]] = {
    "simple profiler": (Net, batches, lambda folder: {"profiler": SimpleProfiler(folder, "simple")}),
    "advanced profiler": (Net, batches, lambda folder: {"profiler": AdvancedProfiler(folder, "advanced")}),
    "pytorch profiler": (
        Net, batches, lambda folder: {"profiler": PyTorchProfiler(folder, "torch", export_to_chrome=False)},
    ),
    "device stats": (Net, batches, logged(callbacks=[DeviceStatsMonitor()])),
    "throughput": (Net, batches, logged(callbacks=[ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)])),
    "timer": (Net, batches, lambda folder: {"callbacks": [Timer(timedelta(hours=1))], "max_time": "00:01:00:00"}),
    "lambda callback": (Net, batches, lambda folder: {"callbacks": [LambdaCallback(on_fit_start=lambda *_: None)]}),
    "rich progress bar": (
        Net, batches, lambda folder: {"callbacks": [RichProgressBar()], "enable_progress_bar": True},
    ),
    "combined loader": (Combined, lambda: CombinedLoader({"a": batches(), "b": batches(24)}), lambda folder: {}),
    "reloaded loaders": (Reloads, lambda: None, lambda folder: {"reload_dataloaders_every_n_epochs": 1}),
    "overfit batches": (Net, batches, lambda folder: {"overfit_batches": 2, "max_epochs": 3}),
    "detect anomaly": (Net, batches, lambda folder: {"detect_anomaly": True}),
    "deterministic": (Net, batches, lambda folder: {"deterministic": True}),
    "no inference mode": (Net, batches, lambda folder: {"inference_mode": False}),
    "async checkpoint plugin": (
        Net,
        batches,
        lambda folder: {
            "plugins": AsyncCheckpointIO(),
            "enable_checkpointing": True,
            "callbacks": [ModelCheckpoint(folder, filename="saved")],
        },
    ),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SWITCHES)
@on_ranks(2)
def test_the_numbers_are_those_of_ddp(rank: int, world_size: int, name: str, tmp_path: Path) -> None:
    make, data, options = SWITCHES[name]
    expected: Any = None
    for strategy in ("ddp", 1, 3):
        module, folder = make(), tmp_path / str(strategy)
        trainer = trainer_of(strategy, save_as="file", default_root_dir=folder, **options(folder))
        trainer.fit(module, data())
        found = module.losses, weights(module)
        assert len(found[0]) > 2
        expected = expected or found
        assert_close(found[0], expected[0], f"{strategy}, losses")
        assert_close(found[1], expected[1], f"{strategy}, weights")
        if name == "async checkpoint plugin":
            assert (folder / "saved.ckpt").is_file()


class Writes(BasePredictionWriter):
    """Every rank writes its own predictions at the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__("epoch")
        self.folder = folder

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save((torch.cat(predictions), batch_indices), self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.wide
@on_ranks(2)
def test_predictions_are_written_by_the_rank_that_made_them(rank: int, world_size: int, tmp_path: Path) -> None:
    found = {}
    for strategy in ("ddp", 1, 3):
        folder = tmp_path / str(strategy)
        folder.mkdir(exist_ok=True)
        trainer_of(strategy, callbacks=[Writes(folder)]).predict(Net(), batches(24))
        found[strategy] = torch.load(folder / f"{rank}.pt")
        assert_equal(found[strategy][0], found["ddp"][0], f"{strategy}, predictions")
        assert found[strategy][1] == found["ddp"][1]


@pytest.mark.wide
@on_ranks(2)
def test_a_barebones_trainer_trains_as_under_ddp(rank: int, world_size: int) -> None:
    def losses(strategy: str) -> list[float]:
        module = Net()
        pl.Trainer(accelerator="cpu", devices=world_size, strategy=strategy, barebones=True, max_epochs=1).fit(
            module, batches()
        )
        return module.losses

    expected = losses("ddp")
    assert len(expected) > 2
    for strategy in ("zero1", "zero3"):
        assert_close(losses(strategy), expected, strategy)
