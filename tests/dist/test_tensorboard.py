"""What a user sees in TensorBoard: losses first, no chart of nothing, pictures with axes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from ls_strategy import Monitor, ZeROStrategy
from ls_strategy.extras.callbacks.expert_monitor import ExpertMonitor
from ls_strategy.moe.layer import MoE
from tests.dist.ranks import WIDTH, Net, batches, on_ranks, trainer_of

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.loggers import TensorBoardLogger


class Experts(Net):
    """Logs as the recipes do. Its experts take every token, so that none is dropped."""

    def build(self) -> None:
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([MoE(WIDTH, lambda: nn.Linear(WIDTH, WIDTH), 4, drop_tokens=False)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, i: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True)


def group_of(tag: str) -> str:
    """Where TensorBoard shows a chart. It sorts groups by name and opens the first two."""
    return tag.split("/")[0]


@pytest.mark.wide
@on_ranks(2)
def test_losses_are_what_is_seen_first_and_no_chart_is_of_nothing(rank: int, world_size: int, tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="", version="0", default_hp_metric=False)
    trainer = trainer_of(
        ZeROStrategy(2),
        logger=logger,
        callbacks=[Monitor(), ExpertMonitor(1)],
        max_steps=4,
        log_every_n_steps=1,
        limit_val_batches=1,
    )
    trainer.fit(Experts(), batches(), batches())
    if rank:
        return
    logger.experiment.flush()
    events = EventAccumulator(str(tmp_path / "0"), size_guidance={"scalars": 0, "images": 0}).Reload()
    curves = {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    groups = sorted({group_of(tag) for found in (curves, events.Tags()["images"]) for tag in found})
    assert groups[:2] == ["train", "val"]
    assert all(group.startswith("zero") for group in groups[2:])
    assert {"zero", "zero_time", "zero_memory_kib", "zero_traffic", "zero_experts"} <= set(groups)
    assert len(curves["zero_experts/entropy"]) == 4
    assert [tag for tag, values in curves.items() if not any(values)] == []
    assert "zero_experts/dropped" not in curves
    image = events.Images("zero_experts/load")[0]
    assert (image.width, image.height) == (960, 26 + 130)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """What the run's file says."""
    return [json.loads(line) for line in (folder / "zero_run.jsonl").read_text().splitlines()]


@on_ranks(2)
def test_a_step_is_drawn_once_per_interval_of_pictures(rank: int, world_size: int, tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="", version="0", default_hp_metric=False)
    monitor = Monitor(picture_every_n_steps=4)
    strategy = ZeROStrategy(3, sharding={"min_unit_numel": 0})
    trainer = trainer_of(strategy, logger=logger, callbacks=[monitor], max_steps=7, log_every_n_steps=2)
    trainer.fit(Net(), batches())
    if rank:
        return
    logger.experiment.flush()
    events = EventAccumulator(str(tmp_path / "0"), size_guidance={"images": 0}).Reload()
    assert set(events.Tags()["images"]) == {"zero_time/step", "zero_memory/step"}
    for tag in events.Tags()["images"]:
        assert [image.step for image in events.Images(tag)] == [2, 6]
        assert all(image.width == 1200 for image in events.Images(tag))
    first, last = lines_of(tmp_path / "0")
    assert (first["event"], first["step"], first["world_size"]) == ("start", 0, 2)
    assert first["options"]["stage"] == 3
    assert first["versions"]["torch"] == torch.__version__.split("+")[0]
    assert (last["event"], last["step"]) == ("end", 7)


class Fails(Net):
    def training_step(self, batch: Any, i: int) -> Tensor:
        if self.trainer.global_step == 2:
            raise RuntimeError("no more <data>")
        return super().training_step(batch, i)


@pytest.mark.wide
@on_ranks(2)
def test_without_images_nothing_is_drawn_and_an_error_is_noted(rank: int, world_size: int, tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path), name="", version="0")
    monitor = Monitor()
    trainer = trainer_of(ZeROStrategy(2), logger=logger, callbacks=[monitor], max_steps=4, log_every_n_steps=1)
    with pytest.raises(RuntimeError):
        trainer.fit(Fails(), batches())
    assert not monitor._figures.due(100)
    if rank == 0:
        first, last = lines_of(tmp_path / "0")
        assert first["event"] == "start"
        assert (last["event"], last["step"], last["type"]) == ("error", 2, "RuntimeError")
        assert "no more <data>" in last["message"]


@pytest.mark.wide
@on_ranks(1)
def test_without_matplotlib_training_goes_on(rank: int, world_size: int, tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="", version="0", default_hp_metric=False)
    monitor = Monitor()
    trainer = trainer_of(ZeROStrategy(1), logger=logger, callbacks=[monitor], max_steps=3, log_every_n_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        trainer.fit(Net(), batches())
    assert trainer.global_step == 3
    events = EventAccumulator(str(tmp_path / "0")).Reload()
    assert events.Tags()["images"] == []
