"""What a user sees in TensorBoard: losses first, no chart of nothing, pictures with axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from ls_strategy import Monitor, ZeROStrategy
from ls_strategy.callbacks.expert_monitor import ExpertMonitor
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
    assert (image.width, image.height) > (960, 32)  # more than the cells: names at the left, numbers below
